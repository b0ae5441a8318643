"""Read-only state of a run (counters, noise, stop reason) and its context manager."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from trimtab.core.stopping_rule import StopReason
from trimtab.decide.batch_size_policy import NoiseEstimate
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.batch_size_controller import BatchSizeController
from trimtab.runtime.call_order import CallOrder
from trimtab.runtime.early_stopping import EarlyStopping
from trimtab.runtime.fixed_batch_size import FixedBatchSize
from trimtab.runtime.oom_retry import OutOfMemoryRetry
from trimtab.runtime.precision import MixedPrecision
from trimtab.runtime.training_progress import TrainingProgress


class RunView:
    """Base class of `Run` with its read-only properties. Leaving the `with` block closes the run."""

    _auxiliary: list[Any]
    _consumed: TrainingProgress
    _control: BatchSizeController | FixedBatchSize
    _order: CallOrder
    _precision: MixedPrecision
    _recovery: OutOfMemoryRetry
    _stopping: EarlyStopping
    _weights: WindowWeights

    @property
    def loss_share(self) -> float | Tensor:
        """Weight of this rank's mean loss in the mean over all ranks' samples or tokens.

        The mean over ranks of `weight * mean loss` is the global mean.

        1.0 in one process. Available after the window's last micro-batch. With several ranks, reading it waits for the
        other ranks' metadata, as `unscale` and `step` do, but does not synchronise with the device.

        Raises:
            LoopError: no window is open, or its last micro-batch has not run.
        """
        self._order.require_complete("run.loss_share")
        return self._weights.share

    @property
    def auxiliary(self) -> tuple[Any, ...]:
        """Auxiliary value of each micro-batch of the last window, for losses that return `(loss, auxiliary)`.

        None for micro-batches without an auxiliary value. Tensors are detached and kept until the next window begins:
        return metrics rather than activations if memory is scarce.
        """
        return tuple(self._auxiliary)

    @property
    def num_batches(self) -> int:
        """Number of loader batches in the next window; 1 unless the plan adapts it or `of_batches` set it."""
        return self._control.num_batches

    @property
    def consumed_samples(self) -> int:
        """Number of samples consumed, skipped steps included."""
        return self._consumed.rows

    @property
    def num_windows(self) -> int:
        """Number of finished windows, skipped steps included."""
        return self._consumed.windows

    @property
    def applied_steps(self) -> int:
        """Number of optimizer steps taken."""
        return self._consumed.applied

    @property
    def micro_batch_limit(self) -> int | None:
        """Largest micro-batch in samples that fits on every rank, known after an out-of-memory error; None before."""
        return self._recovery.limit.rows

    @property
    def noise(self) -> NoiseEstimate | None:
        """Gradient noise scale over the last windows; None if the batch size is fixed or nothing was measured yet."""
        return self._control.noise

    @property
    def stop_reason(self) -> StopReason | None:
        """`Stop` condition that was met; None while the run continues."""
        return self._stopping.reason

    @property
    def loss_scale(self) -> float | None:
        """Current fp16 loss scale; None under any other precision."""
        return self._precision.loss_scale

    def close(self, error: BaseException | None = None) -> None:
        """Close the run; `error` is the exception that ended it, or None."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)
