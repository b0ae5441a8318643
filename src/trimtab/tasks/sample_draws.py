"""Counter-based random numbers per sample, independent of batch, micro-batch and rank.

Hashes a counter with SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014) in
torch's wrapping int64, so that CPU and GPU produce identical numbers. Seed and epoch stay Python ints, so nothing is
copied to the device.
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
        """Return uniform integers (B,) int64 from 0 to `high` - 1.

        Args:
            high: Exclusive upper bound, at most 2^31. Probabilities deviate from 1/high by less than 2^-31.
        """
        self._drawn += 1
        return _shifted(_mixed(self._keys + _signed(self._drawn * _GOLDEN)), 32) * high >> 32

    def chance(self, share: float) -> Tensor:
        """Return (B,) bool, True with probability `share` (to within 2^-31)."""
        return self.integers(1 << 31) < share * (1 << 31)


def _mixed(values: _Int64) -> _Int64:
    """Apply the finaliser of SplitMix64 elementwise."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        values = (values ^ _shifted(values, shift)) * _signed(multiplier)
        values = (
            _signed(values) if isinstance(values, int) else values
        )  # int64 tensors wrap on overflow; Python ints do not
    return values ^ _shifted(values, 31)


def _shifted(values: _Int64, bits: int) -> _Int64:
    """Shift right logically. The `>>` operator alone is an arithmetic shift, which extends the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Wrap a Python int to a signed 64-bit value."""
    value %= _BITS
    return value - _BITS if value >= _BITS >> 1 else value
