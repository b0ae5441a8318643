"""One gradient reduction a window: ranks wait for each other in its last micro-batch alone."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` that a model is, or wraps, as a compiled one does; None without one."""
    return next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)


class GradientSync:
    """Keeps a `DistributedDataParallel` from reducing before the last micro-batch; nothing to do for other models.

    Set before each forward: DDP decides there whether the backward will reduce.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = data_parallel(model)
        self._skipping, self._is_settled = contextlib.ExitStack(), False

    def begin(self, *, last: bool) -> None:
        """A micro-batch is about to be handed out."""
        if self._model is not None:
            self._skipping.close()
            if not last:
                self._skipping.enter_context(self._model.no_sync())

    def end(self) -> None:
        """The window was given up."""
        self._skipping.close()

    def stepped(self) -> None:
        """A window was stepped: after the first, have DDP lay out its buckets anew now, with the other ranks.

        It would in its next forward, where a rank without data does not come before it knows that others go on.
        """
        if self._model is not None and not self._is_settled:
            self._model.reducer._rebuild_buckets()
            self._is_settled = True
