"""A run's passes over a loader: windows drawn one by one, which is where a run can be kept and gone on with."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trimtab.core.stop import StopReason
from trimtab.runtime.backend import Backend
from trimtab.runtime.batch_control import BatchControl
from trimtab.runtime.data_position import DataPosition
from trimtab.runtime.fixed_batch import FixedBatch
from trimtab.runtime.joining import Joining, NoRows
from trimtab.runtime.keeping import Keeper
from trimtab.runtime.order import LoopOrder
from trimtab.runtime.peers import Peers
from trimtab.runtime.recorder import Recorder
from trimtab.runtime.run_view import RunView
from trimtab.runtime.window import Window


class Passes(RunView):
    """How a run draws its windows."""

    _backend: Backend
    _control: BatchControl | FixedBatch
    _device: torch.device
    _joining: Joining
    _keeper: Keeper
    _order: LoopOrder
    _peers: Peers
    _recorder: Recorder | None
    _position: DataPosition

    @property
    def passes(self) -> int:
        """Passes over the loader that are over, before the run was gone on with too."""
        return self._position.passes

    @property
    def position(self) -> DataPosition:
        """Where the run is in its data."""
        return self._position

    @property
    def recorder(self) -> Recorder | None:
        """What writes the run's record, if it has one."""
        return self._recorder

    def checkpoint(self) -> None:
        """Save the run as it is between two windows, whether that is due or not.

        Raises:
            ValueGivenError: it was started without checkpoints. LoopError: a window is open. OSError: it failed.
        """
        self._require_open()
        self._order.require_idle("run.checkpoint")
        self._keeper.save()

    def interrupt(self) -> None:
        """Have the run end where it can be gone on with: here, or of several ranks after their next window."""
        self._stopping.asked = StopReason.INTERRUPTED
        if self._peers.num_ranks == 1:
            self._stopping.adopt(StopReason.INTERRUPTED)

    def windows(self, loader: Iterable[Any]) -> Iterator[Window]:
        """Yield windows of the loader's batches, one optimizer step each: of one, or several where the plan freed it.

        Ends early where a `Stop` condition is met. Of a run that is gone on with, the first call yields what was left
        of the pass that was under way; `run.passes` says how many were over before it.

        Raises:
            LoopError: a window was opened and neither stepped nor discarded; the last one too.
        """
        batches = self._position.batches(loader)
        self._joining.begin_pass()
        while True:
            self._require_open()
            self._order.require_idle("run.windows")
            self._keeper.between()
            self._backend.settle()
            with self._control.drawing():
                drawn = [] if self.stop_reason else list(itertools.islice(batches, self.num_batches))
            self._trained_before(self._position.taken_first())
            if own := [batch for batch in drawn if not isinstance(batch, NoRows)]:
                yield self.window(*own)
            elif self._joining.goes_on(self.stop_reason):
                if not self._joining.is_able:
                    self._trained_before(self._position.drawn_anew())
                yield self._joining.window(self, self._device)
            elif not drawn:
                break
        self._position.over()
        self._order.require_stepped("run.windows")

    def window(self, *batches: Any) -> Window:
        """Return batches as a window."""
        raise NotImplementedError

    def _trained_before(self, batch: Any) -> None:
        """Take a batch, where there is one, for that of a window that was stepped before the run was gone on with."""
        if batch is not None and self._peers.num_ranks > 1:
            self.window(batch)
            self._joining.stepped(applied=True)

    def _require_open(self) -> None:
        """Raise where the run is closed."""
        raise NotImplementedError
