"""SIGTERM, SIGINT and SIGHUP while a run is kept: it is saved and left where the window is over; a second one ends it.

Either is seen where the interpreter next runs, not before a call of torch is over. A thread that a wakeup descriptor
rouses could end it then; but forked workers write to that too, and newer Pythons warn of a fork beside a thread.

Who signals a whole group signals the loader's workers too, and torch raises in the middle of a window where one of them
has died. From the first signal on it is not told of that, until the run is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakSet

from torch.utils.data import get_worker_info

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # nohup has the last ignored, and so it stays
_SAME_S = 0.1  # `timeout` signals its child, and then the group that it is in


class Signals:
    """Handlers of a run. They are installed in the main thread alone; elsewhere nothing is.

    A handler of the user's own is called when the signal comes, as it would be without this. One that was installed
    later may call these after the run is closed: they do then as what was there before them.

    Attributes:
        came: the first signal there was, or None.
    """

    _at_work: ClassVar[WeakSet[Signals]] = WeakSet()  # of runs that are not closed

    def __init__(self) -> None:
        self.came: signal.Signals | None = None
        self._at_s = 0.0
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._of_children: Any = None
        self._has_child_died = self._has_left = False

    def install(self) -> None:
        """Handle the signals, but those that the process was told to ignore."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)
                Signals._at_work.add(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            self._handle_in_child(number, frame)
        elif self not in Signals._at_work:
            self._handle_late(number, frame)
        elif self.came is None:
            self.came, self._at_s = signal.Signals(number), time.monotonic()
            self._quieten()
            before = self._before_of(number)
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)
        elif time.monotonic() - self._at_s > _SAME_S:
            _end_by(number)  # whatever is left of the window

    def _handle_late(self, number: int, frame: FrameType | None) -> None:
        """Do as it would without this run; but what ends at once is left to another that is kept: it saves first."""
        before = self._before_of(number)
        ends = not callable(before) or before is signal.default_int_handler
        if not (ends and Signals._at_work):
            _do(before, number, frame)

    def _handle_in_child(self, number: int, frame: FrameType | None) -> None:
        """Do in a forked process as it would without this; but a loader's worker draws on, for the window under way."""
        before = self._before_of(number)
        if before is signal.default_int_handler and get_worker_info() is not None:
            return  # its loader ends it, and it sees for itself when there is none
        _do(before, number, frame)

    def _before_of(self, number: int) -> Any:
        """Return what was there before; of runs that are closed, what was there before them."""
        before = self._before[number]
        of = getattr(before, "__self__", None)
        return of._before_of(number) if isinstance(of, Signals) and of not in Signals._at_work else before

    def _quieten(self) -> None:
        """Keep the deaths of children from who would raise at them."""
        before = signal.getsignal(signal.SIGCHLD)
        if callable(before):
            self._of_children = before
            signal.signal(signal.SIGCHLD, self._child_died)

    def _child_died(self, number: int, frame: FrameType | None) -> None:
        self._has_child_died = True

    def restore(self) -> None:
        """Put the handlers back that were there, where they are still these."""
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._before_of(number))
        Signals._at_work.discard(self)
        before, self._of_children = self._of_children, None
        if before is not None and signal.getsignal(signal.SIGCHLD) == self._child_died:
            signal.signal(signal.SIGCHLD, before)
            if self._has_child_died:
                with contextlib.suppress(RuntimeError):  # of a worker's end, which the run has outlived
                    before(signal.SIGCHLD, None)

    def leave(self) -> None:
        """End the process's run as the signal would have: by KeyboardInterrupt, or an exit of 128 and its number.

        Where none came here, but to another rank, as SIGTERM would.

        Raises:
            KeyboardInterrupt, SystemExit: as said.
        """
        self._has_left = True
        if self.came is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.came or signal.SIGTERM))

    def leave_late(self) -> None:
        """Leave, where a signal came after the last window and nothing has been left for it."""
        if self.came is not None and not self._has_left:
            self.leave()


def _do(handler: Any, number: int, frame: FrameType | None) -> None:
    """Do as a handler would that is in place."""
    if callable(handler):
        handler(number, frame)
    else:
        _end_by(number)


def _end_by(number: int) -> None:
    """End the process by a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
