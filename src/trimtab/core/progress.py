"""Progress of long-running work: the callback, and the sentence on files kept by an interrupted command."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Callback for a line of text and, if known, the completed fraction of all work."""

    def __call__(self, text: str, share: float | None = None) -> None: ...


def silent(text: str, share: float | None = None) -> None:
    """Ignore progress."""


# What an interruption leaves behind, for the last line of an interrupted command.

_kept = ""


def note_kept(text: str) -> None:
    """Set the sentence on files kept after an interruption of the command; "" for no files."""
    global _kept
    _kept = text


def kept() -> str:
    """Return the sentence of `note_kept`."""
    return _kept
