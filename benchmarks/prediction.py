"""What a step is predicted to take, against what it took.

`python benchmarks/prediction.py [--quick] [--json]` prints `prediction` rows, for each kind of model at two batch
sizes, in each precision and with each optimizer in turn: peak bytes of a step, traced on fake tensors, and counted
while it ran; its seconds, on a straight line through two other sizes, by the device's peaks alone, and as it took.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import command
import torch
from prediction_models import KINDS, OPTIMIZERS, Kind
from torch import Tensor

from trimtab.decide.roofline import step_seconds
from trimtab.measure.machine import device_spec
from trimtab.measure.memory import peak_bytes
from trimtab.measure.step_trace import trace_peaks, trace_step
from trimtab.measure.timing import time_call

CPU = torch.device("cpu")
ROUNDS = 9
PRECISIONS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "fp32": contextlib.nullcontext,
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
}


def row_of(name: str, rows: int, precision: str, optimizer: str) -> dict[str, Any]:
    """Trace a step and run it."""
    torch.manual_seed(0)
    kind, autocast = KINDS[name], PRECISIONS[precision]
    model, batch = kind.make().train(), kind.batch(rows)
    made = OPTIMIZERS[optimizer](model.parameters())
    start = time.perf_counter()
    predicted = trace_step(model, made, kind.loss_fn, batch, autocast=autocast).peak_bytes
    traced_s = time.perf_counter() - start
    with_scratch = trace_step(model, made, kind.loss_fn, batch, autocast=autocast, counts_scratch=True).peak_bytes
    measured = _counted(kind, model, made, batch, autocast)
    probes = _probes(rows)
    seconds = _seconds(kind, model, made, (rows, *probes), autocast)
    roofline_s = _by_roofline(kind, model, made, rows, precision, autocast)
    row = {"metric": "prediction", "model": name, "batch": rows, "precision": precision, "optimizer": optimizer}
    row |= {"schedule": "none", "predicted_bytes": predicted, "measured_bytes": measured, "traced_s": traced_s}
    row |= {"calibrated_bytes": with_scratch}
    row |= {"error": predicted / measured - 1, "calibrated_error": with_scratch / measured - 1}
    measured_s, (a, b) = seconds[rows], probes
    predicted_s = seconds[a] + (seconds[b] - seconds[a]) / (b - a) * (rows - a)
    row |= {"predicted_s": predicted_s, "measured_s": measured_s, "roofline_s": roofline_s}
    return row | {"time_error": predicted_s / measured_s - 1, "roofline_error": roofline_s / measured_s - 1}


def _probes(rows: int) -> tuple[int, int]:
    """Return the two sizes that a step of another is predicted from: a half and three halves of it."""
    return max(2, rows // 2) if rows > 2 else 3, max(4, 3 * rows // 2)


def _seconds(kind: Kind, model: Any, made: Any, sizes: tuple[int, ...], autocast: Any) -> dict[int, float]:
    """Return the median seconds of a step of each size, run in turn."""
    batches = {rows: kind.batch(rows) for rows in sizes}
    taken: dict[int, list[float]] = {rows: [] for rows in sizes}
    for turn in range(ROUNDS + 1):
        for rows in sizes if turn % 2 else reversed(sizes):
            seconds = time_call(lambda rows=rows: _step(kind, model, made, batches[rows], autocast), CPU)
            taken[rows] += [seconds] if turn else []
    return {rows: statistics.median(each) for rows, each in taken.items()}


def _by_roofline(kind: Kind, model: Any, made: Any, rows: int, precision: str, autocast: Any) -> float:
    """Return seconds as they are guessed of a device that is not here."""
    sizes = (max(2, rows // 2), max(3, rows))
    batches = tuple(map(kind.batch, sizes))
    work = trace_peaks(model, made, kind.loss_fn, (batches[0], batches[1]), sizes, autocasts=[autocast])[0].work
    return step_seconds(work, device_spec(CPU), precision, rows, 1) or math.nan


def _step(kind: Kind, model: Any, made: Any, batch: Any, autocast: Any) -> None:
    with autocast():
        loss = kind.loss_fn(model, batch)
    loss.backward()
    del loss
    made.step()
    made.zero_grad(set_to_none=True)


def _counted(kind: Kind, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, autocast: Any) -> int:
    def step() -> None:
        _step(kind, model, optimizer, batch, autocast)

    def live() -> list[Tensor]:
        states = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
        return [*model.parameters(), *model.buffers(), *batch, *(v for v in states if isinstance(v, Tensor))]

    step()
    return peak_bytes(step, CPU, live)


def rows_of(names: list[str], *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind, batch and precision, the optimizers taking turns."""
    optimizers = itertools.cycle(OPTIMIZERS)
    for name in names:
        for rows, precision in itertools.product(KINDS[name].sizes[:1] if quick else KINDS[name].sizes, PRECISIONS):
            row = row_of(name, rows, precision, next(optimizers))
            print(_line(row), file=sys.stderr, flush=True)
            yield row


def main() -> None:
    """Predict, measure, and print how far they are apart."""
    parser = command.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    rows = list(rows_of(options.models, quick=options.quick))
    command.show("prediction", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    where = f"{row['model']:<9} batch {row['batch']:<4} {row['precision']} {row['optimizer']:<9}"
    sizes = f"{row['predicted_bytes'] / 2**20:8.1f} MiB predicted {row['measured_bytes'] / 2**20:8.1f} measured"
    errors = f"{100 * row['error']:+6.2f}%, with scratch {100 * row['calibrated_error']:+6.2f}%"
    times = f"{row['measured_s']:.3f} s, predicted {row['time_error']:+.1%}, by peaks {row['roofline_error']:+.0%}"
    return f"{where} {sizes}  {errors}  traced in {row['traced_s']:.1f} s; {times}"


if __name__ == "__main__":
    main()
