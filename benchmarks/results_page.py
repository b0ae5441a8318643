"""Tables of docs/RESULTS.md: a row per record in `benchmarks/results`, and a section per evaluation.

A row has the main figures of a record with their intervals. The whole tables of a record are printed by
`python -m benchmarks.figures --record NAME`; those of an evaluation are in its record.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.docs_figures import SAVED, by_model, cheapest, optimal
from benchmarks.figure_words import difference, medians, ratio, speed
from benchmarks.paper.evaluation_record import RESULTS
from benchmarks.paper.judge import NOT_MEASURED
from benchmarks.records import SECTIONS, section_of
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

Row = dict[str, Any]
WITHIN = 0.25  # relative error of step times predicted for another device
MOST_OF_WHOLE = 0.4  # goal for the time of compilation by block, relative to the whole model
METRICS = ("throughput_ratio", "peak_memory_ratio", "final_metric_difference", "do_no_harm_ratio")


class Summary(NamedTuple):
    """Summary of a record.

    Args:
        subject: Tasks, models or measured quantity.
        n: Number of pairs, rounds, cases or runs.
        result: Main figures with intervals.
        verdict: Verdict, or number of cases that meet the requirement.
    """

    subject: str
    n: str
    result: str
    verdict: str = ""


def page(records: Sequence[Row], evaluations: Mapping[str, Row]) -> Iterator[str]:
    """Yield the tables of all records by section, then all evaluations.

    Args:
        records: Records with `file`, the name of the file.
        evaluations: Compact records of evaluations by name.
    """
    for title in SECTIONS:
        of = [found for found in records if section_of(found["name"]) == title]
        yield f"## {title}"
        yield ""
        yield from _comparisons(of) if title == section_of("compare") else _table(of)
        yield ""
    for name, found in evaluations.items():
        yield from _evaluation(name, found)


def _table(records: Iterable[Row]) -> Iterator[str]:
    yield "| record | subject | n | result (95%) | verdict |"
    yield "|---|---|---|---|---|"
    for found in records:
        summary = KINDS[found["name"]](found["rows"])
        remark = f" *{found['remark']}*" if "remark" in found else ""
        cells = summary._replace(result=f"{summary.result}.{remark}")
        yield f"| {_link(found)} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _link(found: Row) -> str:
    """Return a link to the JSON file of a record."""
    return f"[{found['file'].removesuffix('.json')}](../{RESULTS}/{found['file']})"


# Comparisons, of records and of evaluations.


_COLUMNS = (
    "S: speed",
    "S: peak memory",
    "S: final metric",
    "F: speed to a target, search included",
    "F: final metric",
    "P1: speed",
    "P2: speed",
    "plan for P2: speed over P2",
    "A/A control",
)


def _comparisons(records: Sequence[Row]) -> Iterator[str]:
    yield from _comparison_head("record")
    for found in records:
        yield _comparison(_link(found), found["rows"])
    for found in records:
        if "remark" in found:
            yield ""
            yield f"{found['file'].removesuffix('.json')}: *{found['remark']}*"


def _comparison_head(what: str) -> Iterator[str]:
    yield f"| {what} | {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' * (1 + len(_COLUMNS))}"


def _comparison(name: str, rows: Sequence[Row]) -> str:
    throughput, memory, metric, harm = METRICS
    cells = (
        _cell(rows, throughput, "equivalent_plan"),
        _cell(rows, memory, "equivalent_plan", verdict=False),
        _cell(rows, metric, "equivalent_plan"),
        _to_target(rows),
        _cell(rows, metric, "tuned_plan"),
        _cell(rows, throughput, "paper"),
        _cell(rows, throughput, "strong"),
        _cell(rows, harm, "strong_plan", "strong", verdict=False),
        _cell(rows, throughput, "self", "self", verdict=False),
    )
    return f"| {name} | {' | '.join(cells)} |"


def _cell(rows: Sequence[Row], metric: str, arm: str, against: str = "reference", *, verdict: bool = True) -> str:
    """Return a figure with its number of pairs and its verdict; empty if not measured."""
    wanted = {"metric": metric, "arm": arm, "against": against}
    found = next((row for row in rows if wanted.items() <= row.items()), None)
    if found is None:
        return ""
    shown = difference(found) if metric == "final_metric_difference" else ratio(found)
    counted = "" if metric == "peak_memory_ratio" else f", n={found['n']}"
    return f"{shown}{counted}, {found['verdict']}" if verdict else f"{shown}{counted}"


def _to_target(rows: Sequence[Row]) -> str:
    """Return a tuned plan's speed to its hardest target with a ratio or with a bound that has a verdict.

    A harder target that the baseline reached in more runs is added.
    """
    wanted = {"metric": "time_to_target_ratio", "arm": "tuned_plan", "against": "reference", "charged": True}
    found = [row for row in rows if wanted.items() <= row.items()]
    known = [row for row in found if "bound" not in row or row["verdict"] in ("gain", "harm")]
    if not known:
        return f"{found[-1]['bound']} (target {found[-1]['target']:g})" if found else ""
    best, last = known[-1], found[-1]
    more = ""
    if last is not best and last["reached"] < last["reached_against"]:
        more = f"; target {last['target']:g} in {last['reached']} of {last['n']} runs, P0 in {last['reached_against']}"
    shown = speed({"censored": "bound" in best} | best)
    return f"{shown} (target {best['target']:g}), n={best['n']}, {best['verdict']}{more}"


# Evaluations.


def _evaluation(name: str, found: Row) -> Iterator[str]:
    facts, file = found["environment"], f"{name}.json"
    done, left = (len(found["slices"][state]) for state in ("done", "to do"))
    machine = ", ".join(facts[key] for key in ("cpu", "gpu") if key in facts)
    yield f"## {name}"
    yield ""
    yield f"{machine}, {facts['cpu_cores']} cores; {done} of {done + left} slices."
    yield f"Figures: [{file}](../{RESULTS}/{file})."
    yield ""
    yield from _goals(found["goals"])
    yield from _paper(found)
    yield from _runs(found["runs"])


def _goals(goals: Sequence[Row]) -> Iterator[str]:
    yield "| goal | status | measured |"
    yield "|---|---|---|"
    for goal in goals:
        if goal["status"] != NOT_MEASURED:
            yield f"| {goal['says']} | {goal['status']} | {goal['figure']} |"
    yield ""
    if unmeasured := [goal["says"] for goal in goals if goal["status"] == NOT_MEASURED]:
        yield f"Not measured: {'; '.join(unmeasured)}."
        yield ""


def _paper(found: Row) -> Iterator[str]:
    """Yield the headline of the comparison with the paper, and its comparable claims."""
    if found["headline"] is not None:
        yield f"**The paper.** {found['headline']['sentence']}"
        yield ""
    judged = [claim for claim in found["claims"] if "mean" in claim]
    for claim in judged:
        measured = f"{claim['arm']} in {claim['run']}: {_bounded(claim, 'mean')}, n={claim['n']}"
        yield f"- {claim['claim']}, {claim['source']}: **{claim['status']}**. {measured}, bar {claim['bar']:g}."
    if judged:
        yield ""


def _runs(runs: Sequence[Row]) -> Iterator[str]:
    compared = [run for run in runs if run["kind"] == "comparison"]
    others = [run for run in runs if run["kind"] != "comparison"]
    if compared:
        yield from _comparison_head("run")
        for run in compared:
            yield _comparison(f"{run['name']} ({run['task']})", _flat(run))
        yield ""
    if others:
        yield "| run | task | verdict | result |"
        yield "|---|---|---|---|"
        for run in others:
            yield f"| {run['name']} | {run['task']} | {run['verdict']} | {_result(run)} |"
        yield ""
    known = list(dict.fromkeys(says for run in runs for says in run.get("known", ())))
    for says in known:
        names = ", ".join(run["name"] for run in runs if says in run.get("known", ()))
        yield f"- {names}: *{says}*"
    if known:
        yield ""


def _flat(run: Row) -> list[Row]:
    return [
        {"metric": metric, "low": None, "high": None} | row for metric, rows in run["figures"].items() for row in rows
    ]


def _result(run: Row) -> str:
    """Return the headline sentence of a run and, for some kinds of runs, further figures."""
    said = [run["sentence"].replace("|", "/")]
    rows = _flat(run)
    if run["kind"] == "phases":
        speeds = [row for row in rows if row["metric"] == "step_speedup"]
        said += [f"Speed of a step: {_bounded(row, 'mean')}, n={row['n']}." for row in speeds]
    if run["kind"] == "ablation":
        for row in rows:
            if (row["metric"], row.get("arm"), row.get("setting")) == ("throughput_ratio", "plan", "whole"):
                said += [f"Speed of the plan: {ratio(row)}."] if row["n"] < FEW else []
    if run["kind"] == "scaling":
        for row in rows:
            if row["low"] is not None:
                said.append(f"{row['arm']} on {row['ranks']} ranks: {_bounded(row, 'mean')}, n={row['n']}.")
    return " ".join(said)


# Figures of several rows.


def _bounded(row: Row, name: str, form: str = ".3f") -> str:
    """Return a value, with its interval if there are enough pairs."""
    if row.get("low") is None or row["n"] < FEW:
        return f"{row[name]:{form}}"
    return f"{row[name]:{form}} ({row['low']:{form}} to {row['high']:{form}})"


def _range(rows: Sequence[Row], case: Callable[[Row], str], name: str = "mean", form: str = ".3f") -> str:
    """Return the smallest and the largest value with intervals and cases."""
    ends = sorted(rows, key=lambda row: float(row[name]))
    shown = [f"{_bounded(row, name, form)} for {case(row)}" for row in (ends[0], ends[-1])]
    return " to ".join(dict.fromkeys(shown))


def _each(rows: Iterable[Row], case: Callable[[Row], str], name: str = "mean", form: str = ".3f") -> str:
    return "; ".join(f"{case(row)} {_bounded(row, name, form)}" for row in rows)


def _n(rows: Iterable[Row]) -> str:
    numbers = sorted({row["n"] for row in rows})
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _names(rows: Iterable[Row], key: str) -> str:
    return ", ".join(dict.fromkeys(str(row[key]) for row in rows))


def _errors(rows: Iterable[Row], key: str) -> str:
    """Return the median and the range of relative errors."""
    errors = [row[key] for row in rows if row.get(key) is not None]
    middle = statistics.median(map(abs, errors))
    return f"median error {middle:.2%}, {min(errors):+.1%} to {max(errors):+.1%}"


def _count(rows: Sequence[Row], meets: Callable[[Row], bool], what: str) -> str:
    return f"{sum(map(meets, rows))} of {len(rows)} {what}"


def _case(row: Row) -> str:
    name = row.get("task", row.get("host"))
    return f"{name}, k={row['num_micro_batches']}" if row.get("num_micro_batches", 1) > 1 else str(name)


# Kinds of records.


def _no_harm(rows: list[Row]) -> Summary:
    peaks = "".join(f"; peak memory {row['peak_ratio']:.2f}x" for row in rows if row.get("peak_ratio"))
    result = f"speed of the plan for P2 over P2: {_each(rows, _case)}{peaks}; changes: {_names(rows, 'changes')}"
    return Summary(
        _names(rows, "task"), _n(rows), result, _count(rows, lambda row: row["low"] >= 0.97, "at least 0.97")
    )


def _strong_sweep(rows: list[Row]) -> Summary:
    is_loss = rows[0]["of"] != "accuracy"
    best, second = sorted(rows, key=lambda row: row["value"], reverse=not is_loss)[:2]
    result = f"best learning rate {best['lr']:g} ({best['value']:.4g}), then {second['lr']:g} ({second['value']:.4g})"
    return Summary(f"{rows[0]['task']}, {rows[0]['of']}", "1", result)


def _exhaustive(rows: list[Row]) -> Summary:
    said = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of = [row for row in rows if row["task"] == task]
        said.append(f"{task}, {of[0]['space']} combinations: {_range(of, lambda row: str(row['other']))}")
    beaten = _count(rows, lambda row: row["low"] > 1, "others significantly faster")
    return Summary("step time of the plan over the best others", _n(rows), "; ".join(said), beaten)


def _planted(rows: list[Row]) -> Summary:
    (row,) = rows
    result = (
        f"plans that change a loop that no setting makes faster: {row['share']:.1%}, 95%: at most {row['high']:.1%}"
    )
    return Summary("multilayer perceptron", str(row["n"]), result)


def _budgets(rows: list[Row]) -> Summary:
    feasible = [row for row in rows if row["feasible"]]
    own = _count([row for row in rows if "plans_monotone" in row], lambda row: row["plans_monotone"], "")
    inside = _count([row for row in rows if "is_between" in row], lambda row: row["is_between"], "")
    result = (
        f"{len(rows) - len(feasible)} of {len(rows)} limits are infeasible; step time inside its predicted interval: "
    )
    result += f"{inside}({_errors(feasible, 'time_error')}); not faster than under a looser limit: {own}"
    met = _count(feasible, lambda row: row["is_met"], "feasible limits met")
    return Summary(_names(rows, "model"), "1", result.rstrip(), met)


def _frontier(rows: list[Row]) -> Summary:
    """Return the step time of the optimal schedules for given savings of peak memory."""
    said = []
    for model, _, found in optimal(rows):
        enough = [(share, row) for share in SAVED.values() if (row := cheapest(found, share))]
        took = [f"{1 - share:.0%} less memory {_bounded(row, 'over_none', '.2f')}" for share, row in enough]
        if len(enough) < len(SAVED):
            took.append(f"more than {1 - min(row['share'] for row in found):.0%} less is not reachable")
        said.append(f"{model}: {', '.join(took)}")
    return Summary("time of forward and backward over that without recomputation", _n(rows), "; ".join(said))


def _compiled(rows: list[Row]) -> Summary:
    kept = [row for row in rows if row["share"] == 1.0]
    wrong = _count(rows, lambda row: row["gradient_error"] > 0.1, "rows with wrong gradients (off by more than 10%)")
    slowest = max(rows, key=lambda row: row["over_none"])
    result = f"{_range(kept, lambda row: str(row['model']), 'over_none')}; with an activation memory budget "
    result += f"up to {_bounded(slowest, 'over_none')} for {slowest['model']}"
    return Summary("step time of the compiled over the eager model", _n(rows), result, wrong)


def _walk(rows: list[Row]) -> Summary:
    said = []
    for model, _, of in by_model(rows):
        first, last = of[0], [row for row in of if row["feasible"]][-1]
        share = f"{last['measured_bytes'] / first['measured_bytes']:.0%} of the first peak"
        said.append(f"{model} down to {share} at {last['measured_s'] / first['measured_s']:.2f}x the step time")
    met = [row for row in rows if row["feasible"]]
    return Summary(
        "plans under 20 decreasing limits", "1", "; ".join(said), _count(met, lambda row: row["is_met"], "met")
    )


def _prediction(rows: list[Row]) -> Summary:
    if "calibrated_error" in rows[0]:
        return Summary("steps of models", "1", f"peak memory: {_errors(rows, 'calibrated_error')}")
    times = [row for row in rows if row.get("time_error") is not None]
    result = f"peak memory: {_errors(rows, 'error')}; step time: {_errors(rows, 'time_error')}"
    within = _count(times, lambda row: abs(row["time_error"]) <= 0.12, "step times within 12%")
    return Summary(f"{len(rows)} steps of models", "1", result, within)


def _published(rows: list[Row]) -> Summary:
    close = _count(rows, lambda row: abs(row["time_error"]) <= WITHIN, f"within {WITHIN:.0%}")
    result = f"step time: {_errors(rows, 'time_error')}; reserved memory: {_errors(rows, 'error')}"
    return Summary("published steps on one GPU", str(len(rows)), result, close)


def _published_ranks(rows: list[Row]) -> Summary:
    steps = [row for row in rows if row["metric"] == "published_ranks"]
    eager = [row for row in steps if not row["compiled"]]
    pairs = [100 * (row["predicted"] - row["published"]) for row in rows if row["metric"] == "published_efficiency"]
    result = f"step time: {_errors(eager, 'time_error')}; memory: {_errors(steps, 'error')}; scaling efficiency of "
    middle = f"{statistics.median(pairs):+.1f} points in the median"
    result += f"{len(pairs)} pairs: {middle}, {min(pairs):+.1f} to {max(pairs):+.1f}"
    close = _count(eager, lambda row: abs(row["time_error"]) <= WITHIN, f"step times within {WITHIN:.0%}")
    return Summary("published steps on several GPUs, not compiled", str(len(eager)), result, close)


def _planning_time(rows: list[Row]) -> Summary:
    plans = [row for row in rows if row["metric"] == "planning_s"]
    (chain,) = (row for row in rows if row["metric"] == "schedule_s")

    def case(row: Row) -> str:
        limit = f" within {row['budget_bytes'] / 2**30:g} GiB" if row.get("budget_bytes") else ""
        return f"{row['model']} on {row['device']}{limit}"

    result = f"seconds to plan: {_range(plans, case, form='.2f')}; recomputation schedule of {chain['model']}: "
    result += f"{_bounded(chain, 'mean')} s"
    return Summary("plans for another device", _n(rows), result)


def _probing(rows: list[Row]) -> Summary:
    over = _count(rows, lambda row: row["seconds"] > row["allowed_s"], "over the time budget")
    took = [row["seconds"] / row["run_s"] for row in rows]
    result = (
        f"measurements take {min(row['seconds'] for row in rows):.0f} to {max(row['seconds'] for row in rows):.0f} s, "
    )
    result += f"{min(took):.1%} to {max(took):.1%} of the run"
    return Summary(_names(rows, "task"), "1", result, over)


def _overhead(rows: list[Row]) -> Summary:
    within = _count(rows, lambda row: row["high"] <= 1.01 + row["control_half_width"], "within 1% and the control")
    result = f"step time of trimtab's loop over a plain loop: {_range(rows, _case, form='.4f')}"
    return Summary(_names(rows, "task"), _n(rows), result, within)


def _hosts(rows: list[Row]) -> Summary:
    within = _count(rows, lambda row: row["high"] <= 1.01 + row["control_half_width"], "within 1% and the control")
    result = f"step time with trimtab over the framework's own: {_range(rows, _case, form='.4f')}"
    return Summary(_names(rows, "host"), _n(rows), result, within)


def _monitor(rows: list[Row]) -> Summary:
    result = f"step time with the noise monitor over that without: {_each(rows, _monitored, form='.4f')}"
    judged = [row for row in rows if "control_half_width" in row]
    if not judged:
        return Summary("other estimators, not used", _n(rows), result)
    within = _count(judged, lambda row: row["high"] <= 1.005 + row["control_half_width"], "within 0.5% and the control")
    return Summary(_names(rows, "task"), _n(rows), result, within)


def _monitored(row: Row) -> str:
    return _case(row) if row["estimator"] == "exact" else f"{_case(row)}, {row['estimator']}"


def _imports(rows: list[Row]) -> Summary:
    parts = (f"{row['part']} {row['median_s']:.2f} s ({row['low_s']:.2f} to {row['high_s']:.2f})" for row in rows)
    return Summary("import, in this order", _n(rows), f"median (quartiles): {'; '.join(parts)}")


def _regret(rows: list[Row]) -> Summary:
    ours = [row for row in rows if row["policy"] == "goodput" and row["regret"] is not None]
    means, singles = ([row for row in ours if (row["easiest"] != row["target"]) is mean] for mean in (True, False))
    shown = "; ".join(f"{row['link']} link {row['regret']:+.1%}, paired {_bounded(row, 'mean')}" for row in means)
    worst = max(singles, key=lambda row: row["regret"])
    result = f"time of `goodput` over the best fixed k: {shown}; a single target at worst {worst['regret']:+.1%}"
    paper = [row for row in rows if row["policy"] == "paper" and row["easiest"] != row["target"]]
    missed = [row for row in paper if row["regret"] is None]
    result += f"; the paper's rule missed the target on {len(missed)} of {len(paper)} links"
    return Summary(
        _names(rows, "task"), _n(means), result, _count(means, lambda row: row["regret"] <= 0.04, "within 4%")
    )


def _rank_memory(rows: list[Row]) -> Summary:
    within = _count(rows, lambda row: abs(row["error"]) <= 0.05, "within 5%")
    return Summary(_names(rows, "model"), "5 steps", f"peak memory per rank: {_errors(rows, 'error')}", within)


def _scaling(rows: list[Row]) -> Summary:
    return _SCALING[rows[0]["metric"]](rows)


def _efficiency(rows: list[Row]) -> Summary:
    several = [row for row in rows if row["mean"] is not None]
    result = f"scaling efficiency: {_each(several, lambda row: _on_link(row, 'recipe'))}"
    return Summary(f"{_names(rows, 'task')}, 2 ranks", _n(several), result)


def _on_link(row: Row, key: str) -> str:
    link = row["link"] if row["link"] in ("local", "slow") else f"{row['link']} Mbit/s"
    return f"{row[key]}, {link} link"


def _courses(rows: list[Row]) -> Summary:
    several = [row for row in rows if row.get("mean") is not None]
    if several:
        result = f"efficiency to a loss of {rows[0]['target']:g}: {_each(several, lambda row: str(row['recipe']))}"
    else:
        result = f"samples to a loss of {rows[0]['target']:g}: "
        result += "; ".join(f"{row['recipe']} {row['samples_to_target']:,.0f}" for row in rows)
    reached = f"reached by {sum(row['reached'] for row in rows)} of {sum(row['seeds'] for row in rows)} runs"
    return Summary(f"{_names(rows, 'task')}, 2 ranks", str(rows[0]["seeds"]), result, reached)


def _windows(rows: list[Row]) -> Summary:
    result = f"step time predicted from one process: {_errors(rows, 'error')}; after a dry run: "
    result += _errors(rows, "rehearsal_error")
    within = _count(rows, lambda row: abs(row["rehearsal_error"]) <= 0.15, "within 15% after a dry run")
    return Summary(f"{_names(rows, 'task')}, 2 ranks", str(len(rows)), result, within)


def _in_step(rows: list[Row]) -> Summary:
    over = [row for row in rows if row["kept"] == "over the link"]
    shown = _each(over, lambda row: {"ddp": "DDP, k=1, fp32", "plan": "plan, k=16, bf16 sent"}[row["loop"]])
    result = f"efficiency at {rows[0]['mbit']} Mbit/s: {shown}"
    return Summary(f"{_names(rows, 'task')}, 2 ranks", _n(rows), result)


def _weights(rows: list[Row]) -> Summary:
    most = {each: max(row["difference"] for row in rows if row["dtype"] == each) for each in ("float64", "float32")}
    shown = "; ".join(f"{name} {value:.1e}" for name, value in most.items())
    return Summary(_names(rows, "backend"), str(len(rows)), f"largest relative difference of a weight: {shown}")


def _rank_overhead(rows: list[Row]) -> Summary:
    (row,) = rows
    result = f"step time of an unchanged plan over plain DDP: {_bounded(row, 'mean')}"
    return Summary(f"{row['task']}, {row['ranks']} ranks", str(row["n"]), result)


def _rank_faults(rows: list[Row]) -> Summary:
    shown = "; ".join(f"{row['kind']} {row['median_s']:.1f} s" for row in rows)
    named = f"rank named in {sum(row['named'] for row in rows)} of {sum(row['tried'] for row in rows)}"
    return Summary("one of two ranks fails", _tried(rows), f"median time until the command ends: {shown}", named)


def _tried(rows: Iterable[Row]) -> str:
    return " and ".join(str(row["tried"]) for row in rows)


_SCALING: dict[str, Callable[[list[Row]], Summary]] = {
    "scaling_efficiency": _efficiency,
    "samples_to_target": _courses,
    "window_prediction": _windows,
    "in_step": _in_step,
    "weight_difference": _weights,
    "loop_overhead_ratio": _rank_overhead,
    "rank_fault": _rank_faults,
}


def _sending(rows: list[Row]) -> Summary:
    said = []
    for arm, shown in (("ddp", "DDP"), ("fp32", "fp32"), ("bf16", "bf16")):
        of = [row for row in rows if row["arm"] == arm]
        said.append(f"{shown} {_range(of, lambda row: _on_link(row, 'task'))}")
    return Summary("step time over DDP without buffer broadcast", _n(rows), "; ".join(said))


def _faults(rows: list[Row]) -> Summary:
    kinds = {"damaged checkpoints refused": True, "losses equal after SIGKILL": False}
    said = []
    for what, is_damage in kinds.items():
        of = [row for row in rows if (row["kills"] is None) is is_damage]
        said.append(f"{what}: {sum(row['survived'] for row in of):,} of {sum(row['tried'] for row in of):,}")
    failed = sum(row["survived"] < row["tried"] for row in rows)
    return Summary("checkpointed runs", str(len(rows)), "; ".join(said), f"{failed} of {len(rows)} cases failed")


def _checkpoint_cost(rows: list[Row]) -> Summary:
    shown = [row for row in rows if row["way"] not in ("plain", "control")]

    def case(row: Row) -> str:
        what = row["metric"].removesuffix("_ratio").replace("_", ", ")
        return f"{what}, {'resume' if row['way'] == 'going on' else row['way']}"

    return Summary("seconds over a plain write or read", _n(rows), _each(shown, case, form=".2f"))


def _settings_on_models(rows: list[Row]) -> Summary:
    said = [
        f"{', '.join(f'{name}={value}' for name, value in row['values'].items())}: time {row['time']:.2f}x, "
        f"memory {row['memory']:.2f}x"
        for row in rows
    ]
    faster = _count(rows, lambda row: row["high"] < 1, "significantly faster")
    return Summary(_names(rows, "model"), _n(rows), "; ".join(said), faster)


def _compile_time(rows: list[Row]) -> Summary:
    ratios, said = [], []
    for row in rows:
        start_s, whole_s, blocks_s = medians(row)
        ratios.append(blocks_s / whole_s)
        said.append(f"{row['model']}: start {start_s:.1f} s, whole {whole_s:.1f} s, by block {blocks_s:.1f} s")
    result = (
        f"processor time of compilation, medians: {'; '.join(said)}; by block over whole model, without the start: "
    )
    met = f"{sum(each <= MOST_OF_WHOLE for each in ratios)} of {len(ratios)} at most {MOST_OF_WHOLE:g}"
    return Summary(_names(rows, "model"), _n(rows), result + ", ".join(f"{each:.2f}" for each in ratios), met)


KINDS: dict[str, Callable[[list[Row]], Summary]] = {
    "settings_on_models": _settings_on_models,
    "compile_time": _compile_time,
    "no_harm": _no_harm,
    "strong_sweep": _strong_sweep,
    "exhaustive": _exhaustive,
    "planted": _planted,
    "budget_sweep": _budgets,
    "frontier": _frontier,
    "frontier_compiled": _compiled,
    "frontier_walk": _walk,
    "prediction": _prediction,
    "published": _published,
    "published_ranks": _published_ranks,
    "planning_time": _planning_time,
    "probing": _probing,
    "overhead": _overhead,
    "hosts": _hosts,
    "monitor": _monitor,
    "import_time": _imports,
    "regret": _regret,
    "rank_memory": _rank_memory,
    "scaling": _scaling,
    "sending": _sending,
    "faults": _faults,
    "checkpoint_cost": _checkpoint_cost,
}
