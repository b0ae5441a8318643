"""A training script: objects, the plain loop, the same loop through trimtab, and the registry of patterns."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import trimtab

STEPS, SAMPLES = 12, 16
LossFn = Callable[[nn.Module, Any], Any]


def nothing() -> None:
    """Do nothing."""


@dataclass
class Script:
    """Objects of one training script.

    Args:
        others: further modules that training changes (a second network, an average of the weights), compared too.
        before_step: runs between the backward and the optimizer's step and sees the gradients.
        after_step: runs after the optimizer's step.
        modules: criteria with parameters, as `trimtab.plan` and `trimtab.start` take them.
        start: further options of `trimtab.start`.
        plain: the user's own loop; None: `plain_loop`.
        through: the same loop through trimtab; None: `trimtab_loop`.
        per_step: loader batches of one optimizer step.
        skipped: steps that a run skipped.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    batches: Any
    others: Mapping[str, nn.Module] = field(default_factory=dict)
    before_step: Callable[[], None] | None = None
    after_step: Callable[[], None] = nothing
    modules: tuple[nn.Module, ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)
    plain: Callable[[Script, Loop], None] | None = None
    through: Callable[[Script, trimtab.Plan], None] | None = None
    per_step: int = 1
    skipped: int = 0

    def options(self) -> dict[str, Any]:
        """Return the options of `trimtab.start`."""
        return dict(self.start) | ({"modules": list(self.modules)} if self.modules else {})


@dataclass(frozen=True)
class Loop:
    """What the user would write into a plain loop for the same settings: autocast, a loss scale, accumulation.

    Args:
        dtype: of autocast; None: fp32. parts: micro-batches per batch.
    """

    dtype: torch.dtype | None = None
    parts: int = 1

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return autocast on the CPU, or nothing."""
        return contextlib.nullcontext() if self.dtype is None else torch.autocast("cpu", self.dtype)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler, which does nothing except in fp16."""
        return torch.amp.GradScaler("cpu", enabled=self.dtype is torch.float16)


def scalar(result: Any) -> Tensor:
    """Return the loss that a plain loop calls `backward` on."""
    if isinstance(result, trimtab.Summed):
        return result.loss_sum / max(float(result.count), 1.0)
    return result[0] if isinstance(result, tuple) else result


def plain_loop(script: Script, loop: Loop) -> None:
    """Train as tutorials do: zero_grad, loss, backward, step."""
    scaler = loop.scaler()
    for index, batch in enumerate(script.batches):
        if index % script.per_step == 0:
            script.optimizer.zero_grad()
        pieces = in_parts(batch, loop.parts) if loop.parts > 1 else [batch]
        for piece in pieces:
            with loop.autocast():
                loss = scalar(script.loss_fn(script.model, piece)) / len(pieces) / script.per_step
            scaler.scale(loss).backward()
        if (index + 1) % script.per_step:
            continue
        if script.before_step is not None:
            scaler.unscale_(script.optimizer)
            script.before_step()
        scaler.step(script.optimizer)
        scaler.update()
        script.after_step()


def trimtab_loop(script: Script, plan: trimtab.Plan) -> None:
    """Train the same through a plan."""
    with trimtab.start(script.model, script.optimizer, plan, **script.options()) as run:
        if script.per_step > 1:
            run.of_batches(script.per_step)
        for window in run.windows(script.batches):
            if script.before_step is None:
                run.train_step(window, script.loss_fn)
            else:
                run.accumulate(window, script.loss_fn)
                run.unscale()
                script.before_step()
                run.step()
            script.after_step()
        script.skipped = run.num_windows - run.applied_steps


def in_parts(batch: Any, parts: int) -> list[Any]:
    """Return a batch in equal parts by the first dimension of its tensors and the items of its lists."""
    if isinstance(batch, dict):
        columns = {key: in_parts(value, parts) for key, value in batch.items()}
        return [{key: column[index] for key, column in columns.items()} for index in range(parts)]
    if isinstance(batch, tuple):
        return list(zip(*(in_parts(each, parts) for each in batch), strict=True))
    if isinstance(batch, list):
        size = len(batch) // parts
        return [batch[index * size : (index + 1) * size] for index in range(parts)]
    return list(batch.chunk(parts))


# Settings of the plans set by hand; a micro-batch is a half of the batch.
PLANS: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "half": {"micro_batch": 2},
    "fused": {"fused_optimizer": True},
    "recompute": {"recompute": "every_block"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "together": {"micro_batch": 2, "fused_optimizer": True, "recompute": "every_block"},
}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Outcomes that many patterns have.
REFUSED = dict.fromkeys((*PLANS, "planned"), "refused")
SPLIT_CHANGES = {"half": "warned", "together": "warned"}  # a loss or layer that computes over the whole batch
NOT_FUSED = {"fused": "refused", "together": "refused"}  # an optimizer without a fused step
NOT_RECOMPUTED = {"recompute": "refused", "together": "refused"}  # a forward that cannot run twice
GRADIENT_HOOKS = {"half": "refused", "fp16": "refused", "together": "refused"}  # they would see other gradients
SKIPS = {"fp16": "skips"}  # a loss scale that overflows at first, and a loss with state of its own
NO_FP16 = {"fp16": "raises"}  # torch has no fp16 kernel for it on a CPU: the plain loop raises


@dataclass(frozen=True)
class Pattern:
    """One pattern of the matrix.

    Args:
        build: makes the script's objects; random generators are seeded before it.
        samples: per batch, as the loader's user would count them.
        rounding: largest difference of a parameter after training, as a fraction of the distance that it moved, by a
            plan that splits the batch or fuses the step.
        repeats: whether two plain loops are the same to the bit; then so are all other plans.
        draws: whether losses draw random numbers, so that a split batch is compared with a plain loop that accumulates.
        outcomes: of each plan whose outcome is not "equal". "planned" is the plan that `trimtab.plan` makes,
            "proved_split" a split in two that its check allows.
    """

    name: str
    build: Callable[[], Script]
    samples: int
    rounding: float
    repeats: bool
    draws: bool
    outcomes: Mapping[str, str]

    def made(self, seed: int = 0) -> Script:
        """Return new objects, with all random generators seeded for the training that follows."""
        seed_all(seed)
        script = self.build()
        seed_all(seed + 1)
        return script

    def plan(self, name: str) -> trimtab.Plan:
        """Return a plan set by hand."""
        values = dict(PLANS[name])
        if "micro_batch" in values:
            values["micro_batch"] = max(1, self.samples // 2)
        return trimtab.Plan.fixed(self.samples, **values)

    def train_plain(self, loop: Loop) -> Script:
        """Return the script after plain training."""
        script = self.made()
        (script.plain or plain_loop)(script, loop)
        return script

    def loop_of(self, plan: trimtab.Plan) -> Loop:
        """Return the plain loop that a plan is compared with."""
        return Loop(_AUTOCAST.get(plan.precision.value), parts=plan.num_micro_batches if self.draws else 1)

    def tolerance_of(self, plan: trimtab.Plan) -> float:
        """Return the largest difference that a plan may make, as a fraction of the distance moved."""
        sums_alike = not (plan.splits or plan.fused_optimizer.value or plan.memory_layout.value != "keep")
        return 0.0 if sums_alike and self.repeats else self.rounding


PATTERNS: dict[str, Pattern] = {}


def pattern(
    *,
    samples: int = SAMPLES,
    rounding: float = 1e-3,
    repeats: bool = True,
    draws: bool = False,
    outcomes: Mapping[str, str] | None = None,
) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
    """Register a function that makes a script, under its name; arguments as of `Pattern`."""
    outcomes = outcomes or {}
    assert outcomes.keys() <= PLANS.keys() | {"planned", "proved_split"}

    def register(build: Callable[[], Script]) -> Callable[[], Script]:
        assert build.__name__ not in PATTERNS
        PATTERNS[build.__name__] = Pattern(build.__name__, build, samples, rounding, repeats, draws, outcomes)
        return build

    return register


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


# Models and data that several patterns share.


def mlp(inputs: int = 6, outputs: int = 3, width: int = 16) -> nn.Sequential:
    """Return a small classifier of three layers in two blocks that can be recomputed."""
    return nn.Sequential(nn.Linear(inputs, width), Block(width), Block(width), nn.Linear(width, outputs))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def classes(
    samples: int = SAMPLES, inputs: int = 6, outputs: int = 3, steps: int = STEPS
) -> list[tuple[Tensor, Tensor]]:
    """Return batches of (inputs, labels), in which labels depend on the inputs."""
    made = [torch.randn(samples, inputs) for _ in range(steps)]
    return [(x, x[:, :outputs].argmax(1)) for x in made]


def images(samples: int = SAMPLES, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return batches of (images of three channels, labels)."""
    made = [torch.randn(samples, 3, size, size) for _ in range(STEPS)]
    return [(x, x.mean((2, 3)).argmax(1)) for x in made]


def tokens(samples: int = SAMPLES, length: int = 8, words: int = 11) -> list[Tensor]:
    """Return batches of token sequences."""
    return [torch.randint(1, words, (samples, length)) for _ in range(STEPS)]


def sgd(model: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.SGD:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, **options)


def adamw(model: nn.Module, lr: float = 1e-2, **options: Any) -> torch.optim.AdamW:
    """Return AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the usual loss of a classifier."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)
