"""Errors of loops that call the methods of a run out of order."""

from __future__ import annotations

from typing import Any

from trimtab.core.errors import LoopError, LossError, ValueGivenError

BACKWARD = "Call run.backward(loss) once for every micro-batch, inside `for micro in window`."


def run_closed() -> LoopError:
    """Return the error for a call on a closed run."""
    hint = "Call trimtab.start again to train further."
    return LoopError("run", problem="The run is closed.", hint=hint, code="run.closed")


def unscaled_twice() -> LoopError:
    """Return the error for a second `run.unscale` in a window."""
    return LoopError(
        "run.unscale",
        got="a second call",
        expected="one call per step",
        hint="Call run.unscale() once, after the step's last run.backward(loss).",
        code="loop.unscaled_twice",
    )


def batch_size_adaptive(num_batches: int) -> LoopError:
    """Return the error for `run.of_batches` under a plan that adapts the batch size."""
    return LoopError(
        "run.of_batches",
        problem=f"run.of_batches({num_batches}) was called, but the plan adapts the number of batches per step.",
        hint='Remove the call, or make the plan without adapt="batch".',
        code="loop.batch_adaptive",
    )


def position_unknown() -> LoopError:
    """Return the error for a window made by hand in a run with checkpoints."""
    return LoopError(
        "run.window",
        problem="run.window(batch) does not track the data position, which a run with checkpoints saves.",
        hint="Iterate over run.windows(loader), or start the run without checkpoints.",
        code="loop.position_unknown",
    )


def no_checkpoints() -> ValueGivenError:
    """Return the error for saving in a run without checkpoints."""
    return ValueGivenError(
        "run.checkpoint",
        problem="run.checkpoint() was called, but the run has no checkpoint folder.",
        hint="Pass checkpoints=Checkpoints(folder) to trimtab.start.",
        code="checkpoints.not_configured",
    )


def window_ended() -> LoopError:
    """Return the error for a loop that continues over a window that was dropped."""
    return LoopError(
        "window",
        problem="The loop continued over a window that run.discard() or an error had ended.",
        hint="Leave `for micro in window` with break, and continue with the next window.",
        code="loop.window_ended",
    )


def backward_missing() -> LoopError:
    """Return the error for a micro-batch without `run.backward`."""
    return LoopError(
        "window",
        problem="The next micro-batch was requested before run.backward(loss) was called for the current micro-batch.",
        hint=BACKWARD + " Do not convert a window to a list.",
        code="loop.backward_missing",
    )


def not_a_window(window: Any, *, is_window: bool) -> LoopError:
    """Return the error for a window that the run did not make."""
    return LoopError(
        "window",
        got="a window of another run" if is_window else f"a {type(window).__name__}",
        expected="a window of this run",
        hint="Take windows from run.windows(loader), or make one with run.window(batch).",
        code="loop.not_a_window",
    )


def not_callable(loss_fn: Any) -> LossError:
    """Return the error for a loss function that cannot be called."""
    return LossError(
        "loss_fn",
        got=f"a {type(loss_fn).__name__}",
        expected="a function loss_fn(model, batch)",
        hint="Pass a function that returns the loss of a batch.",
        code="loss_fn.not_callable",
    )
