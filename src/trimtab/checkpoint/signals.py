"""SIGTERM and SIGINT while a run is kept: the run is saved and left where the window is over; a second one ends it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Handlers of a run. They are installed in the main thread alone; elsewhere nothing is.

    A handler of the user's own is called when the signal comes, as it would be without this.

    Attributes:
        came: the first signal there was, or None.
    """

    def __init__(self) -> None:
        self.came: signal.Signals | None = None
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals, but those that the process was told to ignore."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.came is not None or os.getpid() != self._pid:  # at once, whatever runs; a forked child keeps nothing
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.came = signal.Signals(number)
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def restore(self) -> None:
        """Put the handlers back that were there, where they are still these."""
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before.clear()

    def leave(self) -> None:
        """End the process's run as the signal would have: by KeyboardInterrupt, or an exit of 128 and its number.

        Where none came here, but to another rank, as SIGTERM would.

        Raises:
            KeyboardInterrupt, SystemExit: as said.
        """
        if self.came is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.came or signal.SIGTERM))
