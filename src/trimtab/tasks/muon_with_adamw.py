"""Muon for matrices and AdamW for all else, as one optimizer: torch's own two, behind one set of groups and one state.

Muon (Jordan et al. 2024) steps along the orthogonalised momentum of a matrix; torch's takes two-dimensional parameters
alone, so that a convolution's weights are AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers over shared groups and state; a group's key "muon" says which of them steps it.

    Args:
        groups: each with "muon", and what its optimizer takes.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__([self._completed(dict(group)) for group in groups], {})

    @staticmethod
    def _completed(group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with all that its optimizer keeps in one."""
        is_muon = group.pop("muon")
        options = {key: value for key, value in group.items() if key != "params"}
        (whole,) = _build(group["params"], is_muon, options).param_groups
        return {**whole, "muon": is_muon}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every group by its own optimizer."""
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
    """Return the optimizer; `matrices` have two dimensions each."""
    adamw = {"lr": adamw_rate, "betas": betas, "weight_decay": weight_decay, "fused": True}
    muon = {"lr": muon_rate, "weight_decay": weight_decay}
    return MuonWithAdamW(
        [{"params": list(matrices), "muon": True, **muon}, {"params": list(others), "muon": False, **adamw}]
    )


def _build(params: Any, is_muon: bool, options: dict[str, Any]) -> torch.optim.Optimizer:
    return (torch.optim.Muon if is_muon else torch.optim.AdamW)(params, **options)
