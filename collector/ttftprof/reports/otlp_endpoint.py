"""Spans sent to an OpenTelemetry collector: OTLP over HTTP, in its JSON encoding.

One request, no retries: identities of spans are derived from the facts, so sending again after a
failure is safe. Redirects are not followed: the headers may hold a key that is meant for one host.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from ttftprof.errors import OutputError, UsageError
from ttftprof.model import Report
from ttftprof.reports import otlp_json
from ttftprof.reports.safe import plain

HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
TIMEOUT_S = 10.0
_TOLD = 200  # characters of an answer


def send(report: Report, endpoint: str, timeout_s: float = TIMEOUT_S) -> int:
    """Sends all spans of a report and returns how many. A URL without a path gets `/v1/traces`.

    Raises `UsageError` for what is no address, `OutputError` if they were not all taken.
    """
    url = _url(endpoint)
    text = io.StringIO()
    spans = otlp_json.write(report, text)
    headers = {"Content-Type": "application/json", **_headers(os.environ)}
    request = urllib.request.Request(url, text.getvalue().encode(), headers, method="POST")
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            _check(url, answer.read(1 << 16))
    except urllib.error.HTTPError as error:
        with error:
            told = plain(error.read(4096).decode("utf-8", "replace"), _TOLD)
        raise OutputError(
            f"{_shown(url)} answered {error.code} {plain(error.reason, 80)}"
            + (f": {told}" if told else ""),
            _next_step(error.code),
        ) from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = getattr(error, "reason", error)
        raise OutputError(
            f"{_shown(url)} cannot be reached: {plain(reason, _TOLD)}",
            "is a collector running there? its OTLP/HTTP receiver usually has port 4318",
        ) from error
    return spans


_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_VALUE = re.compile(r"[\x20-\x7e\xa0-\xff]*")  # what an HTTP header can hold


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _url(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        sound = sound and endpoint.isascii() and endpoint.isprintable() and " " not in endpoint
    except ValueError:
        sound = False
    if not sound or parts.username or parts.password:
        raise UsageError(
            f"--endpoint {_shown(endpoint)} is no address of a collector",
            f"give http://HOST:4318; keys belong into {HEADERS_VARIABLE}",
        )
    return parts._replace(path=parts.path if parts.path.strip("/") else "/v1/traces").geturl()


def _shown(url: str) -> str:
    """Without what may be a secret: the user part and the query."""
    address = url.split("?", maxsplit=1)[0]
    return plain(address.rpartition("@")[2] if "@" in address else address, _TOLD)


def _headers(environment: Mapping[str, str]) -> dict[str, str]:
    """`key=value,key=value`, percent-encoded, as OpenTelemetry specifies."""
    found = {}
    for pair in filter(None, environment.get(HEADERS_VARIABLE, "").split(",")):
        name, is_pair, value = pair.partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not is_pair or not _HEADER.fullmatch(name) or not _VALUE.fullmatch(value):
            raise UsageError(
                f"{HEADERS_VARIABLE} is not of the form key=value,key=value",
                "percent-encode what is special in a value",
            )
        found[name] = value
    return found


def _check(url: str, answer: bytes) -> None:
    """A collector may take a part only, and says so in a successful answer."""
    try:
        partial = (json.loads(answer or b"{}") or {}).get("partialSuccess") or {}
        rejected = int(partial.get("rejectedSpans") or 0)
    except (ValueError, TypeError, AttributeError):
        return  # some answer with nothing, or in words: it was a success
    if rejected:
        why = plain(partial.get("errorMessage") or "without a reason", _TOLD)
        raise OutputError(f"{_shown(url)} rejected {rejected} spans: {why}", "its log may say more")


def _next_step(status: int) -> str:
    if status in (401, 403):
        return f"give its key in {HEADERS_VARIABLE}, as authorization=Bearer%20KEY"
    if status in (404, 405, 415):
        return "give the whole address of its OTLP/HTTP receiver, which takes JSON"
    if 300 <= status < 400:
        return "give the address that it redirects to"
    return "its log may say more; sending again does no harm"
