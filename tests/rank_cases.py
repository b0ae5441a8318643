"""What every backend is to train as one process does: a small language model, and the ways to train it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from trimtab.losses import Summed
from trimtab.plans.plan import Plan

ROWS, LENGTH, WORDS, WIDTH, DEPTH, STEPS = 8, 6, 11, 8, 3, 10
STAGES = {
    "ddp": {"zero_stage": 0},
    "zero-1": {"zero_stage": 1},
    "zero-2": {"zero_stage": 2},
    "zero-2-each": {"zero_stage": 2, "reduces_once": False},
    "zero-3": {"zero_stage": 3},
    "zero-3-each": {"zero_stage": 3, "reduces_once": False},
}
DEEPSPEED = (
    "mean",
    "mean-k3",
    "tokens",
    "tokens-k3-clip",
    "uneven-ends",
    "rank-without-rows",
    "recompute",
    "weight-decay",
)
DROPPED = -1  # a target that the loss leaves out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tokens(nn.Module):
    """A head tied to its embedding, blocks, and a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("gain", torch.ones(()))
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Args:
        values: of the plan. micro: rows of a micro-batch. is_mean: the loss is a mean over rows, else (sum, count).
        last: rows of the last batch of an epoch of 5.
    """

    values: dict
    micro: int = ROWS
    is_mean: bool = False
    dtype: torch.dtype = torch.float64
    clip_norm: float | None = None
    last: int = ROWS
    optimizer: str = "adamw"
    total_samples: int | None = None
    steps: int = STEPS

    def plan(self, ranks: int) -> Plan:
        rows = -(-ROWS // ranks)
        return Plan.fixed(rows, min(self.micro, rows), num_ranks=ranks, **self.values)

    def alone(self, ranks: int) -> Case:
        """The same on one process, in the same micro-batches where a precision rounds each."""
        known = ("precision", "schedule", "recompute", "weight_decay")
        kept = {name: v for name, v in self.values.items() if name in known}
        micro = min(self.micro, ROWS // ranks) if "precision" in kept else ROWS
        return replace(self, values=kept, micro=micro)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]):
        tokens, targets = batch
        each = nn.functional.cross_entropy(
            model(tokens).flatten(0, 1), targets.flatten(), ignore_index=DROPPED, reduction="none"
        )
        if self.is_mean:
            return each.mean()
        return Summed(each.sum(), int((targets != DROPPED).sum()))


def batches_of(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of the whole job: rows that count few terms, and last ones of few rows."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(case.steps):
        rows = case.last if index % 5 == 4 else ROWS
        tokens = torch.randint(0, WORDS, (rows, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        if not case.is_mean:
            kept = torch.randint(1, LENGTH + 1, (rows, 1), generator=generator)
            targets[torch.arange(LENGTH)[None] >= kept] = DROPPED
            targets[: rows // 2, 1:] = DROPPED  # the first ranks' rows count next to nothing
        found.append((tokens[:, :-1], targets))
    return found


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2)


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the loop's own schedule, which reads the rate back and multiplies it."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return all parameters, whole."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double() for p in model.parameters()]


def _cases():
    ways = {
        "mean": Case({}, is_mean=True),
        "mean-k3": Case({}, micro=3, is_mean=True),
        "tokens": Case({}, optimizer="sgd"),  # AdamW would not feel a gradient that is too large throughout
        "tokens-k3-clip": Case({}, micro=3, clip_norm=0.02),
        "uneven-ends": Case({}, micro=2, last=3, optimizer="sgd"),
        "rank-without-rows": Case({}, micro=2, last=1, optimizer="sgd"),
        "recompute": Case({"recompute": "every_block"}, micro=2),
        "weight-decay": Case({"weight_decay": 0.4}, is_mean=True),
        "schedule": Case({"schedule": "warmup_cosine"}, last=3, total_samples=2 * (4 * ROWS + 3)),
        "fp16-clip": Case({"precision": "fp16"}, micro=2, dtype=torch.float32, clip_norm=0.05, optimizer="sgd"),
    }
    for (stage, values), (way, case) in itertools.product(STAGES.items(), ways.items()):
        yield f"{stage}/{way}", replace(case, values=case.values | values)
    for stage, (way, case) in itertools.product((1, 2, 3), ways.items()):  # whose weights are fp32
        if way in DEEPSPEED:
            how = {"engine": "deepspeed", "zero_stage": stage, "reduces_once": stage == 1 or way != "tokens-k3-clip"}
            yield f"deepspeed-{stage}/{way}", replace(case, values=case.values | how, dtype=torch.float32)
    for stage in STAGES:
        values = STAGES[stage] | {"reduce_dtype": "bf16"}
        yield f"{stage}/bf16-reduction", Case(values, micro=2, dtype=torch.float32)
    for stage in ("ddp", "zero-1"):
        yield f"{stage}/small-buckets", Case(STAGES[stage] | {"bucket_bytes": 512}, micro=2)
    powersgd = STAGES["ddp"] | {"powersgd_rank": 1}  # which compresses no gradient of the first ten steps
    yield "ddp/powersgd", Case(powersgd, micro=2, dtype=torch.float32, steps=2 * STEPS)


CASES: dict[str, Case] = dict(_cases())
