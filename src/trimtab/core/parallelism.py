"""How a model is shared between ranks, and the step that it is shared for, as their communication sees both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.core.sharing import GATHER_DTYPES, REDUCE_DTYPES


@dataclass(frozen=True)
class Parallelism:
    """One way to share.

    Args:
        ranks: processes that each hold a part of the batch.
        zero_stage: what is sharded besides: 0 nothing (DDP), 1 optimizer state, 2 gradients too, 3 parameters too.
        reduce_dtype: what gradients are sent in, "fp32" (as they are) or "bf16" (half of the bytes).
        bucket_bytes: gradients that stages 0 and 1 send at once; None: as torch does, 25 MiB, and first 1 MiB.
        overlaps: whether communication runs beside the computation, as far as it can.
        reduces_once: whether gradients are reduced once a window, rather than after each micro-batch.
        gather_dtype: what parameters are gathered in at stages 2 and 3: "fp32" (as they are, and autocast computes in
            less) or "bf16" (half of the bytes, and all is computed in it: FSDP2's own mixed precision).

    Raises:
        ValueGivenError: a choice is out of range, or parameters that no rank gathers are gathered in bf16.
    """

    ranks: int
    zero_stage: int = 0
    reduce_dtype: str = "fp32"
    bucket_bytes: int | None = None
    overlaps: bool = True
    reduces_once: bool = True
    gather_dtype: str = "fp32"

    def __post_init__(self) -> None:
        checks.integer("parallelism.ranks", self.ranks)
        checks.integer("parallelism.zero_stage", self.zero_stage, low=0, high=3)
        checks.one_of("parallelism.reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)
        checks.one_of("parallelism.gather_dtype", self.gather_dtype, GATHER_DTYPES)
        if self.gather_dtype != "fp32" and self.zero_stage < 2:
            given = f"{self.gather_dtype!r} at stage {self.zero_stage}, which gathers no parameters"
            raise ValueGivenError("parallelism.gather_dtype", given=given, expected="stage 2 or 3, or 'fp32'")
        if self.bucket_bytes is not None:
            checks.integer("parallelism.bucket_bytes", self.bucket_bytes)
        for name in ("overlaps", "reduces_once"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueGivenError(f"parallelism.{name}", given=repr(value), expected="true or false")


@dataclass(frozen=True)
class StepShape:
    """A step of one rank: what a micro-batch computes, block by block, and the optimizer's step.

    Args:
        forward_s, backward_s: seconds of a micro-batch.
        optimizer_s: seconds of the optimizer's step of all parameters.
        block_bytes: of each block's fp32 parameters that are trained, in the forward's order; their gradients have as
            many. What lies outside of the blocks is a block too.
        block_shares: of the seconds that each block takes; made to sum to 1.
        num_tensors: parameters by number; None: one a block.
        gathered_bytes: of each block's parameters, those that are not trained too; None: all of them are.

    Raises:
        ValueGivenError: a figure is out of range, or there are not as many shares as blocks.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    block_bytes: tuple[int, ...]
    block_shares: tuple[float, ...]
    num_tensors: int | None = None
    gathered_bytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s"):
            checks.number(f"step.{name}", getattr(self, name), low=0, open_low=True)
        checks.number("step.optimizer_s", self.optimizer_s, low=0)
        if self.num_tensors is not None:
            checks.integer("step.num_tensors", self.num_tensors)
        for each in self.block_bytes:
            checks.integer("step.block_bytes", each, low=0)
        if self.gathered_bytes is not None and len(self.gathered_bytes) != len(self.block_bytes):
            given = f"{len(self.gathered_bytes)} sizes of {len(self.block_bytes)} blocks"
            raise ValueGivenError("step.gathered_bytes", given=given, expected="one of each block")
        object.__setattr__(self, "block_shares", self._of_one())

    def _of_one(self) -> tuple[float, ...]:
        if not self.block_bytes or len(self.block_shares) != len(self.block_bytes):
            given = f"{len(self.block_shares)} shares of {len(self.block_bytes)} blocks"
            raise ValueGivenError("step.block_shares", given=given, expected="one of each block, and a block at least")
        shares = [checks.number("step.block_shares", share, low=0) for share in self.block_shares]
        largest = max(shares)
        if largest == 0:
            raise ValueGivenError("step.block_shares", given="zeros", expected="a block at least that takes time")
        total = math.fsum(share / largest for share in shares)  # at most 1 each: no sum overflows
        settled = abs(total * largest - 1) < 1e-15  # already of sum 1: read back exactly as written
        return tuple(shares if settled else (share / largest / total for share in shares))
