"""Parts of a run's state, loaded all or none: each looks at its state first, and nothing changes before all have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab.core.errors import FormatError, ValueGivenError

Load = Callable[[], None]


class Part(ABC):
    """What a run keeps of one kind."""

    @abstractmethod
    def state_dict(self) -> Any:
        """Return what a resumed run needs."""

    @abstractmethod
    def loading(self, state: Any) -> Load:
        """Return what makes this part continue from `state_dict()`; nothing is changed before it is called.

        Raises:
            FormatError, ValueGivenError: not such a state.
        """

    def load_state_dict(self, state: Any) -> None:
        """Continue from `state_dict()`.

        Raises:
            FormatError, ValueGivenError: not such a state; nothing was changed.
        """
        self.loading(state)()


def loading_parts(parts: Mapping[str, Part], state: Any, where: str = "state") -> Load:
    """Return what loads each part's state under its name.

    Raises:
        ValueGivenError: not a mapping. FormatError: other keys. UsageError: a part refuses its state.
    """
    if not isinstance(state, Mapping):
        raise ValueGivenError(where, given=f"a {type(state).__name__}", expected="what run.state_dict() returned")
    if set(state) != set(parts):
        given = ", ".join(sorted(map(str, set(state) ^ set(parts))))
        raise FormatError(
            where, given=f"keys that differ: {given}", expected="the state of a run of this plan and precision"
        )
    loads = [part.loading(state[name]) for name, part in parts.items()]

    def load() -> None:
        for each in loads:
            each()

    return load


def require_keys(where: str, state: Any, names: Iterable[str]) -> None:
    """Raise `FormatError` unless a state is a mapping of just these names."""
    expected = list(names)
    if not isinstance(state, Mapping) or set(state) != set(expected):
        raise FormatError(where, given=f"{state!r:.80}", expected="the keys " + ", ".join(expected))
