"""Schedules as they are written, and read again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core.errors import UsageError
from trimtab.core.recompute_schedule import (
    KeptBlock,
    RecomputedSegment,
    check_recompute,
    check_schedule,
    kept_in,
    read_schedule,
    schedule_of,
    stages_of,
    to_notation,
)

WRITTEN = {
    "0-2": (KeptBlock(0), KeptBlock(1), KeptBlock(2)),
    "(0) 1": (RecomputedSegment((KeptBlock(0),)), KeptBlock(1)),
    "0 (1 2) ~3 4": (
        KeptBlock(0),
        RecomputedSegment((KeptBlock(1), KeptBlock(2))),
        KeptBlock(3, in_part=True),
        KeptBlock(4),
    ),
    "((0) 1) ~2-3": (
        RecomputedSegment((RecomputedSegment((KeptBlock(0),)), KeptBlock(1))),
        KeptBlock(2, in_part=True),
        KeptBlock(3, in_part=True),
    ),
    "~0[] ~1-2[0,2-4] ~3 4": (
        KeptBlock(0, in_part=True, results=()),
        KeptBlock(1, in_part=True, results=(0, 2, 3, 4)),
        KeptBlock(2, in_part=True, results=(0, 2, 3, 4)),
        KeptBlock(3, in_part=True),
        KeptBlock(4),
    ),
}


@pytest.mark.parametrize("text", [text for text in WRITTEN if text != "0 (1 2) ~3 4"])
def test_what_is_written_is_read(text):
    assert read_schedule(text) == WRITTEN[text]
    assert to_notation(WRITTEN[text]) == text


def test_a_run_in_a_segment_is_one_too():
    assert read_schedule("0 (1 2) ~3 4") == WRITTEN["0 (1 2) ~3 4"]
    assert to_notation(WRITTEN["0 (1 2) ~3 4"]) == "0 (1-2) ~3 4"


@st.composite
def schedules(draw):
    """Any schedule: cut stages into runs, and runs into segments again."""

    def parts(first, last, inside):
        found = []
        while first < last:
            end = draw(st.integers(first + 1, last))
            if draw(st.booleans()) and end - first < last - first + inside:
                found.append(RecomputedSegment(parts(first, end, 0)))
            else:
                found += map(KeptBlock, range(first, end))
            first = end
        return tuple(found)

    number = draw(st.integers(1, 8))
    found = parts(0, number, 1)
    results = st.none() | st.sets(st.integers(0, 9)).map(lambda each: tuple(sorted(each)))
    return tuple(
        KeptBlock(part.index, True, draw(results)) if isinstance(part, KeptBlock) and draw(st.booleans()) else part
        for part in found
    )


@given(schedules())
def test_any_schedule_is_written_and_read(schedule):
    number = len(list(kept_in(schedule)))
    check_schedule(schedule, number)
    assert read_schedule(to_notation(schedule)) == schedule
    assert [index for part in schedule for index in stages_of(part)] == list(range(number))
    assert schedule_of(to_notation(schedule), number) == schedule
    check_recompute(to_notation(schedule), number)


INVALID_RESULTS = ("0[1]", "~0[1", "~0[1,0]", "~0[1,1]", "~0[a]", "~0[,]", "~0[0-99999]", "~0[0][1]", "~[0]")


@pytest.mark.parametrize(
    "text", ["", "()", "(0", "0)", "0 (1", "a", "0,1", "~", "-1", "0 ~(1)", "0 1x", *INVALID_RESULTS]
)
def test_what_is_no_schedule_is_refused(text):
    with raises(UsageError, code="format.invalid", field="plan.recompute"):
        read_schedule(text)


@pytest.mark.parametrize(
    "text", ["0-99999999999", "(" * 5000 + "0" + ")" * 5000, "0" * 5000, "9" * 5000 + "-1", "0 5-3 1", "0-9999 " * 1000]
)
def test_what_no_model_has_is_refused_before_it_is_counted(text):
    with raises(UsageError, code="format.invalid", field="plan.recompute"):
        check_recompute(text, 0)


@pytest.mark.parametrize("depth", [40, 299])
def test_a_block_in_many_segments_is_one_block(depth):
    schedule = schedule_of("(" * depth + "0" + ")" * depth, 1)
    assert schedule[0].stages == range(1)
    check_recompute(to_notation(schedule), 0)


@pytest.mark.parametrize(
    ("text", "got"),
    [("0 2", "[0, 2]"), ("1 0 2", "[1, 0, 2]"), ("0-3", "[0, 1, 2, 3]"), ("0 (~1 2)", "~"), ("0 (~1[] 2)", "~")],
)
def test_a_schedule_of_other_blocks_is_refused(text, got):
    with raises(UsageError, code="value.invalid", field="plan.recompute") as caught:
        schedule_of(text, 3)
    assert got in caught.value.got
    with raises(UsageError, code="value.invalid", field="plan.recompute"):
        check_recompute(text, 3)


def test_every_block_is_of_any_number():
    check_recompute("every_block", 0)
    assert schedule_of("every_block", 2) == (RecomputedSegment((KeptBlock(0),)), RecomputedSegment((KeptBlock(1),)))


def test_segments_of_several_blocks_need_their_names():
    check_recompute("0 (1) ~2", 0)
    with raises(UsageError, code="value.invalid", field="plan.recompute"):
        check_recompute("0 (1-2)", 0)
    with raises(UsageError, code="format.invalid", field="plan.recompute"):
        check_recompute(True, 3)
