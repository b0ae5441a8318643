"""One gradient reduction a window: ranks wait for each other in its last micro-batch alone."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.runtime.optimizers import drop_gradients


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` that a model is, or wraps, as a compiled one does; None without one."""
    return next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)


class GradientSync:
    """Keeps a `DistributedDataParallel` from reducing before the last micro-batch; nothing to do for other models.

    Set before each forward: DDP decides there whether the backward will reduce.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = data_parallel(model)
        self._skipping = contextlib.ExitStack()
        self._has_begun = self._is_settled = False

    def begin(self, *, last: bool) -> None:
        """A micro-batch is about to be handed out."""
        if self._model is not None:
            self._has_begun = True
            self._skipping.close()
            if not last:
                self._skipping.enter_context(self._model.no_sync())

    def end(self) -> None:
        """The window was given up."""
        self._skipping.close()

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Between two windows: after the first, have DDP lay out its buckets anew, which every rank has to do at once.

        By itself it does so in its next forward, where a rank without data comes only once it knows that others go on.
        """
        if self._model is None or self._is_settled or not self._has_begun:
            return
        self._is_settled = True
        drop_gradients(optimizer)  # which hold the old buckets
        self._model.reducer._rebuild_buckets()
