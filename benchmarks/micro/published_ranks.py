"""Predictions for several ranks on other devices, compared with published step times.

`python -m benchmarks.micro.published_ranks [--quick] [--json]` prints `published_ranks` rows for the steps of
`published_ranks_cases.py`, and `published_efficiency` rows for pairs of steps with different numbers of ranks. No step
is executed. Seconds are predicted in four ways:

- `predicted_s`: gather and compute dtypes as published, links within and between nodes ("8 x nvlink + ib:NDR");
- `flat_s`: the same with a single flat ring over the ports ("ib:NDR");
- `alone_s`: without exposed communication;
- `own_s`: like `predicted_s` with trimtab's backend, which gathers parameters in fp32 and uses autocast.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks import command
from benchmarks.micro.published import default_dtype
from benchmarks.micro.published_ranks_cases import CASES, EFFICIENCIES, SOURCES, Case, Efficiency, Model
from trimtab.core.choice import MeasuredCost, SplitCheck
from trimtab.core.hardware import Link
from trimtab.core.memory_model import PeakMemoryModel, StepWork
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.distributed.rank_memory import trace_rank
from trimtab.measure.fake_tensors import FakeCudaMode, FakeTensors
from trimtab.planner.communication_cost import WindowCost, window_s
from trimtab.planner.cost_model import step_seconds
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, Profile, TracedCandidate
from trimtab.profiling.candidate_traces import trace_elsewhere
from trimtab.profiling.communication_profile import step_shape
from trimtab.profiling.loop_facts import loop_facts

QUICK = ("resnet50", "gpt2", "MPT 125M")
TRACED_ROWS = (2, 4)  # FLOP and peaks are linear in the batch size
_SCALES = 60  # bisection steps


@contextlib.contextmanager
def made(model: Model, *, cast: bool, fused: bool) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """Context manager that yields a model on fake tensors and its optimizer."""
    with FakeTensors(), default_dtype(torch.bfloat16 if cast else torch.float32):
        module = model.make().train()
        yield module, model.optimizer(module, fused=fused)


@functools.cache
def traced(model: Model, precision: str, *, cast: bool, fused: bool) -> TracedCandidate:
    """Return the traced operators of a rank's step, entirely in bf16 (`cast`) or under autocast."""
    with made(model, cast=cast, fused=fused) as (module, optimizer), torch.device("cpu"):
        batch = model.batch(TRACED_ROWS[-1])
    as_traced = {"tf32": "fp32", "fp16": "bf16"}.get(precision, precision)
    candidate = Candidate(TRACED_ROWS[-1], precision="fp32" if cast else as_traced, fused_optimizer=fused)
    (found,) = trace_elsewhere(module, optimizer, model.loss_fn, batch, [candidate])
    return replace(found, candidate=replace(found.candidate, precision=precision))


def shape_of(case: Case, *, like_theirs: bool) -> StepShape:
    """Return the communication profile of a rank's step, from the data sheet of its device.

    Args:
        case: Published step.
        like_theirs: True to compute in the published gather dtype with an fp32 optimizer step, False for trimtab's
            backend.
    """
    of = functools.partial(traced, case.model, case.precision, fused=case.fused)
    found = of(cast=case.model.casts)
    if like_theirs and case.how.gather_dtype == "bf16":
        assert found.work is not None
        in_half = of(cast=True).work
        assert in_half is not None
        found = replace(found, work=StepWork(in_half.micro_batch, found.work.step))
    assert found.work is not None
    device, k = case.joined.spec, case.micro_batches
    told_s = step_seconds(found.work, device, case.precision, case.rows, k)
    assert told_s is not None
    with made(case.model, cast=case.model.casts, fused=case.fused) as (module, optimizer):
        facts = loop_facts(module, optimizer, k * case.rows, {})
        profile = Profile(device, facts, SplitCheck(True, "as published"), traces=(found,))
        plan = Plan.fixed(k * case.rows, case.rows, precision=case.precision)
        shape = step_shape(module, profile, replace(plan, predicted=MeasuredCost(told_s, None)))
    assert shape is not None
    return shape


def window_of(case: Case, link: Link, *, like_theirs: bool = True) -> WindowCost:
    """Return the predicted cost of a window."""
    how = case.how if like_theirs else replace(case.how, gather_dtype="fp32")
    return window_s(how, link, shape_of(case, like_theirs=like_theirs), case.micro_batches)


def peak_of(case: Case) -> int:
    """Return the predicted peak of a rank's tensors, with the published gather dtype."""
    # Replicas (stage 0) reduce gradients in the gradients' dtype.
    how = case.how if case.how.zero_stage else replace(case.how, reduce_dtype="fp32")
    return _held(case.model, how, case.micro_batches, fused=case.fused).peak_bytes(case.rows)


@functools.cache
def _held(model: Model, how: Parallelism, num_micro_batches: int, *, fused: bool) -> PeakMemoryModel:
    with made(model, cast=model.casts, fused=fused) as (module, optimizer), torch.device("cpu"):
        batches = tuple(model.batch(rows) for rows in TRACED_ROWS)
    with FakeCudaMode():
        loop = (module, optimizer, model.loss_fn, batches, TRACED_ROWS)
        return trace_rank(*loop, how, num_micro_batches=num_micro_batches)


def row_of(case: Case) -> dict[str, Any]:
    """Predict a published step and return its row."""
    joined, how = case.joined, case.how
    link = joined.rings(how.ranks)
    told, own = window_of(case, link), window_of(case, link, like_theirs=False)
    flat = window_of(case, joined.flat(how.ranks))
    row: dict[str, Any] = {"metric": "published_ranks", "source": SOURCES[case.source], "device": joined.spec.name}
    row |= {"ranks": how.ranks, "link": link.name, "link_stated": joined.is_stated, "model": case.model.name}
    row |= {"zero_stage": how.zero_stage, "gather_dtype": how.gather_dtype, "reduce_dtype": how.reduce_dtype}
    row |= {"precision": case.precision, "samples": case.rows, "micro_batches": case.micro_batches}
    row |= {"recompute": case.model.recompute, "compiled": case.compiled}
    row |= {"published_s": case.step_s, "predicted_s": told.total_s, "time_error": told.total_s / case.step_s - 1}
    row |= {"waited_s": told.exposed_s, "alone_s": told.compute_s + told.optimizer_s}
    row |= {"flat_s": flat.total_s, "flat_error": flat.total_s / case.step_s - 1, "own_s": own.total_s}
    predicted_bytes = None if case.held_bytes is None else peak_of(case)
    return row | {
        "published_bytes": case.held_bytes,
        "is_reserved": case.is_reserved,
        "predicted_bytes": predicted_bytes,
        "error": None if predicted_bytes is None or case.held_bytes is None else predicted_bytes / case.held_bytes - 1,
    }


def efficiency_of(pair: Efficiency) -> dict[str, Any]:
    """Return the row of a published efficiency, predicted from data sheets and from the step time of fewer ranks."""
    fewer, more = pair.fewer, pair.more
    ranks = [each.how.ranks for each in (fewer, more)]

    def told(ways: Sequence[Link]) -> float:
        return window_of(fewer, ways[0]).total_s / window_of(more, ways[1]).total_s

    rings, flat = ([way(number) for number in ranks] for way in (fewer.joined.rings, fewer.joined.flat))
    timed = fewer.step_s / window_s(more.how, rings[1], _as_timed(fewer, rings[0]), more.micro_batches).total_s
    row: dict[str, Any] = {"metric": "published_efficiency", "source": SOURCES[fewer.source]}
    row |= {"device": fewer.joined.spec.name, "model": fewer.model.name, "zero_stage": more.how.zero_stage}
    row |= {"precision": fewer.precision, "samples": fewer.rows, "compiled": fewer.compiled}
    row |= {"recompute": fewer.model.recompute, "fewer_ranks": ranks[0], "ranks": ranks[1]}
    row |= {"published": pair.published, "predicted": told(rings), "flat": told(flat), "timed": timed}
    return row | {f"{name}_error": row[name] / pair.published - 1 for name in ("predicted", "flat", "timed")}


def _as_timed(case: Case, link: Link) -> StepShape:
    """Return the communication profile with compute times scaled so that the window takes the published time."""
    shape = shape_of(case, like_theirs=True)

    def scaled(by: float) -> StepShape:
        times = {name: by * getattr(shape, name) for name in ("forward_s", "backward_s", "optimizer_s")}
        return replace(shape, **times)

    low, high = 1e-3, 1e3
    for _ in range(_SCALES):
        middle = (low * high) ** 0.5
        is_over = window_s(case.how, link, scaled(middle), case.micro_batches).total_s > case.step_s
        low, high = (low, middle) if is_over else (middle, high)
    return scaled(high)


def main() -> None:
    """Predict every step and print the errors."""
    options = command.parser(__doc__).parse_args()
    rows = []
    for case in [each for each in CASES if not options.quick or each.model.name in QUICK]:
        rows.append(row_of(case))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    for key in ("time_error", "flat_error"):
        errors = [abs(row[key]) for row in rows if not row["compiled"]]
        print(f"{key}: median {statistics.median(errors):.0%} off, worst {max(errors):.0%}", file=sys.stderr)
    for pair in [each for each in EFFICIENCIES if not options.quick or each.more.model.name in QUICK]:
        rows.append(efficiency_of(pair))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    command.show("published_ranks", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    about = f"{row['ranks']:>4} {row['device']:<15} {row['model']:<13} stage {row['zero_stage']} {row['samples']:>4}"
    about += " compiled" if row["compiled"] else ""
    if row["metric"] == "published_efficiency":
        told = ", ".join(f"{name} {row[name]:.1%}" for name in ("predicted", "flat", "timed"))
        return f"{about} over {row['fewer_ranks']} ranks: {row['published']:.1%}, {told}"
    held = "" if row["error"] is None else f"; {row['published_bytes'] / 2**30:.1f} GiB, predicted {row['error']:+.1%}"
    others = f", over one ring {row['flat_error']:+.1%}, ours {row['own_s'] / row['published_s'] - 1:+.1%}"
    waited = f"({row['waited_s'] / row['predicted_s']:.0%} waiting)"
    return f"{about} {row['published_s']:>7.3f} s, predicted {row['time_error']:+.1%} {waited}{others}{held}"


if __name__ == "__main__":
    main()
