"""Storage in 16, 8 and 4 bits: the published maps, values that survive being written again, and unbiased rounding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.techniques.low_bit_storage import KINDS, NOISE_LIMIT, round_stochastically, storage_of

CPU = torch.device("cpu")
every_storage = pytest.mark.parametrize(("kind", "is_signed"), [*itertools.product(KINDS, (True, False))])
# Largest distance from a value to the nearest in its map, as a fraction of the block's largest value.
ERRORS = {("bf16", True): 2**-7, ("bf16", False): 2**-7, ("8bit", True): 0.0071, ("8bit", False): 0.0036}
ERRORS |= {("4bit", True): 0.11251, ("4bit", False): 1 / 16}


def values_of(numel: int, seed: int, *, is_signed: bool) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=draw) * 10 ** (4 * torch.rand(numel, generator=draw) - 8)
    return values if is_signed else values.square()


def noise_of(numel: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(NOISE_LIMIT, (numel,), dtype=torch.int32, generator=draw)


def written(kind: str, values: torch.Tensor, *, is_signed: bool) -> tuple:
    storage = storage_of(kind, CPU, is_signed=is_signed)
    stored = storage.zeros(values.numel())
    storage.write(stored, 0, values, noise_of(values.numel()))
    return storage, stored


@every_storage
@given(numel=st.integers(1, 700), seed=st.integers(0, 99))
def test_what_was_read_is_written_without_a_change(kind, is_signed, numel, seed):
    """A checkpoint holds plain values: loaded, they are the low-bit state that was saved."""
    values = values_of(numel, seed, is_signed=is_signed)
    storage, stored = written(kind, values, is_signed=is_signed)
    read = storage.read(stored, 0, numel)
    again = storage.zeros(numel)
    storage.write(again, 0, read, noise_of(numel, seed + 1))
    assert torch.equal(storage.read(again, 0, numel), read)
    assert all(map(torch.equal, stored, again))


@every_storage
def test_an_error_is_at_most_half_a_gap_of_the_map_or_a_unit_of_bf16(kind, is_signed):
    values = values_of(128, 0, is_signed=is_signed)  # at most one block
    storage, stored = written(kind, values, is_signed=is_signed)
    error = (storage.read(stored, 0, 128) - values).abs()
    limit = ERRORS[kind, is_signed]
    if kind == "bf16":
        assert bool((error <= limit * values.abs()).all())
    else:
        assert float(error.max() / values.abs().max()) <= limit
        assert float(error[values.abs().argmax()]) == 0


@every_storage
def test_chunks_are_the_parts_of_a_whole(kind, is_signed):
    values = values_of(1300, 3, is_signed=is_signed)
    storage, whole = written(kind, values, is_signed=is_signed)
    parts = storage.zeros(1300)
    for begin, end in ((0, 512), (512, 1024), (1024, 1300)):
        noise = noise_of(1300)[begin:end]
        storage.write(parts, begin, values[begin:end], noise)
    assert all(map(torch.equal, whole, parts))
    assert torch.equal(storage.read(whole, 512, 1024), storage.read(whole, 0, 1300)[512:1024])


@every_storage
def test_zeros_are_zero_before_and_after_they_are_written(kind, is_signed):
    storage, stored = written(kind, torch.zeros(300), is_signed=is_signed)
    assert not storage.read(storage.zeros(300), 0, 300).any()
    assert not storage.read(stored, 0, 300).any()


@every_storage
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_value_is_not_hidden(kind, is_signed, value):
    values = torch.ones(300)
    values[7] = value
    storage, stored = written(kind, values, is_signed=is_signed)
    assert not math.isfinite(storage.read(stored, 0, 300)[7])


@pytest.mark.parametrize(
    ("kind", "is_signed", "count", "least"),
    [
        ("8bit", True, 256, 0.55e-6),
        ("8bit", False, 256, 0.325e-6),
        ("4bit", True, 16, 0.0055),
        ("4bit", False, 16, 1 / 16),
    ],
)
def test_the_maps_are_the_published_ones(kind, is_signed, count, least):
    """Dynamic maps span seven decades in 8 bits; the linear map of 4 bits has no zero."""
    storage = storage_of(kind, CPU, is_signed=is_signed)
    codes = torch.arange(256, dtype=torch.uint8)
    found = storage.read((codes, torch.ones(2)), 0, 256).unique()
    assert found.numel() == count
    assert float(found.max()) == 1
    assert float(found[found > 0].min()) == pytest.approx(least, rel=1e-3)
    assert (0 in found.tolist()) is (kind == "8bit" or is_signed)
    assert bool((found < 0).any()) is is_signed


def test_stochastic_rounding_is_right_on_average():
    values = torch.full((200_000,), 1.001)
    rounded = round_stochastically(values, noise_of(200_000)).float()
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert float(rounded.mean()) == pytest.approx(1.001, abs=3e-5)
    assert torch.equal(round_stochastically(-values, noise_of(200_000)).float(), -rounded)


def test_a_nan_with_any_payload_stays_nan():
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    rounded = round_stochastically(nan, torch.full((2,), NOISE_LIMIT - 1, dtype=torch.int32))
    assert bool(rounded.isnan().all())
