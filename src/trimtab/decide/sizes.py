"""The sizes of a micro-batch that a search considers, and the tokens of one."""

from __future__ import annotations

from trimtab.core.profile import Candidate, Profile


def halvings(profile: Profile) -> tuple[int, ...]:
    """Return the sizes of a micro-batch that are considered, the largest first: the batch, halved again and again.

    And that of a loop that accumulates, which alone is considered where splitting changes the gradient.
    """
    rows, own = profile.loop.batch_rows, profile.reference_candidate.micro_batch
    if not profile.check.splittable:
        return (own,)
    sizes = {own, *(-(-rows // 2**i) for i in range(rows.bit_length() + 1))}
    return tuple(sorted(sizes, reverse=True))


def head_tokens(profile: Profile, candidate: Candidate) -> int:
    """Return the tokens of a micro-batch that its loss head sees."""
    return (profile.loop.head_tokens or 0) * candidate.micro_batch // profile.loop.batch_rows


def is_in_chunks(profile: Profile, candidate: Candidate) -> bool:
    """Return whether a candidate's chunks are smaller than its micro-batch, or it has none: else it is all at once."""
    return candidate.loss_chunk is None or candidate.loss_chunk < head_tokens(profile, candidate)
