"""What the files of a state are called: each rank has its own."""

from __future__ import annotations

TENSORS, TREE = "tensors.safetensors", "state.json"


def prefix_of(rank: int) -> str:
    """Return what the names of a rank's files begin with."""
    return f"rank-{rank}-" if rank else ""
