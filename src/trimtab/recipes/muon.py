"""P3: the strong peer with Muon for the matrices of its blocks, everything else as in P2.

Run it: `python -m trimtab.recipes.muon wikitext2_gpt --steps 50`
"""

from __future__ import annotations

from trimtab.recipes.strong import StrongLoop


class MuonLoop(StrongLoop):
    """The hand-tuned loop by the task's recipe with Muon."""

    field = "muon"


if __name__ == "__main__":
    from trimtab.recipes.command import main

    main(MuonLoop)
