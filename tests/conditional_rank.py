"""One rank of a job whose layers are used by some micro-batches only; run by test_conditional_layers.py.

    python conditional_rank.py RANK RANKS FOLDER PATTERN

PATTERN, a regular expression, names the cases. Each rank writes, per case, the largest difference of its weights to a
plain loop on one process that sees every window as one batch, or the type and code of the error that ended the case.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trimtab
from trimtab.core.errors import TrimtabError
from trimtab.distributed.process_group import limited_to
from trimtab.plans.plan import Plan

ROWS, WIDTH, EXPERTS, WINDOWS = 8, 6, 3, 6
LIMIT_S = 20.0


class Routed(nn.Module):
    """Rows choose an expert; the frozen layer trains never, and two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.frozen, self.again = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.again.weight = self.experts[0].weight
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.trunk(x)))
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = to == number
            if rows.any():
                out[rows] = torch.tanh(expert(hidden[rows]))
        return self.head(out + self.again(hidden))


class Heads(nn.Module):
    """All heads are computed; the loss uses the one of each row's task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(EXPERTS))
        self.double()

    def forward(self, x: Tensor, to: Tensor) -> list[Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return [head(hidden) for head in self.heads]


class Words(nn.Module):
    """A sparse embedding per task."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(5, WIDTH, sparse=True) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        found = torch.zeros(len(x), WIDTH, dtype=torch.float64)
        for number, words in enumerate(self.words):
            rows = to == number
            if rows.any():
                found[rows] = words((x[rows, 0].abs() * 2).long().clamp_max(4))
        return self.head(found)


def each_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of each row."""
    found = model(batch["x"], batch["to"])
    if isinstance(found, list):
        found = sum(
            torch.where((batch["to"] == task)[:, None], each, 0.0)
            for task, each in enumerate(found)
            if (batch["to"] == task).any()
        )
    return (found - batch["x"].sum(1, keepdim=True)).square().squeeze(1)


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return each_loss(model, batch).mean()


def valid_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over rows of those of expert 0; a constant for a micro-batch without any."""
    found = each_loss(model, batch)
    if not (batch["to"] == 0).any():
        return torch.zeros((), dtype=torch.float64, requires_grad=True)
    return (found * (batch["to"] == 0)).mean()


@dataclass(frozen=True)
class Case:
    """A way to use layers.

    Args:
        to: expert of each row of a window; None: drawn. Ranks have equal parts of the rows, rank 0 the first.
        k: micro-batches per window.
        later: windows before the first that is so; in these every expert has a row on every rank.
        unfreezes: the frozen layer is trained from the third window on.
    """

    to: tuple[int, ...] | None = None
    k: int = 2
    model: type[nn.Module] = Routed
    loss: object = mean_loss
    optimizer: str = "adamw"
    options: dict = field(default_factory=dict)
    unfreezes: bool = False
    later: int = 0


CASES = {
    "first": Case((1, 1, 0, 0, 1, 1, 0, 0)),
    "first-of-one-rank": Case((1, 0, 0, 0, 0, 0, 0, 0)),
    "last-of-one-rank": Case((0, 0, 0, 1, 0, 0, 0, 0)),
    "unlike": Case((1, 1, 0, 0, 2, 2, 0, 0)),
    "drawn": Case(),
    "whole-first-of-one-rank": Case((1, 0, 0, 0, 0, 0, 0, 0), k=1),
    "whole-drawn": Case(k=1),
    "used-by-none": Case((0,) * 8),
    "heads": Case((1, 1, 0, 0, 2, 2, 1, 1), model=Heads),
    "heads-drawn": Case(model=Heads),
    "whole-heads": Case((1, 1, 1, 1, 0, 0, 2, 2), k=1, model=Heads),
    "last-without-graph": Case((0, 1, 1, 1, 0, 0, 0, 0), loss=valid_loss),
    "whole-without-graph": Case((1, 1, 1, 1, 0, 1, 0, 0), k=1, loss=valid_loss),
    "sparse": Case((1, 1, 0, 0, 2, 2, 0, 0), model=Words, optimizer="sgd"),
    "unlike-later": Case((1, 1, 0, 0, 2, 2, 0, 0), k=1, later=4),
    "unused-later": Case((1, 1, 0, 0, 2, 2, 0, 0), k=1, later=4, model=Heads),
    "unfrozen-later": Case((0,) * 8, k=1, unfreezes=True),
    "clipped": Case((1, 1, 0, 0, 2, 2, 0, 0), options={"clip_norm": 0.05}),
}
STAGES = {
    "ddp": {"zero_stage": 0},
    "ddp-bf16": {"zero_stage": 0, "reduce_dtype": "bf16"},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-2-each": {"zero_stage": 2, "reduces_once": False},
    "zero-3": {"zero_stage": 3},
    "zero-3-each": {"zero_stage": 3, "reduces_once": False},
    "deepspeed-1": {"zero_stage": 1, "engine": "deepspeed"},
    "deepspeed-2": {"zero_stage": 2, "engine": "deepspeed"},
    "deepspeed-3": {"zero_stage": 3, "engine": "deepspeed"},
}
WRAPS = {
    "own": {},
    "own-views": {"gradient_as_bucket_view": True},
    "own-unused": {"find_unused_parameters": True},
    "own-unused-views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "own-static": {"static_graph": True},
    "own-small": {"bucket_cap_mb": 1e-4},
}


def batches_of(case: Case) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for window in range(WINDOWS):
        x = torch.randn(ROWS, 4, dtype=torch.float64, generator=generator)
        drawn = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), ROWS, replacement=True, generator=generator)
        to = (0, 1, 2, 0) * 2 if window < case.later else case.to
        found.append({"x": x, "to": drawn if to is None else torch.tensor(to)})
    return found


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05)
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def plain(case: Case) -> nn.Module:
    """Train on one process, a window at once."""
    model = model_of(case)
    optimizer = optimizer_of(case, model)
    for batch in batches_of(case):
        optimizer.zero_grad()
        case.loss(model, batch).backward()
        if "clip_norm" in case.options:
            nn.utils.clip_grad_norm_(model.parameters(), case.options["clip_norm"])
        optimizer.step()
    return model


def ours(case: Case, backend: str, ranks: int) -> nn.Module:
    model = model_of(case)
    rows = ROWS // ranks
    values = {"num_ranks": ranks, **STAGES[backend]} if backend in STAGES else {}
    if backend in WRAPS:
        model = DistributedDataParallel(model, **WRAPS[backend])
    elif backend == "own-shards":
        for expert in list(getattr(model, "experts", ()))[1:]:  # the first shares its weight
            fully_shard(expert)
        fully_shard(model)
    optimizer = optimizer_of(case, model)
    with trimtab.start(model, optimizer, Plan.fixed(rows, rows // case.k, **values), **case.options) as run:
        for window in run.windows(trimtab.shard(batches_of(case))):
            if case.unfreezes and run.applied_steps == 2:
                model.requires_grad_(True)
            run.train_step(window, case.loss)
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double()
        for name, p in model.named_parameters()
    }


def outcome(name: str, ranks: int) -> dict:
    backend, _, way = name.partition("/")
    case = CASES[way]
    reference = weights(plain(case))
    try:
        found = weights(ours(case, backend, ranks))
    except TrimtabError as error:
        return {"error": type(error).__name__, "code": error.code, "said": str(error)}
    except Exception as error:
        return {"error": type(error).__name__, "code": "untyped", "said": traceback.format_exc()[-1500:]}
    apart = {key: float((found[key] - value).norm() / value.norm()) for key, value in reference.items()}
    sums = [float(each.sum()) for each in found.values()]
    return {"difference": max(apart.values()), "where": max(apart, key=apart.get), "sums": sums}


def main(rank: int, ranks: int, folder: Path, pattern: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    names = [f"{backend}/{way}" for backend in (*STAGES, *WRAPS, "own-shards") for way in CASES]
    report = {}
    with limited_to(LIMIT_S):
        for name in names:
            if re.search(pattern, name):
                report[name] = outcome(name, ranks)
                (folder / f"rank-{rank}.json").write_text(json.dumps(report))
    if not any("error" in each for each in report.values()):  # the others may have ended
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    os._exit(0)  # gloo's threads may outlive the interpreter, and end it with an error
