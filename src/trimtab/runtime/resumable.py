"""What a resumed run needs beside model, optimizer and the data's position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.core.plan import Plan
from trimtab.core.state_parts import Load, loading_parts
from trimtab.runtime.accumulation import WindowWeights
from trimtab.runtime.batch_control import BatchControl
from trimtab.runtime.consumed import Consumed
from trimtab.runtime.fixed_batch import FixedBatch
from trimtab.runtime.muon import Momentum
from trimtab.runtime.precision import MixedPrecision, in_place
from trimtab.runtime.recovery import Recovery
from trimtab.runtime.stopping import StopTest
from trimtab.runtime.voids import Voids


class Resumable:
    """A run's state."""

    _consumed: Consumed
    _voids: Voids
    _stopping: StopTest
    _weights: WindowWeights
    _recovery: Recovery
    _control: BatchControl | FixedBatch
    _precision: MixedPrecision
    plan: Plan
    model: nn.Module
    _optimizer: torch.optim.Optimizer

    @property
    def stepped_by(self) -> torch.optim.Optimizer:
        """What steps: the user's optimizer, or what shares it out between ranks; its groups have every parameter."""
        return self._optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return counters, the precision in use and its loss scaler, k with its averages, limits in force, momentum.

        And terms a row, where a loss counts them. Plain numbers, but for the momentum of a plan with Muon: tensors.
        """
        return {name: part.state_dict() for name, part in self._parts()}

    def report_nonfinite(self, what: str) -> None:
        """Warn that something has become non-finite, or raise, by the run's policy.

        Args:
            what: for a person, such as "NaN or infinity in parameter fc.weight".

        Raises:
            NonFiniteError: the policy is "error" or "stop".
        """
        self._voids.report(what)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`.

        Raises:
            UsageError: not such a state, or one saved under another plan or precision; nothing was changed.
        """
        self.loading(state)()

    def loading(self, state: Any) -> Load:
        """Return what continues from `state_dict()`; errors as there."""
        load_parts = loading_parts(dict(self._parts()), state)

        def load() -> None:
            load_parts()
            self._note_precision("it was left before")

        return load

    def _parts(self) -> Iterator[tuple[str, Any]]:
        yield from (("consumed", self._consumed), ("voids", self._voids), ("stop", self._stopping))
        yield from (("weights", self._weights), ("memory", self._recovery.limit))
        if isinstance(self._control, BatchControl):
            yield "batch", self._control
        if self.plan.optimizer.value == "muon":
            yield "muon", Momentum(self.model, self._optimizer)
        yield "precision", self._precision

    def _note_precision(self, reason: str) -> None:
        """Say in plan and record that another precision is computed in than planned."""
        before, after = self.plan.precision.value, self._precision.name
        if before != after:
            self.plan = in_place(self.plan, after, reason)
            self.note("precision", {"from": before, "to": after, "reason": reason})

    def note(self, name: str, detail: Mapping[str, Any]) -> None:
        """Record something that happened."""
        raise NotImplementedError
