"""Sharding settings of a plan, and the rank's step as input of the communication model (math: sections 2 and 4)."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError

ENGINES = ("torch", "deepspeed")
REDUCE_DTYPES = GATHER_DTYPES = ("fp32", "bf16")
STAGES = {
    0: "every rank holds all (DDP)",
    1: "optimizer state is sharded",
    2: "gradients and optimizer state are sharded",
    3: "parameters, gradients and optimizer state are sharded",
}


@dataclass(frozen=True)
class Parallelism:
    """Data-parallel configuration.

    Args:
        ranks: number of processes.
        zero_stage: sharded state: 0 none (DDP), 1 optimizer state, 2 gradients too, 3 parameters too.
        reduce_dtype: dtype of the gradient reduction: "fp32" (unchanged) or "bf16" (half the bytes).
        bucket_bytes: size of a gradient bucket at stages 0 and 1; None: torch's default, 25 MiB after a first bucket
            of 1 MiB.
        overlaps: True if communication overlaps computation as far as possible.
        reduces_once: True if gradients are reduced once per window, False if after each micro-batch.
        gather_dtype: dtype of the parameter all-gather at stages 2 and 3: "fp32" (unchanged; autocast may compute in
            less) or "bf16" (half the bytes, and all computation in bf16: FSDP2's mixed precision).

    Raises:
        ValueGivenError: a value is out of range, or gather_dtype is "bf16" at a stage that gathers no parameters.
    """

    ranks: int
    zero_stage: int = 0
    reduce_dtype: str = "fp32"
    bucket_bytes: int | None = None
    overlaps: bool = True
    reduces_once: bool = True
    gather_dtype: str = "fp32"

    def __post_init__(self) -> None:
        validation.integer("parallelism.ranks", self.ranks)
        validation.integer("parallelism.zero_stage", self.zero_stage, low=0, high=3)
        validation.one_of("parallelism.reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)
        validation.one_of("parallelism.gather_dtype", self.gather_dtype, GATHER_DTYPES)
        if self.gather_dtype != "fp32" and self.zero_stage < 2:
            given = f"{self.gather_dtype!r} with zero_stage={self.zero_stage}, which gathers no parameters"
            raise ValueGivenError("parallelism.gather_dtype", got=given, expected="'fp32', or zero_stage 2 or 3")
        if self.bucket_bytes is not None:
            validation.integer("parallelism.bucket_bytes", self.bucket_bytes)
        for name in ("overlaps", "reduces_once"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueGivenError(f"parallelism.{name}", got=repr(value), expected="true or false")


@dataclass(frozen=True)
class StepShape:
    """Times and sizes of a rank's step: a micro-batch by block, and the optimizer step.

    Args:
        forward_s, backward_s: seconds per micro-batch.
        optimizer_s: seconds of the optimizer step over all parameters.
        block_bytes: bytes of trainable fp32 parameters per block, in forward order; equal to the bytes of their
            gradients. Parameters outside of all blocks form a block too.
        block_shares: fraction of the seconds per block; normalised to sum 1.
        num_tensors: number of parameter tensors; None: one per block.
        gathered_bytes: bytes of all parameters per block, including frozen ones; None: all are trainable.

    Raises:
        ValueGivenError: a figure is out of range, or the numbers of shares and blocks differ.
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
            validation.number(f"step.{name}", getattr(self, name), low=0, open_low=True)
        validation.number("step.optimizer_s", self.optimizer_s, low=0)
        if self.num_tensors is not None:
            validation.integer("step.num_tensors", self.num_tensors)
        for each in self.block_bytes:
            validation.integer("step.block_bytes", each, low=0)
        if self.gathered_bytes is not None and len(self.gathered_bytes) != len(self.block_bytes):
            given = f"{len(self.gathered_bytes)} sizes for {len(self.block_bytes)} blocks"
            raise ValueGivenError("step.gathered_bytes", got=given, expected="one size per block")
        if not self.block_bytes or len(self.block_shares) != len(self.block_bytes):
            given = f"{len(self.block_shares)} fractions for {len(self.block_bytes)} blocks"
            expected = "one fraction per block, and at least one block"
            raise ValueGivenError("step.block_shares", got=given, expected=expected)
        shares = validation.shares(
            [validation.number("step.block_shares", share, low=0) for share in self.block_shares]
        )
        if shares is None:
            expected = "a positive fraction for at least one block"
            raise ValueGivenError("step.block_shares", got="only zeros", expected=expected)
        object.__setattr__(self, "block_shares", shares)
