"""Writes step records without holding the loop up: scalars stay on the device until a block of steps is flushed."""

from __future__ import annotations

import time

from torch import Tensor

from trimtab.core.errors import ValueGivenError
from trimtab.core.record import RecordWriter, StepRecord

Scalar = Tensor | float | int
_FLUSH_STEPS = 50


class Recorder:
    """Collects one line per window for a `RecordWriter`; reads device scalars every 50 steps and at close."""

    def __init__(self, writer: RecordWriter) -> None:
        if not isinstance(writer, RecordWriter):
            raise ValueGivenError(
                "record", given=f"a {type(writer).__name__}", expected="a trimtab.RecordWriter(path, header)"
            )
        self._writer = writer
        self._pending: list[tuple[int, Scalar, Scalar, Scalar, float, bool, Scalar | None, float | None]] = []
        self._index = 0
        self._last = time.perf_counter()

    def step(
        self,
        rows: int,
        terms: Scalar,
        loss: Scalar,
        rate: Scalar,
        applied: bool,
        grad_norm: Scalar | None,
        loss_scale: float | None,
    ) -> None:
        """Note one window."""
        now = time.perf_counter()
        self._pending.append((rows, terms, loss, rate, now - self._last, applied, grad_norm, loss_scale))
        self._last = now
        if len(self._pending) >= _FLUSH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write what is pending."""
        for rows, terms, loss, rate, wall_s, applied, norm, scale in self._pending:
            grad_norm = None if norm is None else float(norm)
            self._writer.write(
                StepRecord(self._index, rows, float(terms), float(loss), float(rate), wall_s, applied, grad_norm, scale)
            )
            self._index += 1
        self._pending.clear()
        self._writer.flush()

    def close(self) -> None:
        """Write what is pending; the writer stays open for its owner."""
        self.flush()
