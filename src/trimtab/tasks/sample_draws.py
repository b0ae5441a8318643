"""Random numbers that belong to a row: the same whatever batch, micro-batch or rank the row is seen in.

A counter is hashed instead of a generator advanced: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
number generators", 2014), in torch's wrapping int64, so that a device draws what a processor draws. Nothing is copied
to the device: what is not the rows' own is plain numbers.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BITS = 1 << 64
_Int64 = TypeVar("_Int64", int, Tensor)


class SampleDraws:
    """Random numbers per sample of a batch. Every call returns the next number of each sample.

    Args:
        seed: Seed of the run.
        epoch: Epoch, from 0.
        rows: Indices of the samples in the dataset, (B,) int64.
    """

    def __init__(self, seed: int, epoch: int, rows: Tensor) -> None:
        start = _mixed(_signed(_mixed(_signed(seed * _GOLDEN)) + (epoch + 1) * _MULTIPLIERS[0]))
        self._keys = _mixed((rows + 1) * _signed(_GOLDEN) + start)
        self._drawn = 0

    def integers(self, high: int) -> Tensor:
        """Return (B,) int64 from 0 to `high` - 1, `high` at most 2^31: even to within 2^-31 of `high`."""
        self._drawn += 1
        return _shifted(_mixed(self._keys + _signed(self._drawn * _GOLDEN)), 32) * high >> 32

    def chance(self, share: float) -> Tensor:
        """Return (B,) bool, true with that probability to within 2^-31."""
        return self.integers(1 << 31) < share * (1 << 31)


def _mixed(values: _Int64) -> _Int64:
    """Return the finaliser of SplitMix64 of each."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        values = (values ^ _shifted(values, shift)) * _signed(multiplier)
        values = _signed(values) if isinstance(values, int) else values  # a tensor wraps by itself
    return values ^ _shifted(values, 31)


def _shifted(values: _Int64, bits: int) -> _Int64:
    """Return the values as unsigned, shifted right: a shift of signed ones drags the sign along."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 of the same last 64 bits."""
    value %= _BITS
    return value - _BITS if value >= _BITS >> 1 else value
