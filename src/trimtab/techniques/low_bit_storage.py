"""Storage of optimizer state in 16, 8 or 4 bits, read and written in chunks of fp32 values.

8 and 4 bits are quantized in blocks: every element is stored as the index of the nearest value in a fixed map, times
the block's element of largest magnitude. The maps are those of 8-bit Adam (Dettmers et al. 2022, arXiv:2110.02861,
section 2: dynamic map, blocks of 256) and of 4-bit Adam (Li et al. 2023, arXiv:2309.01507: blocks of 128, dynamic map
for first moments, linear map without zero for second moments). The scale keeps its sign, so that writing values that
were read changes no bit.

torchao stores the same formats, but compiles its step for every shape of a parameter, which takes seconds per shape,
and its search for the nearest value takes most of a step on the CPU. Here a table holds the index of the nearest value
for every fp16 number.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

KINDS = ("bf16", "8bit", "4bit")
BLOCKS = {"8bit": 256, "4bit": 128}  # Elements per scale.
NOISE_LIMIT = 2**16  # fp32 has 16 bits more than bf16.

Stored = tuple[Tensor, ...]


class Storage(Protocol):
    """Storage of a tensor's elements in other tensors.

    Attributes:
        names: names of the stored tensors.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def zeros(self, numel: int) -> Stored:
        """Return the stored tensors of `numel` zeros."""

    def read(self, stored: Stored, begin: int, end: int) -> Tensor:
        """Return the elements from `begin`, a multiple of the block size, to `end` in fp32."""

    def write(self, stored: Stored, begin: int, values: Tensor, noise: Tensor) -> None:
        """Store fp32 values from `begin` on; only the last block of a tensor may be incomplete.

        Args:
            noise: random integers below `NOISE_LIMIT`, int32, at least as many as values.
        """


def storage_of(kind: str, device: torch.device, *, is_signed: bool) -> Storage:
    """Return the storage of a kind in `KINDS`; `is_signed` is False for second moments, which are not negative."""
    return Bfloat16(device) if kind == "bf16" else QuantizedBlocks(kind, device, is_signed=is_signed)


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 values in bf16, rounded away from zero with the probability of the dropped fraction.

    The expectation is the exact value, so updates below half a unit of bf16 accumulate. Non-finite values stay
    non-finite.
    """
    bits = (values.view(torch.int32) + noise[: values.numel()]).bitwise_and_(-NOISE_LIMIT)
    # The sum of NaN's bits and noise may be a finite number; 0 times a non-finite value is NaN.
    return bits.view(torch.float32).add_(values, alpha=0).bfloat16()


class Bfloat16:
    """Storage in bf16, with stochastic rounding."""

    names = ("bf16",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, numel: int) -> Stored:
        return (torch.zeros(numel, dtype=torch.bfloat16, device=self._device),)

    def read(self, stored: Stored, begin: int, end: int) -> Tensor:
        return stored[0][begin:end].float()

    def write(self, stored: Stored, begin: int, values: Tensor, noise: Tensor) -> None:
        stored[0][begin : begin + values.numel()] = round_stochastically(values, noise)


class QuantizedBlocks:
    """Storage as indices into a map of 256 or 16 values, with a scale per block; two 4-bit indices share a byte."""

    names = ("codes", "scale")

    def __init__(self, kind: str, device: torch.device, *, is_signed: bool) -> None:
        self._block, self._is_packed, self._device = BLOCKS[kind], kind == "4bit", device
        numbers = _map_of(kind, is_signed=is_signed)
        self._zero = min(range(len(numbers)), key=lambda index: abs(numbers[index]))
        values = torch.tensor(numbers)
        self._index_of = _nearest_by_fp16(values).to(device)
        if self._is_packed:
            # Both values of a byte as one 8-byte number, because one lookup per byte is several times as fast as two.
            pairs = torch.cartesian_prod(values, values).contiguous()
            values = pairs.view(torch.int64).flatten()
        self._values = values.to(device)

    def zeros(self, numel: int) -> Stored:
        num_blocks = -(-numel // self._block)
        code = self._zero << 4 | self._zero if self._is_packed else self._zero
        num_bytes = num_blocks * self._block // (2 if self._is_packed else 1)
        codes = torch.full((num_bytes,), code, dtype=torch.uint8, device=self._device)
        return codes, torch.zeros(num_blocks, device=self._device)

    def read(self, stored: Stored, begin: int, end: int) -> Tensor:
        codes, scale = stored
        first, last = begin // self._block, -(-end // self._block)
        width = self._block // 2 if self._is_packed else self._block
        found = self._values.index_select(0, codes[first * width : last * width].int())
        values = found.view(torch.float32).view(-1, self._block).mul_(scale[first:last, None])
        return values.view(-1)[: end - begin]

    def write(self, stored: Stored, begin: int, values: Tensor, noise: Tensor) -> None:
        codes, scale = stored
        if missing := -values.numel() % self._block:
            values = torch.nn.functional.pad(values, (0, missing))
        blocks = values.view(-1, self._block)
        high, low = blocks.amax(1), blocks.amin(1)
        scales = torch.where(high < -low, low, high)
        ratios = blocks / torch.where(scales == 0, 1, scales)[:, None]
        bits = ratios.half().view(torch.int16).view(-1).int().bitwise_and_(0xFFFF)
        found = self._index_of.index_select(0, bits)
        if self._is_packed:
            pairs = found.view(torch.int16)
            found = (pairs << 4 | pairs >> 8).to(torch.uint8)
        first = begin // self._block
        scale[first : first + scales.numel()] = scales
        begin = begin // 2 if self._is_packed else begin
        codes[begin : begin + found.numel()] = found


def _map_of(kind: str, *, is_signed: bool) -> list[float]:
    """Return the values of a map, ascending and at most 1 in magnitude."""
    if kind == "4bit" and not is_signed:
        return [index / 16 for index in range(1, 17)]
    # Each further decade below 1 has half as many values, because the exponent takes bits from the fraction.
    num_decades = 7 if kind == "8bit" else 3
    magnitudes = [
        10.0 ** (decade - num_decades + 1) * fraction
        for decade in range(num_decades)
        for fraction in _fractions(2**decade if is_signed else 2 ** (decade + 1))
    ]
    negative = [-each for each in magnitudes] if is_signed else []
    return sorted([*negative, 0.0, *magnitudes, 1.0])


def _fractions(count: int) -> list[float]:
    """Return the centres of `count` equal intervals from 0.1 to 1."""
    return [0.1 + 0.9 * (index + 0.5) / count for index in range(count)]


def _nearest_by_fp16(values: Tensor) -> Tensor:
    """Return the index of the nearest value for the bits of every fp16 number, as bytes."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.float16).float().nan_to_num(nan=0.0)
    limits = (values[1:] + values[:-1]) / 2
    return torch.bucketize(numbers, limits).to(torch.uint8)
