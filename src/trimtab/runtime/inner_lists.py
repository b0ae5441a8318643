"""Lists and dicts of constants in the long lists of a batch: copied for a loss only where it may change them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class InnerLists:
    """Copies of a batch's inner lists, and a watch of whether losses change them in place.

    A batch of texts may hold thousands of lists of words, whose copies take longer than a small step. Micro-batches 1,
    2, 4, 8, ... of a run get copies, which are compared with the originals after the backward. The others get the
    originals, as in a plain loop, until a copy was changed: from then on all get copies.

    Attributes:
        are_copied: whether the next micro-batch gets copies.
    """

    def __init__(self) -> None:
        self.are_copied, self._are_changed = True, False
        self._number = 1  # of the next micro-batch
        self._pairs: list[tuple[Sequence[Any], list[Any]]] = []

    def copies_of(self, items: Sequence[Any], kind: Any) -> list[Any]:
        """Return copies of lists or dicts, to be compared with the originals."""
        copies = list(map(kind.copy, items))
        self._pairs.append((items, copies))
        return copies

    def returned(self) -> None:
        """Compare the copies with the originals: the loss and its backward have run."""
        pairs, self._pairs = self._pairs, []
        if not self._are_changed:
            self._are_changed = any(list(items) != copies for items, copies in pairs)
        self._number += 1
        self.are_copied = self._are_changed or not self._number & (self._number - 1)

    def dropped(self) -> None:
        """Drop the copies of a micro-batch whose loss raised."""
        self._pairs = []
