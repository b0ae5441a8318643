"""Micro-batch sizes to consider in a search."""

from __future__ import annotations

from trimtab.core.profile import Candidate, Profile


def sizes_to_consider(profile: Profile) -> tuple[int, ...]:
    """Return the micro-batch sizes to consider, the largest first: the batch size and its repeated halves.

    Includes the micro-batch size of a loop that accumulates; if splitting changes the gradient, no other.
    """
    rows, own = profile.loop.batch_size, profile.reference_candidate.micro_batch
    if not profile.check.splittable:
        return (own,)
    sizes = {own, *(-(-rows // 2**i) for i in range(rows.bit_length() + 1))}
    return tuple(sorted(sizes, reverse=True))


def head_tokens(profile: Profile, candidate: Candidate) -> int:
    """Return the tokens per micro-batch at the loss head."""
    return (profile.loop.head_tokens or 0) * candidate.micro_batch // profile.loop.batch_size


def is_in_chunks(profile: Profile, candidate: Candidate) -> bool:
    """Return True if chunks are smaller than the micro-batch or not used; otherwise chunking has no effect."""
    return candidate.loss_chunk is None or candidate.loss_chunk < head_tokens(profile, candidate)
