"""What a tracker is sent of a record: figures by step, events as text, plan and environment as parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from trimtab.core.codec import to_jsonable
from trimtab.core.record import Evaluation, Event, Header, Line, StepRecord

# Of a step, by their names in the record.
STEP_FIGURES = (
    "loss",
    "learning_rate",
    "rows",
    "wall_s",
    "num_micro_batches",
    "noise_scale",
    "grad_norm",
    "loss_scale",
)
# Of a header's environment, as `measure.machine` names it. A header may hold what its owner likes, a process's own
# variables too; these alone are sent.
ENVIRONMENT = (
    "trimtab",
    "sources",
    "python",
    "torch",
    "numpy",
    "os",
    "cpu",
    "cpu_cores",
    "threads",
    "gpu",
    "cuda",
)
_MOST_CHARACTERS = 500  # of a text: what every one of the trackers takes


class Row(NamedTuple):
    """What a line of the record says.

    Args:
        step: windows before it; it never falls, as W&B wants it.
        values: figures by name, and texts, which are of events.
    """

    step: int
    values: Mapping[str, float | str]


def parameters(header: Header) -> dict[str, str]:
    """Return name, seed, plan and environment of a run as texts, by dotted names such as `plan.precision.value`."""
    known = {name: header.environment[name] for name in ENVIRONMENT if name in header.environment}
    given = {"name": header.name, "seed": header.seed, "plan": header.plan, "environment": known}
    return dict(_leaves("", given))


def row(step: int, line: Line) -> Row:
    """Return what is sent of a line that stands after so many windows."""
    match line:
        case StepRecord():
            return Row(step, dict(_figures(line)))
        case Evaluation():
            found = {"rows": line.rows, "train_s": line.train_s} | dict(line.metrics)
            return Row(step, {f"evaluation/{name}": float(value) for name, value in found.items()})
        case Event():
            return Row(step, {f"event/{line.name}": _text(line.detail)})
        case _:
            return Row(step, {})


def _figures(line: StepRecord) -> Iterator[tuple[str, float]]:
    for name in STEP_FIGURES:
        value = getattr(line, name)
        if value is not None:
            yield f"train/{name}", float(value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), each)
    elif value is not None:
        yield name, _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(to_jsonable(value), ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"
