"""What `make figures` writes: figures of records, and of too few pairs the pairs themselves."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import matplotlib
import pytest

from benchmarks import advice_figures, docs_figures, figures, results_page, technique_figures
from benchmarks.frontier_figures import drawings
from benchmarks.phases_figures import phases
from benchmarks.records import SECTIONS, Record
from benchmarks.scaling_figures import scaling

ROOT = Path(__file__).parents[2]


def third(n: int, **more):
    """Return a row of a third of training, of so many pairs."""
    head = {
        "metric": "third_speed_ratio",
        "task": "t",
        "third": "early",
        "plan_kind": "equivalent",
        "arm": "equivalent_plan",
    }
    return head | {"mean": 1.2, "low": 1.1, "high": 1.3, "n": n, "pairs": [1.2] * n} | more


def test_of_fewer_than_five_pairs_the_pairs_stand_alone():
    few, enough = ("\n".join(phases([third(n)])) for n in (3, 5))
    assert "| 1.200x, 1.200x, 1.200x | 3 |" in few
    assert "to" not in few.partition("---|\n")[2]
    assert "| 1.200x (1.100x to 1.300x) | 5 |" in enough
    share = third(3, metric="third_saved_share", mean=0.3, pairs=[0.2, 0.3, 0.4])
    assert "| 20.0%, 30.0%, 40.0% | 3 |" in "\n".join(phases([share]))
    saved = {"metric": "phase_saved_s", "task": "t", "phase": "data", "reference_s": 1.0, "plan_s": 0.5, "share": None}
    saved |= {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 3}
    assert "| 500 ms | 3 | not told |" in "\n".join(phases([saved]))
    row = {
        "metric": "doubling_months",
        "task": "t",
        "cycle_months": 5.0,
        "mean": 33.4,
        "low": 14.0,
        "high": 52.0,
        "n": 8,
    }
    assert "33.4 months (95% 14.0 to 52.0 months, n = 8), if every cycle" in "\n".join(phases([row]))
    assert "| 33.4 months, if every cycle" in "\n".join(phases([row | {"n": 4}]))
    unclear = row | {"mean": 703.2, "high": None}  # as records were written before they said why
    assert "| nothing is projected: no gain is clear |" in "\n".join(phases([unclear]))
    assert "projected: its steps take longer |" in "\n".join(phases([unclear | {"reason": "its steps take longer"}]))


def test_of_fewer_than_five_rounds_or_seeds_there_is_no_interval():
    row = {"metric": "samples_to_target", "target": 1.5, "recipe": "plan", "ranks": 2, "mbit": 1, "reached": 3}
    row |= {"seeds": 3, "effective_batch": 8.0, "samples_to_target": 9.0, "seconds_to_target": 1.0}
    row |= {"mean": 0.9, "low": 0.8, "high": 1.0, "n": 3}
    assert "| 1.0 | 0.900 |" in "\n".join(scaling([row]))
    assert "0.900 (0.800 to 1.000, n=24)" in "\n".join(scaling([row | {"n": 24}]))
    step = {"metric": "in_step", "mean": 0.9, "low": 0.8, "high": 1.0, "n": 3}
    assert "| 0.9 |  |  | 3 |" in "\n".join(scaling([step]))
    assert "| 0.9 | 0.8 | 1 | 24 |" in "\n".join(scaling([step | {"n": 24}]))
    loss = {"easiest": 1.7, "target": 1.7, "policy": "goodput", "task": "t", "link": "local", "mean_k": 2.0}
    loss |= {
        "median_s": 1.0,
        "median_samples": 10.0,
        "regret": 0.1,
        "best": "k=2",
        "mean": 1.1,
        "low": 1.0,
        "high": 1.2,
    }
    (few,), (enough,) = (list(figures._regret([loss | {"n": n}]))[2:] for n in (3, 5))
    assert "| 1.100 |" in few
    assert "| 1.100 (1.000 to 1.200) |" in enough


def test_a_page_without_its_marks_is_refused():
    begin, end = figures.BEGIN.format("x"), figures.END.format("x")
    assert figures._between(f"a\n{begin}\nold\n{end}\nb", "x", "new") == f"a\n{begin}\nnew\n{end}\nb"
    for text in ("a", f"{begin}", f"{begin}{end}{begin}{end}"):
        with pytest.raises(ValueError, match="once each"):
            figures._between(text, "x", "new")


def recorded(root, name, rows):
    path = root / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": name.partition("-")[0], "rows": rows}))


def record(*rows, name="r"):
    return Record(name, name, "a machine", rows)


def test_a_benchmark_without_a_record_or_a_row_is_said_not_to_be_measured(tmp_path):
    (line,) = figures._or_unmeasured([], "hosts")
    assert line.startswith("**Not measured**: no record of `benchmarks/micro/hosts.py`")
    assert figures._or_unmeasured(["a figure"], "hosts") == ["a figure"]
    found = record({"metric": "a", "arm": "x"}, {"metric": "a", "arm": "y"}, {"metric": "b"})
    assert found.one("a", arm="y") == {"metric": "a", "arm": "y"}
    for fields in ({}, {"arm": "z"}):
        with pytest.raises(ValueError, match="expected one row of a"):
            found.one("a", **fields)
    recorded(tmp_path, "prediction-a-2026-11-24", [{"time_error": 0.1}, {"time_error": -0.2}, {}])
    recorded(tmp_path, "prediction-z-2026-11-22", [])
    assert docs_figures.newest(tmp_path, "prediction")[0] == {"time_error": 0.1}
    said = list(docs_figures._missed(docs_figures.newest(tmp_path, "prediction")))
    assert said == ["1 of 2 steps in [this table](memory.md) were within 15% of the prediction."]


def test_an_aim_is_met_or_missed_by_its_interval():
    def stands(low, high):
        row = {"mean": 1.5, "low": low, "high": high, "n": 8}
        return advice_figures._aim("twice", row, record(), 2.0).split(" | ")[1]

    assert [stands(2.0, 2.5), stands(1.2, 1.9), stands(1.2, 2.5)] == ["met", "missed", "not shown"]
    turned = advice_figures._turned({"mean": 0.5, "low": 0.25, "high": 1.0})
    assert turned == {"mean": 2.0, "low": 1.0, "high": 4.0}
    case = {"task": "t", "num_micro_batches": 4, "mean": 1.0, "low": 0.99, "n": 9, "control_half_width": 0.01}
    within, beyond = ({**case, "high": high} for high in (1.02, 1.03))
    (line,) = advice_figures._of_the_loop("cost", [record(within, beyond)], "task")
    assert "| not shown | 1 of 2 cases within; t, k=4: 1.000x (0.990 to 1.030), n=9 |" in line
    (line,) = advice_figures._of_the_loop("cost", [record(within)], "task")
    assert "| met | 1 of 1 cases within |" in line

    def walked(model, peak, changes):
        row = {"metric": "budget", "model": model, "feasible": True}
        return row | {"measured_bytes": peak, "changes": f"precision bf16{changes}"}

    steps = [walked("m", 100, ""), walked("m", 60, ", micro batch 2"), walked("m", 30, ", recompute every_block")]
    steps += [walked("none", 100, ""), walked("none", 70, ", recompute every_block")]
    (line,) = advice_figures._before_recomputing(record(*steps))
    assert line.startswith("- m in bf16 gave up 40% by micro-batches before")


def test_tables_of_techniques():
    def rung(target, reached, against=5):
        arms = {"metric": "time_to_target_ratio", "arm": "tuned_plan", "against": "reference", "charged": True}
        return arms | {"target": target, "reached": reached, "reached_against": against, "n": 5}

    rungs = record(rung(0.3, 5), rung(0.4, 5), rung(0.5, 4), rung(0.6, 4, 4))
    assert technique_figures._hardest(rungs)["target"] == 0.4
    row = {"metric": "budget", "model": "gpt_tied", "feasible": True, "measured_bytes": 2**20, "measured_s": 0.1}
    rows = [row | {"budget_bytes": k * 2**20, "changes": changes} for k, changes in ((4, "a"), (3, "b"), (2, "b"))]
    lines = [line for line in technique_figures._limits(record(*rows)) if line.startswith("| ")][1:]
    assert lines == ["| 4.0 | 1.0 | 0.100 | a |", "| 3.0 | 1.0 | 0.100 | b |"]

    def step(precision, optimizer="sgd", batch=8):
        head = {"metric": "prediction", "model": "m", "batch": batch, "optimizer": optimizer, "schedule": "none"}
        head |= {"num_micro_batches": 1, "loss_chunk": None, "precision": precision}
        return head | {"measured_bytes": 2**20, "measured_s": 0.1}

    steps = (step("fp32", batch=4), step("fp32"), step("bf16", batch=4), step("bf16"), step("bf16", "adamw"))
    lines = list(technique_figures._precisions(record(*steps)))
    assert lines[2:-2] == ["| m, 8, sgd | 1.0 MiB, 0.100 s | 1.0 MiB, 0.100 s |"]


def test_the_cheapest_schedule_is_the_one_that_saves_what_is_asked_for():
    def schedule(name, peak, over):
        head = {"model": "m", "precision": "fp32", "schedule": name, "n": 15}
        return head | {"peak_bytes": peak, "over_none": over, "low": over - 0.1, "high": over + 0.1}

    rows = [schedule("none", 1000, 1.0), schedule("sqrt", 700, 9.0)]
    rows += [schedule("optimal", peak, over) for peak, over in ((1000, 1.0), (750, 1.2), (600, 1.3))]
    (line,) = list(docs_figures._least(rows))[2:]
    a_fourth, half = line.split(" | ")[1:3]
    assert a_fourth == "1.20 times (1.10 to 1.30), at -25%"
    assert half == "not reachable; 1.30 times (1.20 to 1.40), at -40%"


def test_goodput_is_within_its_bar_or_of_other_seeds_alone_or_not():
    def arm(policy, regret, again, n=10):
        head = {"policy": policy, "task": "t", "link": "local", "easiest": 2.0, "target": 1.0, "best_k": 4, "n": n}
        head |= {"fixed_s": 0.5, "micro_s": 1.0, "mean": 1.0, "low": 0.9, "high": 1.1, "seeds": 5}
        return head | {"regret": regret, "over_again": again}

    def line(ours, again, *paper):
        single = arm("goodput", 0.123, 0.0) | {"easiest": 1.0}
        rows = [arm("k=1", 2.0, 2.0), arm("goodput", ours, again), arm("paper", *paper), single]
        *_, found, _, worst = docs_figures._goodput(rows)
        assert "takes 12.3% more" in worst
        return found

    assert "| 0.50 | 4 | +200.0% | +3.0% | 1.00 (0.90 to 1.10), n = 10 | +9.0% | yes |" in line(0.03, 0.09, 0.1, 0.2)
    assert "| only with new seeds | +10.0% | +20.0% |" in line(0.05, 0.01, 0.1, 0.2)
    assert "| no | reached from 1 of 5 seeds |  |" in line(0.05, 0.05, None, None, 1)


def test_a_drawing_is_the_same_bytes_whatever_matplotlib_is_told():
    first = drawings(ROOT)
    assert len(first) == 5
    with matplotlib.rc_context({"axes.facecolor": "red", "lines.linewidth": 9.0, "svg.hashsalt": "other"}):
        assert drawings(ROOT) == first


def test_results_are_small_and_their_page_is_short():
    results = ROOT / "benchmarks" / "results"
    sizes = {path.name: path.stat().st_size for path in results.iterdir()}
    assert sum(sizes.values()) <= 3_000_000
    assert {name: size for name, size in sizes.items() if name.endswith(".json") and size > 200_000} == {}
    assert {path.suffix for path in results.iterdir()} == {".json"}
    assert len((ROOT / "docs" / "RESULTS.md").read_text(encoding="utf-8").splitlines()) <= 400


def test_every_record_has_a_row_and_can_be_printed_with_all_tables():
    assert {kind for kinds in SECTIONS.values() for kind in kinds} == {*results_page.KINDS, "compare", "phases"}
    found = figures._records(ROOT)
    assert len(found) > 40
    lines = list(results_page.page(found, {}))
    for each in found:
        (row,) = (line for line in lines if f"(../benchmarks/results/{each['file']})" in line)
        assert row.count("|") in (6, 11)
        assert "nan" not in row
        tables = list(figures._sections([each]))
        assert any(line.startswith(("|---", "- ")) for line in tables), each["file"]


def test_a_tuned_plans_time_is_to_the_hardest_target_with_a_verdict():
    def target(value, **more):
        row = {"metric": "time_to_target_ratio", "arm": "tuned_plan", "against": "reference", "charged": True, "n": 5}
        row |= {"target": value, "censored": "bound" in more, "reached": 5, "reached_against": 5, "verdict": "gain"}
        return row | {"mean": 0.5, "low": 0.4, "high": 0.625} | more

    def shown(*rows):
        return results_page._to_target(rows)

    assert shown() == ""
    assert (
        shown(target(0.3), target(0.4, mean=0.25, low=0.2, high=0.5)) == "4.00x (2.00 to 5.00) (target 0.4), n=5, gain"
    )
    few = target(0.5, bound="reached in some pairs only", reached=2, verdict="no verdict")
    assert shown(target(0.3), few) == "2.00x (1.60 to 2.50) (target 0.3), n=5, gain; target 0.5 in 2 of 5 runs, P0 in 5"
    assert shown(target(0.3), target(0.5, bound=">= 4.57x")) == ">= 4.57x (target 0.5), n=5, gain"
    slower = target(0.5, bound="<= 0.06x", verdict="harm")
    assert shown(slower, target(0.6, bound=">= 0.03x", verdict="no verdict")) == "<= 0.06x (target 0.5), n=5, harm"
    assert shown(few) == "reached in some pairs only (target 0.5)"


def test_a_small_number_of_pairs_is_shown_as_pairs_in_a_comparison():
    row = {
        "metric": "throughput_ratio",
        "arm": "equivalent_plan",
        "against": "reference",
        "low": 1.1,
        "high": 1.3,
        "mean": 1.2,
    }
    few = row | {"n": 3, "pairs": [1.1, 1.2, 1.3], "verdict": "no verdict"}
    assert (
        results_page._cell([few], "throughput_ratio", "equivalent_plan") == "pairs 1.10x, 1.20x, 1.30x, n=3, no verdict"
    )
    enough = row | {"n": 5, "pairs": [1.2] * 5, "verdict": "gain"}
    assert results_page._cell([enough], "throughput_ratio", "equivalent_plan") == "1.20x (1.10 to 1.30), n=5, gain"
    assert results_page._cell([enough], "throughput_ratio", "tuned_plan") == ""


BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_names_that_a_benchmark_imports_exist(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("trimtab", "benchmarks"):
            module = importlib.import_module(str(node.module))
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")
