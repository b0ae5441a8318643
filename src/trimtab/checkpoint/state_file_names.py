"""File names of a saved state. Each rank has its own prefix."""

from __future__ import annotations

TENSORS, TREE = "tensors.safetensors", "state.json"


def prefix_of(rank: int) -> str:
    """Return the prefix of a rank's file names; empty for rank 0."""
    return f"rank-{rank}-" if rank else ""
