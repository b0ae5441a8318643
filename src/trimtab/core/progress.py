"""Progress of long-running work: the callback, and what an interruption of a command keeps."""

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
    """Set the sentence on the files that an interruption of the command leaves behind; "" if there are none."""
    global _kept
    _kept = text


def kept() -> str:
    """Return the sentence of `note_kept`."""
    return _kept
