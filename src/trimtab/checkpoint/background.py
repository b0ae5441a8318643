"""A save beside the training: one at a time, from a copy, and its failure is never lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor


class Background:
    """One thread, made with the first save."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Have something written; what was before it is over."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="trimtab-checkpoint")
        self._under_way = self._pool.submit(write)

    def wait(self) -> None:
        """Wait for what is written; raises what it failed with."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def end(self) -> None:
        """End the thread, once nothing is under way."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def copied(self, state: Any) -> Any:
        """Return a state whose tensors the training does not change, on the host."""
        copies: dict[int, Tensor] = {}  # one of each, so that what is tied is written once

        def copy(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in copies:
                    copies[id(value)] = value.detach().to("cpu", copy=True)
                return copies[id(value)]
            if isinstance(value, Mapping):
                return {key: copy(each) for key, each in value.items()}
            return type(value)(map(copy, value)) if type(value) in (list, tuple) else value

        return copy(state)
