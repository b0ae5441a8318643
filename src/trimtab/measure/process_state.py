"""Process-wide state that a training loop reads or changes: random generators and global modes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from trimtab.measure import allocator


@dataclass(frozen=True)
class ProcessState:
    """Random generators (torch, Python, NumPy) and global modes (fp32 modes, threads, gradients, host allocator)."""

    cpu_rng: Tensor
    cuda_rng: tuple[Tensor, ...]
    python_rng: Any
    numpy_rng: Any
    fp32_modes: tuple[str, ...]
    num_threads: int
    grad_enabled: bool
    allocator: str

    @classmethod
    def capture(cls, *, wakes_cuda: bool = True) -> ProcessState:
        """Return the state as it is now.

        Args:
            wakes_cuda: whether CUDA's generators are asked for where nothing has used CUDA yet, which initialises it: a
                process cannot be forked then.
        """
        asks_cuda = torch.cuda.is_available() and (wakes_cuda or torch.cuda.is_initialized())
        return cls(
            torch.get_rng_state(),
            tuple(torch.cuda.get_rng_state_all()) if asks_cuda else (),
            random.getstate(),
            numpy.random.get_state(),
            tuple(place.fp32_precision for place in fp32_places()),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            allocator.mode(),
        )

    def restore(self) -> None:
        """Make the process's state this one again."""
        torch.set_rng_state(self.cpu_rng)
        if self.cuda_rng:
            torch.cuda.set_rng_state_all(list(self.cuda_rng))
        random.setstate(self.python_rng)
        numpy.random.set_state(self.numpy_rng)
        for place, mode in zip(fp32_places(), self.fp32_modes, strict=True):
            if place.fp32_precision != mode:
                place.fp32_precision = mode
        if torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        torch.set_grad_enabled(self.grad_enabled)
        allocator.set_mode(self.allocator)


def convolves_in_tf32() -> bool:
    """Return whether fp32 convolutions on CUDA round their operands to TF32, as they do unless torch is told not to."""
    return bool(torch.backends.cudnn.conv.fp32_precision != "ieee")


def fp32_places() -> tuple[Any, ...]:
    """Return every place where torch keeps how it computes in fp32: CUDA's, and a processor's."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn
