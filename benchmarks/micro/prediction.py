"""Predicted step time and peak memory compared with measurements.

`python -m benchmarks.micro.prediction [--quick] [--json]` profiles each kind of model at two batch sizes, with
different optimizers, and executes every step that the cost model predicts: each precision, one and several
micro-batches, whole and chunked loss head, with and without recomputation. It prints `prediction` rows:

- Bytes: traced on fake tensors at two micro-batch sizes, compared with the measured peak. `bare_error` excludes
  operator workspaces, as for another device.
- Seconds: predicted by the cost model from its trials (`tried`: the trials include this step) and from the device's
  peaks (`roofline_s`), compared with interleaved measurements.
- `ratio_error`: error of the time relative to the unchanged loop, which is robust to a machine that is slower during
  profiling.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.micro.prediction_models import KINDS, OPTIMIZERS, Kind
from trimtab.core.recompute_schedule import EVERY_BLOCK
from trimtab.measure.memory_trace import trace_peaks
from trimtab.measure.timing import time_call, time_settled
from trimtab.planner.cost_model import CostModel, head_tokens, step_seconds
from trimtab.plans.profile import FINAL, Candidate, Profile
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.peak_memory import peak_bytes
from trimtab.techniques.mixed_precision import autocast
from trimtab.training.run import Run

CPU = torch.device("cpu")
ROUNDS, BLOCK_S = 9, 0.15
PRECISIONS = ("fp32", "bf16")
SPLITS = (1, 4)


def rows_of_loop(name: str, rows: int, optimizer: str) -> Iterator[dict[str, Any]]:
    """Profile a loop and yield a row per candidate that the cost model predicts."""
    torch.manual_seed(0)
    kind = KINDS[name]
    model, batch = kind.make().train(), kind.batch(rows)
    subject = TrainingLoop(model, OPTIMIZERS[optimizer](model.parameters()), kind.loss_fn, batch)
    found = trimtab.profile(model, subject.optimizer, kind.loss_fn, batch, traces=True)
    before = tuple(trial for trial in found.trials if not trial.stage.startswith(FINAL))
    told = CostModel(replace(found, trials=before))
    candidates = [c for c in candidates_of(found) if told.predict(c).step_s and told.traced_bytes(c)]
    seconds = _seconds(subject, candidates)
    own = candidates[0]
    own_s, own_told_s = seconds[own], told.predict(own).step_s or math.nan
    tried = {trial.candidate for trial in before if trial.is_whole and trial.step_s}
    for candidate in candidates:
        k = math.ceil(rows / candidate.micro_batch)
        row = {"metric": "prediction", "model": name, "batch": rows, "optimizer": optimizer}
        row |= {"schedule": candidate.recompute or "none"}
        row |= {"precision": candidate.precision, "num_micro_batches": k, "loss_chunk": candidate.loss_chunk}
        predicted, measured = told.traced_bytes(candidate), _counted(subject, candidate)
        assert predicted is not None
        row |= {"predicted_bytes": predicted, "measured_bytes": measured, "error": predicted / measured - 1}
        predicted_s, measured_s = told.predict(candidate).step_s, seconds[candidate]
        row |= {"predicted_s": predicted_s, "measured_s": measured_s, "time_error": (predicted_s or 0) / measured_s - 1}
        row |= {"ratio_error": (predicted_s or 0) / own_told_s / (measured_s / own_s) - 1 if candidate != own else None}
        row |= {"tried": candidate in tried}
        if k == 1 and candidate.loss_chunk is None and candidate.recompute is None:
            row |= _from_afar(kind, subject, found, candidate, measured, measured_s)
        yield row


def candidates_of(profile: Profile) -> Iterator[Candidate]:
    """Yield the candidates to predict, with the loop's memory format and optimizer and the allocator of the trials."""
    rows, base = profile.loop.batch_size, replace(profile.trials[0].candidate, micro_batch=profile.loop.batch_size)
    chunks = sorted({each.candidate.loss_chunk or 0 for each in profile.traces})
    splits = [k for k in SPLITS if 2 * k <= rows] if profile.check.splittable else [1]
    for precision, k, chunk in itertools.product(PRECISIONS, splits or [1], chunks):
        plain = replace(base, precision=precision, micro_batch=math.ceil(rows / k), loss_chunk=chunk or None)
        if chunk < head_tokens(profile, plain) or not chunk:
            yield plain
    for found, k in itertools.product(profile.recomputables, splits or [1]):
        if found.whole is not None:
            sliced = replace(found.candidate, micro_batch=math.ceil(rows / k))
            if (sliced.loss_chunk or 0) >= (head_tokens(profile, sliced) or math.inf):
                continue
            has_parts = all(stage.part is not None for stage in found.whole.many.stages[:-1])
            schedules = (EVERY_BLOCK, f"~0-{len(found.blocks) - 1}") if has_parts else (EVERY_BLOCK,)
            yield from (replace(sliced, recompute=text) for text in schedules)


def _seconds(subject: TrainingLoop, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
    """Return the median seconds per step of each candidate, interleaved."""
    taken: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    for turn in range(ROUNDS + 1):
        for candidate in candidates if turn % 2 else reversed(candidates):
            with subject.start(candidate) as run:
                seconds = _steady_s(run, subject, candidate)
            taken[candidate] += [seconds] if turn else []
    return {candidate: statistics.median(each) for candidate, each in taken.items()}


def _steady_s(run: Run, subject: TrainingLoop, candidate: Candidate) -> float:
    """Return the seconds of a step after a warm-up step; for short steps the median of several."""
    timed = time_settled if candidate.allocator == "retain" else time_call

    def step() -> None:
        run.train_step(run.window(subject.batch), subject.loss_fn)

    step()
    first_s = timed(step, CPU)
    return statistics.median([first_s, *(timed(step, CPU) for _ in range(min(8, int(BLOCK_S / first_s))))])


def _counted(subject: TrainingLoop, candidate: Candidate) -> int:
    with subject.start(candidate) as run:
        run.train_step(run.window(subject.batch), subject.loss_fn)
        # Gradients allocated before the measurement would not be counted.
        subject.optimizer.zero_grad(set_to_none=True)
        return peak_bytes(lambda: run.train_step(run.window(subject.batch), subject.loss_fn), CPU, subject.live_tensors)


def _from_afar(
    kind: Kind, subject: TrainingLoop, profile: Profile, candidate: Candidate, measured: int, measured_s: float
) -> dict[str, Any]:
    """Return bytes and seconds of a step as predicted for another device, without trials."""
    rows, precision = subject.rows, candidate.precision
    sizes = max(2, rows // 2), max(3, rows)
    few, many = map(kind.batch, sizes)
    forward = [lambda: autocast(precision, CPU)]
    (found,) = trace_peaks(subject.model, subject.optimizer, kind.loss_fn, (few, many), sizes, autocasts=forward)
    roofline_s = step_seconds(found.work, profile.device, precision, rows, 1)
    bare = {"bare_error": found.whole.peak_bytes(rows) / measured - 1, "roofline_s": roofline_s}
    return bare | {"roofline_error": None if roofline_s is None else roofline_s / measured_s - 1}


def rows_of(names: list[str], *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of each kind and batch size, with alternating optimizers."""
    optimizers = itertools.cycle(OPTIMIZERS)
    for name in names:
        for rows in KINDS[name].sizes[:1] if quick else KINDS[name].sizes:
            for row in rows_of_loop(name, rows, next(optimizers)):
                print(_line(row), file=sys.stderr, flush=True)
                yield row


def main() -> None:
    """Predict, measure and print the errors."""
    parser = command.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    rows = list(rows_of(options.models, quick=options.quick))
    command.show("prediction", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    chunk = "" if row["loss_chunk"] is None else f", chunks of {row['loss_chunk']}"
    chunk += "" if row["schedule"] == "none" else f", recomputing {row['schedule']}"
    where = f"{row['model']:<9} {row['batch']:<4} {row['precision']} {row['optimizer']:<9} k={row['num_micro_batches']}"
    sizes = f"{row['measured_bytes'] / 2**20:8.1f} MiB, predicted {row['error']:+.2%}"
    ratio = "" if row["ratio_error"] is None else f", as a ratio {row['ratio_error']:+.1%}"
    times = f"{row['measured_s']:.3f} s, predicted {row['time_error']:+.1%}{ratio}{' (tried)' if row['tried'] else ''}"
    afar = f"; from afar {row['bare_error']:+.2%}, {row['roofline_error']:+.0%}" if row.get("roofline_error") else ""
    return f"{where}{chunk}  {sizes}; {times}{afar}"


if __name__ == "__main__":
    main()
