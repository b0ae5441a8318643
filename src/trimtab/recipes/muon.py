"""P3, hand-tuned recipe with Muon for the matrices of the blocks. Everything else equals P2.

Run it: `python -m trimtab.recipes.muon wikitext2_gpt --steps 50`
"""

from __future__ import annotations

from trimtab.recipes.strong import StrongLoop


class MuonLoop(StrongLoop):
    """Training loop of the task's Muon recipe."""

    field = "muon"


if __name__ == "__main__":
    from trimtab.recipes.command import main

    main(MuonLoop)
