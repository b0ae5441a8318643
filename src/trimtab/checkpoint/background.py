"""A save beside the training: one at a time, and its failure is never lost."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """One thread, made with the first save. What is written must not change meanwhile: it is the caller's copy."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Have something written, once what was before it is; raises what that failed with, and begins nothing then."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="trimtab-checkpoint")
        self._under_way = self._pool.submit(write)

    def wait(self) -> None:
        """Wait for what is written; raises what it failed with, once."""
        under_way = self._under_way
        if under_way is None:
            return
        try:
            under_way.result()
        finally:
            if under_way.done():  # a signal may have ended the wait, and not the save
                self._under_way = None

    def end(self) -> None:
        """End the thread, once nothing is under way; a failure is still there for `wait`."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __del__(self) -> None:
        under_way = self._under_way
        if under_way is not None and under_way.done() and (error := under_way.exception()) is not None:
            warnings.warn(f"A checkpoint failed, and nobody asked: {error}", RuntimeWarning, stacklevel=1)
