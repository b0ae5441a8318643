"""P1, the paper's optimised recipe, taken literally (section IV.B, equations 4-7, 10, 11, 15-20).

Micro-batches of the task's batch; k in {4, 8} by equation 6, from the variance of equation 7, gathered as gradients
come: the window's mean is held beside one of them. Learning rate scaled linearly by k; 5% warm-up and cosine to a
tenth; half precision with loss scaling; checkpoints every ceil(sqrt(L)) blocks, whose batch statistics are updated
again as they are run again, as torch's checkpointing has it. The paper gives no sigma_target: here it is the variance
of the first window over 4, so that training starts at k = 4 and takes 8 while the variance is above its first value.
ZeRO-2 has nothing to shard on one device. fp16 becomes bf16 on a CPU with hardware for it and fp32 on one without.
Gradients are not clipped: equation 12 is in section III.C, its threshold "typically" 1.0, and not in section IV.B,
which lists what was run.
Run it: `python -m trimtab.recipes.paper source_gpt --steps 20`
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.core.schedule import warmup_cosine
from trimtab.losses import mean_of
from trimtab.recipes.loop import autocast, move
from trimtab.tasks.task import Task

ALLOWED_K = (4, 8)


class PaperLoop:
    """The paper's loop."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._device = task, device
        self.model = task.make_model().to(device).train()
        checkpoint_every_sqrt(self.model)
        self.optimizer = task.make_optimizer(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.precision = half_precision(device)
        self._scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        self._sigma2_target: float | None = None
        self.k = ALLOWED_K[0]
        self._rows = 0

    def step(self, batches: Iterator[Any]) -> int:
        """Train on k batches as one (equations 4 and 5)."""
        k, rows = self.k, self.k * self._task.batch_rows
        means = self._gradients(next(batches))
        squares = torch.zeros((), device=self._device)
        for j in range(2, k + 1):  # running mean and sum of squared deviations: of k gradients two are held
            deviations = self._gradients(next(batches))
            torch._foreach_sub_(deviations, means)
            torch._foreach_add_(means, deviations, alpha=1 / j)
            squares += (1 - 1 / j) * torch.stack(torch._foreach_norm(deviations)).square().sum()
            del deviations
        self._choose_k(float(squares) / (k - 1))
        self._rows += rows
        factor = k * warmup_cosine(self._rows / self._task.budget_rows)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        for parameter, mean in zip(self._parameters(), means, strict=True):
            parameter.grad = mean
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return rows

    def _gradients(self, batch: Any) -> list[Tensor]:
        """Return the gradients of a batch; they are nobody else's."""
        self._forget()
        with autocast(self.precision, self._device):
            loss = mean_of(self._task.loss_fn(self.model, move(batch, self._device)))
        self._scaler.scale(loss).backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters()]
        self._forget()
        return gradients

    def _forget(self) -> None:
        """Let go of gradients, whose tensors stay as they are: an optimizer's own `zero_grad` may write into them."""
        for parameter in self._parameters():
            parameter.grad = None

    def _choose_k(self, sigma2: float) -> None:
        sigma2 /= self._scaler.get_scale() ** 2
        if not math.isfinite(sigma2):  # an overflow under the loss scale, or a diverged model: k stays
            return
        if self._sigma2_target is None:
            self._sigma2_target = sigma2 / ALLOWED_K[0]
        wanted = min(ALLOWED_K[-1], math.ceil(sigma2 / (self._sigma2_target + 1e-12)))
        self.k = next(k for k in ALLOWED_K if k >= wanted)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def close(self) -> None:
        """Nothing was changed outside the model."""


class Segment(nn.Sequential):
    """Blocks whose activations are recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpoint_every_sqrt(model: nn.Module) -> None:
    """Cut the model's chain of blocks into segments of ceil(sqrt(L)) blocks (equations 18-20)."""
    for name in ("blocks", "stages"):
        chain = getattr(model, name, None)
        if isinstance(chain, nn.ModuleList | nn.Sequential):
            nested = isinstance(next(iter(chain)), nn.Sequential)
            blocks = [block for stage in chain for block in stage] if nested else list(chain)
            size = math.ceil(math.sqrt(len(blocks)))
            segments = [Segment(*blocks[i : i + size]) for i in range(0, len(blocks), size)]
            setattr(model, name, type(chain)(segments) if isinstance(chain, nn.ModuleList) else type(chain)(*segments))


def half_precision(device: torch.device) -> str:
    """Return what stands for the paper's FP16 on a device."""
    if device.type == "cuda":
        return "fp16"
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return "bf16" if any("bf16" in name and present is True for name, present in capabilities.items()) else "fp32"


if __name__ == "__main__":
    from trimtab.recipes.command import main

    main(PaperLoop)
