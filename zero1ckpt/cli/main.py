"""``zero1ckpt``: finds the verb, runs it, and turns every failure into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import rich_click as click
from click.exceptions import Exit

from .environment import start_fast
from .exit_codes import DONE, explain, signals_interrupt
from .render import mute_stdout
from .text import one_line

__all__ = ["cli", "main", "run"]

_VERBS = ("inspect", "reshard", "convert", "verify", "diff", "log", "plan", "export", "doctor", "clean", "demo")
_PROGRAM = "zero1ckpt"


class _Verbs(click.RichGroup):
    """Imports a verb when it is asked for, so that each starts as fast as it can."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = getattr(import_module(f"{__package__}.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in _VERBS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        from difflib import get_close_matches

        near = get_close_matches(name, _VERBS, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(_VERBS)}"
        raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)


@click.group(cls=_Verbs, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, help="Print the version.")
@click.pass_context
def cli(ctx: click.Context, version: bool) -> int:
    """ZeRO-1 checkpoints: look into them, prove them, and move them between data-parallel and bucket sizes."""
    if version:
        from .. import __version__

        click.echo(__version__)
    elif ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    return DONE


def run(args: Sequence[str]) -> int:
    """Runs one command and returns its exit code; prints what there is to print."""
    try:
        with signals_interrupt():
            return _invoke(args)
    except Exit as end:
        return int(end.exit_code)
    except BrokenPipeError:  # `zero1ckpt --help | head`
        mute_stdout()
        return DONE
    except BaseException as error:
        if os.environ.get("ZERO1CKPT_DEBUG", "") not in ("", "0"):
            import traceback

            traceback.print_exc()
        code, line = explain(error)
        complain(line)
        return code


def _invoke(args: Sequence[str]) -> int:
    with cli.make_context(_PROGRAM, list(args)) as ctx:
        code = cli.invoke(ctx)
    return code if isinstance(code, int) else DONE


def complain(line: str) -> None:
    """One line on standard error."""
    try:
        print(f"{_PROGRAM}: {one_line(line)}", file=sys.stderr, flush=True)
    except OSError:  # nobody is there to read it
        pass


def main() -> NoReturn:
    """The console script."""
    if "_ZERO1CKPT_COMPLETE" in os.environ:
        cli.main(prog_name=_PROGRAM, complete_var="_ZERO1CKPT_COMPLETE")
    start_fast()
    sys.exit(run(sys.argv[1:]))
