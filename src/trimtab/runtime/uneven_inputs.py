"""Uneven inputs: a rank without data joins other ranks' collectives with zero-weight micro-batches.

See `torch.distributed.algorithms.Join` for the same problem in DDP.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab.core.errors import BatchError
from trimtab.core.stopping_rule import StopReason
from trimtab.runtime.batch_splitting import BY_CONTAINERS, BatchSplitting
from trimtab.runtime.rank_sync import RankSync
from trimtab.runtime.window import Window, WindowCallbacks


class EmptyBatch:
    """Placeholder that a loader yields instead of a batch on a rank without samples of that batch."""


class UnevenInputs:
    """Keeps a micro-batch for padding, and asks other ranks whether they have more windows.

    The padding is the first usable micro-batch of an epoch, because a resumed run can draw it again.
    """

    def __init__(self, peers: RankSync, batching: BatchSplitting = BY_CONTAINERS) -> None:
        self._peers, self._batching = peers, batching
        self._kept: Any = None
        self._at_hand: Any = None
        self._has_good = self._is_of_pass = False
        self._wanted = 0

    @property
    def is_able(self) -> bool:
        """True if a padding micro-batch is available."""
        return self._kept is not None

    def begin_pass(self) -> None:
        """Begin an epoch; the previous padding is used until a window of this epoch has been applied."""
        self._is_of_pass = False

    def keep(self, batch: Any, rows: int, micro_batch: int) -> None:
        """Consider the first micro-batch of a batch as padding."""
        if self._peers.num_ranks > 1:
            self._peers.drew(batch)
            self._at_hand, _ = next(self._batching.slices(batch, rows, micro_batch))
            if not self._has_good:
                self._kept = self._at_hand

    def stepped(self, *, applied: bool) -> None:
        """End a window. Batches of skipped steps are not used as padding, because zero times NaN is NaN."""
        if applied and self._at_hand is not None and not self._is_of_pass:
            self._kept, self._has_good, self._is_of_pass = self._at_hand, True, True
        self._at_hand = None

    def goes_on(self, reason: StopReason | None) -> bool:
        """Return True if another rank has a window although this rank has none. Waits for all ranks.

        Args:
            reason: stop reason of this rank, which all ranks adopt after that window; None at the end of its data.
        """
        if self._peers.num_ranks == 1:
            return False
        self._wanted = self._peers.others_go_on(reason)
        return bool(self._wanted)

    def window(self, loop: WindowCallbacks, device: torch.device) -> Window:
        """Return a padding window.

        Raises:
            BatchError: this rank never had a batch.
        """
        if not self.is_able:
            raise BatchError(
                "loader",
                problem="The loader of this rank has no batch, but other ranks have batches.",
                got="no batch on this rank",
                hint="Give every rank at least one batch; trimtab.shard(loader) divides each batch among all ranks.",
                code="loader.empty_on_rank",
            )
        window = Window(loop, (), (), (), device)
        window.pad(self._kept, self._wanted)
        return window
