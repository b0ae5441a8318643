"""Iterator over a loader's windows, with a length if the loader has one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from trimtab.runtime.window import Window


class WindowIterator(Iterator[Window]):
    """Windows of one epoch.

    Args:
        windows: yields the windows. Dropping this object drops the generator, which ends the epoch, as `break` does.
        length: returns the number of windows; raises `TypeError` if the loader has no length.
    """

    def __init__(self, windows: Generator[Window, None, None], length: Callable[[], int]) -> None:
        self._windows, self._length = windows, length

    def __iter__(self) -> WindowIterator:
        return self

    def __next__(self) -> Window:
        return next(self._windows)

    def __len__(self) -> int:
        """Return the number of windows; an estimate if the number of batches per window changes.

        Raises:
            TypeError: the loader has no length.
        """
        return self._length()

    def __bool__(self) -> bool:
        return True  # The length may be unknown.

    def close(self) -> None:
        """End the epoch."""
        self._windows.close()
