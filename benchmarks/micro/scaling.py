"""Data parallelism on several ranks, over the machine's loopback and over a slow link.

`python -m benchmarks.micro.scaling [--quick] [--json] [--rounds 8] [--seeds 5] [--links local slow]` prints

- `weight_difference`: largest weight difference between each backend on 2 and 4 ranks and a single process after 20
  windows, relative to the largest weight;
- `scaling_efficiency`: weak scaling by `trimtab scale`, throughput(n) / (n throughput(1)), paired within rounds, for
  the plain loop in DDP and for the plan;
- `samples_to_target`: training to a validation loss on one rank, and on two over the slow link, for both loops and for
  a plan with adaptive batch size: samples, and efficiency paired by seed. The part `samples` counts samples only, also
  for windows of sixteen micro-batches;
- `window_prediction`: seconds per window for each ZeRO stage, predicted from one process and a timed link, and
  measured;
- `in_step`: speed of ranks over the slow link relative to one rank, interleaved in a job, for DDP and for a plan that
  sends bf16 once per sixteen micro-batches; also if ranks only synchronise once per window and send nothing;
- `loop_overhead_ratio`: a plan without changes on two ranks relative to the plain loop in DDP, step by step, and the
  seconds of the per-window exchange between ranks;
- `rank_fault`: seconds from SIGKILL or SIGSTOP of a rank to the end of the command that started it.

Ranks have one thread each. The slow link is the loopback in a separate network namespace, limited to `--mbit` by the
kernel's token bucket (`tc`). It requires root and `tc`, and is skipped without them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.micro.scaling_faults import faults
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, ratio_interval, resolution

HERE = Path(__file__).resolve().parent
MBIT = {"resnet_small": 400, "resnet_wide": 4000, "gpt_small": 2000}
TARGETS, MOST = {"resnet_small": 1.5, "resnet_wide": 1.6}, 100_000
COURSES = ("baseline", "no_buffers", "plan", "plan_batch", "plan_k")
PAIRS = 400


def run_ranks(link: str, mbit: int, ranks: int, program: Sequence[str]) -> None:
    """Run a program with torchrun over a link, with one thread per rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    one = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": _importable()}
    subprocess.run(over(link, mbit, [sys.executable, *launcher]), env=one, check=True, stdout=sys.stderr)


def _importable() -> str:
    """Return PYTHONPATH of the ranks: the checkout and the PYTHONPATH of this process."""
    return os.pathsep.join([str(command.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def over(link: str, mbit: int, program: Sequence[str]) -> list[str]:
    """Return the command that runs a program over a link, "local" or "slow"."""
    if link == "local":
        return list(program)
    limit = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 128kb latency 1s"
    return ["unshare", "--net", "sh", "-c", f'ip link set lo up && {limit} && exec "$@"', "sh", *program]


def has_slow_link() -> bool:
    """Return True if this machine can create a network namespace with a slow loopback."""
    if not all(map(shutil.which, ("unshare", "tc", "ip"))):
        return False
    return subprocess.run(over("slow", 100, ["true"]), capture_output=True, check=False).returncode == 0


def found_by(link: str, mbit: int, ranks: int, what: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a job of scaling_ranks.py and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        run_ranks(link, mbit, ranks, [str(HERE / "scaling_ranks.py"), what, str(out), *map(str, arguments)])
        found: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def efficiencies(task: str, link: str, mbit: int, ranks: Iterable[int], rounds: int, folder: Path) -> list[Any]:
    """Run `trimtab scale` and return its rows."""
    name = {"resnet_small": "RESNET", "resnet_wide": "WIDE", "gpt_small": "GPT"}[task]
    asked = ["scale", f"benchmarks.micro.scaling_tasks:{name}", "--ranks", ",".join(map(str, ranks))]
    asked += ["--rounds", str(rounds), "--scaling", "weak", "--out", str(folder), "--json"]
    program = [sys.executable, "-c", "from trimtab.cli import main; main()", *asked]
    given = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": _importable()}
    how = {"cwd": command.ROOT, "env": given, "stdout": subprocess.PIPE, "text": True}
    done = subprocess.run(over(link, mbit, program), check=True, **how)
    rows = json.loads(done.stdout)["rows"]
    return [row | {"link": link} | ({"mbit": mbit} if link == "slow" else {}) for row in rows]


def courses(
    task: str, seeds: int, mbit: int, folder: Path, recipes: Sequence[str] = COURSES
) -> Iterator[dict[str, Any]]:
    """Yield samples to the target and efficiency, paired by seed, for each recipe on one rank and two.

    `no_buffers` is the baseline without DDP's broadcast of batch statistics in every forward, `plan_batch` a plan with
    adaptive batch size, `plan_k` a plan with sixteen micro-batches in every window.
    """
    arms = [(recipe, n) for recipe in recipes for n in (1, 2) if (recipe, n) != ("no_buffers", 1)]
    found: dict[tuple[str, int], list[dict[str, Any]]] = {arm: [] for arm in arms}
    for seed in range(seeds):
        turn = 1 if seed % 2 == 0 else -1
        for ranks in (1, 2)[::turn]:
            link = "slow" if ranks > 1 else "local"  # a single rank sends nothing
            own = ",".join([recipe for recipe, n in arms if n == ranks][::turn])
            for run in found_by(link, mbit, ranks, "courses", folder, task, own, seed, TARGETS[task], MOST):
                found[run["recipe"], ranks].append(run)
                print(_course_line(run), file=sys.stderr, flush=True)
    for (recipe, ranks), runs in found.items():
        alone = found["baseline" if recipe == "no_buffers" else recipe, 1]
        ratios = [ours["samples_per_s"] / (ranks * one["samples_per_s"]) for ours, one in zip(runs, alone, strict=True)]
        timed = {"seconds_to_target": _median(runs, "target_s"), "seconds_of_seeds": [run["target_s"] for run in runs]}
        yield (
            _reached(task, "slow" if ranks > 1 else "none", mbit, runs)
            | timed
            | _efficiency(ratios if ranks > 1 else [])
        )


def samples(task: str, seeds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield samples to the target on two ranks, for the baseline and for windows of sixteen micro-batches.

    Neither loop depends on time, so other load on the machine does not change the result.
    """
    recipes = ("baseline", "plan_k")
    found: dict[str, list[dict[str, Any]]] = {recipe: [] for recipe in recipes}
    for seed in range(seeds):
        for run in found_by("local", 0, 2, "courses", folder, task, ",".join(recipes), seed, TARGETS[task], MOST):
            found[run["recipe"]].append(run)
            print(_course_line(run), file=sys.stderr, flush=True)
    for runs in found.values():
        yield _reached(task, "local", 0, runs) | {"seconds_to_target": None} | _efficiency([])


def _reached(task: str, link: str, mbit: int, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    recipe, ranks = runs[0]["recipe"], runs[0]["ranks"]
    return {
        "metric": "samples_to_target",
        "task": task,
        "link": link,
        "mbit": mbit if link == "slow" else None,
        "ranks": ranks,
        "recipe": recipe,
        "plan_kind": "tuned" if recipe in ("plan_batch", "plan_k") else "equivalent" if recipe == "plan" else "",
        "target": TARGETS[task],
        "reached": sum(run["target_s"] is not None for run in runs),
        "seeds": len(runs),
        "samples_to_target": _median(runs, "target_rows"),
        "samples_of_seeds": [run["target_rows"] for run in runs],
        "effective_batch": statistics.fmean(run["rows"] / run["windows"] for run in runs),
        "says": runs[0]["says"],
    }


def _median(runs: Sequence[Any], key: str) -> float | None:
    """Return the median of all runs; None if a run did not reach the target."""
    found = [run[key] for run in runs]
    return None if None in found else statistics.median(found)


def _efficiency(ratios: list[float]) -> dict[str, Any]:
    if not ratios:
        return {"mean": None, "low": None, "high": None, "n": 0, "pairs": []}
    found = ratio_interval(ratios)
    bounds = (found.low, found.high) if found.n >= MIN_PAIRS_FOR_VERDICT else (None, None)
    return {"mean": found.mean, "low": bounds[0], "high": bounds[1], "n": found.n, "pairs": ratios}


def _course_line(run: dict[str, Any]) -> str:
    return (
        f"  {run['recipe']} on {run['ranks']}, seed {run['seed']}: {run['rows']} rows in {run['seconds']:.1f} s, "
        f"{run['rows'] / run['windows']:.0f} a window{', not reached' if run['target_s'] is None else ''}"
    )


def in_step(task: str, mbit: int) -> Iterator[dict[str, Any]]:
    """Yield the speed of two ranks relative to one: over the slow link, and synchronised without sending."""
    for row in found_by("slow", mbit, 2, "in_step", task):
        taken = row.pop("sample_s")
        for loop in ("ddp", "plan"):
            alone, bound, sharing = (taken[f"{loop}{state}"] for state in (" alone", " in step", ""))
            compared = {"in step": (alone, bound), "over the link": (alone, sharing), "of in step": (bound, sharing)}
            for what, (over, under) in compared.items():
                found = ratio_interval([one / other for one, other in zip(over, under, strict=True)])
                kept = {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n}
                yield row | {"loop": loop, "kept": what, "mbit": mbit, "sample_s": statistics.median(sharing)} | kept


def overhead(pairs: int) -> Iterator[dict[str, Any]]:
    """Yield the overhead of trimtab's loop on two ranks over the loopback."""
    for row in found_by("local", 0, 2, "agreement", pairs):
        ours, control = ratio_interval(row.pop("pairs")), ratio_interval(row.pop("control_pairs"))
        figures = {"mean": ours.mean, "low": ours.low, "high": ours.high, "n": ours.n}
        yield row | figures | {"resolution": resolution(control), "control": control.mean}


def measured(options: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of the selected parts."""
    for ranks in () if "weights" not in options.parts else (2,) if options.quick else (2, 4):
        yield from found_by("local", 0, ranks, "weights")
    links = [link for link in options.links if link == "local" or has_slow_link()]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for task in options.tasks if "efficiency" in options.parts else ():
            mbit = options.mbit or MBIT[task]
            for link in links:
                yield from efficiencies(task, link, mbit, options.ranks, options.rounds, folder / f"{task}-{link}")
        for link in links if "windows" in options.parts else ():
            (folder / "windows").mkdir(exist_ok=True)
            for row in found_by(link, options.mbit or MBIT["gpt_small"], 2, "windows", folder / "windows"):
                yield row | {"link": link}
        for task in options.tasks if "courses" in options.parts and "slow" in links else ():
            if task in TARGETS:
                (folder / f"courses-{task}").mkdir()
                made_in, mbit = folder / f"courses-{task}", options.mbit or MBIT[task]
                yield from courses(task, options.seeds, mbit, made_in, options.recipes)
        for task in options.tasks if "samples" in options.parts else ():
            if task in TARGETS:
                (folder / f"samples-{task}").mkdir()
                yield from samples(task, options.seeds, folder / f"samples-{task}")
        for task in options.tasks if "in_step" in options.parts and "slow" in links else ():
            yield from in_step(task, options.mbit or MBIT[task])
        if "overhead" in options.parts:
            yield from overhead(PAIRS // 4 if options.quick else PAIRS)
        if "faults" in options.parts:
            yield from faults({"SIGKILL": 5, "SIGSTOP": 1})
    if "slow" in options.links and "slow" not in links:
        yield {"metric": "not measured", "link": "slow", "why": "it takes root, unshare, ip and tc"}


def _line(row: dict[str, Any]) -> str:
    match row["metric"]:
        case "weight_difference":
            return f"{row['backend']:<12} {row['ranks']} ranks: weights {row['difference']:.1e} apart ({row['dtype']})"
        case "scaling_efficiency":
            share = "" if row["mean"] is None else f"efficiency {_bounded(row)}"
            what = f"{row['task']} {row['link']:<5} {row['ranks']} {row['recipe']:<9}"
            return f"{what} {row['samples_per_s']:>8.0f} rows/s {share}"
        case "samples_to_target":
            share = "" if row["mean"] is None else f", efficiency {_bounded(row)}"
            reached = f"{row['target']:g} ({row['reached']}/{row['seeds']})"
            what = f"{row['task']} {row['recipe']:<10} on {row['ranks']} to {reached}"
            if row["samples_to_target"] is None:
                return f"{what}: not reached in each{share}"
            seconds = "" if row["seconds_to_target"] is None else f", {row['seconds_to_target']:.1f} s"
            return f"{what}: {row['samples_to_target']:.0f} rows{seconds}{share}"
        case "window_prediction":
            once = "" if row["reduces_once"] else ", each reduced"
            told, taken = 1000 * row["predicted_s"], 1000 * row["measured_s"]
            what = f"stage {row['zero_stage']}, {row['micro_batches']} micro-batches{once}"
            return f"{row['link']:<5} {what:<40} {told:8.1f} ms told, {taken:8.1f} taken: {row['error']:+.1%}"
        case "in_step":
            return f"{row['task']} at {row['mbit']} Mbit/s, {row['loop']}, {row['kept']}: {_bounded(row)}"
        case "loop_overhead_ratio":
            asks = f"asking takes {1e6 * row['ask_s']:.0f} µs, and {1e6 * row['answer_s']:.0f} µs to the answer"
            return f"loop on 2 ranks {_bounded(row)} of the plain one's (control ±{row['resolution']:.1%}); {asks}"
        case "rank_fault":
            named = f"rank named in {row['named']} of {row['tried']}"
            return f"{row['kind']}: {row['median_s']:.2f} s to the end, {row['longest_s']:.2f} at the most; {named}"
    return f"not measured: {row.get('link', '')} {row.get('why', '')}"


def _bounded(row: dict[str, Any]) -> str:
    bounds = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"
    return f"{row['mean']:.3f}{bounds}"


PARTS = ("weights", "efficiency", "windows", "courses", "samples", "in_step", "overhead", "faults")


def main() -> None:
    """Print the rows."""
    parser = command.parser(__doc__)
    parser.add_argument("--links", nargs="+", default=("local", "slow"), choices=("local", "slow"))
    parser.add_argument("--parts", nargs="+", default=None, choices=PARTS, help="all of them, or some")
    parser.add_argument(
        "--tasks", nargs="+", default=tuple(MBIT), choices=tuple(MBIT), help="of efficiency and courses"
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2), help="of efficiency")
    parser.add_argument("--rounds", type=int, default=None, help="of jobs: 8, or 1 when quick")
    parser.add_argument("--seeds", type=int, default=5, help="of courses to a loss")
    parser.add_argument("--recipes", nargs="+", default=COURSES, choices=COURSES, help="of courses")
    parser.add_argument("--mbit", type=int, default=None, help="of the slow link")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 8)
    options.parts = options.parts or (("weights", "overhead") if options.quick else PARTS)
    rows = []
    for row in measured(options):
        rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    command.show("scaling", rows, _line, as_json=options.json)


if __name__ == "__main__":
    main()
