"""Main program of the command line: list of commands, error messages and exit status."""

from __future__ import annotations

import enum
import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import trimtab
from trimtab.cli import checkpoint_commands, experiment_commands, planning_commands, train_commands
from trimtab.cli.output import print_error, print_text
from trimtab.cli.streams import prepare_streams
from trimtab.core import progress
from trimtab.core.errors import FormatError, RankError, TrimtabError, UsageError
from trimtab.distributed.launch import LaunchedRank

# Immediate exit of a rank: Gloo threads may outlive the interpreter and abort a process that has finished.

_UNWRITTEN = 120  # Python's own exit status if standard output could not be written


def exit_rank(end: BaseException) -> NoReturn:
    """End the process with the status that the interpreter would use for this exception, skipping exit handlers."""
    code = _status(end)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream is closed
            code = code or _UNWRITTEN
    os._exit(code)


def _status(end: BaseException) -> int:
    if not isinstance(end, SystemExit):
        sys.excepthook(type(end), end, end.__traceback__)
        return 1
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


# Command `init`.

_NAMES = {"task": ("my_task.py", "task")}  # File and name of a kind; all other kinds are loops.
_LOOP = ("my_loop.py", "setup")


class Kind(enum.StrEnum):
    """Kinds of files that `init` writes."""

    PLAIN = "plain"
    IMAGES = "images"
    TEXT = "text"
    TRANSFORMERS = "transformers"
    TASK = "task"


def init(
    file: Annotated[Path | None, typer.Argument(help="new Python file; by default my_loop.py or my_task.py")] = None,
    kind: Annotated[
        Kind,
        typer.Option(
            help="loop in the file: tensors (plain), images, text with get_batch, a Transformers Trainer, or a task "
            "with a metric and targets"
        ),
    ] = Kind.PLAIN,
) -> None:
    """Write a working file with a training loop, with numbered parts to replace by your own code."""
    default, name = _NAMES.get(kind, _LOOP)
    file = Path(default) if file is None else file
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise FormatError(
            "file",
            problem=f"{file.name} is not the name of a Python module.",
            hint=f"Use letters, digits and underscores, and the suffix .py, as in {default}.",
            code="file.name_invalid",
        )
    if not file.parent.is_dir():
        raise FormatError(
            "file",
            problem=f"The folder {file.parent} does not exist.",
            hint="Create it first.",
            code="folder.missing",
        )
    called = shlex.quote(f"{file.as_posix()}:{name}")
    text = (
        _starter(kind).replace(f"{default}:{name}", called).replace(f"python {default} ", f"python {file.as_posix()} ")
    )
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(text.replace('name="my_task"', f'name="{file.stem}"'))
    except FileExistsError:
        raise FormatError(
            "file", problem=f"The file {file} exists already.", hint="Choose another name.", code="file.exists"
        ) from None
    print_text(f"Wrote {file}. It runs as it is. Replace its numbered parts with your code, then run")
    print_text(f"  trimtab plan {called}")
    print_text(f"  trimtab compare {called} --quick")


def _starter(kind: Kind) -> str:
    """Return the text of the file of a kind."""
    if kind is Kind.TASK:
        import trimtab.tasks

        return Path(trimtab.tasks.__file__).with_name("starter.py").read_text(encoding="utf-8")
    return (Path(__file__).parent / "starters" / f"{kind}.py").read_text(encoding="utf-8")


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


# Sections of the help, in order.
GROUPS = {
    "Start here": ("doctor", "init", "tasks", "estimate", "plan", "compare"),
    "More": ("profile", "train", "race", "ablate", "phases", "scale", "report", "checkpoint"),
}


class GroupedCommands(TyperGroup):
    """The program, with the commands of its help in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each entry of `GROUPS`."""
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            found = {name: self.commands[name].get_short_help_str(formatter.width - width - 6) for name in names}
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in found.items()])


def show_version(is_asked: bool) -> None:
    """Print the version and end the program."""
    if is_asked:
        print_text(f"trimtab {trimtab.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=GroupedCommands,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Plan, apply and prove the compute settings of a PyTorch training loop."""


for command in (
    planning_commands.doctor,
    init,
    planning_commands.tasks,
    planning_commands.estimate,
    planning_commands.plan,
    experiment_commands.compare,
    planning_commands.profile,
    train_commands.train,
    experiment_commands.race,
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
        print_error(f"trimtab: interrupted. {progress.kept() or 'Nothing was kept.'}")
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
