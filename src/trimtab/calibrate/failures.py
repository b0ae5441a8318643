"""What went wrong in the user's model or on the device, in a line; and whether it was memory that ran out."""

from __future__ import annotations

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return "out of memory" in text or "can't allocate memory" in text


def describe(error: BaseException) -> str:
    """Return an error's kind and its first line, at most 200 characters of it."""
    if is_out_of_memory(error):
        return "out of memory"
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
