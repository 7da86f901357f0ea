"""`ttftprof completion`: what a shell needs to complete this program's commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_NEXT = {
    "bash": "ttftprof completion bash > /etc/bash_completion.d/ttftprof",
    "zsh": 'ttftprof completion zsh > "${fpath[1]}/_ttftprof"',
    "fish": "ttftprof completion fish > ~/.config/fish/completions/ttftprof.fish",
}


@click.command(
    "completion",
    epilog="\b\nInstall it with:\n" + "\n".join(f"  {line}" for line in _NEXT.values()),
)
@click.argument("shell", type=click.Choice(sorted(_NEXT)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script for SHELL."""
    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root().command
    click.echo(kind(root, {}, "ttftprof", "_TTFTPROF_COMPLETE").source())
