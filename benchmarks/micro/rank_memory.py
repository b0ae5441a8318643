"""Peak memory per rank at each ZeRO stage: predicted in one process and measured on two ranks.

`python -m benchmarks.micro.rank_memory [--quick] [--json] [--models gpt] [--engine deepspeed]` prints `rank_memory`
rows for each stage and for windows of one and three micro-batches: the predicted peak (traced without execution), the
larger measured peak of two gloo ranks, and the relative error. `least_bytes` is the smallest measured window, because
gloo's threads release send buffers with a delay. DeepSpeed's memory between windows is measured over all live tensors.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trimtab
from benchmarks import command
from benchmarks.micro.prediction_models import KINDS, OPTIMIZERS, Kind
from trimtab.core.parallelism import Parallelism
from trimtab.distributed.rank_memory import trace_rank
from trimtab.measure.gradient_norms import local_shard
from trimtab.plans.plan import Plan
from trimtab.state.peak_memory import peak_growth, storage_bytes

RANKS, ROWS, SEVERAL = 2, 8, 3
WARM, WINDOWS = 2, 5
MODELS = ("gpt", "gpt_tied", "vit", "resnet18", "mlp")
STAGES = {"torch": (0, 1, 2, 3), "deepspeed": (1, 2, 3)}


def ways(engine: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (stage, micro-batches, True if gradients are reduced once per window). DeepSpeed always reduces once."""
    for stage in STAGES[engine]:
        yield stage, 1, True
        yield stage, SEVERAL, True
        if stage > 1 and engine == "torch":
            yield stage, SEVERAL, False


def predicted(kind: Kind, stage: int, k: int, reduces_once: bool) -> int:
    """Return the predicted peak in bytes."""
    torch.manual_seed(0)
    model = kind.make()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    few, many = kind.batch(ROWS // 2), kind.batch(ROWS)
    how = Parallelism(RANKS, stage, reduces_once=reduces_once)
    seen = {"num_micro_batches": k, "counts_scratch": True}
    return trace_rank(model, optimizer, kind.loss_fn, (few, many), (ROWS // 2, ROWS), how, **seen).peak_bytes(ROWS)


def counted(name: str, engine: str, stage: int, k: int, reduces_once: bool) -> list[int]:
    """Return the measured peak of each window, maximum over ranks."""
    with tempfile.TemporaryDirectory() as folder:
        given = [name, engine, str(stage), str(k), str(int(reduces_once)), folder]
        one = os.environ | {"OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "benchmarks.micro.rank_memory", "--as-rank", *given]
        ranks = [subprocess.Popen([*program, str(rank)], env=one) for rank in range(RANKS)]
        if sum(each.wait() for each in ranks):
            raise RuntimeError(f"{name} at stage {stage} did not run")
        found = [json.loads(Path(folder, str(rank)).read_text(encoding="utf-8")) for rank in range(RANKS)]
    return [max(each) for each in zip(*found, strict=True)]


def run_rank(name: str, engine: str, stage: int, k: int, reduces_once: bool, folder: Path, rank: int) -> None:
    """Train as one rank and write the peak of each window to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    kind = KINDS[name]
    model = kind.make().train()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    batch = kind.batch(k * ROWS)
    shared: dict[str, Any] = {"zero_stage": stage} | ({"reduces_once": reduces_once} if stage > 1 else {})
    plan, peaks = Plan.fixed(k * ROWS, ROWS, num_ranks=RANKS, engine=engine, **shared), []
    with trimtab.start(model, optimizer, plan) as run:
        for index, window in enumerate(run.windows([batch] * (WARM + WINDOWS))):
            if index < WARM:
                run.train_step(window, kind.loss_fn)
                continue
            # Gradients are freed within the measurement, so they must be allocated within it as well.
            model.zero_grad(set_to_none=True)
            held = held_by_any(batch) if engine == "deepspeed" else held_by_torch(model, optimizer, stage)
            batch_bytes = storage_bytes(batch) // k  # the trace contains a single micro-batch at a time
            growth = peak_growth(lambda window=window: run.train_step(window, kind.loss_fn))
            peaks.append(held + batch_bytes + growth)
    Path(folder, str(rank)).write_text(json.dumps(peaks), encoding="utf-8")
    dist.destroy_process_group()


def held_by_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> int:
    """Return the bytes that a rank holds between windows, including DDP's buckets."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    alive = [local_shard(each) for each in (*model.parameters(), *model.buffers(), *states)]
    buckets = sum(p.numel() * p.element_size() for p in model.parameters()) if stage < 2 else 0
    return storage_bytes(alive) + buckets


def held_by_any(batch: Any) -> int:
    """Return the bytes of all live CPU tensors and their gradients, without the batch."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.device.type == "cpu"]
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    return storage_bytes(found) - storage_bytes(batch)


def rows_of(name: str, engine: str) -> Iterator[dict[str, Any]]:
    """Yield a row per stage and number of micro-batches."""
    for way in ways(engine):
        peaks, told = counted(name, engine, *way), predicted(KINDS[name], *way)
        stage, k, once = way
        taken = int(statistics.median(peaks))
        yield {
            "metric": "rank_memory",
            "model": name,
            "ranks": RANKS,
            "engine": engine,
            "zero_stage": stage,
            "micro_batches": k,
            "reduces_once": once,
            "predicted_bytes": told,
            "measured_bytes": taken,
            "least_bytes": min(peaks),
            "most_bytes": max(peaks),
            "error": told / taken - 1,
        }


def _line(row: dict[str, Any]) -> str:
    what = f"{row['model']:<9} stage {row['zero_stage']}, {row['micro_batches']} micro-batches"
    what += "" if row["reduces_once"] else ", each reduced"
    told, taken = (row[name] / 2**20 for name in ("predicted_bytes", "measured_bytes"))
    return f"{what:<50} {told:8.1f} MiB predicted, {taken:8.1f} measured: {row['error']:+.2%}"


def main() -> None:
    """Print the rows."""
    if sys.argv[1:2] == ["--as-rank"]:
        name, engine, stage, k, once, folder, rank = sys.argv[2:]
        run_rank(name, engine, int(stage), int(k), once == "1", Path(folder), int(rank))
        return
    parser = command.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=sorted(KINDS))
    parser.add_argument("--engine", default="torch", choices=sorted(STAGES))
    options = parser.parse_args()
    names = options.models[:1] if options.quick else options.models
    rows = [row for name in names for row in rows_of(name, options.engine)]
    command.show("rank_memory", rows, _line, as_json=options.json)


if __name__ == "__main__":
    main()
