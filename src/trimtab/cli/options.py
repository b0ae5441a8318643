"""Options shared by several commands, validated before any long measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.progress_display import be_quiet

if TYPE_CHECKING:
    from trimtab.carbon.intensity import Intensity
    from trimtab.checkpoint.config import Checkpoints

TaskName = Annotated[str, typer.Argument(help="built-in task, my_module:task or path/to/file.py:task")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show no progress", callback=be_quiet)]
Memory = Annotated[str | None, typer.Option(help="hard limit on the peak memory of a step, such as 8GiB")]
StepTime = Annotated[float | None, typer.Option("--time", help="hard limit on seconds per optimizer step")]
Weight = Annotated[float, typer.Option(help="weight of peak memory in the objective (time has weight 1)")]
EnergyWeight = Annotated[float, typer.Option(min=0, help="weight of energy in the objective (time has weight 1)")]
EnergyWatts = Annotated[
    float | None, typer.Option(help="power of the whole machine; energy is then estimated and labelled as an estimate")
]
WithoutMeter = Annotated[
    str, typer.Option(help="energy weight without a meter: refuse (an error), or renormalise (ignore energy)")
]
Carbon = Annotated[
    str | None,
    typer.Option(help="g CO2e per kWh, or a CSV file (time, g_per_kwh), to report the carbon of the run"),
]
CarbonKind = Annotated[
    str | None, typer.Option(help="kind of intensity for --carbon and --when-clean: average or marginal")
]
Record = Annotated[Path | None, typer.Option(help="new file for the record of the run (JSON lines, one line per step)")]
Track = Annotated[
    list[str] | None,
    typer.Option(help="tracker for the record: tensorboard=FOLDER, mlflow=EXPERIMENT, wandb=PROJECT, trackio=PROJECT"),
]
KeptIn = Annotated[
    Path | None, typer.Option("--checkpoints", help="folder for checkpoints, and to resume from (see --resume)")
]
Every = Annotated[int | None, typer.Option(min=1, help="steps between checkpoints; default: every ten minutes")]
Resume = Annotated[
    str | None,
    typer.Option(
        help="auto (default with --checkpoints): resume from the newest valid checkpoint, if any; always: fail "
        "without a checkpoint; never: require an empty folder. Default folder: runs/train-TASK"
    ),
]
Accept = Annotated[
    str | None, typer.Option(help="accepted differences on resume: torch,threads,device,fp32,ranks,plan,optimizer,data")
]
NonFinite = Annotated[
    str,
    typer.Option(
        help="on a non-finite loss or parameter: error (one step later), stop (before the step is applied; "
        "synchronises each step), skip (drop the step), warn or continue"
    ),
]
TrialBatchSize = Annotated[int | None, typer.Option(min=1, help="batch size for a trial run, instead of the task's")]
Judged = Annotated[int | None, typer.Option(min=1, help="number of validation batches; default: all")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="JSON file of a plan; default: make a plan")]
Ranks = Annotated[int, typer.Option(min=1, help="processes on this machine; under a launcher its ranks are used")]
Rehearse = Annotated[
    bool, typer.Option(help="on several ranks: dry runs of plans before the choice, or predictions only")
]
Adapt = Annotated[
    str | None,
    typer.Option(
        help="training settings that the plan may tune, separated by commas: learning-rate, schedule, "
        "optimizer, dropout, optimizer-state, batch"
    ),
]
# Settings that planning tests by short trainings.
TRAINED = ("learning-rate", "schedule", "optimizer", "dropout", "optimizer-state")


def conflict(option: str, problem: str, hint: str, code: str = "option.conflict") -> ValueGivenError:
    """Return the error for an option that has no effect, or cannot be combined with another."""
    return ValueGivenError(option, problem=problem, hint=hint, code=code)


def settings_to_adapt(adapt: str | None, known: tuple[str, ...] = (*TRAINED, "batch")) -> tuple[str, ...]:
    """Return the settings listed in `--adapt`.

    Raises:
        ValueGivenError: A name is unknown, or "none" is combined with other names.
    """
    from trimtab.core.validation import one_of

    names = [] if adapt is None else [one_of("--adapt", name, (*known, "none")) for name in adapt.split(",")]
    if "none" in names and set(names) != {"none"}:
        problem, hint = "combines none with names of settings.", "Pass either none, or the settings to tune."
        raise conflict("--adapt", f"--adapt {adapt} {problem}", hint)
    return tuple(name.replace("-", "_") for name in dict.fromkeys(names) if name != "none")


def refuse_adapt(adapt: str | None, recorded: str) -> None:
    """Raise `ValueGivenError` if `--adapt` is used together with a recorded source of the plan."""
    if settings_to_adapt(adapt):
        raise conflict(
            "--adapt",
            f"--adapt {adapt} cannot be combined with {recorded}, because tuning trains the model.",
            f"Remove --adapt, or plan for a task without {recorded}.",
        )


def intensity(carbon: str | None, kind: str | None) -> Intensity | None:
    """Return the current carbon intensity forecast from `--carbon`, or None without the option."""
    import time

    from trimtab.carbon.services import named

    if carbon is None:
        if kind is not None:
            problem = f"--carbon-kind {kind} has no effect without a carbon intensity."
            raise conflict("--carbon-kind", problem, "Add --carbon, or remove --carbon-kind.", "option.required")
        return None
    return named(carbon, kind).forecast(time.time())


def kept_in(
    task: str, folder: Path | None, every: int | None, resume: str | None, accept: str | None
) -> Checkpoints | None:
    """Return the checkpoint settings from `--checkpoints` and related options; None for a run without checkpoints.

    With `--resume` alone, the folder is named after the task.

    Raises:
        ValueGivenError: A checkpoint option is used without a folder.
    """
    from trimtab.checkpoint.config import Checkpoints
    from trimtab.experiments.result_folder import folder_of

    if folder is None and resume is None:
        for option, value in (("--every", every), ("--accept", accept)):
            if value is not None:
                problem = f"{option} {value} has no effect on a run without checkpoints."
                hint = "Add --checkpoints FOLDER, or --resume auto to use the folder runs/train-TASK."
                raise conflict(option, problem, hint, "option.required")
        return None
    if folder is None:
        folder = folder_of("train", task, None)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"The folder {folder.parent} for checkpoints cannot be created: {error.strerror or error}."
            hint = "Name another folder with --checkpoints."
            raise FormatError("--resume", problem=problem, hint=hint, code="folder.not_created") from None
    accepts = () if accept is None else tuple(name.strip() for name in accept.split(","))
    return Checkpoints(folder, every, None if every else 600.0, resume=resume or "auto", accepts=accepts)


def refuse_memory(memory: str | None) -> None:
    """Raise `ValueGivenError` if `--memory` is used with an existing plan."""
    if memory is not None:
        problem = f"--memory {memory} cannot be combined with --plan, because the plan was made before."
        raise conflict("--memory", problem, "Pass --memory to `trimtab plan`, or remove --plan.")


def require_folder(out: Path | None) -> None:
    """Raise `FormatError` if the output file cannot be created."""
    if out is not None and out.is_dir():
        raise FormatError(
            "--out", problem=f"{out} is a folder.", hint="Name a file, such as plan.json.", code="file.is_folder"
        )
    if out is not None and not out.parent.is_dir():
        raise _without_folder("--out", out)


def require_record(record: Path | None, kept: Checkpoints | None, task: str, seed: int) -> None:
    """Check before any measurement that the record can be written and belongs to this run.

    Raises:
        FormatError: The record exists for another run, or cannot be written.
        InUseError: Another run writes the record or uses the checkpoint folder.
    """
    from trimtab.core.files import require_unlocked
    from trimtab.core.record import Header, require_own

    if record is not None:
        require_unlocked(record)
    if kept is not None:
        require_unlocked(kept.path)
    if record is None:
        return
    if kept is not None and record.exists():
        if not kept.saved_samples():
            require_own(record, Header(task, seed), "--record")
        return
    if record.exists():
        raise FormatError(
            "--record",
            problem=f"The file {record} exists already.",
            hint="Name a new file, or delete the old one.",
            code="record.exists",
        )
    if not record.parent.is_dir():
        raise _without_folder("--record", record)


def _without_folder(option: str, file: Path) -> FormatError:
    return FormatError(
        option,
        problem=f"{option} {file} cannot be written: the folder {file.parent} does not exist.",
        hint="Create the folder, or name a file in another folder.",
        code="folder.missing",
    )
