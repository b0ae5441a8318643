"""Where `train` keeps its run, and what it says of it before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.core.errors import ValueGivenError

if TYPE_CHECKING:
    from trimtab.checkpoint.settings import Checkpoints

EVERY_S = 600.0
Folder = Annotated[Path | None, typer.Option("--checkpoints", help="folder that the run is kept in, and gone on from")]
Every = Annotated[int | None, typer.Option("--every", min=1, help="steps between checkpoints; without it, ten minutes")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        help="auto: from the newest checkpoint that is whole; always: there must be one; never. auto, where the run "
        "is kept; with it alone, that is in runs/TASK",
    ),
]
Accept = Annotated[
    str | None, typer.Option("--accept", help="what may have changed since: torch,threads,device,fp32,ranks,plan,data")
]


def kept_where(
    name: str, folder: Path | None, every: int | None, resume: str | None, accept: str | None
) -> Checkpoints | None:
    """Return where and how a run is kept; None where that is not asked for.

    Args:
        name: of the task, and of the run's folder where none is given.

    Raises:
        ValueGivenError: something is said of checkpoints that there are none of.
    """
    from trimtab.checkpoint.settings import Checkpoints

    if folder is None and resume is None:
        for option, value in (("--every", every), ("--accept", accept)):
            if value is not None:
                raise ValueGivenError(
                    option,
                    given=f"{value} of a run that is not kept",
                    expected="--checkpoints FOLDER beside it",
                    way_out="--resume auto keeps it in runs/TASK.",
                )
        return None
    if folder is None:
        folder = Path("runs") / name
        folder.parent.mkdir(exist_ok=True)
    accepts = () if accept is None else tuple(each.strip() for each in accept.split(","))
    return Checkpoints(folder, every, None if every else EVERY_S, resume=resume or "auto", accepts=accepts)


def refuse_planning(adapt: str | None, memory: str | None) -> None:
    """Raise where a plan is asked for that the run has already."""
    for option, value in (("--adapt", adapt), ("--memory", memory)):
        if value is not None and value != "none":
            raise ValueGivenError(
                option,
                given=f"{value} for a run that has a plan, with which it is gone on",
                expected="no such option",
                way_out="Leave it out, or begin anew in another folder (--checkpoints).",
            )
