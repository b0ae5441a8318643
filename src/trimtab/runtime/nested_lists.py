"""Copies of the nested lists and dicts of constants in a batch, made only if a loss may change the originals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NestedLists:
    """Decides on copying nested lists for the loss, by checking for in-place changes.

    A batch of texts may hold thousands of word lists, and copying them may take longer than a small step. Micro-batches
    1, 2, 4, 8, ... of a run get copies, which are compared with the originals after the backward. Other micro-batches
    get the originals, as in a plain loop. Once a copy was changed, all later micro-batches get copies.

    Attributes:
        are_copied: True if the next micro-batch gets copies.
    """

    def __init__(self) -> None:
        self.are_copied, self._are_changed = True, False
        self._number = 1  # Number of the next micro-batch.
        self._pairs: list[tuple[Sequence[Any], list[Any]]] = []

    def copies_of(self, items: Sequence[Any], kind: Any) -> list[Any]:
        """Return copies of lists or dicts, and keep them for comparison."""
        copies = list(map(kind.copy, items))
        self._pairs.append((items, copies))
        return copies

    def returned(self) -> None:
        """Compare the copies with the originals, after the loss and its backward."""
        pairs, self._pairs = self._pairs, []
        if not self._are_changed:
            self._are_changed = any(list(items) != copies for items, copies in pairs)
        self._number += 1
        self.are_copied = self._are_changed or not self._number & (self._number - 1)

    def dropped(self) -> None:
        """Drop the copies of a micro-batch whose loss raised."""
        self._pairs = []
