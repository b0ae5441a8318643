"""Generated figures of the pages choosing.md, limits.md and start.md, for `make figures`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.docs_figures import SAVED, cheapest, optimal
from benchmarks.figure_words import difference, ratio, speed
from benchmarks.paper.arithmetic import checks
from benchmarks.paper.claims import LEAST, MOST
from benchmarks.paper.evaluation_record import records
from benchmarks.paper.judge import GOAL_WORDS, NO_VERDICT, PASS, within
from benchmarks.records import Record, evaluated, every, is_evaluated, newest

Row = dict[str, Any]
CLOSE = 0.12  # relative error of predicted seconds
RACES = ("cifar-recipes", "wikitext-recipes")


def blocks(root: Path) -> dict[str, dict[str, list[str]]]:
    """Return the generated lines by page and block name."""
    races = [*every(root, "compare"), *(evaluated(root, name) for name in RACES)]
    cifar, gpt, digits = (
        newest(root, f"compare-{task}-xeon") for task in ("cifar10_resnet", "source_gpt", "digits_resnet")
    )
    frontiers = [newest(root, name) for name in ("frontier-epyc", "frontier-no_dropout")]
    walk, head = newest(root, "frontier_walk"), newest(root, "no_harm-wikitext2_gpt")
    published, ranks, own = (newest(root, name) for name in ("published", "published_ranks", "prediction"))
    return {
        "choosing.md": {
            "limits": list(_limits(newest(root, "budget_sweep"))),
            "plan_kinds": [*_tiers(cifar), *_ends(every(root, "compare-source_gpt"))],
            "recomputing": [*_schedules(frontiers), *_before_recomputing(walk), *_head(head)],
            "unchanged": list(_kept(newest(root, "no_harm-xeon"))),
            "short": list(_too_short(digits)),
        },
        "limits.md": {
            "elsewhere": [*_told(published, "of one GPU"), *_told(ranks, "of several GPUs, not compiled")],
            "aims": list(_aims(root, cifar, gpt, digits)),
            "told": list(_missed(own)),
            "paper": [*_paper(races), *_contradicted()],
        },
        "start.md": {"planning": list(_planning(races))},
    }


# docs/choosing.md


def _limits(found: Record) -> Iterator[str]:
    runs = [row for row in found.rows if row["feasible"]]
    met = sum(row["is_met"] for row in runs)
    yield f"Of {len(found.rows)} limits of a sweep {len(runs)} could be met, and {met} were ({found.link})."


def _tiers(cifar: Record) -> Iterator[str]:
    target = cifar.of("time_to_target_ratio")[-1]["target"]
    rung = {"metric": "time_to_target_ratio", "target": target}
    plain = [cifar.one(arm=arm, against="reference", charged=True, **rung) for arm in ("tuned_plan", "equivalent_plan")]
    freed, same = (f"{speed(row)}, n={row['n']}" for row in plain)
    yield f"- to {target:g} accuracy, search charged, over the plain loop: the tuned plan {freed};"
    yield f"  the equivalent plan {same} ({cifar.link})"
    tuned = cifar.one(arm="tuned_plan", against="strong", charged=False, **rung)
    throughput = cifar.one("throughput_ratio", arm="equivalent_plan", against="strong")
    yield f"- over the recipe that was tuned by hand: the tuned plan, uncharged, {speed(tuned)}, n={tuned['n']};"
    yield f"  the equivalent plan in throughput {ratio(throughput)}, n={throughput['n']}"


def _ends(each: Iterable[Record]) -> Iterator[str]:
    """Yield a line per machine: difference of the final metric between tuned plan and baseline, with their samples."""
    for found in each:
        ended = found.one("final_metric_difference", arm="tuned_plan", against="reference")
        rung = found.of("time_to_target_ratio", arm="tuned_plan")[0]
        share = f"after {rung['arm_samples']:,} of {rung['against_samples']:,} rows"
        ends = f"{difference(ended)} percent, n={ended['n']} ({found.link})"
        yield f"- the tuned plan's end on source_gpt, {share}: {ends}"


def _schedules(each: Iterable[Record]) -> Iterator[str]:
    found = [(model, rows) for record in each for model, _, rows in optimal(list(record.rows))]
    links = ", ".join(record.link for record in each)
    for says, share in SAVED.items():
        enough = {model: row["over_none"] for model, rows in found if (row := cheapest(rows, share))}
        took = f"{min(enough.values()):.2f} to {max(enough.values()):.2f} times as long"
        yield f"- {says} of the peak: forward and backward take {took}, on {', '.join(enough)} ({links})"
    for model, rows in found:
        if cheapest(rows, SAVED["a fourth less"]) is None:
            most = 1 - min(row["share"] for row in rows)
            yield f"- of {model} no recomputation schedule lowers the peak by more than {most:.0%} (same records)"


def _before_recomputing(walk: Record) -> Iterator[str]:
    """Yield a line per model: memory saved by micro-batches before plans start to recompute, if any."""
    for model in dict.fromkeys(row["model"] for row in walk.rows):
        rows = walk.of("budget", model=model, feasible=True)
        first = next(index for index, row in enumerate(rows) if "recompute" in row["changes"])
        saved = 1 - min(row["measured_bytes"] for row in rows[:first]) / rows[0]["measured_bytes"]
        if saved > 0:
            yield f"- {model} in bf16 gave up {saved:.0%} by micro-batches before its plan recomputed ({walk.link})"


def _head(found: Record) -> Iterator[str]:
    (row,) = found.rows
    figures = f"{row['peak_ratio']:.2f} of the peak, at {row['mean']:.2f} times ({row['low']:.2f} to {row['high']:.2f}"
    yield f"- the loss of {row['task']} in chunks: {figures}, n={row['n']})"
    yield f"  the speed of the recipe that was tuned by hand ({found.link})"


def _kept(found: Record) -> Iterator[str]:
    yield "| recipe tuned by hand | the plan for it changes | throughput kept (95%) | n |"
    yield "|---|---|---|---|"
    for row in found.rows:
        kept = f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        yield f"| {row['task']} | {row['changes']} | {kept} | {row['n']} |"
    yield ""
    yield f"{found.link}."


def _too_short(found: Record) -> Iterator[str]:
    plan = found.one("planning_s", arm="equivalent_plan")
    rungs = found.of("time_to_target_ratio", arm="equivalent_plan", against="reference", charged=False)
    arrived = ", ".join(f"{row['median_against_s']:.0f}" for row in rungs)
    yield f"{plan['task']} takes {plan['planning_s']:.0f} s to plan; the plain loop is at its targets after {arrived} s"
    yield f"({found.link})."


# docs/limits.md


def _told(found: Record, of: str) -> Iterator[str]:
    errors = sorted(abs(row["time_error"]) for row in found.rows if "time_error" in row and not row.get("compiled"))
    off = f"{statistics.median(errors):.0%} off in the median, {errors[-1]:.0%} at the worst"
    yield f"- seconds of {len(errors)} published steps {of}: {off} ({found.link})"


def _missed(found: Record) -> Iterator[str]:
    errors = [abs(row["time_error"]) for row in found.rows if row.get("time_error") is not None]
    close = f"{sum(error <= CLOSE for error in errors)} within {CLOSE:.0%}"
    yield f"Seconds of {len(errors)} steps: {close}, the worst {max(errors):.0%} off ({found.link})."


def _aims(root: Path, cifar: Record, gpt: Record, digits: Record) -> Iterator[str]:
    """Yield a line per goal: paired runs, ranks, checkpoints and loop overhead."""
    yield "| aim | | what was found | record |"
    yield "|---|---|---|---|"
    throughput = cifar.one("throughput_ratio", arm="equivalent_plan", against="reference")
    yield _aim("the equivalent plan 1.8 times the plain loop on images, with bf16", throughput, cifar, 1.8)
    for found, which, times in ((cifar, "three times as soon on images", 3), (gpt, "four times as soon on text", 4)):
        rung, behind = _hardest(found)
        said = f"the tuned plan {which} (to {rung['target']:g}), search charged"
        yield _aim(said, _turned(rung), found, times, behind, may_be_met=not behind)
    harm = digits.one("do_no_harm_ratio", arm="strong_plan")
    yield _aim("no harm to a loop tuned by hand, in whole races: 0.97 of its speed", harm, digits, 0.97)
    yield from _goals(root)
    yield from _of_ranks(newest(root, "scaling-courses"))
    yield from _of_checkpoints(newest(root, "checkpoint_cost"))
    yield from _of_the_loop("the loop's own cost", every(root, "overhead"), "task")
    yield from _of_the_loop("the cost in a host's loop", [newest(root, "hosts")], "host")


def _aim(says: str, row: Row, found: Record, least: float, more: str = "", *, may_be_met: bool = True) -> str:
    """Return the line of a goal on the minimum of a ratio."""
    status = within(LEAST, least, row["low"], row["high"])
    if status == PASS and not may_be_met:
        status = NO_VERDICT
    return f"| {says} | {GOAL_WORDS[status]} | {ratio(row)}, n={row['n']}{more} | {found.link} |"


def _turned(row: Row) -> Row:
    """Return a row with a ratio of times converted to a ratio of speeds."""
    return row | {"mean": 1 / row["mean"], "low": 1 / row["high"], "high": 1 / row["low"]}


def _hardest(found: Record) -> tuple[Row, str]:
    """Return the hardest target that every run of the tuned plan and of the baseline reached, search time included.

    The second value lists, as text, harder targets that the baseline reached in more runs.
    """
    rungs = found.of("time_to_target_ratio", arm="tuned_plan", against="reference", charged=True)
    last = max(at for at, row in enumerate(rungs) if row["reached"] == row["reached_against"] == row["n"])
    more = [
        f"; {row['target']:g} in {row['reached']} of {row['n']} runs, the plain loop in {row['reached_against']}"
        for row in rungs[last + 1 :]
        if row["reached"] < row["reached_against"]
    ]
    return rungs[last], "".join(more)


def _goals(root: Path) -> Iterator[str]:
    """Yield a line per goal and machine. Omits machines without a result if another machine has one."""
    each = [(name, found["environment"], row) for name, found in records(root).items() for row in found["goals"]]
    known = {row["says"] for _, _, row in each if row.get("figure")}
    for name, facts, row in each:
        if row.get("figure") or row["says"] not in known:
            said = f"{_place(facts, row)}{row['says']}"
            yield f"| {said} | {row['status']} | {row.get('figure', '')} | {_run(root, name, row['run'])} |"


def _place(facts: Row, row: Row) -> str:
    """Return the kind of machine as text; empty for predictions, which concern another device."""
    if "gpu" in facts:
        return f"on an {facts['gpu']}, "
    is_predicted = row["run"].startswith("prediction")
    return "" if is_predicted else "with bf16, " if "bf16" in facts["cpu"] else "without bf16, "


def _run(root: Path, evaluation: str, name: str) -> str:
    """Return the link to a run of an evaluation, or to the evaluation."""
    if is_evaluated(root, name, evaluation):
        return evaluated(root, name, evaluation).link
    return f"[{evaluation}, {name}](RESULTS.md#{evaluation})"


def _of_ranks(found: Record) -> Iterator[str]:
    freed, plain = (found.one("samples_to_target", recipe=recipe, ranks=2) for recipe in ("plan_batch", "baseline"))
    yield _aim(
        *("93% of one rank's speed kept on two over a slow link, the batch freed", freed, found, 0.93),
        more=f"; DDP keeps {ratio(plain)}, n={plain['n']}",
    )


def _of_checkpoints(found: Record) -> Iterator[str]:
    aims = (
        ("a checkpoint within 1.5 times the seconds of a plain write", "save_ratio", "checkpoint", 1.5),
        ("going on, to the first window, within twice the seconds of a plain read", "read_warm_ratio", "going on", 2.0),
        ("the same of files that no memory holds", "read_cold_ratio", "going on", 2.0),
    )
    for says, metric, way, most in aims:
        row = found.one(metric, way=way)
        status = within(MOST, most, row["low"], row["high"])
        yield f"| {says} | {GOAL_WORDS[status]} | {ratio(row)}, n={row['n']} | {found.link} |"


def _of_the_loop(says: str, each: Iterable[Record], name: str) -> Iterator[str]:
    """Yield a line per machine: number of cases with an overhead within 1% plus the control's half-width."""
    for found in each:
        beyond = [row for row in found.rows if row["high"] > 1.01 + row["control_half_width"]]
        within = f"{len(found.rows) - len(beyond)} of {len(found.rows)} cases within"
        others = "".join(f"; {row[name]}, k={row['num_micro_batches']}: {_finely(row)}" for row in beyond)
        status = GOAL_WORDS[NO_VERDICT if beyond else PASS]
        yield f"| {says} within 1% and the control | {status} | {within}{others} | {found.link} |"


def _finely(row: Row) -> str:
    return f"{row['mean']:.3f}x ({row['low']:.3f} to {row['high']:.3f}), n={row['n']}"


def _contradicted() -> Iterator[str]:
    holds = [each.holds for each in checks()]
    yield ""
    yield f"Its own figures contradict {holds.count(False)} of {len(holds)} statements that they can be held against."


def _paper(races: Iterable[Record]) -> Iterator[str]:
    yield "| machine | task, record | throughput (95%, or each pair) | n |"
    yield "|---|---|---|---|"
    for found in sorted(races, key=lambda found: found.machine):
        row = found.one("throughput_ratio", arm="paper", against="reference")
        yield f"| {found.machine} | {found.link} | {ratio(row)} | {row['n']} |"


# docs/start.md


def _planning(races: Iterable[Record]) -> Iterator[str]:
    took = sorted((float(found.one("planning_s", arm="equivalent_plan")["planning_s"]), found.link) for found in races)
    (least_s, quickest), *_, (most_s, longest) = took
    yield f"Of {len(took)} equivalent plans the quickest took {least_s:.0f} s ({quickest}), the longest {most_s:.0f} s"
    yield f"({longest})."
