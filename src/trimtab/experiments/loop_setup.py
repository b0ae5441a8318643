"""Functions `setup(seed)` that build a training loop: calling them, observing the loop's precision, and planning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trimtab.api import plan as make_plan
from trimtab.core.errors import LoopError, TrimtabError, ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, Reference
from trimtab.experiments.loops import DataStream, Loop, plain_steps, seed_everything
from trimtab.experiments.trainer_loops import loop_of_trainer
from trimtab.plans.plan import Plan
from trimtab.profiling.measurement_notes import describe
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData
from trimtab.training.batch import to_device

Setup = Callable[[int], Any]
_OBSERVED_STEPS = 2


def build(setup: Setup, seed: int, name: str = "setup") -> Loop:
    """Return the loop built by `setup(seed)`, with all random generators seeded before the call.

    Raises:
        ValueGivenError: `setup` is not callable, or returns neither a loop nor a trainer.
        LoopError: `setup` raises, chained to the original error.
    """
    if not callable(setup):
        raise ValueGivenError(
            name,
            got=f"a {type(setup).__name__}",
            expected="a function setup(seed) that returns a trimtab.Loop",
            code="setup.not_callable",
        )
    seed_everything(seed)
    try:
        found = setup(seed)
    except Exception as error:
        raise LoopError(
            name,
            problem=f"{name}({seed}) raised {describe(error).rstrip('.')}.",
            hint="Call it yourself with a number, and correct the error.",
            code="setup.failed",
        ) from error
    loop = found if isinstance(found, Loop) else loop_of_trainer(found)
    if loop is None:
        raise ValueGivenError(
            name,
            got=f"{name}({seed}) returned a {type(found).__name__}",
            expected="a trimtab.Loop, a Transformers Trainer, or a Lightning (trainer, module, loader)",
            code="setup.not_loop",
        )
    if not loop.model.training:  # A model in training mode may have normalisation layers that are not.
        loop.model.train()
    return loop


def setup_function(setup: Setup | Task) -> Setup:
    """Return the function of a task, which loads the data once, or the given function."""
    if not isinstance(setup, Task):
        return setup
    task, load_data = setup, functools.cache(setup.load_data)

    def build_task(seed: int) -> Loop:
        device, data = device_here(), load_data()
        model = task.make_model().to(device)
        own = task.step

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
            assert own is not None
            return own(model, optimizer, to_device(batch, device))

        return Loop(
            model,
            task.make_optimizer(model),
            task.loss_fn,
            _TaskLoader(data, task.batch_size, seed),
            evaluate=lambda model: {task.metric.name: task.metric.check(task.metric.evaluate(model, data.held_out))},
            step=None if own is None else step,
            reference=task.reference,
        )

    build_task.__name__ = task.name
    return build_task


class _TaskLoader:
    """The batches of a task's data in the order of a seed, without end."""

    def __init__(self, data: TaskData, batch_size: int, seed: int) -> None:
        self._data, self._batch_size, self._seed = data, batch_size, seed

    def __iter__(self) -> Iterator[Any]:
        return self._data.batches(self._seed, self._batch_size)


def observed_reference(setup: Setup, seed: int, name: str = "setup") -> Reference:
    """Return the declared reference of a loop, or a reference with the precision observed in the user's step.

    Runs a few steps of a separate loop, and observes autocast in the forward of the model.
    """
    loop = build(setup, seed, name)
    if loop.reference is not None or loop.step is None:
        return loop.reference or ASSUMED_REFERENCE
    seen: set[str] = set()
    kind, names = loop.device.type, {torch.bfloat16: "bf16", torch.float16: "fp16"}

    def note(*_: Any) -> None:
        seen.add(names.get(torch.get_autocast_dtype(kind), "fp32") if torch.is_autocast_enabled(kind) else "fp32")

    hook = loop.model.register_forward_pre_hook(note)
    steps = plain_steps(loop, DataStream(loop.loader, seed))
    try:
        for _ in range(_OBSERVED_STEPS):
            next(steps)
    except Exception as error:
        raise step_failed(name, error) from error
    finally:
        hook.remove()
    return Reference(seen.pop(), declared=False) if len(seen) == 1 else ASSUMED_REFERENCE


def step_failed(name: str, error: Exception) -> Exception:
    """Return the error for a failed step of the baseline: a typed error unchanged, or a `LoopError`."""
    if isinstance(error, TrimtabError):
        return error
    return LoopError(
        name,
        problem=f"A step of the loop raised {describe(error).rstrip('.')}.",
        hint="Run a few steps of the loop by itself, and correct the error.",
        code="baseline.failed",
    )


def plan_of(loop: Loop, reference: Reference, *, total_steps: int | None = None, **options: Any) -> Plan:
    """Return a plan for a loop.

    Args:
        reference: precision and clipping of the loop.
        total_steps: optimizer steps of the planned run, or None.
        options: further arguments of `trimtab.plan`.
    """
    own: Mapping[str, Any] = {
        "reference": reference,
        "accumulate": loop.accumulate,
        "longest_batch": loop.longest_batch,
        "modules": loop.modules,
        "count": loop.count,
        "split": loop.split,
        "total_steps": total_steps,
        "data": loop.loader,
    }
    example = next(DataStream(loop.loader, 0))  # A list as a loader would be taken for a batch.
    return make_plan(loop.model, loop.optimizer, loop.loss_fn, example, **{**own, **options})


def with_reference(loop: Loop, reference: Reference) -> Loop:
    """Return the loop with a declared or observed reference."""
    return replace(loop, reference=reference)
