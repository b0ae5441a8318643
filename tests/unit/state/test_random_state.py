"""Global random generators, written down and gone on from."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from raising import raises

from trimtab.core.errors import FormatError
from trimtab.state.random_state import generator_states, loading_generators, loading_random_state, random_state


def drawn() -> list:
    """Return numbers of every generator, normal ones among them: each keeps a second one for the next call."""
    return [
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
    ]


def test_what_follows_is_the_same_again():
    drawn()
    state = random_state()
    first = drawn()
    loading_random_state(state)()
    assert drawn() == first
    assert drawn() != first


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu", torch.zeros(3, dtype=torch.uint8)),
        ("cpu", torch.zeros(5056)),
        ("python", {"version": 2, "words": torch.zeros(625, dtype=torch.int64), "gauss": None}),
        ("python", {"version": 3, "words": torch.full((625,), 2**32), "gauss": None}),
        ("numpy", {"name": "PCG64", "words": torch.zeros(624, dtype=torch.int64)}),
        ("numpy", None),
    ],
)
def test_what_is_no_state_is_refused_and_nothing_changes(name, value):
    state = copy.copy(random_state()) | {name: value}
    before = torch.get_rng_state()
    with pytest.raises(FormatError) as caught:
        loading_random_state(state)
    assert caught.value.code in ("format.invalid", "random_state.other_torch")
    assert caught.value.field.startswith(f"state.random.{name}")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_s_own_generators_too():
    generators = [torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)]
    state = generator_states(generators)
    first = [torch.rand(2, generator=each).tolist() for each in generators]
    loading_generators(generators, state, "state.data")()
    assert [torch.rand(2, generator=each).tolist() for each in generators] == first
    with raises(FormatError, code="random_state.other_loader", field="state.data"):
        loading_generators(generators, state[:1], "state.data")
