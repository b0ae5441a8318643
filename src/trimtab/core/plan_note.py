"""Sentences of a plan with a stable code: notes, advice and reasons."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """Sentence with a stable code: a figure that planning left out, advice on the loop, or a reason.

    Args:
        code: stable identifier of the sentence, such as "flops.not_counted", for programs and tests.
        text: the sentence.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text
