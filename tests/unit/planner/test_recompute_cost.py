"""Schedules of a chain's recomputation: what they take, and that the least is found."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from trimtab.core.block_costs import BlockCost, ExpensivePart
from trimtab.core.errors import UsageError
from trimtab.core.recompute_schedule import KeptBlock, RecomputedSegment
from trimtab.planner.recompute_cost import every_block, keep_all, predict, sqrt_segments
from trimtab.planner.recompute_solver import optimal


def stage(saved=4, *, f=1.0, out=1, forward=None, dropping=None, backward=0, grad=0, parts=(), **others):
    forward = saved if forward is None else forward
    dropping = forward if dropping is None else dropping
    return BlockCost(f, out, saved, forward, dropping, backward, grad, parts=parts, **others)


def alike(number, **how):
    return [stage(**how) for _ in range(number)]


@cache
def every_schedule(first, last, start, in_part=()):
    """Return all schedules of the stages from one to another, nested ones too.

    A segment of all stages from the start is left out: it is run forward for nothing.
    """
    if first > last:
        return ((),)
    each = dict(in_part).get(first, ())  # in no segment
    kept = [KeptBlock(first), *(KeptBlock(first, in_part=True, results=results) for results in each)]
    found = [(one, *rest) for one in kept for rest in every_schedule(first + 1, last, start, in_part)]
    for end in range(first, last + 1):
        if (first, end) != (start, last):
            rests = every_schedule(end + 1, last, start, in_part)
            found += [
                (RecomputedSegment(inner), *rest) for inner in every_schedule(first, end, first) for rest in rests
            ]
    return tuple(found)


def may_be(chain, schedule):
    """Return whether no segment goes on past a stage that is not linked."""
    segments = [part for part in schedule if isinstance(part, RecomputedSegment)]
    return all(
        all(chain[index].is_linked for index in part.stages[:-1]) and may_be(chain, part.parts) for part in segments
    )


def by_hand(chain, limit):
    """Return the least recomputation within a limit of all schedules there are; None where none is."""
    in_part = tuple((i, tuple(part.results for part in each.parts)) for i, each in enumerate(chain))
    schedules = every_schedule(0, len(chain) - 1, 0, in_part)
    each = (predict(chain, schedule) for schedule in schedules if may_be(chain, schedule))
    return min((found.recompute_s for found in each if found.peak_bytes <= limit), default=None)


def test_what_is_kept_is_held_from_forward_to_backward():
    chain = alike(4, saved=5, out=1, backward=2)
    found = predict(chain, keep_all(4))
    assert found.peak_bytes == 4 * 5 + 1 + 2  # the last one's backward, its output's gradient beside it
    assert found.recompute_s == 0
    assert found.runs == (1, 1, 1, 1)


def test_a_segment_holds_what_goes_in_and_runs_twice():
    chain = alike(4, saved=5, out=1)
    found = predict(chain, every_block(4))
    assert found.runs == (2, 2, 2, 1)
    assert found.recompute_s == 3.0
    assert found.peak_bytes == 3 * 1 + 5 + 1


def test_gradients_grow_while_activations_fall():
    chain = alike(3, saved=5, out=0, grad=4)
    assert predict(chain, keep_all(3)).peak_bytes == 15
    chain = alike(3, saved=3, out=0, grad=4)
    assert predict(chain, keep_all(3)).peak_bytes == 11  # in the first one's backward: 3 and two gradients


@pytest.mark.parametrize(
    ("number", "widths"), [(1, [1]), (4, [2, 2]), (9, [3, 3, 3]), (10, [4, 4, 2]), (12, [4, 4, 4])]
)
def test_segments_of_the_root_of_the_stages(number, widths):
    schedule = sqrt_segments(number)
    segments = [len(part.stages) for part in schedule if isinstance(part, RecomputedSegment)]
    assert segments == widths[:-1]
    assert sum(isinstance(part, KeptBlock) for part in schedule) == widths[-1]
    assert predict(alike(number), schedule).runs == (2,) * sum(widths[:-1]) + (1,) * widths[-1]


def test_segments_are_cut_where_stages_are_not_linked():
    found = [
        tuple(part.stages)
        for part in sqrt_segments(9, [True] * 4 + [False] + [True] * 3)
        if isinstance(part, RecomputedSegment)
    ]
    assert found == [(0, 1, 2), (3, 4), (5,)]


def test_what_lies_between_stages_is_held_whatever_is_recomputed():
    plain, beside = alike(4, saved=5, out=1), alike(4, saved=5, out=1, beside_bytes=2, is_linked=False)
    for schedule in (keep_all(4), every_block(4)):
        assert predict(beside, schedule).peak_bytes == predict(plain, schedule).peak_bytes + 3 * 2


def test_nested_segments_run_more_than_twice():
    chain = alike(4, saved=5)
    found = predict(
        chain, (RecomputedSegment((RecomputedSegment((KeptBlock(0), KeptBlock(1))), KeptBlock(2))), KeptBlock(3))
    )
    assert found.runs == (3, 3, 2, 1)
    assert found.recompute_s == 2 + 2 + 1


def test_a_schedule_of_other_stages_is_refused():
    with raises(UsageError, code="value.invalid", field="plan.recompute"):
        predict(alike(3), keep_all(2))
    with raises(UsageError, code="value.invalid", field="plan.recompute"):
        predict(alike(2), (KeptBlock(1), KeptBlock(0)))
    with raises(UsageError, code="value.invalid", field="plan.recompute"):
        predict(
            alike(2, parts=(ExpensivePart(2, 2, 0.1),)),
            (RecomputedSegment((KeptBlock(0, in_part=True),)), KeptBlock(1)),
        )


@st.composite
def chains(draw, most=4):
    number = draw(st.integers(1, most))
    each = []
    for _ in range(number):
        out, grad = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        saved = out + draw(st.integers(0, 6))
        forward, backward = saved + draw(st.integers(0, 2)), draw(st.integers(0, 3))
        dropping = draw(st.integers(out, forward))
        f = draw(st.integers(1, 5))
        in_part = st.builds(ExpensivePart, st.integers(out, saved), st.integers(0, 9), st.integers(0, f))
        level = in_part.map(lambda part: replace(part, results=(1,)))
        link, spare = draw(st.integers(0, 3)) > 0, draw(st.integers(0, out))
        others = {"spare_bytes": spare, "is_linked": link, "beside_bytes": 0 if link else draw(st.integers(0, 3))}
        others |= {"forward": forward, "dropping": dropping, "backward": backward}
        others["parts"] = (*draw(st.lists(in_part, max_size=1)), *draw(st.lists(level, max_size=1)))
        each.append(stage(saved, f=f, out=out, grad=grad, **others))
    return each


@settings(max_examples=150, deadline=None)
@given(chain=chains(), share=st.floats(0.2, 1.1))
def test_the_least_recomputation_is_found(chain, share):
    """Against all schedules there are, where a slot is a byte."""
    limit = max(1, int(share * predict(chain, keep_all(len(chain))).peak_bytes))
    schedule, least = optimal(chain, limit), by_hand(chain, limit)
    assert (schedule is None) is (least is None)
    if schedule is not None:
        found = predict(chain, schedule)
        assert found.peak_bytes <= limit
        assert may_be(chain, schedule)
        assert found.recompute_s == least


def test_every_limit_that_can_be_met_is_met_and_less_room_takes_no_less_time():
    chain = alike(12, saved=900, out=100, backward=300, grad=50)
    whole = predict(chain, keep_all(12)).peak_bytes
    least = min(predict(chain, each).peak_bytes for each in (every_block(12), sqrt_segments(12)))
    taken = []
    for limit in range(least, whole + 1, max(1, (whole - least) // 20)):
        schedule = optimal(chain, limit)
        assert schedule is not None
        assert predict(chain, schedule).peak_bytes <= limit
        taken.append(predict(chain, schedule).recompute_s)
    assert taken[-1] == 0 or taken[-1] < taken[0]
    assert all(later <= sooner + 1 for sooner, later in itertools.pairwise(taken))  # slots are rounded


@pytest.mark.parametrize("seed", range(3))
def test_slots_cost_no_more_than_a_twentieth(seed):
    """Of what is recomputed, against slots of a fortieth of theirs: chains that are not alike, at several limits."""
    random.seed(seed)
    chain = [
        stage(
            random.randint(200, 2000), f=random.uniform(0.5, 2), out=random.randint(10, 200), grad=random.randint(0, 50)
        )
        for _ in range(12)
    ]
    whole = predict(chain, keep_all(12)).peak_bytes
    compared = 0
    for share in (0.8, 0.65, 0.5, 0.4):
        coarse, fine = (optimal(chain, int(share * whole), slots) for slots in (250, 10_000))
        if fine is not None:
            assert coarse is not None
            assert predict(chain, coarse).recompute_s <= 1.05 * predict(chain, fine).recompute_s
            compared += 1
    assert compared >= 2


def test_what_cannot_be_met_is_none():
    assert optimal(alike(6, saved=10, backward=5), 12) is None
    assert optimal(alike(1, saved=10), 9) is None
    assert optimal(alike(1, saved=10, out=0), 10) == (KeptBlock(0),)


def test_the_dear_part_alone_is_kept_where_that_is_enough():
    """It is recomputed at a tenth of what the whole stage takes."""
    chain = alike(4, saved=10, out=1, parts=(ExpensivePart(4, 6, 0.1),))
    schedule = optimal(chain, 4 * 4 + 10)
    assert schedule is not None
    found = predict(chain, schedule)
    assert found.recompute_s <= 0.4 + 1e-9
    assert any(isinstance(part, KeptBlock) and part.in_part for part in schedule)
    assert math.isclose(found.recompute_s, by_hand(chain, 4 * 4 + 10))
