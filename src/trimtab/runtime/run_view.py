"""What a run says of itself, read-only, and its `with` block."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from trimtab.core.stop import StopReason
from trimtab.decide.accumulation import Noise
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.batch_control import BatchControl
from trimtab.runtime.consumed import Consumed
from trimtab.runtime.fixed_batch import FixedBatch
from trimtab.runtime.order import LoopOrder
from trimtab.runtime.precision import MixedPrecision
from trimtab.runtime.recovery import Recovery
from trimtab.runtime.stopping import StopTest


class RunView:
    """Counters and standing of a run, which is closed where its `with` block ends."""

    _auxiliary: list[Any]
    _consumed: Consumed
    _control: BatchControl | FixedBatch
    _order: LoopOrder
    _precision: MixedPrecision
    _recovery: Recovery
    _stopping: StopTest
    _weights: WindowWeights

    @property
    def loss_share(self) -> float | Tensor:
        """What the open window's mean loss is multiplied by, for its mean over ranks to be that of all their terms.

        Known once the window's last micro-batch was seen; 1.0 in one process. On ranks it waits for what the others
        say of their parts, as `unscale` and `step` do, and for no device.

        Raises:
            LoopError: the window's last micro-batch was not seen, or there is no window.
        """
        self._order.require_complete("run.loss_share")
        return self._weights.share

    @property
    def auxiliary(self) -> tuple[Any, ...]:
        """Auxiliary value of each micro-batch of the last window, for losses that return `(loss, auxiliary)`.

        None for a micro-batch without one. Tensors are detached. They are held until the next window begins: return
        metrics, not activations, where memory is scarce.
        """
        return tuple(self._auxiliary)

    @property
    def num_batches(self) -> int:
        """Loader batches of the next window; 1 unless the plan freed the batch, or `of_batches` said how many."""
        return self._control.num_batches

    @property
    def consumed_rows(self) -> int:
        """Samples seen, voided windows too."""
        return self._consumed.rows

    @property
    def num_windows(self) -> int:
        """Windows that are over, voided ones too."""
        return self._consumed.windows

    @property
    def applied_steps(self) -> int:
        """Optimizer steps taken."""
        return self._consumed.applied

    @property
    def micro_batch_limit(self) -> int | None:
        """Rows of a micro-batch that fit, on the rank that has least room, once memory ran out; None before."""
        return self._recovery.limit.rows

    @property
    def noise(self) -> Noise | None:
        """Gradient noise over the last windows, where the plan freed the batch; None before anything is known."""
        return self._control.noise

    @property
    def stop_reason(self) -> StopReason | None:
        """Which `Stop` condition was met; None while the run goes on."""
        return self._stopping.reason

    @property
    def loss_scale(self) -> float | None:
        """The fp16 loss scale; None under any other precision."""
        return self._precision.loss_scale

    def close(self, error: BaseException | None = None) -> None:
        """End the run, by an error or without one."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close(error)
