"""Handlers for SIGTERM, SIGINT and SIGHUP: the run is saved after the current window; a second signal ends the process.

Python runs signal handlers between bytecodes, so a signal is noticed only after the current torch call. A thread woken
through a wakeup descriptor could react earlier, but forked workers write to that descriptor too, and newer Python
versions warn about a fork in a process with threads.

A signal to the process group also ends the data loader's workers, and torch then raises in the middle of a window.
Therefore SIGCHLD is held back from torch between the first signal and the end of the run.
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

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # nohup ignores SIGHUP, and an ignored signal stays ignored
_SAME_S = 0.1  # `timeout` signals its child and then the child's group, which must count as one signal


class Signals:
    """Signal handlers of a run, installed in the main thread only.

    A handler of the user still runs when the first signal arrives. A handler installed later may chain to this handler
    after the run is closed; it then behaves like the handler that was installed before.

    Attributes:
        came: First signal received, or None.
    """

    _at_work: ClassVar[WeakSet[Signals]] = WeakSet()  # handlers of runs that are not closed

    def __init__(self) -> None:
        self.came: signal.Signals | None = None
        self._at_s = 0.0
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._of_children: Any = None
        self._has_child_died = self._has_left = False

    def install(self) -> None:
        """Install the handlers, except for ignored signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)
                Signals._at_work.add(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before_of(number)
        would_end = not callable(before) or before is signal.default_int_handler
        if os.getpid() != self._pid:
            # A forked process. A loader's worker ignores SIGINT, because the window needs its data: the loader ends the
            # worker, or the worker notices that the loader is gone.
            if before is not signal.default_int_handler or get_worker_info() is None:
                _do(before, number, frame)
        elif self not in Signals._at_work:
            # This run is closed, and a later handler calls this one. An open run decides about the end of the process.
            if not (would_end and Signals._at_work):
                _do(before, number, frame)
        elif self.came is None:
            self.came, self._at_s = signal.Signals(number), time.monotonic()
            self._quieten()
            if not would_end:
                before(number, frame)
        elif time.monotonic() - self._at_s > _SAME_S:
            _end_by(number)  # end now, without waiting for the window

    def _before_of(self, number: int) -> Any:
        """Return the previous handler, looking through the handlers of closed runs."""
        before = self._before[number]
        of = getattr(before, "__self__", None)
        return of._before_of(number) if isinstance(of, Signals) and of not in Signals._at_work else before

    def _quieten(self) -> None:
        """Hold SIGCHLD back from torch's handler, which would raise an error."""
        before = signal.getsignal(signal.SIGCHLD)
        if callable(before):
            self._of_children = before
            signal.signal(signal.SIGCHLD, self._child_died)

    def _child_died(self, number: int, frame: FrameType | None) -> None:
        self._has_child_died = True

    def restore(self) -> None:
        """Restore the previous handlers, unless another handler was installed meanwhile."""
        for number in self._before:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._before_of(number))
        Signals._at_work.discard(self)
        before, self._of_children = self._of_children, None
        if before is not None and signal.getsignal(signal.SIGCHLD) == self._child_died:
            signal.signal(signal.SIGCHLD, before)
            if self._has_child_died:
                with contextlib.suppress(RuntimeError):  # torch raises for the dead worker, but the run is already over
                    before(signal.SIGCHLD, None)

    def leave(self) -> None:
        """End the process as the signal would: KeyboardInterrupt for SIGINT, else exit status 128 + signal number.

        If only another rank received a signal, the exit status is SIGTERM's.

        Raises:
            KeyboardInterrupt, SystemExit: Always one of them.
        """
        self._has_left = True
        if self.came is signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.came or signal.SIGTERM))

    def leave_late(self) -> None:
        """Leave if a signal arrived after the last window and `leave` was not called yet."""
        if self.came is not None and not self._has_left:
            self.leave()


def _do(handler: Any, number: int, frame: FrameType | None) -> None:
    """Call a handler, or end the process if the handler is the default."""
    if callable(handler):
        handler(number, frame)
    else:
        _end_by(number)


def _end_by(number: int) -> None:
    """End the process by the default action of a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
