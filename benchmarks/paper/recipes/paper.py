"""P1, the paper's optimised recipe, implemented literally (section IV.B, equations 4-7, 10, 11, 15-20).

- Accumulation: micro-batches of the task's batch size; k in {4, 8} by equation 6 from the variance of equation 7. Mean
  and variance are running values, so that only two sets of gradients are in memory.
- sigma_target: not given in the paper. Here it is a quarter of the first window's variance, so that training starts at
  k = 4 and uses k = 8 while the variance exceeds its first value.
- Learning rate: scaled linearly by k, with 5% warm-up and cosine decay to a tenth.
- Precision: fp16 with loss scaling on a GPU, bf16 on a CPU with bf16 instructions, otherwise fp32.
- Activation checkpointing: every ceil(sqrt(L)) blocks. Recomputation updates batch statistics a second time, as
  `torch.utils.checkpoint` does.
- ZeRO-2: omitted, because a single device has nothing to shard.
- Clipping: omitted. Equation 12 is in section III.C (threshold "typically" 1.0), not in the settings of section IV.B.

Run it: `python -m benchmarks.paper.recipes.command paper source_gpt --steps 20`
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.core.batch_rule import warmup_cosine
from trimtab.core.objective import Reference
from trimtab.experiments.loops import Loop, autocast
from trimtab.losses import mean_of
from trimtab.tasks.task import Task
from trimtab.training.batch import to_device

ALLOWED_K = (4, 8)


def paper(task: Task, loop: Loop) -> Loop:
    """Return the loop of the paper's recipe for a task: a baseline of a comparison."""
    made = PaperLoop(task, loop.device, loop.model)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        made.add(batch)

    reference = Reference(made.precision)
    how: dict[str, Any] = {"step": step, "accumulate": ALLOWED_K[0], "reference": reference}
    return replace(loop, model=made.model, optimizer=made.optimizer, **how)


class PaperLoop:
    """Training loop of the paper's optimised recipe.

    Args:
        task: the task.
        device: device of the model.
        model: the task's model, with the weights of the baseline of a comparison; None to make one.
    """

    def __init__(self, task: Task, device: torch.device, model: nn.Module | None = None) -> None:
        self._task, self._device = task, device
        self.model = (task.make_model().to(device) if model is None else model).train()
        checkpoint_every_sqrt(self.model)
        self.optimizer = task.make_optimizer(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.precision = half_precision(device)
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self._sigma2_target: float | None = None
        self.k = ALLOWED_K[0]
        self._rows = self._taken = 0
        self._means: list[Tensor] = []
        self._squares = torch.zeros((), device=device)

    def step(self, batches: Iterator[Any]) -> int:
        """Accumulate the gradients of k batches (equations 4 and 5) and take an optimizer step."""
        k = self.k
        for _ in range(k):
            self.add(next(batches))
        return k * self._task.batch_size

    def add(self, batch: Any) -> None:
        """Add the gradient of a batch, and take an optimizer step after the k-th."""
        self._taken += 1
        if self._taken == 1:
            self._means, self._squares = self._gradients(batch), torch.zeros((), device=self._device)
        else:  # Running mean and sum of squared deviations (Welford).
            deviations = self._gradients(batch)
            torch._foreach_sub_(deviations, self._means)
            torch._foreach_add_(self._means, deviations, alpha=1 / self._taken)
            self._squares += (1 - 1 / self._taken) * torch.stack(torch._foreach_norm(deviations)).square().sum()
        if self._taken == self.k:
            self._apply()

    def _apply(self) -> None:
        k, means = self.k, self._means
        self._taken, self._means = 0, []
        self._choose_k(float(self._squares) / (k - 1))
        self._rows += k * self._task.batch_size
        factor = k * warmup_cosine(self._rows / self._task.budget_samples)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        for parameter, mean in zip(self._parameters(), means, strict=True):
            parameter.grad = mean
        self._scaler.step(self.optimizer)
        self._scaler.update()

    def _gradients(self, batch: Any) -> list[Tensor]:
        """Return the gradients of a batch as tensors that are no longer referenced by the parameters."""
        self._forget()
        with autocast(self.precision, self._device):
            loss = mean_of(self._task.loss_fn(self.model, to_device(batch, self._device)))
        self._scaler.scale(loss).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters()]
        self._forget()
        return gradients

    def _forget(self) -> None:
        """Set gradients to None. `optimizer.zero_grad` is not used because it may overwrite the returned tensors."""
        for parameter in self._parameters():
            parameter.grad = None

    def _choose_k(self, sigma2: float) -> None:
        sigma2 /= self._scaler.get_scale() ** 2
        if not math.isfinite(sigma2):  # loss-scale overflow or a diverged model: keep k
            return
        if self._sigma2_target is None:
            self._sigma2_target = sigma2 / ALLOWED_K[0]
        wanted = min(ALLOWED_K[-1], math.ceil(sigma2 / (self._sigma2_target + 1e-12)))
        self.k = next(k for k in ALLOWED_K if k >= wanted)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


class Segment(nn.Sequential):
    """Sequence of blocks with activation checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpoint_every_sqrt(model: nn.Module) -> None:
    """Replace the model's `blocks` or `stages` by checkpointed segments of ceil(sqrt(L)) blocks (equations 18-20)."""
    for name in ("blocks", "stages"):
        chain = getattr(model, name, None)
        if isinstance(chain, nn.ModuleList | nn.Sequential):
            nested = isinstance(next(iter(chain)), nn.Sequential)
            blocks = [block for stage in chain for block in stage] if nested else list(chain)
            size = math.ceil(math.sqrt(len(blocks)))
            segments = [Segment(*blocks[i : i + size]) for i in range(0, len(blocks), size)]
            setattr(model, name, type(chain)(segments) if isinstance(chain, nn.ModuleList) else type(chain)(*segments))


def half_precision(device: torch.device) -> str:
    """Return the half precision for the device: "fp16" on CUDA, "bf16" on a CPU with bf16 instructions, else "fp32"."""
    if device.type == "cuda":
        return "fp16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any("bf16" in name and present is True for name, present in capabilities.items()) else "fp32"
