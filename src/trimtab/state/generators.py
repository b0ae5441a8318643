"""States of random generators of torch, Python and NumPy."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy
import torch
from torch import Tensor

GENERATORS = (
    *(random.Random, torch.Generator),
    *(numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator),
)


def is_generator(value: Any) -> bool:
    """Return True for a random generator with restorable state."""
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


def state_of(generator: Any) -> Any:
    """Return a copy of a generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator | numpy.random.RandomState):
        return generator.get_state()
    return getattr(generator, "bit_generator", generator).state


def set_state_of(generator: Any, state: Any) -> None:
    """Restore a generator's state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator | numpy.random.RandomState):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


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


class GlobalGenerator:
    """Python's or NumPy's global Mersenne Twister, compared in 1 us through its raw words in memory.

    Reading the state through its API takes 10 to 100 us, too long for every forward of a recomputed block.

    Args:
        generator: The generator.
        address: Expected address of the position and the words; verified here.
        words: The 624 words and the position, in the order of the memory; empty for another kind of generator.
    """

    def __init__(self, generator: Any, address: int, words: Any) -> None:
        self.generator = generator
        expected = numpy.array(words, numpy.uint32).tobytes()
        is_there = expected and ctypes.string_at(address, len(expected)) == expected
        self._place = (address, len(expected)) if is_there else None
        self._known: tuple[Any, Any] = None, None

    def raw(self) -> Any:
        """Return the words and position, and the value cached by Python's `gauss`."""
        if self._place is None:
            return repr(state_of(self.generator))
        return ctypes.string_at(*self._place), getattr(self.generator, "gauss_next", None)

    def peek(self) -> GeneratorSnapshot:
        """Return a snapshot. The state is read through the API only if the words have changed since the last call."""
        raw = self.raw()
        if self._known[0] != raw:
            self._known = raw, state_of(self.generator)
        return GeneratorSnapshot(self.generator, self._known[1])


def _global_generators() -> tuple[GlobalGenerator, GlobalGenerator]:
    python: Any = random.getstate.__self__  # type: ignore[attr-defined]
    *words, position = python.getstate()[1]
    of_numpy: Any = numpy.random.get_state.__self__  # type: ignore[attr-defined]
    bits = of_numpy._bit_generator
    state = bits.state["state"]
    words = [*state["key"], state["pos"]] if "key" in state else []
    return (
        # In CPython the words follow the object header.
        GlobalGenerator(python, id(python) + object.__basicsize__, [position, *words]),
        GlobalGenerator(of_numpy, bits.ctypes.state_address, words),
    )


GLOBAL_GENERATORS = _global_generators()
PYTHONS, NUMPYS = (each.generator for each in GLOBAL_GENERATORS)
