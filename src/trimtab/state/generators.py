"""States of random generators of torch, Python and NumPy."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy
import torch
from torch import Tensor


def is_generator(value: Any) -> bool:
    """Return True for a random generator with restorable state."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return isinstance(
        value, torch.Generator | numpy.random.Generator | numpy.random.RandomState | numpy.random.BitGenerator
    )


def state_of(generator: Any) -> Any:
    """Return a copy of a generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    return (generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator).state


def set_state_of(generator: Any, state: Any) -> None:
    """Restore a generator's state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    else:
        (generator.bit_generator if isinstance(generator, numpy.random.Generator) else generator).state = state


def same_state(left: Any, right: Any) -> bool:
    """Return True if two states of a generator are equal."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_state(left[key], right[key]) for key in left)
    if isinstance(left, numpy.ndarray):
        return bool(numpy.array_equal(left, right))
    if isinstance(left, tuple) and isinstance(right, tuple) and len(left) < 10:
        return len(left) == len(right) and all(map(same_state, left, right))
    return bool(left == right)


class GeneratorSnapshot:
    """Snapshot of a random generator's state."""

    def __init__(self, generator: Any, state: Any = None) -> None:
        self.owner, self.key = generator, id(generator)
        self.state = state_of(generator) if state is None else state

    def again(self) -> GeneratorSnapshot:
        """Return a new snapshot of the generator."""
        return GeneratorSnapshot(self.owner)

    def has_changed(self) -> bool:
        """Return True if numbers were drawn."""
        return not same_state(self.state, state_of(self.owner))

    def restore(self) -> None:
        """Restore the state."""
        set_state_of(self.owner, self.state)


class _Peeked(GeneratorSnapshot):
    """Snapshot compared through the raw words in 1 us; reading the state through its API takes 10 to 100 us."""

    def __init__(self, of: GlobalGenerator, raw: Any, state: Any) -> None:
        super().__init__(of.generator, state)
        self._of, self._raw = of, raw

    def has_changed(self) -> bool:
        """Return True if numbers were drawn."""
        return bool(self._of.raw() != self._raw)


class GlobalGenerator:
    """Python's or NumPy's global Mersenne Twister, read directly from memory.

    Args:
        generator: The generator object.
        address: Address of the words and position; None falls back to the regular state.
    """

    def __init__(self, generator: Any, address: int | None) -> None:
        self.generator, self._address = generator, address
        self._known: tuple[Any, Any] = None, None

    def raw(self) -> Any:
        """Return the words and position, and the value cached by Python's `gauss`."""
        if self._address is None:
            return state_of(self.generator)
        return ctypes.string_at(self._address, _WORDS_BYTES), getattr(self.generator, "gauss_next", None)

    def peek(self) -> _Peeked:
        """Return a snapshot. The state is read through the API only if the words have changed since the last call."""
        raw = self.raw()
        if self._known[0] != raw:
            self._known = raw, state_of(self.generator)
        return _Peeked(self, raw, self._known[1])


_WORDS_BYTES = 4 * 625  # 624 words and the position


def _python() -> GlobalGenerator:
    """Return Python's global generator. In CPython its words follow the object header, which is verified here."""
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    address = id(generator) + object.__basicsize__
    *words, position = generator.getstate()[1]
    is_there = ctypes.string_at(address, _WORDS_BYTES) == numpy.array([position, *words], numpy.uint32).tobytes()
    return GlobalGenerator(generator, address if is_there else None)


def _numpys() -> GlobalGenerator:
    generator: Any = numpy.random.get_state.__self__  # type: ignore[attr-defined]
    bits = generator._bit_generator
    if not isinstance(bits, numpy.random.MT19937):
        return GlobalGenerator(generator, None)
    address, state = bits.ctypes.state_address, bits.state["state"]
    expected = numpy.array([*state["key"], state["pos"]], numpy.uint32).tobytes()
    return GlobalGenerator(generator, address if ctypes.string_at(address, _WORDS_BYTES) == expected else None)


GLOBAL_GENERATORS = _python(), _numpys()
PYTHONS, NUMPYS = (each.generator for each in GLOBAL_GENERATORS)
