"""Serializable state of the global random generators of torch, Python and NumPy."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import FormatError
from trimtab.core.stateful import Load, require_keys

_NAMES = ("cpu", "cuda", "python", "numpy")
_WORDS = 624  # state size of a Mersenne Twister, used by Python and NumPy


def random_state() -> dict[str, Any]:
    """Return the state of the global generators as tensors, numbers and lists.

    Generators created by the loop (`torch.Generator()`, `numpy.random.default_rng()`) are not included.
    """
    cuda = list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else []
    return _as_state(torch.get_rng_state(), cuda, random.getstate(), np.random.get_state())


def derived_random_state(state: Any, number: int) -> dict[str, Any]:
    """Return a new, deterministic state for a number, with independent random numbers.

    Args:
        state: Result of `random_state()`.
        number: Any integer, such as a rank. Different numbers give different states.
    """
    bits = hashlib.sha256(state["cpu"].cpu().numpy().tobytes() + str(number).encode()).digest()
    seed = int.from_bytes(bits[:7], "big")
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    cuda = [torch.Generator(torch.device("cuda", each)).manual_seed(seed).get_state() for each in devices]
    cpu, numpy = torch.Generator().manual_seed(seed).get_state(), np.random.RandomState(seed % 2**32)
    return _as_state(cpu, cuda, random.Random(seed).getstate(), numpy.get_state())


def _as_state(cpu: Tensor, cuda: list[Tensor], python: Any, numpy: Any) -> dict[str, Any]:
    version, words, gauss = python
    name, keys, position, has_gauss, cached = numpy
    return {
        "cpu": cpu,
        "cuda": cuda,
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "words": torch.tensor(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
    }


def loading_random_state(state: Any, where: str = "state.random") -> Load:
    """Return a function that restores the global generators from `random_state()`.

    If the number of GPUs differs, the common GPUs are restored; the caller must check the number if it matters.

    Raises:
        FormatError: Invalid state. Nothing was changed.
    """
    require_keys(where, state, _NAMES)
    cpu, cuda = _words(f"{where}.cpu", state["cpu"]), [_words(f"{where}.cuda", each) for each in state["cuda"]]
    if len(cpu) != len(torch.get_rng_state()):
        raise FormatError(
            f"{where}.cpu",
            got=f"{len(cpu)} bytes",
            expected=f"the {len(torch.get_rng_state())} bytes of the CPU generator in torch {torch.__version__}",
            hint="Load the state with the torch version that saved it.",
            code="random_state.other_torch",
        )
    python, numpy = _python(f"{where}.python", state["python"]), _numpy(f"{where}.numpy", state["numpy"])

    def load() -> None:
        torch.set_rng_state(cpu)
        for index, each in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, index)
        random.setstate(python)
        np.random.set_state(numpy)

    return load


def _words(where: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype is not torch.uint8 or value.dim() != 1:
        raise FormatError(where, got=f"{value!r:.60}", expected="a 1-D tensor of dtype uint8")
    return value.cpu()


def _python(where: str, state: Any) -> tuple[int, tuple[int, ...], float | None]:
    require_keys(where, state, ("version", "words", "gauss"))
    words = _integers(f"{where}.words", state["words"], _WORDS + 1)
    gauss = state["gauss"]
    if state["version"] != 3 or not (gauss is None or isinstance(gauss, float)):
        given = f"version {state['version']!r} with gauss {gauss!r}"
        raise FormatError(where, got=given, expected="a state as returned by random.getstate()")
    return 3, tuple(words), gauss


def _numpy(where: str, state: Any) -> tuple[str, np.ndarray, int, int, float]:
    require_keys(where, state, ("name", "words", "position", "has_gauss", "cached"))
    words = _integers(f"{where}.words", state["words"], _WORDS)
    name, position, has_gauss, cached = (state[key] for key in ("name", "position", "has_gauss", "cached"))
    known = name == "MT19937" and isinstance(position, int) and 0 <= position <= _WORDS
    if not known or has_gauss not in (0, 1) or not isinstance(cached, float):
        raise FormatError(
            where, got=f"{name!r} at position {position!r}", expected=f"'MT19937' at a position of 0 to {_WORDS}"
        )
    return name, np.asarray(words, dtype=np.uint32), position, has_gauss, cached


def _integers(where: str, value: Any, length: int) -> list[int]:
    is_list = isinstance(value, Tensor) and value.dtype is torch.int64 and tuple(value.shape) == (length,)
    if not is_list or not bool(((value >= 0) & (value < 2**32)).all()):
        raise FormatError(where, got=f"{value!r:.60}", expected=f"an int64 tensor of {length} unsigned 32-bit numbers")
    found: list[int] = value.tolist()
    return found


def generator_states(generators: list[torch.Generator]) -> list[Tensor]:
    """Return the states of generators, in order."""
    return [generator.get_state() for generator in generators]


def loading_generators(generators: list[torch.Generator], state: Any, where: str) -> Load:
    """Return a function that restores generators from `generator_states`.

    Raises:
        FormatError: Invalid state, or a different number of generators. Nothing was changed.
    """
    if not isinstance(state, list) or len(state) != len(generators):
        raise FormatError(
            where,
            got=f"{len(state)} generator states" if isinstance(state, list) else f"{state!r:.60}",
            expected=f"{len(generators)} generator states, one for each generator of the loader",
            hint="Resume with the loader, sampler and dataset that were used when the state was saved.",
            code="random_state.other_loader",
        )
    states = [_words(f"{where}[{index}]", each) for index, each in enumerate(state)]

    def load() -> None:
        for generator, each in zip(generators, states, strict=True):
            generator.set_state(each)

    return load
