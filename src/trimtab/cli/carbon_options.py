"""Options for carbon-aware training, validated before any measurement."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.core.errors import ValueGivenError

if TYPE_CHECKING:
    from trimtab.experiments.train_command import LowCarbonOptions

WhenClean = Annotated[
    str | None,
    typer.Option(
        help="train at low carbon intensity by this forecast: a CSV file (time, g_per_kwh), great-britain, "
        "electricity-maps:ZONE or watttime:REGION"
    ),
]
By = Annotated[str | None, typer.Option(help="deadline: 2026-03-02T06:00+01:00, or 36h from now")]
Pauses = Annotated[
    str | None, typer.Option(help="allow pauses; time lost per pause, such as 90s or 10min (needs --checkpoints)")
]
Takes = Annotated[
    str | None, typer.Option(help="duration of the whole run, such as 5h; default: from the plan's step time")
]
IdleWatts = Annotated[float | None, typer.Option(min=0, help="power of held devices while waiting")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the schedule and exit")]


def clean_hours(
    source: str | None,
    kind: str | None,
    by: str | None,
    *,
    pauses: str | None,
    takes: str | None,
    watts: float | None,
    idle_watts: float | None,
    is_dry: bool,
    is_kept: bool,
    num_ranks: int,
) -> LowCarbonOptions | None:
    """Return the settings of `--when-clean` and its related options; None for an immediate start.

    Raises:
        ValueGivenError: An option is invalid, or lacks a required option.
    """
    from trimtab.carbon.services import source_named
    from trimtab.core.units import parse_duration, parse_moment
    from trimtab.experiments.carbon_aware_training import CarbonRequest
    from trimtab.experiments.train_command import LowCarbonOptions

    beside = {"--by": by, "--pauses": pauses, "--takes": takes, "--idle-watts": idle_watts, "--dry-run": is_dry or None}
    if source is None:
        _refuse_alone(beside)
        return None
    if by is None:
        raise ValueGivenError(
            "--by",
            problem="--when-clean needs a deadline.",
            hint="Add --by with a time such as 2026-03-02T06:00+01:00, or a duration such as 36h.",
            code="option.required",
        )
    _require_what_they_need(num_ranks, pauses, is_kept=is_kept)
    pause_s = None if pauses is None else parse_duration("--pauses", pauses)
    takes_s = None if takes is None else parse_duration("--takes", takes)
    wish = CarbonRequest(source_named(source, kind), parse_moment("--by", by, time.time()))
    return LowCarbonOptions(wish, pause_s, takes_s, watts, idle_watts, is_dry)


def _refuse_alone(beside: dict[str, Any]) -> None:
    if alone := [name for name, given in beside.items() if given is not None]:
        raise ValueGivenError(
            alone[0],
            problem=f"{alone[0]} has no effect without --when-clean.",
            hint=f"Add --when-clean, or remove {alone[0]}.",
            code="option.required",
        )


def _require_what_they_need(num_ranks: int, pauses: str | None, *, is_kept: bool) -> None:
    if num_ranks > 1:
        raise ValueGivenError(
            "--when-clean",
            problem=f"--when-clean supports one process, not {num_ranks} ranks.",
            hint="Get the schedule in one process with --dry-run, and start the job at that time.",
            code="option.conflict",
        )
    if pauses is not None and not is_kept:
        raise ValueGivenError(
            "--pauses",
            problem="--pauses needs checkpoints, because a paused run resumes from a checkpoint.",
            hint="Add --checkpoints FOLDER.",
            code="option.required",
        )
