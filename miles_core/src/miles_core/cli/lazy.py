"""A click group whose commands are named as strings and imported when run.

`miles plugins list` must not pay for `miles train`: help texts are written here, so that listing commands imports none.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

import click

from miles_core.errors import MilesError, PluginError

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Where a command is and what it does, in one line."""

    target: str
    """``module:attribute`` of a click command."""
    summary: str


class LazyGroup(click.Group):
    """A group over `LazyCommand`s. Errors raised on purpose become a message on stderr and their exit code."""

    def __init__(self, name: str, *, lazy: Mapping[str, LazyCommand], help: str, epilog: str | None = None) -> None:
        super().__init__(name, help=help, epilog=epilog, no_args_is_help=False, invoke_without_command=True)
        self.lazy = lazy
        self.callback = self._bare

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, _, attribute = self.lazy[cmd_name].target.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            distribution = module.partition(".")[0].replace("_", "-")
            raise PluginError(
                f"`{ctx.command_path} {cmd_name}` comes with another distribution",
                expected=f"{distribution} in this environment",
                found=f"no module {error.name}",
                do=f"pip install ./{distribution.replace('-', '_')} from the project's folder",
            ) from None
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self.lazy.items()])

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except MilesError as error:
            click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True)
            for note in getattr(error, "__notes__", ()):
                click.echo(note, err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.filename is None:
                raise
            name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else error.filename
            click.echo(f"{click.style('error:', fg='red', bold=True)} {name}: {error.strerror}", err=True)
            click.echo("  do:       name a file that is there and that you may read, or write, here", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)

    def _bare(self) -> None:
        ctx = click.get_current_context()
        if ctx.invoked_subcommand is None:
            click.echo(self.bare_text(ctx))

    def bare_text(self, ctx: click.Context) -> str:
        """What the group prints when no command is given."""
        return ctx.get_help()
