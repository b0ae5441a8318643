"""Functions `setup(seed)` that build a training loop: calling them, observing the loop's precision, and planning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from trimtab.api import plan as make_plan
from trimtab.core.errors import LoopError, TrimtabError, ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, Reference
from trimtab.distributed.coordinator import Coordinator
from trimtab.experiments.loops import DataStream, Loop, plain_steps, seed_everything
from trimtab.experiments.task_loops import Setup
from trimtab.experiments.trainer_loops import loop_of_trainer
from trimtab.plans.plan import Plan
from trimtab.profiling.measurement_notes import describe

PLANNING_SEED = 2**31 - 1  # Unused by paired runs, whose seeds count from 0.
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
    except TrimtabError:
        raise
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
    stream = DataStream(loop.loader, seed)
    steps = plain_steps(loop, stream)
    try:
        for _ in range(_OBSERVED_STEPS):
            next(steps)
    except Exception as error:
        raise step_failed(name, error) from error
    finally:
        hook.remove()
        stream.close()
    return Reference(seen.pop(), declared=False) if len(seen) == 1 else ASSUMED_REFERENCE


def require_reduced(setup: Setup, name: str) -> None:
    """Check the loop of a function for several ranks: its own step must reduce gradients between them.

    Raises:
        ValueGivenError: the loop has its own step, and its model is neither in DistributedDataParallel nor in FSDP.
    """
    loop = build(setup, 0, name)
    if loop.step is not None and not is_reduced(loop.model):
        raise ValueGivenError(
            "Loop.step",
            problem=f"The step of {name} does not reduce gradients between ranks.",
            hint="Put the model in DistributedDataParallel in setup; or pass no step, and the baseline is a plain loop "
            "in DistributedDataParallel.",
            code="step.several_ranks",
        )


def is_reduced(model: nn.Module) -> bool:
    """Return True if the model reduces its gradients between ranks by itself."""
    kinds = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    return any(isinstance(each, kinds) for each in model.modules())


def shares_batches(setup: Setup, name: str, together: Coordinator) -> bool:
    """Return True if the first batch of a function's loop is equal on all ranks. Collective."""
    stream = DataStream(build(setup, 0, name).loader, 0)
    leaves = tree_leaves(next(stream))
    stream.close()
    sums = [float(each.detach().double().sum()) for each in leaves if isinstance(each, torch.Tensor)]
    found = together.each(math.fsum(sum_ * (index + 1) for index, sum_ in enumerate(sums)))
    return together.num_ranks > 1 and bool(sums) and len(set(found)) == 1


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


def plan_of(loop: Loop, reference: Reference, **options: Any) -> Plan:
    """Return a plan for a loop.

    Args:
        reference: precision and clipping of the loop.
        options: further arguments of `trimtab.plan`.
    """
    own: Mapping[str, Any] = {
        "reference": reference,
        "accumulate": loop.accumulate,
        "longest_batch": loop.longest_batch,
        "modules": loop.modules,
        "count": loop.count,
        "split": loop.split,
        "data": loop.loader,
    }
    stream = DataStream(loop.loader, PLANNING_SEED)
    example = next(stream)  # A list as a loader would be taken for a batch.
    stream.close()
    return make_plan(loop.model, loop.optimizer, loop.loss_fn, example, **{**own, **options})
