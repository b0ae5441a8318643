"""Rebuild the figures in README.md and on the pages in docs from the files in benchmarks/results.

    python -m benchmarks.figures            # write the pages
    python -m benchmarks.figures --check    # write nothing; fail if a page differs from the results
    python -m benchmarks.figures --record NAME    # print all tables of a record in benchmarks/results

Results contain ratios of time and memory, trimtab over baseline. Pages show time as a speed-up (above 1 is faster).
README shows only comparisons with at least 8 pairs and a control whose interval contains 1.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import advice_figures, docs_figures, results_page, settings_figures, technique_figures
from benchmarks.comparison_figures import comparison
from benchmarks.figure_words import ratio
from benchmarks.frontier_figures import drawings
from benchmarks.paper import evaluation_record
from benchmarks.phases_figures import phases
from benchmarks.scaling_figures import scaling
from trimtab.adaptive_batch.step_time_model import StepTimes, relative_time
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT as FEW

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BEGIN, END = "<!-- {}: made by `make figures` -->", "<!-- end of {} -->"
MIN_CLAIM = 8
RANKS = ("scaling-courses",)  # records shown in full on docs/scaling.md
CLOSE = 0.25  # relative error of step times predicted for another device

GPU_RECORD = "benchmarks/results/evaluation-h200-x1.json"
GPU_MODELS = {"gpt2-timed": "GPT-2 Small, WikiText-2", "resnet-timed": "ResNet-50, CIFAR-10"}

Row = dict[str, Any]


def main() -> None:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something is out of date")
    parser.add_argument("--record", metavar="NAME", help="print all tables of a record; write nothing")
    options = parser.parse_args()
    if options.record is not None:
        found = [each for each in _records(ROOT) if each["file"] == f"{options.record}.json"]
        print("\n".join(_sections(found)) if found else f"No record {options.record} in benchmarks/results.")
        sys.exit(0 if found else 1)
    check = options.check
    stale = {path: text for path, text in pages(ROOT).items() if _written(path) != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)}: {'out of date' if check else 'rebuilt'}", file=sys.stderr)
        if not check:
            path.write_text(text, encoding="utf-8")
    sys.exit(1 if check and stale else 0)


def _or_unmeasured(lines: Iterable[str], name: str) -> list[str]:
    """Return the lines of a benchmark, or a note that it was not measured."""
    path = f"benchmarks/micro/{name}.py"
    return list(lines) or [f"**Not measured**: no record of `{path}` is among `benchmarks/results`."]


def _written(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def pages(root: Path) -> dict[Path, str]:
    """Return the expected text of README.md, of the pages in docs and of generated files, by path."""
    results = _records(root)
    comparisons = [found for found in results if found["name"] == "compare"]

    def of(*names: str) -> Iterator[str]:
        return _sections([found for found in results if found["name"] in names])

    def files(*parts: str) -> Iterator[str]:
        return _sections([found for found in results if found["file"].startswith(parts)])

    drawn, evaluations = drawings(root), evaluation_record.records(root)
    made: dict[Path, dict[str, Any]] = {
        root / "README.md": {
            "gpu": _gpu_claims(json.loads((root / GPU_RECORD).read_text(encoding="utf-8"))),
            "figures": _claims(comparisons),
        },
        root / "docs" / "RESULTS.md": {"figures": results_page.page(results, evaluations)},
        root / "docs" / "memory.md": {"frontier": _drawn(drawn)},
        root / "docs" / "install.md": {"figures": of("import_time")},
        root / "docs" / "hosts.md": {"figures": _or_unmeasured(of("hosts"), "hosts")},
        root / "docs" / "accumulation.md": {"model": _savings()},
        root / "docs" / "scaling.md": {"figures": files(*RANKS)},
    }
    for source in (docs_figures, technique_figures, advice_figures, settings_figures):
        for name, parts in source.blocks(root).items():
            made.setdefault(root / "docs" / name, {}).update(parts)
    texts = {path: path.read_text(encoding="utf-8") for path in made}
    for path, parts in made.items():
        for name, lines in parts.items():
            texts[path] = _between(texts[path], name, "\n".join(lines))
    return texts | drawn


def _records(root: Path) -> list[Row]:
    """Return all records except evaluations, with the name of the file."""
    paths = sorted((root / evaluation_record.RESULTS).glob("*.json"))
    names = [path for path in paths if not path.name.startswith(evaluation_record.PREFIX)]
    return [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name} for path in names]


def _between(text: str, name: str, figures: str) -> str:
    """Return a page with new figures between the marks of a block.

    Raises:
        ValueError: The page does not contain exactly one pair of marks.
    """
    begin, end = BEGIN.format(name), END.format(name)
    if (text.count(begin), text.count(end)) != (1, 1):
        raise ValueError(f"expected {begin} and {end} once each")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{figures}\n{end}{after}"


# README: one line per model on the GPU; one line per task and machine on CPUs.


def _gpu_claims(record: Row) -> Iterator[str]:
    """Yield throughput before and after, and the speed-up, of the timed runs on one GPU."""
    yield f"| {record['environment']['gpu']} | PyTorch's default fp32 | with the plan | speed (95%) | peak memory | n |"
    yield "|---|---|---|---|---|---|"
    goals = {goal["run"]: found for goal in record["goals"] if (found := _rate(goal.get("figure", "")))}
    for run in record["runs"]:
        figures = run["figures"]
        speed = _of_plan(figures["throughput_ratio"])
        memory = _of_plan(figures.get("peak_memory_ratio", []))
        rate, terms = goals[run["name"]]
        before = f"{rate / speed['mean']:,.0f} {terms}/s"
        less = "" if memory is None else f"{100 * (1 - memory['mean']):.0f}% less"
        model = f"[{GPU_MODELS[run['name']]}]({GPU_RECORD})"
        yield f"| {model} | {before} | {rate:,.0f} {terms}/s | {ratio(speed)} | {less} | {speed['n']} |"


def _rate(figure: str) -> tuple[float, str] | None:
    """Return the rate and its terms in a goal's figure such as "465,393 tokens/s (95% ...)"."""
    found = re.match(r"([\d,]+) (\w+)/s", figure)
    return (float(found[1].replace(",", "")), found[2]) if found else None


def _of_plan(rows: list[Row]) -> Any:
    return next((row for row in rows if (row["arm"], row["against"]) == ("equivalent_plan", "reference")), None)


def _claims(comparisons: list[Row]) -> Iterator[str]:
    yield "| task | machine (threads) | throughput, same maths (95%) | A/A control | n |"
    yield "|---|---|---|---|---|"
    for found in comparisons:
        rows = [row for row in found["rows"] if row.get("n", 0) >= MIN_CLAIM]
        same = next((r for r in rows if _is(r, "throughput_ratio", "equivalent_plan", "reference")), None)
        control = next((r for r in rows if _is(r, "throughput_ratio", "self", "self")), None)
        if same is None or control is None or not control["low"] <= 1 <= control["high"]:
            continue  # no claim if the A/A control differs from 1
        task = f"[{same['task']}](benchmarks/results/{found['file']})"
        cpu, threads = found["environment"]["cpu"], found["environment"]["threads"]
        machine = f"{cpu.replace('(R)', '').replace(' Processor', '')} ({threads})"
        yield f"| {task} | {machine} | {ratio(same)} | {ratio(control)} | {same['n']} |"


def _is(row: Row, metric: str, arm: str, against: str) -> bool:
    return row["metric"] == metric and row.get("arm") == arm and row.get("against") == against


# All tables of a record.


def _sections(results: list[Row]) -> Iterator[str]:
    for found in results:
        environment = found["environment"]
        yield f"## {found['file'].removesuffix('.json')}"
        yield ""
        machine = ", ".join(environment[key] for key in ("cpu", "gpu") if key in environment)
        threads = "1 thread" if environment["threads"] == "1" else f"{environment['threads']} threads"
        yield f"{machine}, {threads}, torch {environment['torch']}.{_how(found)}"
        yield ""
        if "remark" in found:
            yield f"**{found['remark']}**"
            yield ""
        yield from KINDS[found["name"]](found["rows"])
        yield ""


def _how(found: Row) -> str:
    """Return the command of a comparison, and the run length for which the tuned plan was made."""
    command = found["environment"].get("command")
    said = [f"`{_present(command)}`" if command else ""]
    horizon = next((row for row in found["rows"] if row.get("arm") == "tuned_plan" and "arm_samples" in row), None)
    if horizon is not None:
        said.append(
            f"the tuned plan trained on {horizon['arm_samples']:,} samples, the reference on "
            f"{horizon['against_samples']:,}"
        )
    said = [text for text in said if text]
    return f" {'; '.join(said)}." if said else ""


def _present(command: str) -> str:
    """Return a recorded command line with the present module. Older records name `benchmarks/<name>.py`."""

    def module(found: re.Match[str]) -> str:
        folders = (folder for folder in ("micro", "paper") if (HERE / folder / f"{found[1]}.py").is_file())
        return f"python -m benchmarks.{next(folders)}.{found[1]}"

    return re.sub(r"^python benchmarks/(\w+)\.py", module, command)


def _overhead(rows: list[Row]) -> Iterator[str]:
    yield "| task | micro-batches | our loop over a plain one (95%) | n | 1% and the A/A half-width | within |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        yield f"| {row['task']} | {row['num_micro_batches']} | {_over_its_own(row, 'no')}"


def _over_its_own(row: Row, otherwise: str) -> str:
    """Return the overhead of trimtab's loop and its limit: 1% plus the control's half-width."""
    bar = 1.01 + row["control_half_width"]
    within = "yes" if row["high"] <= bar else otherwise
    return f"{row['mean']:.4f} ({row['low']:.4f} to {row['high']:.4f}) | {row['n']} | {bar:.4f} | {within} |"


def _with_interval(row: Row, name: str) -> str:
    """Return a value of a row with its interval."""
    return f"{row[name]:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def _no_harm(rows: list[Row]) -> Iterator[str]:
    yield "| task | throughput over the strong recipe's (95%) | n | A/A control | at least 0.97 | peak | changes |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        ratio = _with_interval(row, "mean")
        control = f"{row['control_low']:.3f} to {row['control_high']:.3f}"
        shown = "yes" if row["low"] >= 0.97 else "not shown" if row["high"] >= 0.97 else "no"
        peak = f"{row['peak_ratio']:.2f}x" if row.get("peak_ratio") else ""
        yield f"| {row['task']} | {ratio} | {row['n']} | {control} | {shown} | {peak} | {row['changes']} |"


def _planted(rows: list[Row]) -> Iterator[str]:
    yield "A multilayer perceptron with a fused step, at a batch where splitting costs: what else is tried is slower."
    yield ""
    yield "| plans of a loop that nothing makes faster | of them changed something | 95%: at most |"
    yield "|---|---|---|"
    for row in rows:
        yield f"| {row['n']} | {row['share']:.1%} | {row['high']:.1%} |"


def _sweep(rows: list[Row]) -> Iterator[str]:
    yield f"| peak rate | {rows[0]['of']} after {rows[0]['rows']:,} rows (n = 1) |"
    yield "|---|---|"
    for row in rows:
        yield f"| {row['lr']:g} | {row['value']:.4g} |"


def _monitor(rows: list[Row]) -> Iterator[str]:
    yield "| task | micro-batches | seen by | with it over without (95%) | n | the bar | its own clock |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:  # limit: half a percent plus the control's half-width
        where = f"| {row['task']} | {row['num_micro_batches']} | {row['estimator']} "
        value = f"| {row['mean']:.4f} ({row['low']:.4f} to {row['high']:.4f}) | {row['n']} "
        if "control_half_width" not in row:
            yield where + value + "| | |"
            continue
        bar = 1.005 + row["control_half_width"]
        within = "within" if row["high"] <= bar else "not shown" if row["low"] <= bar else "beyond"
        price = f"{row['price_of_a_window']:.2%} of a window, one in {row['measured_every']}"
        price += f"; {row['price_of_a_run']:.2%} of 2,000 windows" if "price_of_a_run" in row else ""
        yield where + value + f"| {bar:.4f}: {within} | {price} |"


def _regret(rows: list[Row]) -> Iterator[str]:
    """Yield the arms of each link for the mean of the losses, and goodput for each loss."""
    names = "task, losses", "link", "arm", "mean k", "samples", "seconds", "over the best fixed k", "paired (95%)"
    yield f"| {' | '.join((*names, 'over again', 'n'))} |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        is_mean = row["easiest"] != row["target"]
        if not is_mean and row["policy"] != "goodput":
            continue
        losses = f"{row['easiest']:g} to {row['target']:g}" if is_mean else f"{row['target']:g} alone"
        where = f"| {row['task']}, {losses} | {row['link']} | {row['policy']} | {row['mean_k']:.1f} "
        if row["median_s"] is None:
            yield where + f"| not reached | | | | | {row['n']} |"
            continue
        paired = _paired(row) if "mean" in row else ""
        over = f"{row['regret']:+.1%} ({row['best']})"
        took = f"| {row['median_samples']:,.0f} | {row['median_s']:.1f} | {over} | {paired} "
        again = f"{row['over_again']:+.1%}" if is_mean and row.get("over_again") is not None else ""
        yield where + took + f"| {again} | {row['n']} |"


def _paired(row: Row) -> str:
    """Return a ratio with its interval, or only the mean if there are too few pairs."""
    return _with_interval(row, "mean") if row["n"] >= FEW else f"{row['mean']:.3f}"


def _prediction(rows: list[Row]) -> Iterator[str]:
    """Yield a line per step and a summary of the errors."""
    names = {
        "error": "peak, traced",
        "time_error": "seconds, by the cost model",
        "ratio_error": "seconds over the loop's own",
        "bare_error": "peak, traced without operators' scratch",
        "roofline_error": "seconds, by the device's peaks alone",
    }
    older = [row for row in rows if "calibrated_error" in row]  # older records have a single size and k = 1
    rows = [row | {"bare_error": row["error"], "error": row["calibrated_error"]} for row in older] or rows
    names = {key: name for key, name in names.items() if any(row.get(key) is not None for row in rows)}
    for key, name in names.items():
        yield f"- {name}: {_errors([row[key] for row in rows if row.get(key) is not None])}"
    if told := [abs(row["time_error"]) for row in rows if row.get("time_error") is not None]:
        within = ", ".join(f"{sum(each <= limit for each in told)} within {limit:.0%}" for limit in (0.08, 0.12))
        yield f"- of {len(told)} steps seconds were told {within}"
    if untried := [row["time_error"] for row in rows if not row.get("tried", True)]:
        yield f"- seconds of steps that were not tried themselves: {_errors(untried)}"
    yield ""
    yield f"| model | rows | step | counted, MiB | took, s | {' | '.join(names.values())} |"
    yield "|---|---|---|---|---|" + "---|" * len(names)
    for row in rows:
        chunk = f", loss in chunks of {row['loss_chunk']}" if row.get("loss_chunk") else ""
        again = f", recomputing {row['schedule']}" if row.get("schedule", "none") != "none" else ""
        step = f"{row['precision']}, {row['optimizer']}, k={row.get('num_micro_batches', 1)}{chunk}{again}"
        errors = " | ".join("" if row.get(key) is None else f"{row[key]:+.2%}" for key in names)
        seconds = f"{row['measured_s']:.3f}" if "measured_s" in row else ""
        took = f"{row['measured_bytes'] / 2**20:.1f} | {seconds}"
        yield f"| {row['model']} | {row['batch']} | {step} | {took} | {errors} |"


def _errors(errors: list[float]) -> str:
    """Return a summary of relative errors. For peaks, the worst underestimate is the most important."""
    each = sorted(map(abs, errors))
    median, worst = (f"{value:.2%}" for value in (statistics.median(each), each[-1]))
    return f"median error {median}, worst {worst}, {min(errors):+.2%} to {max(errors):+.2%}"


def _budgets(rows: list[Row]) -> Iterator[str]:
    met = [row["is_met"] for row in rows if row["feasible"]]
    told = [row["is_monotone"] for row in rows if row.get("recorded_s") is not None]
    yield f"- {sum(met)} of {len(met)} feasible budgets were met; of {len(rows)}, {len(rows) - len(met)} are infeasible"
    yield f"- predicted by one profile, {sum(told)} of {len(told)} take no less time than under a looser budget"
    if own := [row["plans_monotone"] for row in rows if "plans_monotone" in row]:
        yield f"- predicted each by its own profile, {sum(own)} of {len(own)}"
    if within := [row["is_between"] for row in rows if "is_between" in row]:
        yield f"- {sum(within)} of {len(within)} took seconds that are within the interval that was predicted"
    yield ""
    yield "| task | limit, MiB | share | peak run, MiB | met | seconds predicted | measured (95%) | error | changes |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        limit = f"| {row['model']} | {row['budget_bytes'] / 2**20:.1f} | {row['share']:.0%} "
        if not row["feasible"]:
            yield limit + f"| | infeasible | | | | {row['hint']} |"
            continue
        took = _with_interval(row, "measured_s")
        met = "yes" if row["is_met"] else "**no**"
        predicted, error = row.get("predicted_s", math.nan), row.get("time_error", math.nan)
        between = f" ({row['predicted_low']:.3f} to {row['predicted_high']:.3f})" if "predicted_low" in row else ""
        peak = f"| {row['measured_bytes'] / 2**20:.1f} | {met} | {predicted:.3f}{between} "
        yield limit + peak + f"| {took} | {error:+.1%} | {row['changes']} |"


def _picks(rows: list[Row]) -> Iterator[str]:
    yield "| task | settings run | picked | against | the pick's seconds over theirs (95%) | n | A/A control |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        ratio = _with_interval(row, "mean")
        control = f"{row['control_low']:.3f} to {row['control_high']:.3f}"
        picked = f"| {row['task']} | {row['space']} | {row['pick']} | {row['other']} "
        yield picked + f"| {ratio} | {row['n']} | {control} |"


def _published(rows: list[Row]) -> Iterator[str]:
    within = sum(abs(row["time_error"]) <= CLOSE for row in rows)
    yield f"- seconds: {_errors([row['time_error'] for row in rows])}; {within} of {len(rows)} within {CLOSE:.0%}"
    held = [row["error"] for row in rows if row["error"] is not None]
    yield f"- peaks of {len(held)}, against what torch's allocator had reserved: {min(held):+.1%} to {max(held):+.1%}"
    yield ""
    yield "| published by | device | step | rows | precision | published, ms | predicted | reserved, GiB | predicted |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        step = f"| {row['source']} | {row['device']} | {row['model']} | {row['samples']} | {row['precision']} "
        peak = "| | |" if row["error"] is None else f"| {row['published_bytes'] / 2**30:.1f} | {row['error']:+.1%} |"
        yield f"{step}| {1000 * row['published_s']:.0f} | {row['time_error']:+.1%} {peak}"


def _published_ranks(rows: list[Row]) -> Iterator[str]:
    steps = [row for row in rows if row["metric"] == "published_ranks"]
    eager = [row for row in steps if not row["compiled"]]
    for name, key in (("nodes named", "time_error"), ("one ring of ports", "flat_error")):
        errors = [row[key] for row in eager]
        within = sum(abs(each) <= CLOSE for each in errors)
        yield f"- seconds, {name}: {_errors(errors)}; {within} of {len(errors)} within {CLOSE:.0%}"
    held = [row for row in steps if row["error"] is not None]
    for is_reserved, against in ((True, "what torch's allocator had reserved"), (False, "what tensors had taken")):
        errors = [row["error"] for row in held if row["is_reserved"] is is_reserved]
        yield f"- peaks of {len(errors)}, against {against}: {min(errors):+.1%} to {max(errors):+.1%}"
    pairs = [row for row in rows if row["metric"] == "published_efficiency"]
    for name, key in (
        ("nodes named", "predicted"),
        ("one ring of ports", "flat"),
        ("from the fewer's seconds", "timed"),
    ):
        off = [row[key] - row["published"] for row in pairs]
        within = sum(abs(each) <= 0.03 for each in off)
        points = f"{100 * min(off):+.1f} to {100 * max(off):+.1f} points, {within} within 3"
        yield f"- efficiencies of {len(pairs)} pairs, {name}: {points}"
    compiled = len(steps) - len(eager)
    yield f"- {compiled} steps that were compiled are told as if they were not, and in no figure of seconds above"
    yield ""
    yield (
        "| published by | ranks | link | step | stage | rows | recomputed | published, ms | predicted "
        "| of it waiting | over one ring | by our backend | GiB | predicted |"
    )
    yield "|---" * 14 + "|"
    yield from map(_rank_step, steps)
    yield ""
    yield "| published by | step | ranks | rows | published | predicted | over one ring | from the fewer's seconds |"
    yield "|---" * 8 + "|"
    for row in pairs:
        told = " | ".join(f"{row[name]:.1%}" for name in ("published", "predicted", "flat", "timed"))
        step = f"{row['device']}, {row['model']}, {_precision(row)}"
        yield f"| {_short(row)} | {step} | {row['fewer_ranks']} to {row['ranks']} | {row['samples']} | {told} |"


def _rank_step(row: Row) -> str:
    link = row["link"] if row["link_stated"] else f"{row['link']}, assumed"
    step = f"{row['device']}, {row['model']}, {_precision(row)}"
    rows = f"{row['micro_batches']} x {row['samples']}" if row["micro_batches"] > 1 else f"{row['samples']}"
    seconds = f"{1000 * row['published_s']:.0f} | {row['time_error']:+.1%} | {row['waited_s'] / row['predicted_s']:.0%}"
    others = f"{row['flat_error']:+.1%} | {row['own_s'] / row['published_s'] - 1:+.1%}"
    peak = " | " if row["error"] is None else f"{row['published_bytes'] / 2**30:.1f} | {row['error']:+.1%}"
    about = f"{row['ranks']} | {link} | {step} | {row['zero_stage']} | {rows} | {row['recompute']}"
    return f"| {_short(row)} | {about} | {seconds} | {others} | {peak} |"


def _precision(row: Row) -> str:
    return f"{row['precision']}, compiled" if row["compiled"] else row["precision"]


def _short(row: Row) -> str:
    """Return the publisher without the location."""
    return row["source"].split(",")[0].removeprefix("github.com/")


def _rank_memory(rows: list[Row]) -> Iterator[str]:
    within = sum(abs(row["error"]) <= 0.05 for row in rows)
    yield f"- {within} of {len(rows)} within 5%; {min(row['error'] for row in rows):+.1%} at the worst"
    yield ""
    yield "| model | stage | micro-batches | reduced | predicted, MiB | counted, median | least | most | error |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        how = f"{row['micro_batches']} | {'once' if row['reduces_once'] else 'each'}"
        names = ("predicted_bytes", "measured_bytes", "least_bytes", "most_bytes")
        sizes = " | ".join(f"{row[name] / 2**20:.1f}" for name in names)
        yield f"| {row['model']} | {row['zero_stage']} | {how} | {sizes} | {row['error']:+.1%} |"


def _probing(rows: list[Row]) -> Iterator[str]:
    yield "| task | steps of a run | seconds of the run | allowed, s | measuring, s | of which the final |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        run = f"| {row['task']} | {row['steps']} | {row['run_s']:.0f} | {row['allowed_s']:.0f} "
        yield f"{run}| {row['seconds']:.1f} | {row['final_s']:.1f} |"


def _planning_times(rows: list[Row]) -> Iterator[str]:
    for row in [row for row in rows if row["metric"] == "schedule_s"]:
        took = f"{1000 * row['mean']:.0f} ms (95% {1000 * row['low']:.0f} to {1000 * row['high']:.0f}, n={row['n']})"
        yield f"- the schedule of least recomputation of a chain of {row['model']}: {took}"
        yield ""
    rows = [row for row in rows if row["metric"] == "planning_s"]
    yield "| model | for | seconds of planning (95%) | n | host memory it took, MiB | predicted step | changes |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        took = f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        step = f"{1000 * row['predicted_s']:.0f} ms, {row['predicted_bytes'] / 2**30:.1f} GiB"
        limit = f", {row['budget_bytes'] / 2**30:g} GiB" if row.get("budget_bytes") else ""
        where = f"| {row['model']} | {row['device']}{limit} | {took} | {row['n']} "
        yield where + f"| {row['grown_bytes'] / 2**20:.0f} | {step} | {row['changes']} |"


def _frontier(rows: list[Row]) -> Iterator[str]:
    """Yield a table per model: time and peak of each schedule relative to a step without recomputation."""
    for model, precision, of in docs_figures.by_model(rows):
        whole = next(row["peak_bytes"] for row in of if row["schedule"] == "none")
        yield f"**{model}, {precision}**"
        yield ""
        yield "| schedule | peak, MiB | of none's | as told | time over none's (95%) | as told | n |"
        yield "|---|---|---|---|---|---|---|"
        for row in of:
            share = f", {row['share']:.0%} asked for" if row["share"] else ""
            peak = f"{row['peak_bytes'] / 2**20:.1f} | {row['peak_bytes'] / whole:.0%} "
            error = f"| {row['predicted_bytes'] / row['peak_bytes'] - 1:+.1%} "
            took = f"| {_with_interval(row, 'over_none')} | {row['predicted_over_none']:.3f} "
            yield f"| {row['schedule']}{share} | {peak}{error}{took}| {row['n']} |"
        yield ""


def _compiled(rows: list[Row]) -> Iterator[str]:
    """Yield a table of compiled models under torch's activation memory budgets."""
    yield "| model | of what it would keep | peak, MiB | time over the eager model's (95%) | n | gradients off |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        where = f"| {row['model']}, {row['precision']} | {row['share']:.0%} | {row['peak_bytes'] / 2**20:.1f} "
        off = f"{row['gradient_error']:.1e}" if row["gradient_error"] < 0.1 else f"**{row['gradient_error']:.0%}**"
        yield f"{where}| {_with_interval(row, 'over_none')} | {row['n']} | {off} |"


def _drawn(drawn: Iterable[Path]) -> Iterator[str]:
    """Yield links to the drawings of the schedules."""
    for path in drawn:
        yield f"![{path.stem.replace('-', ' ')}: time against peak memory](figures/{path.name})"
        yield ""


def _walk(rows: list[Row]) -> Iterator[str]:
    """Yield a table of memory limits per model and whether plans met them."""
    for model, precision, of in docs_figures.by_model(rows):
        met = [row["is_met"] for row in of if row["feasible"]]
        yield f"**{model}, from {precision}**: {sum(met)} of {len(met)} limits met, {len(of) - len(met)} infeasible"
        yield ""
        yield "| limit, MiB | of the whole | peak run, MiB | met | seconds predicted | measured | changes |"
        yield "|---|---|---|---|---|---|---|"
        for row in of:
            limit = f"| {row['budget_bytes'] / 2**20:.1f} | {row['share']:.0%} "
            if not row["feasible"]:
                yield limit + f"| | infeasible | | | {row['hint']} |"
                continue
            peak = f"| {row['measured_bytes'] / 2**20:.1f} | {'yes' if row['is_met'] else '**no**'} "
            yield limit + peak + f"| {row['predicted_s']:.3f} | {row['measured_s']:.3f} | {row['changes']} |"
        yield ""


def _savings() -> Iterator[str]:
    """Yield the time saved by the best k up to 64, relative to k = 1, by the model of docs/math.md, section 4."""
    scales = (1, 10, 100, 1000)
    for normalises, said in ((False, "SGD"), (True, "Adam")):
        head = " | ".join(f"`n` = {scale}" for scale in scales)
        yield f"| {said}: `f` | {head} |"
        yield "|---|" + "---|" * len(scales)
        for fixed in (0.1, 0.3, 1.0, 3.0, 10.0):
            cells = (_saving(scale, StepTimes(1.0, fixed), normalises=normalises) for scale in scales)
            yield f"| {fixed:g} | " + " | ".join(cells) + " |"
        yield ""


def _saving(scale: float, times: StepTimes, *, normalises: bool) -> str:
    costs = {k: relative_time(k, scale, 1, times, normalises=normalises) for k in range(1, 65)}
    best = min(costs, key=costs.__getitem__)
    return f"{1 - costs[best] / costs[1]:.0%} (k={best})"


def _hosts(rows: list[Row]) -> Iterator[str]:
    tells_weights = any("weights_apart" in row for row in rows)
    apart = " weights apart after 20 steps |" * tells_weights
    yield f"| host | its step, ms |{apart} within 1% | ours over its own (95%) | n | 1%, A/A half-width | within |"
    yield f"|---|---|{'---|' * tells_weights}---|---|---|---|---|"
    for row in rows:
        apart = f" {row.get('weights_apart', math.nan):.1e} |" * tells_weights
        host = row["host"] if (k := row.get("num_micro_batches", 1)) == 1 else f"{row['host']}, k={k}"
        within = "yes" if row["high"] <= 1.01 else "no" if row["low"] > 1.01 else "not shown"
        yield f"| {host} | {1000 * row['step_s']:.1f} |{apart} {within} | {_over_its_own(row, 'not shown')}"


def _faults(rows: list[Row]) -> Iterator[str]:
    tells_saves = any("in_saves" in row for row in rows)
    yield f"| fault | kills |{' inside a save |' * tells_saves} tried | came through |"
    yield f"|---|---|{'---|' * tells_saves}---|---|"
    for row in rows:
        in_saves = "" if row["kills"] is None else f"{row.get('in_saves')}"
        kills = f"{row['kills'] or ''} |" + f" {in_saves} |" * tells_saves
        yield f"| {row['kind']} | {kills} {row['tried']} | {row['survived']} |"


def _checkpoint_cost(rows: list[Row]) -> Iterator[str]:
    yield "| what | way | seconds (median) | of the plain way | A/A tells |"
    yield "|---|---|---|---|---|"
    for row in rows:
        ratio = f"{row['mean']:.2f} ({row['low']:.2f} to {row['high']:.2f}, n={row['n']})"
        what = row["metric"].removesuffix("_ratio").replace("_", ", ")
        yield f"| {what} | {row['way']} | {row['median_s']:.2f} | {ratio} | {row['resolution']:.0%} |"


def _imports(rows: list[Row]) -> Iterator[str]:
    yield "| what is imported, in this order | seconds, median (quartiles) | n |"
    yield "|---|---|---|"
    for row in rows:
        yield f"| {row['part']} | {row['median_s']:.3f} ({row['low_s']:.3f} to {row['high_s']:.3f}) | {row['n']} |"


KINDS = {
    "compare": comparison,
    "phases": phases,
    "overhead": _overhead,
    "strong_sweep": _sweep,
    "no_harm": _no_harm,
    "planted": _planted,
    "monitor": _monitor,
    "regret": _regret,
    "prediction": _prediction,
    "budget_sweep": _budgets,
    "exhaustive": _picks,
    "planning_time": _planning_times,
    "published": _published,
    "published_ranks": _published_ranks,
    "rank_memory": _rank_memory,
    "scaling": scaling,
    "sending": scaling,
    "faults": _faults,
    "hosts": _hosts,
    "import_time": _imports,
    "checkpoint_cost": _checkpoint_cost,
    "probing": _probing,
    "frontier": _frontier,
    "frontier_compiled": _compiled,
    "frontier_walk": _walk,
    "settings_on_models": settings_figures.section,
    "compile_time": settings_figures.compile_section,
}


if __name__ == "__main__":
    main()
