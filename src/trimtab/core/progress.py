"""What long work tells while it goes on."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Takes a line of text and, where it is known, the share of all work that is done."""

    def __call__(self, text: str, share: float | None = None) -> None: ...


def silent(text: str, share: float | None = None) -> None:
    """Tell nobody."""
