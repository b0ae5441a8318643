"""Scaling over several ranks by `trimtab scale`, over the machine's loopback and over a slow link.

`python -m benchmarks.micro.scaling [--quick] [--json] [--parts efficiency courses] [--links local slow]` prints

- `scaling_efficiency`: the rows of `trimtab scale` on one rank and two, weak scaling;
- `samples_to_target`: median samples of training to a validation loss with each recipe, and the seconds that they take
  at the measured speed, with the efficiency of the same recipe;
- `weight_difference`: largest weight difference between each backend on 2 and 4 ranks and a single process after 20
  windows, relative to the largest weight;
- `window_prediction`: seconds and peak memory of windows for each ZeRO stage, predicted from one process and a timed
  link, from a dry run, and measured by the loops of `trimtab scale`.

Ranks have one thread each. The slow link is the loopback in a separate network namespace, limited to `--mbit` by the
kernel's token bucket (`tc`). It requires root and `tc`, and is skipped without them. torchrun starts this module again
on the ranks, as `scaling.py OUT JOB [ARGUMENT ...]`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from benchmarks import command
from benchmarks.micro.regret_cases import held_out_loss
from benchmarks.micro.scaling_tasks import BY_NAME, GPT
from trimtab.api import FREED, default_rule
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.core.progress import silent
from trimtab.core.serialization import from_json, to_json
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.dry_run import DryRuns
from trimtab.distributed.process_group import from_first, job_position, total
from trimtab.experiments import loop_setup, loops
from trimtab.experiments.loops import DataStream, StepResult
from trimtab.experiments.result_table import PLANNED
from trimtab.experiments.scale import ScaleOptions, run_job
from trimtab.experiments.scaling import ALONE
from trimtab.experiments.subject import RunOptions, Subject
from trimtab.experiments.task_loops import TaskLoops
from trimtab.experiments.task_plans import job_ranks, loop_of, plan_task, profile_task
from trimtab.planner.communication_cost import window_s
from trimtab.planner.multi_rank_plan import WAYS
from trimtab.plans.plan import Plan
from trimtab.profiling.communication_profile import step_shape
from trimtab.tasks.task import Task

Row = dict[str, Any]
CPU = torch.device("cpu")
MBIT = {"resnet_small": 400, "resnet_wide": 4000, "gpt_small": 2000}
TARGETS, MOST = {"resnet_small": 1.5, "resnet_wide": 1.6}, 100_000
STEPS = 20  # before weights are compared
SEVERAL = 3  # micro-batches of longer windows
EVERY = 2048  # samples between evaluations
PARTS = ("weights", "efficiency", "windows", "courses")
BACKENDS: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    **{f"zero-{stage}": {"zero_stage": stage} for stage in (1, 2, 3)},
    **{f"deepspeed-{stage}": {"zero_stage": stage, "engine": "deepspeed"} for stage in (1, 2, 3)},
}


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


def output_of(link: str, mbit: int, program: Sequence[str]) -> str:
    """Run a Python program over a link, with one thread per rank, and return its standard output."""
    path = os.pathsep.join([str(command.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    how = {"cwd": command.ROOT, "env": env, "check": True, "stdout": subprocess.PIPE, "text": True}
    return str(subprocess.run(over(link, mbit, [sys.executable, *program]), **how).stdout)


def run_ranks(link: str, mbit: int, ranks: int, program: Sequence[str]) -> None:
    """Run a program with torchrun over a link."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    print(output_of(link, mbit, [*launcher, *program]), end="", file=sys.stderr)


def job_rows(link: str, mbit: int, ranks: int, job: str, *arguments: object) -> list[Row]:
    """Run a job of this module on ranks and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        run_ranks(link, mbit, ranks, [__file__, str(out), job, *map(str, arguments)])
        found: list[Row] = json.loads(out.read_text(encoding="utf-8"))
    return found


def efficiencies(task: str, link: str, mbit: int, rounds: int, folder: Path) -> list[Row]:
    """Run `trimtab scale` and return its rows."""
    name = {"resnet_small": "RESNET", "resnet_wide": "WIDE", "gpt_small": "GPT"}[task]
    asked = ["scale", f"benchmarks.micro.scaling_tasks:{name}", "--ranks", "1,2"]
    asked += ["--rounds", str(rounds), "--scaling", "weak", "--out", str(folder), "--json"]
    rows = json.loads(output_of(link, mbit, ["-m", "trimtab.cli", *asked]))["rows"]
    return [row | {"link": link} | ({"mbit": mbit} if link == "slow" else {}) for row in rows]


def courses(task: str, link: str, mbit: int, seeds: int, folder: Path, timed: list[Row]) -> Iterator[Row]:
    """Yield samples to the target for each timed recipe and number of ranks."""
    folder.mkdir()
    for ranks in (1, 2):
        runs = [job_rows(link, mbit, ranks, "courses", folder, task, seed) for seed in range(seeds)]
        for recipe, *found in zip(RECIPES, *runs, strict=True):
            # A plan with an adaptive batch size is not timed apart, so its seconds are unknown.
            row = next((row for row in timed if (row["recipe"], row["ranks"]) == (recipe, ranks)), None)
            if row is None or "refused" in row:
                continue
            taken = [run["samples_to_target"] for run in found]
            median = None if None in taken else statistics.median(taken)
            yield {key: value for key, value in row.items() if key not in ("samples_per_s", "window_s", "plans")} | {
                "metric": "samples_to_target",
                "mbit": mbit if link == "slow" else None,
                "target": TARGETS[task],
                "reached": sum(each is not None for each in taken),
                "seeds": seeds,
                "samples_to_target": median,
                "seconds_to_target": None if median is None else median / row["samples_per_s"],
                "samples_of_seeds": taken,
                "effective_batch": statistics.fmean(run["effective_batch"] for run in found),
            }


def measured(options: Any) -> Iterator[Row]:
    """Yield the rows of the selected parts."""
    parts = options.parts or (("weights",) if options.quick else PARTS)
    for ranks in () if "weights" not in parts else (2,) if options.quick else (2, 4):
        yield from job_rows("local", 0, ranks, "weights")
    links = [link for link in options.links if link == "local" or has_slow_link()]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for task, link in itertools.product(options.tasks if {"efficiency", "courses"} & {*parts} else (), links):
            mbit = options.mbit or MBIT[task]
            rows = efficiencies(task, link, mbit, options.rounds or (1 if options.quick else 8), folder / task / link)
            yield from rows
            if "courses" in parts and task in TARGETS:
                yield from courses(task, link, mbit, options.seeds, folder / f"{task}-{link}", rows)
        for link in links if "windows" in parts else ():
            for row in job_rows(link, options.mbit or MBIT[GPT.name], 2, "windows", folder):
                yield row | {"link": link}
    if "slow" in options.links and "slow" not in links:
        yield {"metric": "not measured", "link": "slow", "why": "it takes root, unshare, ip and tc"}


# Jobs of a rank.


def weights() -> list[Row]:
    """Return weight differences between each backend and a single process after windows of several micro-batches."""
    # DeepSpeed stage 3 supports fp32 only. Other backends use float64, so that differences are errors, not rounding.
    ranks, found = dist.get_world_size(), {}
    for name, how in BACKENDS.items():
        dtype = torch.float32 if how.get("engine") else torch.float64
        found[name] = (dtype, _trained(Plan.fixed(6, 2, num_ranks=ranks, **how), dtype))
    if dist.get_rank():
        return []
    os.environ["WORLD_SIZE"] = "1"
    dist.destroy_process_group()
    alone = {dtype: _trained(Plan.fixed(6 * ranks, 2), dtype) for dtype in (torch.float64, torch.float32)}
    rows = []
    for name, (dtype, ours) in found.items():
        gap = max(float((a - b).abs().max()) for a, b in zip(ours, alone[dtype], strict=True))
        row = {"metric": "weight_difference", "task": GPT.name, "backend": name, "ranks": ranks, "steps": STEPS}
        largest = max(float(each.abs().max()) for each in alone[dtype])
        rows.append(row | {"dtype": str(dtype).removeprefix("torch."), "difference": gap / largest})
    return rows


def _trained(plan: Plan, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = GPT.make_model().to(dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = trimtab.shard(GPT.load_data().batches(0, plan.batch_size * plan.num_ranks))
    with trimtab.start(model, optimizer, plan, clip_norm=1.0) as run:
        for window in itertools.islice(run.windows(batches), STEPS):
            run.train_step(window, GPT.loss_fn)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [each.detach().double().clone() for each in whole]


def windows(folder: str) -> list[Row]:
    """Return predicted and measured seconds and bytes of windows per stage, with one and several micro-batches."""
    ranks, calibration = dist.get_world_size(), calibrate(CPU)
    shape = from_json(StepShape, from_first(lambda: to_json(_shape())))
    rows = []
    for (stage, once), k in itertools.product(WAYS, (1, SEVERAL)):
        if k == 1 and not once:
            continue
        how = Parallelism(ranks, stage, reduces_once=once)
        told = window_s(how, calibration.link, shape, k, overlap_share=calibration.overlap_share)
        shared = {"reduces_once": once} if stage > 1 else {}
        share = replace(GPT, batch_size=k * GPT.batch_size)
        plan = Plan.fixed(share.batch_size, GPT.batch_size, num_ranks=ranks, zero_stage=stage, **shared)
        ran = DryRuns(partial(loop_of, share, "cpu")).of(plan, counts_memory=True)
        with job_ranks() as together:
            subject = Subject.of(share, share.name, RunOptions(together=together))
            job = run_job(subject, 0, Path(folder), ScaleOptions(modes=("weak",), plan=plan), silent, together)
        samples = share.batch_size * ranks
        ours, alone = (job.samples_per_s(arm, "weak") for arm in (PLANNED, f"{PLANNED}{ALONE}"))
        assert ours is not None
        assert alone is not None
        taken = samples / ours
        rows.append(
            {
                "metric": "window_prediction",
                "task": GPT.name,
                "ranks": ranks,
                "zero_stage": stage,
                "micro_batches": k,
                "reduces_once": once,
                "predicted_s": told.total_s,
                "predicted_waiting_s": told.exposed_s,
                "measured_s": taken,
                "measured_waiting_s": taken - samples / alone,
                "error": told.total_s / taken - 1,
                "rehearsed_s": ran.window_s,
                "rehearsal_error": ran.window_s / taken - 1,
                "rehearsed_bytes": ran.peak_bytes,
                "rehearsed_largest_bytes": max(ran.peaks),
                "measured_bytes": job.peak_bytes(PLANNED, "weak"),
                "rehearsal_s": ran.took_s,
                "link_bytes_per_s": calibration.link.bytes_per_s,
                "link_latency_s": calibration.link.latency_s,
                "overlap_share": calibration.overlap_share,
            }
        )
    return rows


def _shape() -> StepShape:
    """Return times and sizes of a step in one process."""
    profile = profile_task(GPT)
    with torch.device("meta"):
        model = GPT.make_model()
    return step_shape(model, profile, Plan.fixed(GPT.batch_size))


RECIPES = ("baseline", "plan", "plan_batch")


def courses_of_rank(folder: str, name: str, seed: str) -> list[Row]:
    """Train with each recipe until the validation loss reaches the target, and return samples and mean batch size."""
    task, ranks = BY_NAME[name], job_position().num_ranks
    whole = replace(task, batch_size=task.batch_size * ranks)
    plan = plan_task(whole)
    plans = {"baseline": None, "plan": plan, "plan_batch": plan.freed(default_rule(plan), FREED)}
    return [_samples(whole, plans[recipe], int(seed), TARGETS[name]) for recipe in RECIPES]


def _samples(whole: Task, plan: Plan | None, seed: int, target: float) -> Row:
    """Return samples to a validation loss, and the mean batch size.

    The loss is reached at the first of two consecutive evaluations that meet it, interpolated from the previous one.
    """
    own = TaskLoops(whole)
    loop = loop_setup.build(own.setup, seed, whole.name)
    stream = DataStream(loop.loader, seed)
    steps: Iterator[StepResult] = (
        loops.plain_steps(loop, stream) if plan is None else loops.planned_steps(loop, stream, plan)
    )
    rows, count, points, met = 0, 0, list[tuple[int, float]](), None
    while rows < MOST and met is None:
        due = (rows // EVERY + 1) * EVERY
        while rows < due:
            rows, count = rows + int(total(float(next(steps).samples))), count + 1
        # Batch statistics differ between ranks, so rank 0's loss decides.
        points.append((rows, float(from_first(lambda: repr(held_out_loss(whole, loop.model, own.data))))))
        met = _met(points[-3:], target)
    steps.close()  # type: ignore[attr-defined]  # A generator.
    return {"samples_to_target": met, "effective_batch": rows / count}


def _met(last: list[tuple[int, float]], target: float) -> float | None:
    """Return interpolated samples to the target; None unless the last two evaluations meet it."""
    if len(last) < 2 or last[-1][1] > target or last[-2][1] > target:
        return None
    (before, loss), (first, reached) = last[-3:-1] if len(last) > 2 else last[:1] * 2
    return first if loss == reached else before + (loss - target) / (loss - reached) * (first - before)


JOBS: dict[str, Callable[..., list[Row]]] = {"weights": weights, "windows": windows, "courses": courses_of_rank}


def run_on_rank(out: str, job: str, *arguments: str) -> None:
    """Run a job on this rank. Rank 0 writes the rows."""
    torch.set_num_threads(1)
    with trimtab.process_group() as here:
        found = JOBS[job](*arguments)
        if here.rank == 0:
            Path(out).write_text(json.dumps(found), encoding="utf-8")
        sys.stdout.flush()
        os._exit(0)  # skips interpreter shutdown, during which gloo threads may raise


def _line(row: Row) -> str:
    match row["metric"]:
        case "weight_difference":
            return f"{row['backend']:<12} {row['ranks']} ranks: weights {row['difference']:.1e} apart ({row['dtype']})"
        case "scaling_efficiency":
            what = f"{row['task']} {row['link']:<5} {row['ranks']} {row['recipe']:<10}"
            return f"{what} {row.get('samples_per_s', 0):>8.0f} samples/s{_efficiency(row)}"
        case "samples_to_target":
            reached = f"{row['target']:g} ({row['reached']}/{row['seeds']})"
            what = f"{row['task']} {row['link']:<5} {row['recipe']:<10} on {row['ranks']} to {reached}"
            return f"{what}: {row['samples_to_target']} samples{_efficiency(row)}"
        case "window_prediction":
            once = "" if row["reduces_once"] else ", each reduced"
            what = f"stage {row['zero_stage']}, {row['micro_batches']} micro-batches{once}"
            seconds = f"{1000 * row['predicted_s']:8.1f} ms predicted, {1000 * row['measured_s']:8.1f} measured"
            return f"{row['link']:<5} {what:<40} {seconds}: {row['error']:+.1%}"
    return f"not measured: {row['link']} {row['why']}"


def _efficiency(row: Row) -> str:
    if row["mean"] is None:
        return ""
    bounds = "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"
    return f", efficiency {row['mean']:.3f}{bounds}"


def main() -> None:
    """Print the rows."""
    parser = command.parser(__doc__)
    parser.add_argument("--links", nargs="+", default=("local", "slow"), choices=("local", "slow"))
    parser.add_argument("--parts", nargs="+", default=None, choices=PARTS)
    parser.add_argument(
        "--tasks", nargs="+", default=tuple(MBIT), choices=tuple(MBIT), help="of efficiency and courses"
    )
    parser.add_argument("--rounds", type=int, default=None, help="of `trimtab scale`: 8, or 1 when quick")
    parser.add_argument("--seeds", type=int, default=5, help="of courses")
    parser.add_argument("--mbit", type=int, default=None, help="of the slow link")
    options = parser.parse_args()
    rows = []
    for row in measured(options):
        rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    command.show("scaling", rows, _line, as_json=options.json)


if __name__ == "__main__":
    run_on_rank(*sys.argv[1:]) if "RANK" in os.environ else main()
