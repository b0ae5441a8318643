"""Values sent to trackers: metrics by step, events as text, plan and environment as parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from trimtab.core.record import Evaluation, Event, Header, Line, StepRecord
from trimtab.core.serialization import to_jsonable

# Metrics of a step, by their names in the record.
STEP_FIGURES = (
    "loss",
    "learning_rate",
    "samples",
    "wall_s",
    "num_micro_batches",
    "noise_scale",
    "grad_norm",
    "loss_scale",
)
# Keys of a header's environment, as in `measure.machine`. A header may contain private values, such as environment
# variables, so only these keys are sent.
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
_MOST_CHARACTERS = 500  # Largest text length that all trackers accept.


class TrackedLine(NamedTuple):
    """Values of a record line.

    Args:
        step: number of windows before the line; never decreases, as W&B requires.
        values: metrics, and texts of events, by name.
    """

    step: int
    values: Mapping[str, float | str]


def parameters(header: Header) -> dict[str, str]:
    """Return name, seed, plan and environment of a run as texts, by dotted names such as `plan.precision.value`."""
    known = {name: header.environment[name] for name in ENVIRONMENT if name in header.environment}
    given = {"name": header.name, "seed": header.seed, "plan": header.plan, "environment": known}
    return dict(_leaves("", given))


def row(step: int, line: Line) -> TrackedLine:
    """Return the values to send for a record line written after `step` windows."""
    match line:
        case StepRecord():
            return TrackedLine(step, dict(_figures(line)))
        case Evaluation():
            found = {"samples": line.samples, "train_s": line.train_s} | dict(line.metrics)
            return TrackedLine(step, {f"evaluation/{name}": float(value) for name, value in found.items()})
        case Event():
            return TrackedLine(step, {f"event/{line.name}": _text(line.detail)})
        case _:
            return TrackedLine(step, {})


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
