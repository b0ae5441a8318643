"""Gain early, in the middle and late: from records made by hand."""

from __future__ import annotations

import math

import pytest
from race_records import record

from trimtab.experiments.comparison.comparison_summary import _NOT_SEEN, THIRDS, third_rows

METRIC = ("accuracy", True, "share")


def rows(*pairs, metric=METRIC):
    races = {seed: {"equivalent_plan": ours, "reference": theirs} for seed, (ours, theirs) in enumerate(pairs)}
    return third_rows(races, "equivalent_plan", "reference", "equivalent", *metric)


def test_each_third_has_its_own_speed():
    # Twelve blocks: the first is left out of the early third, whose other three take a second each.
    ours = record(blocks=[(10, s) for s in (9.0, *[1.0] * 3, *[2.0] * 4, *[3.0] * 4)])
    theirs = record(blocks=[(10, s) for s in (5.0, *[2.0] * 3, *[2.0] * 4, *[1.5] * 4)])
    found = rows((ours, theirs), (ours, theirs))
    assert [row.third for row in found] == list(THIRDS)
    assert [row.speed.mean for row in found] == pytest.approx([2.0, 1.0, 0.5])
    assert {row.speed.n for row in found} == {2}
    assert (found[0].speed.low, found[0].speed.high) == pytest.approx((2.0, 2.0))
    one = record(blocks=[(100, 5.0)])
    assert [row.speed.mean for row in rows((one, one), (one, one))] == pytest.approx([1.0] * 3)
    # Of 4 blocks of 30 rows, the first left out: thirds of 10, 40 and 40 rows, in 1/3, 2/3 + 8/3 and 4/3 + 1 s.
    ours = record(blocks=[(30, 9.0), (30, 1.0), (30, 4.0), (30, 1.0)])
    even = record(blocks=[(30, 1.0)] * 4)
    assert [row.speed.mean for row in rows((ours, even))] == pytest.approx([1.0, 4 / 10, 4 / 7])
    # The tuned plan trains on half of the rows, as fast: its thirds take half of the seconds, at the same rate.
    half, whole = (record(blocks=[(10, 1.0)] * n) for n in (6, 12))
    assert [row.speed.mean for row in rows((half, whole))] == pytest.approx([1.0] * 3)
    whole, capped = (record(blocks=[(10, 1.0)] * 12, end=end) for end in ("budget", "cap"))
    assert rows((whole, capped)) == []
    assert rows() == []
    assert {row.speed.n for row in rows((whole, whole), (whole, capped))} == {1}


def test_each_third_has_its_share_of_what_a_run_saves():
    # Seconds saved a block of twelve: 3, then 2, then 1; the first, in which caches fill, tells nothing.
    theirs = record(blocks=[(10, 5.0)] * 12)
    ours = record(blocks=[(10, s) for s in (50.0, *[2.0] * 3, *[3.0] * 4, *[4.0] * 4)])
    found = rows((ours, theirs), (ours, theirs))
    assert [row.saved.mean for row in found] == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    assert {row.saved.n for row in found} == {2}
    assert {row.saved for row in rows((theirs, ours), (theirs, ours))} == {None}, "slower: nothing is saved"
    half = record(blocks=[(10, 1.0)] * 6)
    assert {row.saved for row in rows((half, theirs), (half, theirs))} == {None}, "it trained on half of the rows"
    # Windows of several batches overshoot: one batch of 120 rows here, which is 1% and no other run.
    ours = record(blocks=[(10, s) for s in (50.0, *[2.0] * 3, *[3.0] * 4, *[4.0] * 3)] + [(11, 4.4)])
    found = rows((ours, theirs), (ours, theirs))
    assert [row.saved.mean for row in found] == pytest.approx([3 / 6, 2 / 6, 1 / 6], rel=0.03)
    even = record(blocks=[(10, 5.0)] * 12)
    ours = [record(blocks=[(10, s)] * 12) for s in (4.0, 6.0, 5.0)]
    assert {row.saved for row in rows(*((each, even) for each in ours))} == {None}
    assert {row.saved for row in rows((ours[0], even))} == {None}, "one pair"


def test_progress_is_of_the_same_third_and_per_second():
    # At twice the speed and the same course: equal progress, twice of it per second.
    course = [(10 * i, 0.0, 0.1 * math.sqrt(i)) for i in range(1, 13)]
    ours, theirs = (record(blocks=[(10, s)] * 12, evaluations=course) for s in (1.0, 2.0))
    for row in rows((ours, theirs), (ours, theirs)):
        assert row.progress.mean == pytest.approx(1.0)
        assert row.progress_per_s.mean == pytest.approx(2.0)
        assert row.speed.mean == pytest.approx(2.0)

    def falling(factor):
        course = [(10 * i, 0.0, 100.0 * factor**i) for i in range(1, 13)]
        return record(blocks=[(10, 1.0)] * 12, evaluations=course, metric="perplexity")

    found = rows((falling(0.81), falling(0.9)), metric=("perplexity", False, "relative"))
    assert [row.progress.mean for row in found] == pytest.approx([2.0, 2.0, 2.0])
    course = [(10 * i, 0.0, min(0.5, 0.1 * i)) for i in range(1, 13)]  # flat from the fifth on
    arm = record(blocks=[(10, 1.0)] * 12, evaluations=course)
    early, middle, late = rows((arm, arm))
    assert early.progress.mean == middle.progress.mean == pytest.approx(1.0)
    assert (late.progress, late.progress_per_s) == (None, None)
    assert "did not improve" in late.why
    assert late.speed.mean == pytest.approx(1.0)


@pytest.mark.parametrize("values", [(), (0.5,)])
def test_where_nothing_was_evaluated_early_there_is_no_progress(values):
    course = [(120, 0.0, value) for value in values]
    arm = record(blocks=[(10, 1.0)] * 12, evaluations=course)
    assert {row.why for row in rows((arm, arm))} == {_NOT_SEEN}
