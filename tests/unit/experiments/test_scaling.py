"""The scaling table: efficiency is paired within rounds, and says what it cannot say."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from measured_runs import scaled
from raising import raises
from typer.testing import CliRunner

from trimtab.cli.main import app
from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import Link
from trimtab.core.progress import silent
from trimtab.core.serialization import from_json, to_json
from trimtab.experiments.report.scaling_page import scaling_page
from trimtab.experiments.scaling import scale
from trimtab.experiments.scaling import scaling_result as scaling
from trimtab.experiments.scaling.scale import ScaleSettings, numbers, path_of
from trimtab.experiments.scaling.scaling_job import JobSettings
from trimtab.experiments.scaling.scaling_result import (
    PlanSharding,
    RefusedRecipe,
    ScalingJob,
    TimedArm,
    TimedBlocks,
    summarise,
)

LINK = Link("gloo of 2 ranks", 1e-4, 1e9, "timed", calibrated=True)
SLOW = replace(LINK, name="gloo of 4 ranks")


def timed(rate: float) -> TimedBlocks:
    return TimedBlocks((100, 100), (100 / rate, 100 / rate))


def job(
    ranks: int,
    number: int,
    rate: float,
    alone: float | None = None,
    mode: str = "weak",
    control: float | None = None,
    recipe: str = "baseline",
    threads: int = 1,
) -> ScalingJob:
    own = None if alone is None else timed(alone)
    arms = [TimedArm(recipe, mode, timed(rate), own, 32.0 * ranks, settled=recipe != "plan_batch")]
    arms += [] if control is None else [TimedArm("self", mode, timed(control), None, 32.0 * ranks)]
    crowded, link = "cores" if ranks > 2 else "", LINK if ranks > 1 else None
    return ScalingJob(ranks, number, tuple(arms), crowded, link, threads)


def row(found: scaling.Scaling, ranks: int, mode: str = "weak", recipe: str = "baseline") -> scaling.ScalingRow:
    (one,) = [each for each in found.rows if (each.ranks, each.mode, each.recipe) == (ranks, mode, recipe)]
    return one


def test_efficiency_is_of_the_same_round_and_what_is_waited_for_of_the_same_job():
    jobs = [job(1, 0, 100.0), job(2, 0, 150.0, 200.0), job(1, 1, 50.0), job(2, 1, 90.0, 100.0)]
    two = row(summarise("tiny", jobs), 2)
    assert two.pairs == pytest.approx((0.75, 0.9))
    assert two.efficiency.mean == pytest.approx(math.sqrt(0.75 * 0.9))
    assert two.waiting.mean == pytest.approx((0.25 + 0.1) / 2)
    assert two.samples_per_s.mean == pytest.approx(math.sqrt(150 * 90))
    assert two.window_s == pytest.approx(64 / math.sqrt(150 * 90))
    assert row(summarise("tiny", jobs), 1).efficiency is None
    found = row(summarise("tiny", [job(2, 0, 150.0), job(1, 1, 100.0)]), 2)
    assert (found.efficiency, found.pairs, found.waiting) == (None, (), None)
    jobs = [job(1, 0, 100.0), job(2, 0, 120.0, mode="strong"), job(2, 0, 180.0)]
    found = summarise("tiny", jobs)
    assert row(found, 2, "strong").pairs == pytest.approx((0.6,))
    assert row(found, 2, "weak").pairs == pytest.approx((0.9,))
    assert [each.mode for each in found.rows if each.ranks == 1] == ["weak"]
    found = row(summarise("tiny", [job(1, 0, 100.0), job(2, 0, 800.0, threads=8)]), 2)
    assert (found.efficiency, found.pairs) == (None, ())
    assert "threads of a rank: 1, 8" in scaling.text(summarise("tiny", [job(1, 0, 1.0), job(2, 0, 8.0, threads=8)]))


def test_few_rounds_are_shown_one_by_one_and_enough_of_them_with_an_interval():
    few = [job(ranks, n, 100.0 * ranks * (1 - 0.1 * n * (ranks > 1))) for n in range(2) for ranks in (1, 2)]
    said = scaling.text(summarise("tiny", few))
    assert "100.0%, 90.0%" in said
    assert "without a verdict" in said
    many = [job(ranks, n, 100.0 * ranks * (1 - 0.01 * n * (ranks > 1))) for n in range(5) for ranks in (1, 2)]
    said = scaling.text(summarise("tiny", many))
    assert "98.0% (96.0 to 100.0)" in said
    assert "without a verdict" not in said
    jobs = [job(2, n, 200.0 - n) for n in range(5)] + [job(1, n, 100.0) for n in range(3)]
    said = scaling.text(summarise("tiny", jobs))
    line = next(line for line in said.splitlines() if "100.0%, 99.5%, 99.0%" in line)
    assert line.split()[-1] == "3"
    assert "fewer than 5 rounds" in said
    jobs = [
        job(ranks, n, 100.0 * ranks, control=100.0 * ranks * (1 + 0.02 * n * (ranks > 1)))
        for n in range(5)
        for ranks in (1, 2)
    ]
    found = summarise("tiny", jobs)
    assert row(found, 2).resolution == row(found, 2, recipe="self").resolution > 0.04
    assert "A/A control resolves" in scaling.text(found)
    assert row(summarise("tiny", jobs[:4]), 2).resolution is None


def test_a_plan_has_a_table_of_its_own_with_what_it_did():
    same = [job(ranks, 0, 100.0 * ranks) for ranks in (1, 2)]
    freed = [job(ranks, 0, 100.0 * ranks, recipe="plan_batch") for ranks in (1, 2)]
    found = summarise("tiny", [*same, *freed])
    assert set(scaling.tables(found)) == {"Equivalent plan", "Adaptive batch size"}
    assert "not measured here" in scaling.text(found)
    assert "still changing" in scaling.text(found)
    assert "plan_batch" not in scaling_page(found).partition("</figure>")[0]
    assert set(scaling.tables(summarise("tiny", same))) == {"Equivalent plan"}
    jobs = [job(2, n, 100.0, recipe="plan") for n in range(2)]
    jobs[1] = replace(jobs[1], arms=(replace(jobs[1].arms[0], says="bf16"),))
    jobs[0] = replace(jobs[0], arms=(replace(jobs[0].arms[0], says="fp32"),))
    assert row(summarise("tiny", jobs), 2, recipe="plan").says == "fp32 / bf16"


def test_a_row_says_how_its_plan_shares_the_model_and_what_a_rank_holds():
    shared = PlanSharding(2, False, 16, 2, "bf16", predicted_bytes=3 * 2**20)
    jobs = [job(1, 0, 100.0, recipe="plan"), *(job(2, n, 150.0, recipe="plan") for n in range(2))]
    for i, each in ((1, shared), (2, replace(shared, zero_stage=3, reduces_once=True))):
        arm = replace(jobs[i].arms[0], sharing=each, peak_bytes=(4 + i) * 2**20)
        jobs[i] = replace(jobs[i], arms=(arm,))
    found = summarise("tiny", jobs)
    (head, one, two) = scaling.tables(found)["Equivalent plan"]
    cells = dict(zip(head, two, strict=True))
    assert (cells["stage"], cells["micro-batches"], cells["reduced in"]) == ("2, each reduced / 3", "2 x 16", "bf16")
    assert (cells["peak per rank"], cells["predicted"]) == ("6 MiB", "3 MiB")
    assert dict(zip(head, one, strict=True))["stage"] == ""
    assert "counted in separate steps" in scaling.text(found)
    (_, flat) = scaling.benchmark_rows(found, "local")
    assert (flat["peak_bytes"], flat["plans"][0]["zero_stage"], flat["plans"][0]["predicted_bytes"]) == (
        6 * 2**20,
        2,
        3 * 2**20,
    )


def test_where_no_plan_meets_the_limit_the_row_says_so_and_the_others_stay():
    jobs = [replace(job(ranks, n, 100.0 * ranks), refused=()) for n in range(2) for ranks in (1, 2)]
    jobs = [
        replace(j, refused=(RefusedRecipe("plan", "weak", 1, "5 MiB over 4 MiB"),)) if j.ranks == 1 else j for j in jobs
    ]
    found = summarise("tiny", jobs)
    assert found.refused == (RefusedRecipe("plan", "weak", 1, "5 MiB over 4 MiB"),)
    *_, last = scaling.tables(found)["Equivalent plan"]
    assert last[:5] == ("", "plan", "1", "", "no plan: see notes")
    assert "plan, one rank: no plan meets the limit: 5 MiB over 4 MiB" in scaling.text(found)
    assert "5 MiB over 4 MiB" in scaling_page(found)
    *_, flat = scaling.benchmark_rows(found, "local")
    assert (flat["recipe"], flat["ranks"], flat["mean"], flat["refused"]) == ("plan", 1, None, "5 MiB over 4 MiB")
    assert row(found, 2).pairs == pytest.approx((1.0, 1.0))
    assert from_json(ScalingJob, to_json(jobs[0])) == jobs[0]


def test_ranks_that_share_cores_have_no_interval_and_are_in_no_figure():
    found = summarise("tiny", [job(1, 0, 100.0), job(4, 0, 120.0)])
    assert row(found, 4).crowded == "cores"
    assert "do not measure scaling" in scaling.text(found)
    assert "do not measure scaling" not in scaling.text(summarise("tiny", [job(2, 0, 120.0)]))
    jobs = [job(ranks, n, 100.0 * ranks * (1 - 0.01 * n * (ranks > 1))) for n in range(5) for ranks in (1, 2, 4)]
    found = summarise("tiny", jobs)
    assert (row(found, 2).has_verdict, row(found, 4).has_verdict) == (True, False)
    assert "98.0% (96.0 to 100.0)" in scaling.text(found)
    shared = next(line for line in scaling.text(found).splitlines() if "4 (share cores)" in line)
    assert "100.0%, 99.0%, 98.0%, 97.0%, 96.0%" in shared
    _, two, four = scaling.benchmark_rows(found, "local")
    assert two["low"] < two["mean"] < two["high"]
    assert (four["mean"], four["low"], four["high"]) == (pytest.approx(two["mean"]), None, None)

    def figure(page: str) -> str:
        return page.partition("<figure>")[2].partition("<figcaption>")[0]

    page, fewer = (scaling_page(summarise("tiny", of)) for of in (jobs, [each for each in jobs if each.ranks < 4]))
    assert figure(page) == figure(fewer) != ""
    assert "(4) are omitted.</figcaption>" in page
    assert "are omitted" not in fewer
    assert "separate cores or devices" in scaling_page(summarise("tiny", [each for each in jobs if each.ranks != 2]))


def test_each_rows_link_is_that_of_its_ranks():
    refused = (RefusedRecipe("plan", "weak", 4, "5 MiB over 4 MiB"),)
    jobs = [job(1, 0, 100.0), job(2, 0, 150.0), replace(job(4, 0, 300.0), link=SLOW, refused=refused)]
    found = summarise("tiny", jobs)
    told = [(each["ranks"], each["link"]) for each in scaling.benchmark_rows(found, None)]
    assert told == [(1, ""), (2, LINK.name), (4, SLOW.name), (4, SLOW.name)]
    assert {each["link"] for each in scaling.benchmark_rows(found, "slow")} == {"slow"}
    before = replace(found, linked=())  # as it was written before it had that
    assert {each["link"] for each in scaling.benchmark_rows(before, None)} == {""}
    (one, two) = scaling.benchmark_rows(summarise("tiny", [job(1, 0, 100.0), job(2, 0, 150.0, 200.0)]), "slow")
    assert (one["metric"], one["mean"], two["mean"]) == ("scaling_efficiency", None, pytest.approx(0.75))
    assert (two["link"], two["recipe"], two["plan_kind"], two["effective_batch"]) == ("slow", "baseline", "", 64.0)
    assert two["low"] is two["high"] is None


def test_under_a_launcher_rows_of_other_jobs_keep_their_own_link(tmp_path, monkeypatch):
    for each in (job(1, 0, 100.0), job(2, 0, 150.0), replace(job(4, 0, 300.0), link=SLOW)):
        path_of(tmp_path, 0, each.ranks).write_text(to_json(each))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(scale, "one_job", lambda *given: None)
    task = f"{Path(__file__).with_name('tiny_task.py')}:task"
    found = scale.run_scale(task, tmp_path, ScaleSettings(), None, silent)
    links = {each["ranks"]: each["link"] for each in scaling.benchmark_rows(found, None)}
    assert links == {1: "", 2: LINK.name, 4: SLOW.name}


def test_a_table_is_of_where_its_jobs_ran_and_not_of_where_it_was_made():
    one = replace(job(2, 3, 150.0, 200.0), environment={"sources": "abc"})
    assert from_json(ScalingJob, to_json(one)) == one
    older = {name: value for name, value in json.loads(to_json(one)).items() if name != "environment"}
    assert from_json(ScalingJob, json.dumps(older)) == replace(one, environment={})
    jobs = [replace(job(2, n, 150.0), environment={"sources": state}) for n, state in enumerate(("abc", "def"))]
    here = {"sources": "zzz"}
    assert summarise("tiny", jobs, here).environment == {"sources": "abc / def"}
    assert summarise("tiny", [job(2, 0, 150.0), jobs[1]], here).environment == {"sources": "unknown / def"}
    assert summarise("tiny", [job(2, 0, 150.0)], here).environment == here


def test_one_rank_is_always_among_them_and_numbers_are_read():
    assert ScaleSettings(numbers("4, 2")).ranks == (1, 2, 4)
    for bad in ("", "2,x", "0", "-1", "2.5"):
        with raises(ValueGivenError, code="ranks.invalid", field="--ranks"):
            numbers(bad)
    with raises(ValueGivenError, code="value.invalid", field="scaling"):
        ScaleSettings(job=JobSettings(modes=("weakly",)))


def test_the_page_draws_efficiency_and_escapes_what_comes_from_outside():
    jobs = [job(ranks, n, 100.0 * ranks * (1 - 0.05 * (ranks > 1))) for n in range(5) for ranks in (1, 2)]
    page = scaling_page(summarise("<script>tiny", jobs))
    assert page.count("<svg") == 1
    assert "<script" not in page
    assert "95.0% (95.0 to 95.0)" in page
    assert "No figure" in scaling_page(summarise("tiny", [job(2, 0, 100.0)]))
    found = summarise("tiny", [job(2, 0, 100.0), job(2, 1, 100.0, mode="strong")])
    head, *rows = scaling.tables(found)["Equivalent plan"]
    assert re.findall(r'<td[^>]*data-label="([^"]*)"', scaling_page(found)) == [*head] * len(rows)


def test_report_writes_the_page_of_a_recorded_table_again(tmp_path):
    found = scaled()
    (tmp_path / "scaling.json").write_text(to_json(found))
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert scaling.text(found) in shown.output
    assert (tmp_path / "report.html").read_text() == scaling_page(found)
    rows = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).output)["rows"]
    assert {row["metric"] for row in rows} == {"scaling_efficiency"}
