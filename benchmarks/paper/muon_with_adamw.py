"""Combined optimizer: `torch.optim.Muon` for matrices and `torch.optim.AdamW` for all remaining parameters.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix. torch's Muon supports two-dimensional
parameters only, so convolution weights use AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW with shared parameter groups and state.

    Args:
        groups: Parameter groups with a boolean "muon" (True for Muon, False for AdamW) and optimizer options.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__([self._completed(dict(group)) for group in groups], {})

    @staticmethod
    def _completed(group: dict[str, Any]) -> dict[str, Any]:
        """Return the group with the default options of its optimizer filled in."""
        is_muon = group.pop("muon")
        options = {key: value for key, value in group.items() if key != "params"}
        (whole,) = _build(group["params"], is_muon, options).param_groups
        return {**whole, "muon": is_muon}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the Muon groups, then the AdamW groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon in (True, False):
            groups = [group for group in self.param_groups if group["muon"] is is_muon]
            if groups:
                inner = _build(groups[0]["params"], is_muon, {})
                inner.param_groups, inner.state = groups, self.state
                inner.step()
        return loss


def muon_with_adamw(
    matrices: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    *,
    muon_rate: float,
    adamw_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> MuonWithAdamW:
    """Return the combined optimizer.

    Args:
        matrices: Two-dimensional parameters, stepped by Muon.
        others: Remaining parameters, stepped by fused AdamW.
        muon_rate: Learning rate of Muon.
        adamw_rate: Learning rate of AdamW.
        betas: Betas of AdamW.
        weight_decay: Weight decay of both optimizers.
    """
    adamw = {"lr": adamw_rate, "betas": betas, "weight_decay": weight_decay, "fused": True}
    muon = {"lr": muon_rate, "weight_decay": weight_decay}
    return MuonWithAdamW(
        [{"params": list(matrices), "muon": True, **muon}, {"params": list(others), "muon": False, **adamw}]
    )


def _build(params: Any, is_muon: bool, options: dict[str, Any]) -> torch.optim.Optimizer:
    return (torch.optim.Muon if is_muon else torch.optim.AdamW)(params, **options)
