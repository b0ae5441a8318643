"""Stateful parts of a run, loaded all or none: every state is validated before any part is changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab.core import validation
from trimtab.core.errors import FormatError, ValueGivenError

Load = Callable[[], None]


class Stateful(ABC):
    """A part of a run's state, with two-phase loading."""

    @abstractmethod
    def state_dict(self) -> Any:
        """Return the state for resuming."""

    @abstractmethod
    def loading(self, state: Any) -> Load:
        """Return a function that loads a validated state; `FormatError` or `ValueGivenError` before any change."""

    def load_state_dict(self, state: Any) -> None:
        """Load the result of `state_dict()`; `FormatError` or `ValueGivenError` before any change."""
        self.loading(state)()


def loading_parts(parts: Mapping[str, Stateful], state: Any, where: str = "state") -> Load:
    """Validate the states of all parts and return a function that loads every state; errors as of `loading`."""
    if not isinstance(state, Mapping):
        raise ValueGivenError(
            where, got=f"a {type(state).__name__}", expected="the mapping that run.state_dict() returned"
        )
    if set(state) != set(parts):
        missing = ", ".join(sorted(map(str, set(parts) - set(state)))) or "none"
        unknown = ", ".join(sorted(map(str, set(state) - set(parts)))) or "none"
        raise FormatError(
            where,
            got=f"missing keys: {missing}; unknown keys: {unknown}",
            expected="the state of a run with the same plan and precision",
            hint="Pass the state of such a run, or start without a state.",
        )
    loads = [part.loading(state[name]) for name, part in parts.items()]

    def load() -> None:
        for each in loads:
            each()

    return load


def require_keys(where: str, state: Any, names: Iterable[str]) -> None:
    """Raise `FormatError` unless a state is a mapping with exactly the keys `names`."""
    expected = list(names)
    if not isinstance(state, Mapping) or set(state) != set(expected):
        raise FormatError(where, got=f"{state!r:.80}", expected="the keys " + ", ".join(expected))


def checked_state(
    where: str, state: Any, *, integers: Iterable[str] = (), numbers: Iterable[str] = (), others: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the integers and numbers of a state, each at least 0; errors as of `loading`.

    Args:
        where: name of the state, for errors.
        state: a mapping with exactly the keys named by the further arguments.
        others: keys whose values the caller checks.
    """
    integers, numbers = tuple(integers), tuple(numbers)
    require_keys(where, state, (*integers, *numbers, *others))
    found = {name: validation.integer(f"{where}.{name}", state[name], low=0) for name in integers}
    return found | {name: validation.number(f"{where}.{name}", state[name], low=0) for name in numbers}
