"""A rank whose data are at their end, in a window of ranks that have more: it joins with what weighs nothing."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.core.errors import BatchError
from trimtab.core.stop import StopReason
from trimtab.runtime.batching import BY_CONTAINERS, Batching
from trimtab.runtime.peers import Peers
from trimtab.runtime.window import Loop, Window


class NoRows:
    """Of a batch of all ranks, the rows of one that has none of it: in place of a batch, in a loader."""


class Joining:
    """Knows whether others go on, and keeps a micro-batch to join them with: the first of a pass that is fit.

    The first, as it is at hand again, whatever place of the pass a run is gone on with from.
    """

    def __init__(self, peers: Peers, batching: Batching = BY_CONTAINERS) -> None:
        self._peers, self._batching = peers, batching
        self._kept: Any = None
        self._at_hand: Any = None
        self._has_good = self._is_of_pass = False
        self._wanted = 0

    @property
    def is_able(self) -> bool:
        """Whether there is a micro-batch to join with."""
        return self._kept is not None

    def begin_pass(self) -> None:
        """Another pass begins; until a window of it is over the micro-batch of the one before serves."""
        self._is_of_pass = False

    def keep(self, batch: Any, rows: int, micro_batch: int) -> None:
        """A window is made of a batch: its first micro-batch may be needed again."""
        if self._peers.num_ranks > 1:
            self._peers.drew(batch)
            self._at_hand, _ = next(self._batching.slices(batch, rows, micro_batch))
            if not self._has_good:
                self._kept = self._at_hand

    def stepped(self, *, applied: bool) -> None:
        """A window is over; of a void one nothing is used again, as no weight makes nothing of what is no number."""
        if applied and self._at_hand is not None and not self._is_of_pass:
            self._kept, self._has_good, self._is_of_pass = self._at_hand, True, True
        self._at_hand = None

    def goes_on(self, reason: StopReason | None) -> bool:
        """Return whether another rank has a window, though this one has none; waits for them to say.

        Args:
            reason: why this rank stops, which all then do after that window; None: its data are at their end.
        """
        if self._peers.num_ranks == 1:
            return False
        self._wanted = self._peers.others_go_on(reason)
        return bool(self._wanted)

    def window(self, loop: Loop, device: torch.device) -> Window:
        """Return the window to join the others in.

        Raises:
            BatchError: there was never a batch to join with.
        """
        if not self.is_able:
            raise BatchError(
                "loader",
                given="no batch on this rank, and some on others",
                expected="a batch on every rank at least",
                way_out="trimtab.shard(loader) deals each batch of a loader out to all ranks.",
            )
        window = Window(loop, (), (), (), device)
        window.pad(self._kept, self._wanted)
        return window
