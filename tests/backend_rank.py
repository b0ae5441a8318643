"""One rank of a job that trains the same cases by every backend; run by test_backends.py.

    python backend_rank.py RANK RANKS FOLDER PATTERN [MUTANT [DEVICE]]

PATTERN, a regular expression, names the cases; MUTANT what is broken first; DEVICE where they train. Rank 0 writes, of
each case, how far its weights are from one process's after all steps, and what else it saw.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from rank_cases import CASES, Case, Tokens, batches_of, optimizer_of, scheduler_of, weights_of

import trimtab
from trimtab.measure.gradient_norms import local_shard
from trimtab.techniques import gradient_clipping
from trimtab.training.rank_sync import RankWeights


def _mean_of_means() -> None:
    RankWeights.correction = property(lambda self: self._peers.agreed() and float(self.divisor) / max(self._count, 1))


def _local_clip() -> None:
    gradient_clipping.norm = lambda optimizer: torch.nn.utils.get_total_norm(
        [local_shard(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    )


def _lost_rows() -> None:
    trimtab.shard.__globals__["samples_of_rank"] = lambda rows, rank, ranks: slice(
        rank * (rows // ranks), (rank + 1) * (rows // ranks)
    )


# What the comparison has to notice.
MUTANTS = {"mean-of-means": _mean_of_means, "local-clip": _local_clip, "lost-rows": _lost_rows}


def train(case: Case, *, ranks: int, windows: list, device: str = "cpu") -> dict:
    """Return what a run of a case ends with: on one process, or on this one of several."""
    model = Tokens(case.dtype).to(device)
    optimizer = optimizer_of(model, case.optimizer)
    scheduler = scheduler_of(optimizer)
    plan = case.plan(ranks)
    losses, rates = [], []
    with trimtab.start(model, optimizer, plan, clip_norm=case.clip_norm, total_samples=case.total_samples) as run:
        for window in run.windows(windows):
            before = run.applied_steps
            run.train_step(window, case.loss)
            if run.applied_steps > before:  # a void window steps nothing
                scheduler.step()
            losses.append(float(run.loss))
            rates.append(optimizer.param_groups[0]["lr"])
        found = {"rows": run.consumed_samples, "steps": run.applied_steps}
        found["scale"] = run.loss_scale
        norm = run.grad_norm
        found["norm"] = None if norm is None else float(norm)
    found["weights"] = weights_of(model)
    names = [[str(tuple(p.shape)) for p in group["params"]] for group in optimizer.param_groups]
    state = sum(value.numel() for each in optimizer.state.values() for value in each.values() if value.dim())
    return found | {"losses": losses, "rates": rates, "names": names, "state": state}


def group_of(device: str, rank: int) -> str:
    """Return what a job is joined by on such devices; a rank takes its own."""
    if device == "cpu":
        return "gloo"
    torch.cuda.set_device(rank)
    return "cpu:gloo,cuda:nccl"


def main(rank: int, ranks: int, folder: Path, pattern: str, mutant: str = "", device: str = "cpu") -> None:
    torch.set_num_threads(1)
    dist.init_process_group(group_of(device, rank), init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    ours = {}
    chosen = {name: case for name, case in CASES.items() if re.search(pattern, name)}
    MUTANTS.get(mutant, lambda: None)()
    for name, case in chosen.items():
        torch.manual_seed(rank)  # weights are rank 0's, whatever others begin with
        try:
            loader = trimtab.shard(batches_of(case))
            ours[name] = train(case, ranks=ranks, windows=loader, device=device)
        except Exception:
            ours[name] = {"error": traceback.format_exc()[-1500:]}
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        report, alone = {}, {}
        for name, case in chosen.items():
            key = repr(case.alone(ranks))  # alike whichever way the model is shared
            if key not in alone:
                torch.manual_seed(0)
                alone[key] = train(case.alone(ranks), ranks=1, windows=batches_of(case), device=device)
            report[name] = compared(ours[name], dict(alone[key]))
        (folder / "report.json").write_text(json.dumps(report))
    else:
        kept = {name: {k: v for k, v in each.items() if k != "weights"} for name, each in ours.items()}
        (folder / f"rank-{rank}.json").write_text(json.dumps(kept))


def compared(ours: dict, theirs: dict) -> dict:
    if "error" in ours:
        return ours
    pairs = list(zip(ours.pop("weights"), theirs.pop("weights"), strict=True))
    largest = [(float((a - b).abs().max()), float(b.abs().max())) for a, b in pairs]
    of_all = max(a for a, _ in largest) / max(b for _, b in largest)
    return {"difference": max(a / b for a, b in largest), "of_all": of_all, "ours": ours, "theirs": theirs}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
    os._exit(0)  # gloo's threads may outlive the interpreter, and end it with an error
