"""Time against peak memory, by what is recomputed: of each model the schedules everyone has, and the optimal ones.

`python benchmarks/frontier.py [--quick] [--json] [--models gpt_tied]` prints `frontier` rows: a step's seconds, in
turns with one that keeps all (`over_none`, with its interval), and its counted peak, as they were predicted and as they
are. `selective` keeps what matrix products and attention make of every block; `optimal` is the schedule of least
recomputation for a share of the peak that keeping all takes, selective ones among them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import command
import torch
from prediction_models import KINDS, Kind
from torch import nn

from trimtab.calibrate.recomputation import Recomputation, measure_chain
from trimtab.core.recompute import Kept, Schedule
from trimtab.decide.checkpoint_schedule import every_block, keep_all, optimal, predict, sqrt_segments
from trimtab.decide.statistics import ratio_interval
from trimtab.measure.memory import peak_bytes
from trimtab.measure.timing import time_call
from trimtab.runtime.activation_checkpoint import use_schedule
from trimtab.runtime.precision import autocast

MODELS = ("gpt_tied", "resnet50", "unet", "vit")
SHARES = (0.9, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
TURNS, QUICK_TURNS = 15, 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Loop:
    """A model's step, as it is timed and weighed."""

    model: nn.Module
    kind: Kind
    batch: Any
    precision: str

    def step(self) -> None:
        """Run forward and backward."""
        self.model.zero_grad(set_to_none=True)
        with autocast(self.precision, CPU):
            result = self.kind.loss_fn(self.model, self.batch)
        (result[0] / result[1] if isinstance(result, tuple) else result).backward()

    def live(self) -> list[torch.Tensor]:
        """Return what is there before a step."""
        return [*self.model.parameters(), *self.model.buffers(), *self.batch]


def schedules_of(found: Recomputation) -> Iterator[tuple[str, float | None, Schedule]]:
    """Yield the name, the share of the peak that was asked for, and the schedule of each."""
    number, chain = len(found.chain), found.chain
    yield "none", None, keep_all(number)
    yield "every_block", None, every_block(number)
    yield "sqrt", None, sqrt_segments(number, [stage.is_linked for stage in chain[:-1]])
    if all(stage.part is not None for stage in chain[:-1]):
        yield "selective", None, (*(Kept(index, in_part=True) for index in range(number - 1)), Kept(number - 1))
    whole = found.held_bytes + predict(chain, keep_all(number)).peak_bytes
    seen = set()
    for share in SHARES:
        schedule = optimal(chain, int(share * whole) - found.held_bytes)
        if schedule is not None and schedule not in seen:
            seen.add(schedule)
            yield "optimal", share, schedule


def rows_of(name: str, precision: str, turns: int) -> Iterator[dict[str, Any]]:
    """Measure each schedule of a model."""
    torch.manual_seed(0)
    kind = KINDS[name]
    loop = Loop(kind.make().train(), kind, kind.batch(kind.sizes[-1]), precision)
    found = measure_chain(loop.model, kind.loss_fn, loop.batch, loop.step, lambda: autocast(precision, CPU))
    assert found is not None
    none_s = None
    for schedule_name, share, schedule in schedules_of(found):
        ratios, seconds = _in_turns(loop, found, schedule, turns)
        expected = predict(found.chain, schedule)
        none_s = none_s or seconds
        undo = use_schedule(loop.model, found.blocks, schedule)
        loop.model.zero_grad(set_to_none=True)
        peak = peak_bytes(loop.step, CPU, loop.live)
        undo()
        over = ratio_interval(ratios)
        row = {"metric": "frontier", "model": name, "precision": precision, "schedule": schedule_name, "share": share}
        row |= {"peak_bytes": peak, "time_s": seconds, "over_none": over.mean, "low": over.low, "high": over.high}
        row |= {"predicted_bytes": found.held_bytes + expected.peak_bytes, "n": turns}
        row |= {"predicted_over_none": 1 + expected.recompute_s / none_s, "runs": list(expected.runs)}
        print(_line(row), file=sys.stderr, flush=True)
        yield row


def _in_turns(loop: Loop, found: Recomputation, schedule: Schedule, turns: int) -> tuple[list[float], float]:
    """Return the ratios of a step's seconds to those of one that keeps all, and its median seconds."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns + 1):
        for kept in (True, False) if turn % 2 else (False, True):
            how = keep_all(len(found.chain)) if kept else schedule
            taken = _timed(loop.step, use_schedule(loop.model, found.blocks, how))
            seconds[kept] += [taken] if turn else []
    ratios = [ours / theirs for ours, theirs in zip(seconds[False], seconds[True], strict=True)]
    return ratios, sorted(seconds[False])[turns // 2]


def _timed(step: Callable[[], None], undo: Callable[[], None]) -> float:
    taken = time_call(step, CPU)
    undo()
    return taken


def main() -> None:
    """Measure, and print the frontier."""
    parser = command.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(KINDS), default=list(MODELS))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    options = parser.parse_args()
    turns = QUICK_TURNS if options.quick else TURNS
    names = options.models[:1] if options.quick else options.models
    rows = [row for name in names for row in rows_of(name, options.precision, turns)]
    command.show("frontier", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    name = row["schedule"] + (f" {row['share']:g}" if row["share"] else "")
    memory = f"{row['peak_bytes'] / 2**20:8.1f} MiB ({row['predicted_bytes'] / row['peak_bytes'] - 1:+.1%} predicted)"
    seconds = f"{row['over_none']:.3f} ({row['low']:.3f} to {row['high']:.3f}) of none's {row['time_s']:.3f} s"
    where = f"{row['model']:<9} {row['precision']} {name:<13}"
    return f"{where} {memory}  {seconds}, predicted {row['predicted_over_none']:.3f}"


if __name__ == "__main__":
    main()
