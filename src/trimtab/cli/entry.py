"""The command line as a whole: its commands, and how it ends."""

from __future__ import annotations

import os
import sys

import typer

from trimtab.cli import checkpoint, init, observe, prove, train
from trimtab.cli.leaving import leave
from trimtab.core.errors import RankError, TrimtabError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, apply and prove the compute settings of a PyTorch training loop.",
)
for command in (
    init.init,
    observe.doctor,
    observe.profile,
    observe.plan,
    train.train,
    prove.compare,
    prove.ablate,
    prove.phases,
    prove.scale,
    prove.report,
):
    app.command()(command)
app.add_typer(checkpoint.app, name="checkpoint")


def main() -> None:
    """Run the command; errors are explained without a traceback (`TRIMTAB_TRACEBACK=1` shows it)."""
    try:
        _explained()
    except BaseException as end:
        if _was_a_rank():
            leave(end)
        raise


def _explained() -> None:
    try:
        app()
    except (TrimtabError, OSError) as error:
        if os.environ.get("TRIMTAB_TRACEBACK"):
            raise
        if not (isinstance(error, RankError) and error.is_echo):
            typer.echo(f"trimtab: {error}", err=True)
        sys.exit(1)
    except Exception as error:  # a task's own code, mostly
        if os.environ.get("TRIMTAB_TRACEBACK"):
            raise
        from trimtab.calibrate.failures import describe

        typer.echo(f"trimtab: {describe(error)} (TRIMTAB_TRACEBACK=1 shows where)", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _was_a_rank() -> bool:
    """Return whether this process was one of several ranks; a command that was none need not load torch to say so."""
    found = sys.modules.get("trimtab.distributed.process_group")
    return found is not None and found.has_joined()
