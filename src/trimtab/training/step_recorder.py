"""Writer of step records that does not delay training: scalars stay on the device until a block of steps is written."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trimtab.core.energy_reading import Energy
from trimtab.core.errors import SaveError, ValueGivenError
from trimtab.core.record import End, Evaluation, Event, RecordWriter, StepRecord
from trimtab.core.stateful import Load, Stateful, checked_state
from trimtab.core.stopping_rule import StopReason
from trimtab.energy.energy_meter import EnergyClock

_FLUSH_STEPS = 50
_ENERGY_S = 10.0  # Seconds between energy events; long compared with the work queued on a device.
_SCALARS = ("terms", "loss", "learning_rate", "grad_norm")  # Fields that may be on the device.
_Line = tuple[dict[str, Any], float] | Event | Evaluation


class StepRecorder(Stateful):
    """Collects lines for a `RecordWriter`, in order; reads device scalars every 50 steps and at close.

    Energy is read between windows, without waiting for the device, and excludes evaluations. At the end of a resumed
    run, the energy is that since the resume, recorded with the step of the resume.

    Args:
        writer: writes the lines.
        energy: energy clock, started here; None records no energy.

    Attributes:
        on_failure: called if due lines cannot be written; the lines are kept. None raises instead.
    """

    on_failure: Callable[[SaveError], None] | None = None

    def __init__(self, writer: RecordWriter, energy: EnergyClock | None = None) -> None:
        if not isinstance(writer, RecordWriter):
            raise ValueGivenError(
                "record",
                got=f"a {type(writer).__name__}",
                expected="a trimtab.RecordWriter",
                hint="Pass record=trimtab.RecordWriter(path, header).",
                code="record.not_writer",
            )
        self._writer = writer
        self._pending: deque[_Line] = deque()
        self._index = self._num_pending = 0
        self._train_s, self._last = 0.0, time.perf_counter()
        self._energy, self._energy_from = energy, 0
        self._is_refused = False
        if energy is not None:
            if not isinstance(energy, EnergyClock):
                raise ValueGivenError(
                    "energy",
                    got=f"a {type(energy).__name__}",
                    expected="a trimtab.energy.energy_meter.EnergyClock",
                    hint="Pass energy=EnergyClock(meter).",
                    code="energy.not_clock",
                )
            energy.start()

    def require_own(self) -> None:
        """Raise `FormatError` if a new run would overwrite a file that does not belong to it."""
        self._writer.require_own()

    def refuse(self) -> None:
        """Leave an unfinished file unchanged at close, after the run was refused."""
        self._is_refused = self._writer.is_open_ended

    def step(self, **values: Any) -> None:
        """Record one window: the fields of `StepRecord` but its index and time. Scalars may be on the device."""
        now = time.perf_counter()
        self._pending.append((values, now - self._last))
        self._train_s, self._last = self._train_s + now - self._last, now
        self._num_pending += 1
        if self._energy is not None:
            self._energy.tick()
            if self._energy.seconds >= _ENERGY_S:
                self.event("energy", _joules(self._energy.lap()))

    def stepped(self) -> None:
        """Write pending lines if due, at the end of a window; `SaveError` if this failed without `on_failure`."""
        if self._num_pending >= _FLUSH_STEPS:
            with self._failing():
                self.flush()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            if self.on_failure is None:
                raise
            self.on_failure(error)

    def event(self, name: str, detail: Mapping[str, Any]) -> None:
        """Record an event between the last window and the next."""
        self._pending.append(Event(name, self._index + self._num_pending, detail))

    def evaluation(self, rows: int, name: str, value: float) -> None:
        """Record an evaluation after `rows` samples. The time since the last window does not count as training time."""
        self._pending.append(Evaluation(rows, self._train_s, {name: value}))
        self._leave_out()

    def _leave_out(self) -> None:
        """Exclude the time and energy since the last window from training."""
        if self._energy is not None:
            self._energy.pause()
            self._energy.start()
        self._last = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Write pending lines and return the position in the record."""
        self.flush()
        return {"index": self._index, "train_s": self._train_s, "end": self._writer.end()}

    def loading(self, state: Any) -> Load:
        """Return a function that continues a record from a `state_dict()`.

        Raises:
            FormatError: the state is invalid; or, from the returned function, the record is another file or too short.
        """
        found = checked_state("state.record", state, integers=("index", "end"), numbers=("train_s",))

        def load() -> None:
            self._writer.keep(found["end"])
            self._index = self._energy_from = found["index"]
            self._train_s = found["train_s"]
            self._leave_out()
            self._pending.clear()
            self._num_pending = 0

        return load

    def flush(self) -> None:
        """Write pending lines; `SaveError` if the disk is full. Lines are kept, and each is written once."""
        self._hand_over()
        self._writer.flush()

    def _hand_over(self) -> None:
        while self._pending:
            line = self._pending.popleft()
            self._writer.write(self._read(*line) if isinstance(line, tuple) else line)

    def _read(self, values: dict[str, Any], wall_s: float) -> StepRecord:
        """Return a step's line. Synchronises."""
        read = values | {name: float(values[name]) for name in _SCALARS if values.get(name) is not None}
        index, self._index, self._num_pending = self._index, self._index + 1, self._num_pending - 1
        return StepRecord(index=index, wall_s=wall_s, **read)

    def close(self, reason: StopReason | None = None, error: BaseException | None = None) -> None:
        """Write pending lines and the reason of the run's end; the writer stays open for its owner.

        Raises:
            SaveError: writing failed and `on_failure` is None.
        """
        if self._is_refused:
            return
        self._hand_over()
        detail = {}
        if self._energy is not None:
            detail = _joules(self._energy.read()) | (
                {"energy_from_step": self._energy_from} if self._energy_from else {}
            )
            self._energy.pause()
        if error is not None:
            self._writer.write(End("error", detail | {"error": f"{type(error).__name__}: {error}"[:500]}))
        else:
            self._writer.write(End("closed" if reason is None else reason.value, detail))
        with self._failing():
            self._writer.flush()


def _joules(energy: Energy) -> dict[str, Any]:
    known = {"energy_j": energy.joules, "energy_s": energy.seconds, "energy": energy.provenance.value}
    return known if energy.joules is not None else known | {"energy_reason": energy.reason}
