"""P3, hand-tuned recipe with Muon for the matrices of the blocks. Everything else equals P2."""

from __future__ import annotations

from trimtab.experiments.baselines.strong import StrongLoop


class MuonLoop(StrongLoop):
    """Training loop of the task's Muon recipe."""

    field = "muon"
