"""Comparison of compiled and uncompiled steps during training; compilation is turned off if it is slower."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from trimtab.decide.statistics import Interval, ratio_interval
from trimtab.measure.overhead_timer import stamp
from trimtab.measure.peak_memory import most_bytes
from trimtab.measure.step_timer import seconds_between, wait_for
from trimtab.runtime.compiled_call import CompiledCall

# Warm-up windows, in which kernels are compiled and selected, then pairs of a compiled and an uncompiled window. The
# first pair is discarded.
WARM_UP, PAIRS = 20, 12
WINDOWS = WARM_UP + 2 * PAIRS + 1  # Number of windows after which the check decides.
# The GPU must have this multiple of the peak memory so far, since an uncompiled model may hold activations that the
# compiler removes.
_MORE = 1.5
Note = Callable[[str, Mapping[str, Any]], None]


class CompileCheck:
    """Runs a few uncompiled windows, in pairs with compiled windows, and turns compilation off if it is slower.

    A window is the time between two optimizer steps, including the loop's own work. Pairs whose input shapes differ,
    for example because of an evaluation, are ignored. Each rank decides for itself. Uncompiled windows are not run if
    they may exceed memory, because the plan may fit only when compiled.

    Args:
        call: the compiled call of the model.
        note: called with an event's name and values.
    """

    def __init__(self, call: CompiledCall, optimizer: torch.optim.Optimizer, device: torch.device, note: Note) -> None:
        self._call, self._device, self._note = call, device, note
        self._stamps: list[float | torch.cuda.Event] = []
        self._host: list[float] = []
        self._work: list[tuple[torch.Size, ...]] = []
        self._gain: Interval | None = None
        self._is_decided = False
        call.shapes = []
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        if self._is_decided:
            return
        event = stamp(self._device)
        self._host.append(time.perf_counter())
        self._stamps.append(self._host[-1] if event is None else event)
        self._work.append(self._call.take_shapes())
        done = len(self._stamps)
        if done == WARM_UP and not self._has_room():
            self._is_decided, self._call.shapes = True, None
            self._note("compile_unchecked", {"reason": "the GPU may not have enough memory for an uncompiled step"})
            return
        self._call.is_on = _is_compiled_in(done)
        if done >= WINDOWS:
            self._is_decided, self._call.shapes = True, None
            self._decide()

    def _has_room(self) -> bool:
        """Return True if the device has memory for an uncompiled window."""
        if self._device.type != "cuda":
            return True
        return _MORE * torch.cuda.max_memory_allocated(self._device) <= most_bytes(self._device)

    def _decide(self) -> None:
        self._gain = self._measured()
        self._call.is_on = self._gain is None or self._gain.high >= 1
        if not self._call.is_on:
            self._note("account", self._figures() | {"pays": False})

    def _measured(self) -> Interval | None:
        """Return the interval of the speed ratio (uncompiled time over compiled time).

        Pairs with different input shapes are skipped. None if fewer than two pairs remain.
        """
        ratios = []
        wait_for(self._stamps[-1])  # The host may be many windows ahead of the device.
        for first in range(WARM_UP + 2, WARM_UP + 2 * PAIRS, 2):
            pair = {_is_compiled_in(i): seconds_between(*self._stamps[i - 1 : i + 1]) for i in (first, first + 1)}
            if self._work[first] == self._work[first + 1] and min(pair.values()) > 0:
                ratios.append(pair[False] / pair[True])
        return ratio_interval(ratios) if len(ratios) > 1 else None

    def _figures(self) -> dict[str, Any]:
        """Return cost (first compilation as a fraction of run time) and gain (fraction of step time saved)."""
        price, began = None, self._call.began
        if began is not None and len(self._host) > 2:
            usual = statistics.median(after - before for before, after in itertools.pairwise(self._host))
            price = max(0.0, self._host[0] - began - usual) / (time.perf_counter() - began)
        gain = None if self._gain is None else 1 - 1 / self._gain.mean
        return {"technique": "compile", "price": price, "gain": gain}

    def close(self) -> None:
        """End the check and record cost and gain, when the run closes."""
        self._hook.remove()
        self._note("account", self._figures())


def _is_compiled_in(window: int) -> bool:
    """Return True if window number `window` (from 0) runs compiled. The order alternates from pair to pair."""
    pair, second = divmod(window - WARM_UP, 2)
    return not 0 <= pair < PAIRS or second == pair % 2
