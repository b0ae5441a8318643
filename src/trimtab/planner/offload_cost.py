"""Predicted time and memory of activation offload, from the same block costs as recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.block_costs import BlockCost
from trimtab.core.hardware import HostLink

# Compute time of a block's backward, in forwards: matrix products have two in the backward for one in the forward.
_BACKWARD = 2.0


@dataclass(frozen=True)
class OffloadCost:
    """Predicted memory and time of a micro-batch with activation offload.

    Args:
        peak_bytes: peak memory, beyond the memory held before.
        moved_bytes: bytes copied to the host, and back.
        waiting_s: seconds of copies that computation does not hide.
    """

    peak_bytes: int
    moved_bytes: int
    waiting_s: float


def predict_offload(stages: Sequence[BlockCost], number: int, link: HostLink) -> OffloadCost:
    """Return the cost of offloading the first `number` blocks of a chain.

    The last stage of the chain is the part of the model after the blocks. The device memory of a block is released at
    the end of the next block's forward, and fetched while the next block's backward computes
    (`techniques.activation_offload`). The computation of the next block hides the copy.
    """
    moved = [_moved_bytes(stages, index) for index in range(number)]
    held = cached = peak = gradients = 0
    for index, stage in enumerate(stages):
        peak = max(peak, held + cached + stage.forward_bytes)
        held += stage.saved_bytes + stage.beside_bytes
        cached += stage.passing_bytes
        held -= moved[index - 1] if 0 < index <= number else 0
    for index, stage in reversed(list(enumerate(stages))):
        held += moved[index - 1] if 0 < index <= number else 0
        held -= stage.beside_bytes + stage.saved_bytes
        need = stage.saved_bytes - stage.spare_bytes + stage.output_bytes + stage.backward_bytes
        peak = max(peak, held + gradients + need)
        gradients += stage.gradient_bytes
    waiting_s = 0.0
    for num_bytes, following in zip(moved, stages[1:], strict=False):
        waiting_s += max(0.0, num_bytes / link.to_host_bytes_s - following.forward_s)
        waiting_s += max(0.0, num_bytes / link.to_device_bytes_s - _BACKWARD * following.forward_s)
    return OffloadCost(peak, sum(moved), waiting_s)


def _moved_bytes(stages: Sequence[BlockCost], index: int) -> int:
    """Return the bytes that a block moves: its saved tensors and its input. The next block saves its output."""
    own = stages[index].saved_bytes - stages[index].output_bytes
    return max(0, own + (stages[index - 1].output_bytes if index else 0))
