"""Loads the parts of a run's state, all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trimtab.core.errors import FormatError, ValueGivenError


class Part(Protocol):
    """What a run keeps of one kind. A state that is none is refused with an error, and nothing changed."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from it."""


def load_parts(parts: Mapping[str, Part], state: Any, where: str = "state") -> None:
    """Load each part's state under its name.

    Raises:
        ValueGivenError: not a mapping. FormatError: other keys. UsageError: a part refuses; all are as before.
    """
    if not isinstance(state, Mapping):
        raise ValueGivenError(where, given=f"a {type(state).__name__}", expected="what run.state_dict() returned")
    expected = set(parts)
    if set(state) != expected:
        given = ", ".join(sorted(map(str, set(state) ^ expected)))
        raise FormatError(
            where, given=f"keys that differ: {given}", expected="the state of a run of this plan and precision"
        )
    before = {name: part.state_dict() for name, part in parts.items()}
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except BaseException:
        for name, part in parts.items():
            part.load_state_dict(before[name])
        raise
