"""The schedule of least recomputation within so many bytes, by dynamic programming over a chain's stages.

Apart from what schedules are and take, for the tables' numpy takes longer to import than most plans to make.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from trimtab.core.chain import Chain, Stage
from trimtab.core.recompute import Kept, Part, Schedule, Segment, stages_of, written
from trimtab.decide.checkpoint_schedule import backward_need, keep_all, kept_bytes, predict

# A limit is cut into so many slots of bytes, in which sizes are rounded up; the table is of so many times the limit,
# for rounded up sizes ask for more than there is, and a schedule is judged by its bytes; or of less than one, for what
# autocast has cached is in no table.
SLOTS = 250
SLACKS = (1.15, 1.1, 1.06, 1.03, 1.0, 0.97, 0.94, 0.9)
# Of what keeping all takes, where memory counts and no limit says how much it may be.
SHARES = (0.85, 0.7, 0.55, 0.4)
# Of longer chains the table would be of hundreds of megabytes.
MOST_STAGES = 250


def optimal(chain: Sequence[Stage], limit_bytes: int, slots: int = SLOTS) -> Schedule | None:
    """Return the schedule of least recomputation whose peak is within a limit.

    None where none is found, or the chain is of more than `MOST_STAGES`.

    By dynamic programming over the stages s to t that are left to run forward and backward, and the bytes m that are
    there for it (Beaumont, Herrmann et al., arXiv:1911.13214, theorem 1, with nested segments in place of calls to the
    forward alone; gradients, which grow while activations fall, are added):

        R(s, t, m) = min over  keeping s:                c_s + R(s+1, t, m - kept_s)
                               a segment s to e < t:     f_s + ... + f_e + R(e+1, t, m - out_e) + R(s, e, m)

    R is what is recomputed, and infinite where a forward or backward in it does not fit m.

    Args:
        slots: that the limit is cut into; sizes are rounded up to whole ones, so that what is found is not the least,
            or is not found, where that is a matter of less than a slot a stage.
    """
    plain = keep_all(len(chain))
    if predict(chain, plain).peak_bytes <= limit_bytes:
        return plain
    if limit_bytes <= 0 or len(chain) > MOST_STAGES:
        return None
    slacks = SLACKS if limit_bytes > slots else tuple(slack for slack in SLACKS if slack <= 1.0)
    table = _Table(chain, slacks[0] * limit_bytes, slots)
    for slack in slacks:
        schedule = table.schedule(slack * limit_bytes)
        if schedule is not None and predict(chain, schedule).peak_bytes <= limit_bytes:
            return schedule
    return None


def by_shares(chain: Chain) -> tuple[str, ...]:
    """Return the schedules of a chain's blocks for some shares of what keeping all takes, as they are written."""
    whole = chain.held_bytes + predict(chain.stages, keep_all(len(chain.stages))).peak_bytes
    found = (optimal(chain.stages, math.floor(share * whole) - chain.held_bytes) for share in SHARES)
    return tuple(dict.fromkeys(written(schedule[:-1]) for schedule in found if schedule is not None))


class _Table:
    """R for all stages and slots, as numbers of bytes that are there.

    Filled by rising numbers of stages, all runs of as many at once.

    Args:
        most_bytes: of all slots together.
    """

    def __init__(self, chain: Sequence[Stage], most_bytes: float, slots: int) -> None:
        self._chain, self._num = chain, len(chain)
        self._slot = max(1.0, most_bytes / slots)
        self._most = int(most_bytes / self._slot)
        self._until = np.concatenate([[0.0], np.cumsum([stage.forward_s for stage in chain])])
        growth = [0, *itertools.accumulate(stage.gradient_bytes for stage in reversed(chain))]
        self._gradients = growth[::-1][1:]  # held when the stages behind one had their backward
        self._outputs = [self._slots(stage.output_bytes) for stage in chain]
        self._beside = [self._slots(stage.beside_bytes) for stage in chain]
        self._kept = [self._slots(kept_bytes(stage, Kept(index))) for index, stage in enumerate(chain)]
        self._always_held = np.array([self._always(last) for last in range(self._num)], float)
        self._forward = np.array([stage.forward_bytes for stage in chain], float)
        needs = (held + backward_need(stage, Kept(0)) for stage, held in zip(chain, self._gradients, strict=True))
        self._backward = np.array([*needs], float)
        self._dropping = self._dropping_from()
        self._reach = np.array(self._furthest())  # of each stage the last one that a segment from it may hold
        shape = self._num, self._num, self._most + 1
        self._least = np.full(shape, np.inf, np.float32)
        self._behind = np.full(
            shape, np.inf, np.float32
        )  # R(s, t, m - out) behind what hands on out, and the forward to s
        for more in range(self._num):
            self._fill(more)

    def _slots(self, size: float) -> int:
        return math.ceil(size / self._slot - 1e-9)

    def _dropping_from(self) -> np.ndarray:
        """Return the most bytes that the stages from one to another take forward, where nothing is kept."""
        found = np.zeros((self._num, self._num))
        for first in range(self._num):
            before = [0, *(stage.output_bytes for stage in self._chain[first:])]
            each = (stage.dropping_bytes + held for stage, held in zip(self._chain[first:], before, strict=False))
            found[first, first:] = list(itertools.accumulate(each, max))
        return found

    def _furthest(self) -> list[int]:
        found = list(range(self._num))
        for index in range(self._num - 2, -1, -1):
            found[index] = found[index + 1] if self._chain[index].is_linked else index
        return found

    def _always(self, last: int) -> int:
        """Return the bytes held while the stages up to one run: gradients, and that of its output but in the end."""
        return self._gradients[last] + (self._chain[last].output_bytes if last < self._num - 1 else 0)

    def _options(self, index: int, last: int) -> list[tuple[Kept, int, int, float]]:
        """Return how a stage may be kept: slots it holds, slots there must be, and what is recomputed."""
        stage, found = self._chain[index], []
        forward, before = self._always(last) + stage.forward_bytes, self._gradients[index]
        ways = [Kept(index)]
        if stage.part is not None and last == self._num - 1:  # up to another stage than the last it is in a segment
            ways.append(Kept(index, in_part=True))
        for kept in ways:
            need = self._slots(max(forward, before + backward_need(stage, kept)))
            recompute_s = stage.part.recompute_s if kept.in_part and stage.part else 0.0
            held = self._slots(kept_bytes(stage, kept)) + self._held_beside(index, last)
            found.append((kept, held, need, recompute_s))
        return found

    def _held_beside(self, index: int, last: int) -> int:
        """Return the slots of what is held between a stage and the next: in a segment nothing, and at its end."""
        return self._beside[index] if index < last == self._num - 1 else 0

    def _fill(self, more: int) -> None:
        """Compute R(s, s + more, m) for all s and m."""
        found = self._of_kept(more)
        if more:
            np.minimum(found, self._of_segments(more), out=found)
        _diagonal(self._least[:, more:])[...] = found
        size, plus = self._most + 1, found + self._until[: len(found), None].astype(np.float32)
        for first in range(1, len(found)):
            last = first + more
            output = self._outputs[first - 1] + self._held_beside(first - 1, last)
            self._behind[first, last, output:] = plus[first, : max(0, size - output)]

    def _of_kept(self, more: int) -> np.ndarray:
        """Return R of the runs of so many stages beyond one whose first is kept."""
        number, size = self._num - more, self._most + 1
        found = np.full((number, size), np.inf, np.float32)
        needs = self._in_slots(np.maximum(self._always_held[more:] + self._forward[:number], self._backward[:number]))
        for first, need in enumerate(needs.tolist()[:-1]):
            begin, held = max(self._kept[first], need), self._kept[first]
            if begin < size:
                rest = self._least[first + 1, first + more, begin - held : size - held] if more else 0.0
                found[first, begin:] = rest
        first, last = number - 1, self._num - 1  # which may be kept in part, and beside which something may be held
        for _, held, need, recompute_s in self._options(first, last):
            begin = max(held, need)
            if begin < size:
                rest = self._least[first + 1, last, begin - held : size - held] if more else 0.0
                np.minimum(found[first, begin:], rest + np.float32(recompute_s), out=found[first, begin:])
        return found

    def _of_segments(self, more: int) -> np.ndarray:
        """Return R of the runs of so many stages beyond one that begin with a segment, by where it ends."""
        firsts = np.arange(self._num - more)
        ends = firsts[:, None] + np.arange(more)
        each = _further(self._least[:-1, :-1], 1, more) + _further(self._behind[1:, more:], 0, more)
        needs = self._in_slots(self._dropping[firsts[:, None], ends] + self._always_held[more:, None])
        needs[ends > self._reach[firsts, None]] = self._most + 1
        below = np.clip(needs - 1, 0, self._most)[..., None]
        is_short = np.isfinite(np.take_along_axis(each, below, 2)[..., 0]) & (needs > 0)  # R never grows with m
        for first, end in np.argwhere(is_short).tolist():
            each[first, end, : needs[first, end]] = np.inf
        least: np.ndarray = each.min(1) - self._until[firsts, None].astype(np.float32)
        return least

    def _in_slots(self, sizes: np.ndarray) -> np.ndarray:
        return np.ceil(sizes / self._slot - 1e-9).astype(int)

    def schedule(self, within_bytes: float) -> Schedule | None:
        """Return the best schedule within so many bytes; None where there is none."""
        slots = min(self._most, int(within_bytes / self._slot + 1e-9))
        if not math.isfinite(self._least[0, self._num - 1, slots]):
            return None
        return self._best(0, self._num - 1, slots)

    def _best(self, first: int, last: int, slots: int) -> Schedule:
        """Return the parts of a schedule that has R of the table."""
        parts: list[Part] = []
        while first <= last:
            part, slots = self._next(first, last, slots)
            parts.append(part)
            first = stages_of(part).stop
        return tuple(parts)

    def _next(self, first: int, last: int, slots: int) -> tuple[Part, int]:
        """Return the first part of the best schedule, and the slots that are there behind it."""
        found: list[tuple[float, Part, int]] = []
        for kept, held, need, recomputed in self._options(first, last):
            if max(held, need) <= slots:
                rest = 0.0 if first == last else float(self._least[first + 1, last, slots - held])
                found.append((rest + recomputed, kept, slots - held))
        ends = range(first, min(last, self._reach[first] + 1))
        costs = [self._segment_cost(first, end, last, slots) for end in ends]
        least = min((cost for cost, *_ in found), default=math.inf)
        if costs and min(costs) < least:
            end = ends[costs.index(min(costs))]
            left = slots - self._outputs[end] - self._held_beside(end, last)
            return Segment(self._best(first, end, slots)), left
        _, part, left = min(found, key=lambda each: each[0])
        return part, left

    def _segment_cost(self, first: int, end: int, last: int, slots: int) -> float:
        left = slots - self._outputs[end] - self._held_beside(end, last)
        if left < 0 or slots < self._slots(self._always(last) + self._dropping[first, end]):
            return math.inf
        again = float(self._until[end + 1] - self._until[first])
        return again + float(self._least[end + 1, last, left]) + float(self._least[first, end, slots])


def _diagonal(table: np.ndarray) -> np.ndarray:
    """Return a view of what a table of runs has for each, one stage further on each time."""
    rows, columns, size = table.shape
    return as_strided(table, (min(rows, columns), size), (sum(table.strides[:2]), table.strides[2]))


def _further(table: np.ndarray, axis: int, number: int) -> np.ndarray:
    """Return a view of the same, and of so many places from each on along an axis, as far as the table goes."""
    rows, columns, size = table.shape
    places = min(columns, rows + 1 - number) if axis == 0 else min(rows, columns + 1 - number)
    return as_strided(table, (places, number, size), (sum(table.strides[:2]), table.strides[axis], table.strides[2]))
