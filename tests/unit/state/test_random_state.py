"""Global random generators, written down and gone on from."""

from __future__ import annotations

import copy

import pytest
import torch

from trimtab.core.errors import FormatError
from trimtab.state.random_state import loading_random_state, random_state


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
