"""Scaling tables: efficiency paired within rounds, waiting, the control's resolution, and plans fitted to ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from raising import raises

from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.hardware import Link
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments.result_table import CONTROL, PEAK, SAMPLES, SECONDS, ResultTable, Row
from trimtab.experiments.scale import ScaleOptions, fit_plan_to_ranks, numbers
from trimtab.experiments.scaling import ALONE, Scaling, ScalingJob, benchmark_rows, text_of
from trimtab.plans.plan import Plan


def table(rates):
    rows = []
    for arm, rate in rates.items():
        for number in range(5):
            rows += [Row(arm, 0, number, SECONDS, 10 / rate, "s"), Row(arm, 0, number, SAMPLES, 10.0, "samples")]
        rows.append(Row(arm, -1, -1, PEAK, 1000.0, "B"))
    return ResultTable.of(rows)


def job(ranks, number, scale=1.0, **changes):
    rates = {"baseline": 100.0, CONTROL: 100.0, "plan": 200.0}
    if ranks > 1:
        rates = {name: rate * ranks * 0.9 * scale for name, rate in rates.items()}
        rates |= {f"{name}{ALONE}": ranks * rate for name, rate in (("baseline", 100.0), ("plan", 200.0))}
    modes = ("weak",) if ranks == 1 else ("weak", "strong")
    return ScalingJob(ranks, number, dict.fromkeys(modes, table(rates)), plans={"weak": Plan.fixed(8)}, **changes)


def scaling(rounds=5, **changes):
    jobs = [job(ranks, number, 1 + 0.01 * number, **changes) for number in range(rounds) for ranks in (1, 2)]
    return Scaling("task", tuple(jobs))


def test_efficiency_is_paired_within_rounds():
    rows = {(row.arm, row.mode, row.ranks): row for row in scaling().rows()}
    found = rows["plan", "weak", 2]
    assert found.pairs == pytest.approx([0.9 * (1 + 0.01 * number) for number in range(5)])
    assert found.efficiency.mean == pytest.approx(0.918, abs=1e-3)
    assert found.has_verdict
    assert found.waiting.mean == pytest.approx(1 - 0.918, abs=1e-3)
    assert found.peak_bytes == 1000.0
    assert rows["plan", "weak", 1].efficiency is None
    assert found.resolution == pytest.approx(0.0, abs=1e-9)
    assert ("plan", "strong", 2) in rows
    assert ("plan", "strong", 1) not in rows


def test_few_rounds_shared_cores_and_other_threads_give_no_verdict():
    few = {(row.arm, row.ranks): row for row in scaling(rounds=3).rows()}
    assert not few["plan", 2].has_verdict
    assert few["plan", 2].resolution is None
    crowded = {(row.arm, row.ranks): row for row in scaling(crowded="cores").rows()}
    assert not crowded["plan", 2].has_verdict
    assert "share cores" in text_of(scaling(crowded="cores"))
    other = Scaling("task", (job(1, 0, threads=2), job(2, 0)))
    assert not other.efficiencies("plan", "weak", 2)


def test_rows_and_text_name_links_and_failures():
    link = Link("gloo", 1e-5, 1e9, "measured", calibrated=True)
    failed = {"strong": {"plan": "no plan meets the limit"}}
    found = Scaling("task", (job(1, 0), job(2, 0, link=link, failures=failed)))
    rows = {(row["recipe"], row["ranks"], row["scaling"]): row for row in benchmark_rows(found)}
    assert rows["plan", 2, "weak"]["link"] == "gloo"
    assert rows["plan", 2, "weak"]["low"] is None
    assert rows["self", 2, "weak"]["mean"] == pytest.approx(0.9)
    assert next(iter(benchmark_rows(found, "local")))["link"] == "local"
    assert "no plan meets the limit" in str(found)
    assert "gloo" in str(found)
    assert from_json(Scaling, to_json(found)) == found
    with pytest.raises(FormatError):
        replace(found, schema=1)


def test_a_given_plan_is_fitted_to_ranks_and_samples():
    plan = Plan.fixed(8, 2)
    assert fit_plan_to_ranks(plan, 8, 1) is plan
    two = fit_plan_to_ranks(plan, 4, 2)
    assert (two.batch_size, two.num_ranks, two.micro_batch.value, two.num_micro_batches) == (4, 2, 2, 2)
    assert fit_plan_to_ranks(two, 8, 1).num_ranks == 1
    assert fit_plan_to_ranks(Plan.fixed(8), 4, 2).micro_batch.value == 4


@pytest.mark.parametrize("text", ["", "1,", "0", "two", "1;2", "-1"])
def test_numbers_that_are_none_are_refused(text):
    with raises(ValueGivenError, code="ranks.invalid"):
        numbers(text)
    assert numbers("1, 4") == (1, 4)


def test_options_that_cannot_be_are_refused():
    assert ScaleOptions(ranks=(4, 2)).ranks == (1, 2, 4)
    for given in ({"rounds": 0}, {"steps": 1}, {"modes": ("other",)}, {"ranks": (0,)}):
        with pytest.raises(ValueGivenError):
            ScaleOptions(**given)
    with raises(ValueGivenError, code="plan.not_equivalent"):
        ScaleOptions(plan=Plan.fixed(8, schedule="warmup_cosine"))
