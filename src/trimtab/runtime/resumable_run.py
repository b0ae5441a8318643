"""State of a run for checkpoints, in addition to model, optimizer and data position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.core.plan import Plan
from trimtab.core.stateful import Load, loading_parts
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.batch_size_controller import BatchSizeController
from trimtab.runtime.early_stopping import EarlyStopping
from trimtab.runtime.fixed_batch_size import FixedBatchSize
from trimtab.runtime.muon import Momentum
from trimtab.runtime.nonfinite import Cause, NonFinitePolicy
from trimtab.runtime.oom_retry import OutOfMemoryRetry
from trimtab.runtime.precision import MixedPrecision, in_place
from trimtab.runtime.training_progress import TrainingProgress


class ResumableRun:
    """Base class of `Run` with its `state_dict` and `load_state_dict`."""

    _consumed: TrainingProgress
    _voids: NonFinitePolicy
    _stopping: EarlyStopping
    _weights: WindowWeights
    _recovery: OutOfMemoryRetry
    _control: BatchSizeController | FixedBatchSize
    _precision: MixedPrecision
    plan: Plan
    model: nn.Module
    _optimizer: torch.optim.Optimizer

    @property
    def stepped_by(self) -> torch.optim.Optimizer:
        """The optimizer that steps: the user's, or its sharded replacement, whose groups contain all parameters."""
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts of the run: counters, precision, memory limit, adaptive batch size and more.

        All values are plain numbers, except the momentum tensors of a plan with Muon.
        """
        return {name: part.state_dict() for name, part in self._parts()}

    def report_nonfinite(self, what: str) -> None:
        """Warn or raise, by the run's policy, because a value has become non-finite.

        Args:
            what: description for the message, such as "NaN or infinity in parameter fc.weight".

        Raises:
            NonFiniteError: the policy is "error" or "stop".
        """
        self._voids.report(what)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict()`.

        Raises:
            UsageError: the state is invalid, or was saved under another plan or precision; nothing was changed.
        """
        self.loading(state)()

    def loading(self, state: Any) -> Load:
        """Return a function that restores a `state_dict()`; raises as `load_state_dict`."""
        load_parts = loading_parts(dict(self._parts()), state)

        def load() -> None:
            load_parts()
            self._note_precision(Cause("precision.resumed", "the checkpointed run had left it"))

        return load

    def _parts(self) -> Iterator[tuple[str, Any]]:
        yield from (("consumed", self._consumed), ("voids", self._voids), ("stop", self._stopping))
        yield from (("weights", self._weights), ("memory", self._recovery.limit))
        if isinstance(self._control, BatchSizeController):
            yield "batch", self._control
        if self.plan.optimizer.value == "muon":
            yield "muon", Momentum(self.model, self._optimizer)
        yield "precision", self._precision

    def _note_precision(self, cause: Cause) -> None:
        """Update plan and record if the precision in use differs from the plan."""
        before, after = self.plan.precision.value, self._precision.name
        if before != after:
            self.plan = in_place(self.plan, after, cause.reason)
            self.note("precision", {"from": before, "to": after, "code": cause.code, "reason": cause.reason})

    def note(self, name: str, detail: Mapping[str, Any]) -> None:
        """Add an event to the run's record."""
        raise NotImplementedError
