"""What planning could not measure, try or read, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """Figure or setting that planning left out.

    Args:
        code: stable identifier of what is missing, such as "flops.not_counted".
        text: sentence with the reason.
    """

    code: str
    text: str
