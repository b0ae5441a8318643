"""What a way to share a model between ranks is predicted to take, as figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankStage:
    """A ZeRO stage, with the best settings that it has within the limits.

    Args:
        reduces_once: whether gradients are reduced once a window, or after each micro-batch.
        refusal: why it cannot be taken, and then nothing else is known; "" where it can.
        peak_bytes: of a rank; None: not known. window_s: seconds of a window; waiting_s: those of them in which
            communication is waited for. micro_batch: rows. num_micro_batches: k, of a full window.
        reduce_dtype: what gradients are sent in.
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
