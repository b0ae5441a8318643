"""Main program of the command line: list of commands, error messages and exit status."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from trimtab.cli import checkpoint_commands, experiment_commands, init_command, planning_commands, train_commands
from trimtab.cli.output import print_error
from trimtab.cli.rank_exit import exit_rank
from trimtab.cli.streams import prepare_streams
from trimtab.core.errors import RankError, TrimtabError, UsageError
from trimtab.distributed.launched_rank import LaunchedRank

_TRACEBACK = "Set TRIMTAB_TRACEBACK=1 to print the traceback."


def no_early_exit(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that `sys.exit(0)` in a task becomes an error."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except SystemExit as end:
            if end.code:
                raise
            raise UsageError(
                "task",
                problem="The task's code called sys.exit(0) before the command had finished.",
                hint="Remove the call from the task.",
                code="task.exits",
            ) from end

    return run


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, apply and prove the compute settings of a PyTorch training loop.",
)
for command in (
    init_command.init,
    planning_commands.doctor,
    planning_commands.profile,
    planning_commands.plan,
    train_commands.train,
    experiment_commands.compare,
    experiment_commands.ablate,
    experiment_commands.phases,
    experiment_commands.scale,
    experiment_commands.report,
):
    app.command()(no_early_exit(command))
app.add_typer(checkpoint_commands.app, name="checkpoint")


def main(launched: LaunchedRank | None = None) -> None:
    """Run the command. Errors are printed without a traceback unless `TRIMTAB_TRACEBACK=1`.

    The line ends with the error's code in brackets, such as `[file.exists]`.

    Args:
        launched: Reports to the launcher how this rank ends.
    """
    prepare_streams()
    try:
        _explained(launched or LaunchedRank())
    except BaseException as end:
        if _was_a_rank():
            exit_rank(end)
        raise


def _explained(launched: LaunchedRank) -> None:
    try:
        _reporting(launched)
    except (TrimtabError, OSError) as error:
        if os.environ.get("TRIMTAB_TRACEBACK"):
            raise
        if not (isinstance(error, RankError) and error.is_echo):
            has_cause = isinstance(error, TrimtabError) and isinstance(error.__cause__, Exception)
            code = f" [{error.code}]" if isinstance(error, TrimtabError) else ""
            print_error(f"trimtab: {error}{' ' + _TRACEBACK if has_cause else ''}{code}")
        sys.exit(1)
    except Exception as error:  # mostly an error in the task's code
        if os.environ.get("TRIMTAB_TRACEBACK"):
            raise
        from trimtab.profiling.measurement_notes import describe

        print_error(f"trimtab: {describe(error).rstrip('.')}. {_TRACEBACK}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _reporting(launched: LaunchedRank) -> None:
    try:
        app()
    except SystemExit as end:
        if not end.code:
            launched.done()
        raise
    except Exception as error:
        launched.failed(error)
        raise


def _was_a_rank() -> bool:
    """Return True if this process belonged to a distributed job. Avoids importing torch in commands without one."""
    found = sys.modules.get("trimtab.distributed.process_group")
    return found is not None and found.has_joined()
