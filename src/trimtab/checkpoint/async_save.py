"""Background saves: one at a time, and a failure is always raised or warned about."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class AsyncSaver:
    """Worker thread for saves, created at the first save. Callers pass copies of the state that no longer change."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Wait for the previous save, then start the next. If the previous save failed, raise the error instead."""
        self.wait()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="trimtab-checkpoint")
        self._under_way = self._pool.submit(write)

    def wait(self) -> None:
        """Wait for the save in progress. An error of the save is raised once."""
        under_way = self._under_way
        if under_way is None:
            return
        try:
            under_way.result()
        finally:
            if under_way.done():  # a signal may have ended the wait but not the save
                self._under_way = None

    def end(self) -> None:
        """End the thread after the save in progress. A later `wait` still raises an error of the save."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __del__(self) -> None:
        under_way = self._under_way
        if under_way is not None and under_way.done() and (error := under_way.exception()) is not None:
            message = f"A background save failed, and the run was never closed to raise the error: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=1)
