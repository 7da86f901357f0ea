"""A line of `watch --format json`: a request as it ended, the request as in the JSON report."""

from __future__ import annotations

import datetime
from typing import Any

from ttftprof.clock import NS_PER_S
from ttftprof.reports import json as json_report
from ttftprof.watch import Ended

SCHEMA_NAME = "ttftprof.watch/1"


def as_json(ended: Ended) -> dict[str, Any]:
    when = datetime.datetime.fromtimestamp(ended.wall_ns / NS_PER_S, datetime.UTC)
    return {
        "schema": SCHEMA_NAME,
        "ended_at": when.isoformat(timespec="milliseconds"),
        "kept": str(ended.kept) if ended.kept else None,
        "request": json_report.request_as_json(ended.request),
    }


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every line satisfies; what a request is, the report's
    schema says."""
    return json_report.load_schema("watch") | {"$defs": json_report.schema()["$defs"]}
