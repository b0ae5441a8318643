"""Line types of a run's record, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab.core import validation
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.serialization import from_jsonable, parse, to_jsonable

RECORD_SCHEMA = 3
_MOST = 2**62  # Limit of a count.
# Marks, in a header's detail, a run of a few steps only, which has a speed but no final metric.
BRIEF = "brief"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, or one skipped step.

    Args:
        index: number of steps before this one.
        samples: samples in the window; None if unknown.
        terms: number of terms that the loss averages over.
        loss: mean loss per term.
        learning_rate: learning rate applied to the first parameter group; None if the optimizer computes its own, as
            Adafactor does.
        wall_s: seconds since the previous step.
        applied: True if the optimizer stepped.
        grad_norm, loss_scale: None if not computed.
        num_micro_batches: k of the window.
        noise_scale: gradient noise scale N in samples, if measured.
    """

    index: int
    samples: int | None
    terms: float
    loss: float
    learning_rate: float | None
    wall_s: float
    applied: bool = True
    grad_norm: float | None = None
    loss_scale: float | None = None
    num_micro_batches: int = 1
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        validation.not_negative(self, "index", "samples", "terms", "wall_s", "num_micro_batches")
        if max(self.index, self.samples or 0, self.num_micro_batches) > _MOST:
            given = f"index={self.index}, rows={self.samples}, num_micro_batches={self.num_micro_batches}"
            raise ValueGivenError("StepRecord", got=given, expected="at most 2**62", code="number.range")


@dataclass(frozen=True)
class Evaluation:
    """A held-out evaluation: after `samples` samples and `train_s` seconds of training (evaluation time excluded)."""

    samples: int
    train_s: float
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        validation.not_negative(self, "samples", "train_s")


@dataclass(frozen=True)
class Event:
    """An event of the run with its figures.

    Args:
        name: kind of the event.
        step: index of the next window, or another count that the kind defines.
        detail: figures of the event.
    """

    name: str
    step: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validation.not_negative(self, "step")


@dataclass(frozen=True)
class Header:
    """First line: name, plan and environment of the run.

    Args:
        name: the user's name for the run.
        seed: random seed, if any.
        plan: the plan as JSON; None for a loop without one.
        environment: versions, machine and threads, from `trimtab.measure.machine`.
        detail: further named values for readers of the record.
    """

    name: str
    seed: int | None = None
    plan: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)
    schema: int = RECORD_SCHEMA


@dataclass(frozen=True)
class End:
    """Last line: reason for the end of the run, and its totals.

    Args:
        reason: "closed", "error", a `StopReason`, or a reason set by the writing loop.
    """

    reason: str
    detail: Mapping[str, Any] = field(default_factory=dict)


Line = Header | StepRecord | Evaluation | Event | End
_KINDS: dict[str, type[Any]] = {
    "header": Header,
    "step": StepRecord,
    "evaluation": Evaluation,
    "event": Event,
    "end": End,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


@dataclass(frozen=True)
class RunRecord:
    """A whole run in memory. `end` is None for a run that crashed."""

    header: Header
    steps: tuple[StepRecord, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[Event, ...] = ()
    end: End | None = None


def encode_line(line: Line) -> bytes:
    """Return a record line as JSON bytes."""
    data = {"kind": _NAMES[type(line)]} | to_jsonable(line)
    return (json.dumps(data, allow_nan=False, ensure_ascii=False) + "\n").encode()


def parsed(where: str, line: bytes) -> Line:
    try:
        data = parse(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(
            where, got=f"a damaged line ({error})", expected="one JSON object per line", code="record.damaged_line"
        ) from None
    kind = data.pop("kind", None) if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise FormatError(
            where, got=f"kind={kind!r}", expected="one of " + ", ".join(_KINDS), code="record.damaged_line"
        )
    try:
        line_value: Line = from_jsonable(_KINDS[kind], data)  # Refuses a header of another schema.
    except (FormatError, ValueGivenError, RecursionError) as error:
        if isinstance(error, RecursionError):
            given, expected = "JSON that is nested too deeply", "a line of a record"
            raise FormatError(where, got=given, expected=expected, code="json.value") from None
        texts = {"got": error.got, "expected": error.expected, "hint": error.hint, "code": error.code}
        problem = f"{where}: {error.problem}" if error.problem else ""
        raise FormatError(f"{where}: {error.field}", problem=problem, **texts) from None
    return line_value
