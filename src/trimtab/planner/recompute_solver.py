"""Optimal activation checkpointing schedule within a memory limit, by dynamic programming over a chain's stages.

Separate from `recompute_candidates`, because the tables need numpy, whose import takes longer than most plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from trimtab.core.block_costs import BlockChain, BlockCost
from trimtab.core.recompute_schedule import (
    KeptBlock,
    Part,
    RecomputedSegment,
    Schedule,
    stages_of,
    to_notation,
)
from trimtab.planner.recompute_cost import backward_need, keep_all, kept_bytes, predict

# The limit is divided into SLOTS slots of bytes, and sizes are rounded up to slots. The table is solved for SLACKS
# times the limit: above 1 because rounded sizes overestimate memory (the schedule is judged by its exact bytes), below
# 1 because autocast's weight cache is not in the table.
SLOTS = 250
SLACKS = (1.15, 1.1, 1.06, 1.03, 1.0, 0.97, 0.94, 0.9)
# Fractions of the memory without recomputation, to solve for if memory is weighed but not limited.
SHARES = (0.85, 0.7, 0.55, 0.4)
# The table of a longer chain would take hundreds of megabytes.
MOST_STAGES = 250


def optimal(chain: Sequence[BlockCost], limit_bytes: int, slots: int = SLOTS) -> Schedule | None:
    """Return the schedule of least recomputation with a peak within the limit; None if none is found.

    Chains longer than `MOST_STAGES` return None, unless nothing needs recomputation.

    Dynamic programming over the stages s to t that remain to run forward and backward, and the bytes m available for
    them (Beaumont, Herrmann et al., arXiv:1911.13214, theorem 1, with nested segments in place of forward-only calls,
    and with gradients, which grow while activations shrink):

        R(s, t, m) = min over  keeping s:                c_s + R(s+1, t, m - kept_s)
                               a segment s to e < t:     f_s + ... + f_e + R(e+1, t, m - out_e) + R(s, e, m)

    R is the recomputed time, infinite if a forward or backward does not fit m.

    Args:
        slots: number of slots of the limit. Sizes are rounded up to slots, so the schedule may be suboptimal, or
            missed, by less than a slot per stage.
    """
    plain = keep_all(len(chain))
    if predict(chain, plain).peak_bytes <= limit_bytes:
        return plain
    if limit_bytes <= 0 or len(chain) > MOST_STAGES:
        return None
    slacks = SLACKS if limit_bytes > slots else tuple(slack for slack in SLACKS if slack <= 1.0)
    table = _Table(chain, slacks[0] * limit_bytes, slots)
    found = [schedule for slack in slacks if (schedule := table.schedule(slack * limit_bytes)) is not None]
    costs = [(predict(chain, schedule), schedule) for schedule in dict.fromkeys(found)]
    within = [(cost.recompute_s, schedule) for cost, schedule in costs if cost.peak_bytes <= limit_bytes]
    return min(within, key=lambda each: each[0], default=(0.0, None))[1]


def by_shares(chain: BlockChain) -> tuple[str, ...]:
    """Return the optimal schedules, as text, for the fractions `SHARES` of the memory without recomputation."""
    whole = chain.held_bytes + predict(chain.stages, keep_all(len(chain.stages))).peak_bytes
    found = (optimal(chain.stages, math.floor(share * whole) - chain.held_bytes) for share in SHARES)
    return tuple(dict.fromkeys(to_notation(schedule[:-1]) for schedule in found if schedule is not None))


class _Table:
    """Table of R for all stages and available slots of bytes, filled by increasing length of the run of stages."""

    def __init__(self, chain: Sequence[BlockCost], most_bytes: float, slots: int) -> None:
        self._chain, self._num = chain, len(chain)
        self._slot = max(1.0, most_bytes / slots)
        self._most = int(most_bytes / self._slot)
        self._until = np.concatenate([[0.0], np.cumsum([stage.forward_s for stage in chain])])
        growth = [0, *itertools.accumulate(stage.gradient_bytes for stage in reversed(chain))]
        self._gradients = growth[::-1][1:]  # gradients held after the backward of all later stages
        self._outputs = [self._slots(stage.output_bytes) for stage in chain]
        self._beside = [self._slots(stage.beside_bytes) for stage in chain]
        self._kept = [self._slots(kept_bytes(stage, KeptBlock(index))) for index, stage in enumerate(chain)]
        self._always_held = np.array([self._always(last) for last in range(self._num)], float)
        self._forward = np.array([stage.forward_bytes for stage in chain], float)
        needs = (held + backward_need(stage, KeptBlock(0)) for stage, held in zip(chain, self._gradients, strict=True))
        self._backward = np.array([*needs], float)
        self._dropping = self._dropping_from()
        self._reach = np.array(self._furthest())  # last stage of a segment starting here
        shape = self._num, self._num, self._most + 1
        self._least = np.full(shape, np.inf, np.float32)
        # R(s, t, m - out) after a segment with output `out`, plus forward time up to s.
        self._behind = np.full(shape, np.inf, np.float32)
        for more in range(self._num):
            self._fill(more)

    def _slots(self, size: float) -> int:
        return math.ceil(size / self._slot - 1e-9)

    def _dropping_from(self) -> np.ndarray:
        """Return the peak bytes of a forward from stage `first` to stage `last` that keeps nothing, for all pairs."""
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
        """Return the bytes held while stages up to `last` run: gradients, and before the end the output's gradient."""
        return self._gradients[last] + (self._chain[last].output_bytes if last < self._num - 1 else 0)

    def _options(self, index: int, last: int) -> list[tuple[KeptBlock, int, int, float]]:
        """Return the ways to keep a stage: slots held, slots required, and recomputed seconds."""
        stage, found = self._chain[index], []
        forward, before = self._always(last) + stage.forward_bytes, self._gradients[index]
        ways = [(KeptBlock(index), 0.0)]
        if last == self._num - 1:  # With an earlier last stage, this stage is in a segment.
            ways += [(KeptBlock(index, in_part=True, results=each.results), each.recompute_s) for each in stage.parts]
        for kept, recompute_s in ways:
            need = self._slots(max(forward, before + backward_need(stage, kept)))
            held = self._slots(kept_bytes(stage, kept)) + self._held_beside(index, last)
            found.append((kept, held, need, recompute_s))
        return found

    def _held_beside(self, index: int, last: int) -> int:
        """Return the slots held between a stage and the next; 0 in a segment and at the end."""
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
        """Return R of all runs of `more + 1` stages with a kept first stage."""
        number, size = self._num - more, self._most + 1
        found = np.full((number, size), np.inf, np.float32)
        needs = self._in_slots(np.maximum(self._always_held[more:] + self._forward[:number], self._backward[:number]))
        for first, need in enumerate(needs.tolist()[:-1]):
            begin, held = max(self._kept[first], need), self._kept[first]
            if begin < size:
                rest = self._least[first + 1, first + more, begin - held : size - held] if more else 0.0
                found[first, begin:] = rest
        first, last = number - 1, self._num - 1  # This run may be kept in part and may hold memory between stages.
        for _, held, need, recompute_s in self._options(first, last):
            begin = max(held, need)
            if begin < size:
                rest = self._least[first + 1, last, begin - held : size - held] if more else 0.0
                np.minimum(found[first, begin:], rest + np.float32(recompute_s), out=found[first, begin:])
        return found

    def _of_segments(self, more: int) -> np.ndarray:
        """Return R of all runs of `more + 1` stages that begin with a segment, minimised over its end."""
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
        slots = min(self._most, int(within_bytes / self._slot + 1e-9))
        if not math.isfinite(self._least[0, self._num - 1, slots]):
            return None
        return self._best(0, self._num - 1, slots)

    def _best(self, first: int, last: int, slots: int) -> Schedule:
        """Return the parts of a schedule that attains the table's R."""
        parts: list[Part] = []
        while first <= last:
            part, slots = self._next(first, last, slots)
            parts.append(part)
            first = stages_of(part).stop
        return tuple(parts)

    def _next(self, first: int, last: int, slots: int) -> tuple[Part, int]:
        """Return the first part of the best schedule, and the slots that remain after it."""
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
            return RecomputedSegment(self._best(first, end, slots)), left
        _, part, left = min(found, key=lambda each: each[0])
        return part, left

    def _segment_cost(self, first: int, end: int, last: int, slots: int) -> float:
        left = slots - self._outputs[end] - self._held_beside(end, last)
        if left < 0 or slots < self._slots(self._always(last) + self._dropping[first, end]):
            return math.inf
        again = float(self._until[end + 1] - self._until[first])
        return again + float(self._least[end + 1, last, left]) + float(self._least[first, end, slots])


def _diagonal(table: np.ndarray) -> np.ndarray:
    """Return a view of a table's diagonal: the entries (i, i) of the first two axes."""
    rows, columns, size = table.shape
    return as_strided(table, (min(rows, columns), size), (sum(table.strides[:2]), table.strides[2]))


def _further(table: np.ndarray, axis: int, number: int) -> np.ndarray:
    """Return a view of diagonal entries together with the next `number` entries along an axis."""
    rows, columns, size = table.shape
    places = min(columns, rows + 1 - number) if axis == 0 else min(rows, columns + 1 - number)
    return as_strided(table, (places, number, size), (sum(table.strides[:2]), table.strides[axis], table.strides[2]))
