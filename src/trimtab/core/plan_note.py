"""Notes of a plan: missing figures and settings, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """Figure or setting that planning left out.

    Args:
        code: stable identifier of the missing item, such as "flops.not_counted".
        text: sentence with the reason.
    """

    code: str
    text: str
