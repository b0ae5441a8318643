"""Steps of several ranks that others published are told by the same arithmetic as a plan of ranks that are not here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.micro import published_ranks

    return published_ranks


def case_of(published, model: str, ranks: int):
    return next(each for each in published.CASES if each.model.name == model and each.how.ranks == ranks)


def test_a_step_of_many_ranks_is_told_from_one_process(published):
    case = case_of(published, "MPT 125M", 128)
    row = published.row_of(case)
    assert row["zero_stage"] == 3
    assert row["predicted_s"] == pytest.approx(row["published_s"], rel=0.25)
    assert row["alone_s"] <= row["predicted_s"] < row["flat_s"]  # one ring is as wide as one port
    assert row["predicted_s"] == pytest.approx(row["alone_s"] + row["waited_s"])
    assert row["predicted_s"] < row["own_s"]  # fp32 parameters are twice the bytes


def test_the_peak_of_a_rank_is_told_where_one_was_published(published):
    case = case_of(published, "MPT 125M", 16)
    row = published.row_of(replace(case, held_bytes=10 * 2**30))
    assert row["error"] == pytest.approx(row["predicted_bytes"] / (10 * 2**30) - 1)
    few, many = (published.peak_of(replace(case, how=replace(case.how, ranks=ranks))) for ranks in (2, 16))
    assert many < few


def test_an_efficiency_is_that_of_two_published_steps(published):
    pair = next(each for each in published.EFFICIENCIES if each.more.model.name == "MPT 125M")
    row = published.efficiency_of(pair)
    assert row["published"] == pytest.approx(123_936 / 130_535)
    assert (row["fewer_ranks"], row["ranks"]) == (16, 128)
    for name in ("predicted", "flat", "timed"):
        assert 0 < row[name] <= 1


def test_pairs_differ_in_their_ranks_alone(published):
    for pair in published.EFFICIENCIES:
        assert pair.fewer.how.ranks < pair.more.how.ranks
        assert pair.fewer.source == pair.more.source
        assert pair.fewer.model.name == pair.more.model.name
        assert (pair.fewer.rows, pair.fewer.micro_batches) == (pair.more.rows, pair.more.micro_batches)


def test_each_figure_has_its_source(published):
    assert len({case.source for case in published.CASES}) >= 3
    for case in published.CASES:
        assert published.SOURCES[case.source]
        assert case.step_s > 0
        assert case.joined.rings(case.how.ranks).source
