"""Errors of loops that call the methods of a run out of order."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from trimtab.core.errors import LoopError, ValueGivenError

BACKWARD = "Call run.backward(loss) once for every micro-batch, inside `for micro in window`."

_LOOP = "Write `for window in run.windows(loader): run.train_step(window, loss_fn)`."


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
        hint=BACKWARD + " Replace loss.backward() by run.backward(loss).",
        code="loop.backward_missing",
    )


class WindowAttributeError(LoopError, AttributeError):
    """A window was used as a batch, by an attribute that windows do not have."""


def window_as_batch(use: str, kind: type[LoopError] = LoopError) -> LoopError:
    """Return the error for a window that is used as a batch: unpacked, indexed or passed to a model."""
    return kind(
        "window",
        problem=f"A window was used as a batch: {use}.",
        hint=f"{_LOOP} Or take the batches of the window with `for micro in window`.",
        code="loop.window_as_batch",
    )


def require_loader(loader: Any) -> None:
    """Raise `LoopError` for objects that can be iterated but are no loader."""
    remedies = {
        enumerate: "Write enumerate(run.windows(loader)).",
        TensorDataset: "It yields single samples. Pass DataLoader(dataset, batch_size=...).",
        Tensor: "Pass a DataLoader, or a list of batches. To train on one batch, use run.window(batch).",
        dict: "Pass a DataLoader, or a list of batches. To train on one batch, use run.window(batch).",
    }
    for kind, hint in remedies.items():
        if isinstance(loader, kind):
            raise LoopError(
                "loader",
                got=f"a {type(loader).__name__}",
                expected="an iterable of batches, such as a DataLoader",
                hint=hint,
                code="loop.not_a_loader",
            )


def not_a_window(window: Any, *, is_window: bool) -> LoopError:
    """Return the error for a window that the run did not make."""
    return LoopError(
        "window",
        got="a window of another run" if is_window else f"a {type(window).__name__}",
        expected="a window of this run",
        hint=f"{_LOOP} For a batch without a loader, use run.train_step(run.window(batch), loss_fn).",
        code="loop.not_a_window",
    )
