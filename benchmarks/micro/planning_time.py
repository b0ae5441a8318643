"""Planning time for another device: GPT-2 Small and ResNet-50 on fake tensors.

`python -m benchmarks.micro.planning_time [--quick] [--json]` prints `planning_s` rows: seconds of
`trimtab.plan(device=...)` for an H100 in a fresh process, and the growth of the process's memory. Each model is also
planned with a limit of about half the memory (`budget_bytes`), which requires traces of blocks and loss heads. A
`schedule_s` row contains the seconds to find the optimal activation checkpointing schedule of a hundred blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import time
from typing import Any

import torch
from torch.nn import functional as F

import trimtab
from benchmarks import command
from benchmarks.micro.prediction_models import ResNet50
from trimtab.core.block_costs import BlockCost
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.planner.recompute_cost import keep_all, predict
from trimtab.planner.recompute_solver import optimal
from trimtab.planner.statistics import mean_interval
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

DEVICE = "H100 SXM"
GPT2_SMALL = GPTShape(50257, 1024, num_layers=12, num_heads=12, width=768, dropout=0.1, tied_head=True)
MODELS = {"gpt2_small": 32, "resnet50": 128}  # batch sizes
LIMITS = {"gpt2_small": 16 * 2**30, "resnet50": 4 * 2**30}
RUNS = 8
STAGES, CHAINS, CHAIN_SHARES = 100, 4, (0.7, 0.5, 0.3)


def loop(name: str) -> tuple[Any, ...]:
    """Return model, optimizer, loss and batch on fake tensors."""
    rows = MODELS[name]
    with FakeTensors():
        if name == "gpt2_small":
            model: torch.nn.Module = GPT(GPT2_SMALL).train()
            return model, torch.optim.AdamW(model.parameters()), next_token_loss, (torch.zeros(rows, 1025).long(),)
        model = ResNet50().train()
        batch = torch.zeros(rows, 3, 224, 224), torch.zeros(rows).long()
        return model, torch.optim.AdamW(model.parameters()), lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch


def once(name: str, limit: int | None) -> dict[str, Any]:
    """Plan a model and return seconds and memory growth."""
    given = loop(name)
    before = _most_held()
    start = time.perf_counter()
    plan = trimtab.plan(*given, device=DEVICE, budget=trimtab.Budget(memory=limit))
    seconds = time.perf_counter() - start
    found = {"planning_s": seconds, "grown_bytes": _most_held() - before, "changes": plan.changes_in_words}
    return found | {"predicted_s": plan.predicted.step_s, "predicted_bytes": plan.predicted.peak_bytes}


def _most_held() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def row_of(name: str, limit: int | None, runs: int) -> dict[str, Any]:
    """Plan a model in several fresh processes and return the row."""
    found, given = [], [] if limit is None else ["--limit", str(limit)]
    for _ in range(runs):
        command_line = [sys.executable, "-m", "benchmarks.micro.planning_time", "--once", name, *given]
        done = subprocess.run(command_line, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
        print(f"{name}: {found[-1]['planning_s']:.2f} s", file=sys.stderr, flush=True)
    interval = mean_interval([each["planning_s"] for each in found])
    row = {"metric": "planning_s", "model": name, "device": DEVICE, "budget_bytes": limit, "mean": interval.mean}
    row |= {"low": interval.low, "high": interval.high, "n": interval.n}
    return row | {key: found[-1][key] for key in ("grown_bytes", "changes", "predicted_s", "predicted_bytes")}


def schedule_row() -> dict[str, Any]:
    """Return the row of optimal schedules, for different chains at three limits each."""
    taken = []
    for seed, share in itertools.product(range(CHAINS), CHAIN_SHARES):
        draw = random.Random(seed)
        chain = [_stage(draw) for _ in range(STAGES)]
        limit = int(share * predict(chain, keep_all(STAGES)).peak_bytes)
        begin = time.perf_counter()
        assert optimal(chain, limit) is not None
        taken.append(time.perf_counter() - begin)
    interval = mean_interval(taken)
    row = {"metric": "schedule_s", "model": f"{STAGES} stages", "mean": interval.mean, "low": interval.low}
    return row | {"high": interval.high, "n": interval.n}


def _stage(draw: random.Random) -> BlockCost:
    kept = draw.randint(200, 2000)
    sizes = {"output_bytes": draw.randint(10, 200), "saved_bytes": kept, "forward_bytes": kept + draw.randint(0, 200)}
    sizes |= {"dropping_bytes": draw.randint(200, 2200), "backward_bytes": draw.randint(0, 400)}
    return BlockCost(draw.uniform(0.1, 2), **sizes, gradient_bytes=draw.randint(0, 100))


def main() -> None:
    """Plan all models and print the times."""
    parser = command.parser(__doc__)
    parser.add_argument("--once", choices=list(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once, options.limit)))
        return
    cases = [(name, limit) for name in MODELS for limit in (None, LIMITS[name])]
    rows = [row_of(name, limit, 2 if options.quick else RUNS) for name, limit in cases]
    rows.append(schedule_row())
    print(_line(rows[-1]), file=sys.stderr, flush=True)
    command.show("planning_time", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    if row["metric"] == "schedule_s":
        milliseconds = " to ".join(f"{1000 * row[key]:.0f}" for key in ("low", "high"))
        return f"{row['model']}: schedule of least recomputation in {milliseconds} ms (95%, n={row['n']})"
    took = f"{row['mean']:.2f} s (95% {row['low']:.2f} to {row['high']:.2f}, n={row['n']})"
    limit = "" if row["budget_bytes"] is None else f" within {row['budget_bytes'] / 2**30:g} GiB"
    return f"{row['model'] + limit:<26} {took}, grown by {row['grown_bytes'] / 2**20:.0f} MiB: {row['changes']}"


if __name__ == "__main__":
    main()
