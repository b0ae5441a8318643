"""Hooks of a run: optional parts that act at fixed points of a window. A disabled part is absent.

A run calls the hooks of an event in this order, a contract between the hooks:

1. `OutOfMemoryRetry` takes its snapshot first, before any other hook or the loop changes state.
2. `WideGradients` rounds fp32 gradients of half-precision weights before other hooks read the sum.
3. `BatchSizeController` measures a window from its first micro-batch to its end.
4. `LeftoverGradientChanges` compares the gradients with those that the run left.
5. `EvaluationMode` looks at the model's mode.
6. `RankSync` forgets the window only after the others have used the values agreed between ranks.
7. `EarlyStopping` may end the run.

Recording, skipped steps, the growth of micro-batches and the check of the loss are part of `Run.step`, around
`window_ends`: a record contains the window before the events caused by the end of the window, and an error of the check
comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from trimtab.losses import Count
from trimtab.training.window import AgreedWindow, Window


@dataclass(frozen=True)
class Outcome:
    """A finished window.

    Args:
        window: the window.
        agreed: its size over all ranks, and what ranks agreed on.
        counted: number of tokens over all ranks; None if the loss is a mean.
        applied: True if the optimizer stepped.
        grad_norm: gradient norm before clipping; None if it was not computed.
    """

    window: Window
    agreed: AgreedWindow
    counted: Count | None
    applied: bool
    grad_norm: Tensor | None


class Hook:
    """Base class of hooks. Each method is an event; the defaults do nothing and are never called."""

    def window_begins(self, window: Window) -> None:
        """Act before the first micro-batch, when gradients of the last window have been dropped."""

    def micro_batch_begins(self, rows: int, *, of_next: bool, last: bool) -> None:
        """Act before a micro-batch is given to the loop.

        Args:
            rows: samples of the micro-batch; 0 for padding.
            of_next: True if it is the first micro-batch of a loader batch.
            last: True if it is the window's last micro-batch.
        """

    def backward_begins(self) -> None:
        """Act after a micro-batch's forward, before its backward."""

    def backward_ends(self, rows: int, terms: Count) -> None:
        """Act after a micro-batch's backward; `terms` is its number of samples or tokens."""

    def step_begins(self, *, is_scaled: bool) -> None:
        """Act when the loop calls `step`; `is_scaled` is True if gradients still have a constant factor."""

    def gradient_complete(self, scale: float | Tensor) -> None:
        """Act on the complete gradient, multiplied by `scale`, before it is unscaled or clipped."""

    def window_ends(self, outcome: Outcome) -> None:
        """Act after the optimizer's step, or after the step was skipped."""

    def window_dropped(self) -> None:
        """Act after an open window was dropped."""


_Methods = tuple[Callable[..., None], ...]


class Hooks:
    """The hooks of a run: for each event, the methods to call in order. An event without hooks costs nothing."""

    def __init__(self, *hooks: Hook | None) -> None:
        self._hooks = [hook for hook in hooks if hook is not None]
        self._bind()

    def _bind(self) -> None:
        self.window_begins = self._of("window_begins")
        self.micro_batch_begins = self._of("micro_batch_begins")
        self.backward_begins = self._of("backward_begins")
        self.backward_ends = self._of("backward_ends")
        self.step_begins = self._of("step_begins")
        self.gradient_complete = self._of("gradient_complete")
        self.window_ends = self._of("window_ends")
        self.window_dropped = self._of("window_dropped")

    def _of(self, event: str) -> _Methods:
        default = getattr(Hook, event)
        return tuple(getattr(hook, event) for hook in self._hooks if getattr(type(hook), event) is not default)

    def remove(self, hook: Hook) -> None:
        """Remove a hook; also allowed while an event is handled."""
        self._hooks = [each for each in self._hooks if each is not hook]
        self._bind()


@dataclass(frozen=True)
class WindowDecision:
    """Composition of a window with an adaptive batch size. It depends on measured times, so a resumed run replays it.

    Args:
        num_batches: loader batches drawn.
        k: number of micro-batches decided, which sets the learning rate.
        is_cut: True if a single loader batch was split in two to measure the noise.
    """

    num_batches: int
    k: int
    is_cut: bool = False


class CheckpointHooks(Protocol):
    """Checkpoint manager of a run, implemented by `trimtab.checkpoint`. All ranks call it in the same windows."""

    def between(self) -> None:
        """Save a checkpoint or end the run if due; called between two windows."""

    def decided(self, index: int, window: WindowDecision) -> None:
        """Store the composition of window number `index`, before its first micro-batch."""

    def decided_before(self, index: int) -> WindowDecision | None:
        """Return the stored composition of window `index` from before a resume; None for later windows."""

    def save(self) -> None:
        """Save a checkpoint now."""

    def is_leaving(self) -> bool:
        """Return True if the run was asked to end and will end at the next `between`."""

    def close(self, error: BaseException | None = None) -> None:
        """Close the manager; `error` is the exception that ended the run, or None."""
