"""Predicted cost of a ZeRO stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroStageCost:
    """A ZeRO stage with its best settings within the limits.

    Args:
        zero_stage: 0 to 3.
        reduces_once: True if gradients are reduced once per window, False if after each micro-batch.
        refusal: reason for excluding the stage, in which case the other figures are None; else "".
        peak_bytes: peak of a rank; None if unknown.
        window_s: seconds per window.
        waiting_s: part of `window_s` spent waiting for communication.
        micro_batch: samples per micro-batch.
        num_micro_batches: k, the micro-batches of a full window.
        reduce_dtype: dtype of the gradient reduction.
        code: stable identifier of the refusal, such as "budget.memory", or "".
    """

    zero_stage: int
    reduces_once: bool
    refusal: str = ""
    peak_bytes: int | None = None
    window_s: float | None = None
    waiting_s: float | None = None
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    reduce_dtype: str | None = None
    code: str = ""
