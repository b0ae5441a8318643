"""Progress callback of long-running work."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Callback for a line of text and, if known, the completed fraction of all work."""

    def __call__(self, text: str, share: float | None = None) -> None: ...


def silent(text: str, share: float | None = None) -> None:
    """Ignore progress."""
