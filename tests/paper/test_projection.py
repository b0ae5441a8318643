"""Eqs. 21 to 23 against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from measured_runs import gain
from trimtab.experiments.comparison.gain_rows import gain_rows

from benchmarks.paper.projection import (
    doubling_months,
    efficiency_after,
    net_of,
    net_speedup,
    projection_sentences,
    speedup_of_time_saved,
    with_doubling,
)
from trimtab.core.errors import ValueGivenError


def test_net_speedup_of_the_papers_figures():
    assert net_speedup(1.42, 0.12) == pytest.approx(1.267857, abs=1e-6)
    assert net_speedup(1.42, 0.0) == 1.42


@pytest.mark.parametrize(("speedup", "months"), [(1.26, 14.996), (1.20, 19.009), (1.355014, 11.408), (2.0, 5.0)])
def test_months_to_double(speedup, months):
    """The paper's own 14.8 months for 1.26 are 15.0."""
    assert doubling_months(speedup) == pytest.approx(months, abs=2e-3)
    assert efficiency_after(doubling_months(speedup), speedup) == pytest.approx(2.0)


def test_another_cycle_is_another_time():
    assert doubling_months(2.0, cycle_months=7.0) == 7.0
    assert efficiency_after(10.0, 1.26) == pytest.approx(1.26**2)
    assert efficiency_after(0.0, 1.26) == 1.0
    assert speedup_of_time_saved(0.262) == pytest.approx(1.3550, abs=1e-4)
    assert speedup_of_time_saved(0.0) == 1.0
    # 2 s against 1.6 s, of which 0.35 s are computed again: 2 / 1.25 = 1.6, 0.35 / 1.25 = 0.28, 1.6 / 1.28 = 1.25.
    found = net_of(2.0, 1.6, 0.35)
    assert (found.gain, found.overhead) == pytest.approx((1.6, 0.28))
    assert found.net == pytest.approx(2.0 / 1.6)


@pytest.mark.parametrize("speedup", [1.0, 0.9])
def test_what_gains_nothing_never_doubles(speedup):
    assert doubling_months(speedup) == math.inf


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: net_speedup(0.0, 0.1), "throughput_gain"),
        (lambda: net_speedup(1.4, -0.1), "recompute_overhead"),
        (lambda: net_of(1.0, 1.0, 1.0), "plan_s - recompute_s"),
        (lambda: net_of(0.0, 1.0, 0.0), "reference_s"),
        (lambda: speedup_of_time_saved(1.0), "1 - share"),
        (lambda: speedup_of_time_saved(-0.1), "share"),
        (lambda: efficiency_after(-1.0, 1.2), "months"),
        (lambda: efficiency_after(1.0, math.nan), "speedup"),
        (lambda: doubling_months(0.0), "speedup"),
        (lambda: doubling_months(1.2, 0.0), "cycle_months"),
        (lambda: doubling_months("fast"), "speedup"),
    ],
)
def test_what_has_no_answer_is_refused(call, field):
    with pytest.raises(ValueGivenError, match=field):
        call()


def test_the_projection_is_of_what_was_measured_and_says_what_it_assumes():
    net, doubling = projection_sentences(gain())
    assert "[21], from rounds in one process: 1.52" in net
    assert re.search(r"1\.52\dx \(95% 1\.\d+x to 1\.\d+x\): 1\.7\d\dx without recomputation", net)
    assert "12.2%" in net
    assert "1.52" in doubling
    assert re.search(r"after 8\.[23] months", doubling)
    assert re.search(r"after a year it is 2\.7\d*x of today's", doubling)
    assert "assumption" in doubling
    none = replace(gain(), plan=gain().reference)
    assert all("not significant" in said for said in projection_sentences(none))
    assert all("changes nothing" in said for said in projection_sentences(replace(gain(), changes="")))
    slower = replace(gain(), plan=gain().reference, reference=gain().plan)
    assert "take longer (0.6" in projection_sentences(slower)[1]
    assert "nothing is projected" in projection_sentences(slower)[1]
    found = gain()
    laps = tuple(replace(lap, plain_s=lap.clocked_s / 2) for lap in found.plan.laps)
    net, _ = projection_sentences(replace(found, plan=replace(found.plan, laps=laps)))
    assert net.endswith("the overhead of recomputation is unknown.")
    assert not any("95%" in said for said in projection_sentences(gain(laps=4)))
    assert all("95%" in said for said in projection_sentences(gain()))


def test_months_to_double_are_between_those_of_the_speed_ups_interval():
    def months(found):
        (row,) = [row for row in with_doubling(gain_rows(found), [found]) if "cycle_months" in row]
        return row

    clear = months(gain())
    assert clear["n"] == 6
    assert clear["low"] < clear["mean"] < clear["high"]
    nothing = months(replace(gain(), plan=gain().reference))
    assert (nothing["mean"], nothing["high"]) == (None, None)
    unchanged = months(replace(gain(), changes=""))
    assert (unchanged["mean"], unchanged["low"], unchanged["high"], unchanged["n"]) == (None, None, None, 6)
    fast, none = gain("a_cnn"), replace(gain("a_gpt"), changes="")
    rows = with_doubling([*gain_rows(fast), *gain_rows(none)], [fast, none])
    months = {row["task"]: row["mean"] for row in rows if row["metric"] == "doubling_months"}
    assert months["a_cnn"] == pytest.approx(8.25, abs=0.1)
    assert months["a_gpt"] is None
