"""Outcome of training a pattern through a plan, compared with its plain loop: equal, warned, refused, or a fault."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import trimtab
from training_patterns.script import PATTERNS, STEPS, Loop, Pattern, Script, trimtab_loop

TORCH = str(Path(torch.__file__).parent)
MOST_NAMED = 3


@dataclass(frozen=True)
class Outcome:
    """Outcome of a training run.

    Args:
        kind: "equal", "warned", "refused", "raises" (the plain loop raises the same error), or "skips" (a step that
            overflowed was skipped with everything as before it; of a plain loop the loss's own state has moved on).
            Or a fault: "differs", "untyped" (an error that is neither trimtab's nor the plain loop's), "changed"
            (refused after something had changed), "unexpected" (trained, though the plain loop raises).
        detail: the largest differences, the warnings or the error.
    """

    kind: str
    detail: str = ""


def outcome(name: str, plan_name: str) -> Outcome:
    """Train a pattern through a plan set by hand, and compare."""
    pattern = PATTERNS[name]
    return outcome_of(pattern, lambda script: pattern.plan(plan_name))


def planned_outcomes(name: str) -> dict[str, Outcome]:
    """Plan for a pattern by its first batch, train it through that plan, and compare with the plain loop.

    Returns:
        The outcome of the plan, "planned"; and "proved_split", that of a split in two, if the plan's check allows it.
    """
    pattern, made = PATTERNS[name], []
    example = next(iter(pattern.made().batches))

    def planned(script: Script) -> trimtab.Plan:
        loop = script.model, script.optimizer, script.loss_fn
        made.append(trimtab.plan(*loop, example, num_blocks=3, modules=script.modules))
        return made[0]

    found = {"planned": outcome_of(pattern, planned)}
    if made and made[0].proves_splitting:
        found["proved_split"] = outcome_of(pattern, lambda script: replace(pattern.plan("half"), check=made[0].check))
    return found


def outcome_of(pattern: Pattern, planned: Callable[[Script], trimtab.Plan]) -> Outcome:
    """Train a pattern through the plan that `planned` returns, and compare with the plain loop."""
    script = pattern.made()
    before, generators, plan = values(script), states_of_generators(), None
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            plan = planned(script)
            if states_of_generators() != generators:
                return Outcome("changed", "planning moved a random generator")
            (script.through or trimtab_loop)(script, plan)
        except trimtab.errors.TrimtabError as error:
            changed = [key for key, value in values(script).items() if not same(value, before.get(key))]
            changed += ["random generators"] if states_of_generators() != generators else []
            said = f"{type(error).__name__}[{error.code}] {error}"
            if changed:
                return Outcome("changed", f"{', '.join(changed[:MOST_NAMED])}: {said}")
            return Outcome("refused", said)
        except Exception as error:  # any error that is not trimtab's is a fault, unless the plain loop raises it too
            raised = f"{type(error).__name__}: {error}"
            return Outcome(
                "raises" if plan is not None and raised in raised_plainly(pattern, plan) else "untyped", raised
            )
    reference = plain(pattern.name, pattern.loop_of(plan))
    if isinstance(reference, str):
        return Outcome("unexpected", f"the plain loop raises {reference}")
    found = differences(values(script), reference, before, pattern.tolerance_of(plan))
    if not found:
        return Outcome("equal")
    if script.skipped:
        return Outcome("skips", "; ".join(found[:MOST_NAMED]))
    said = [str(each.message) for each in seen if not each.filename.startswith(TORCH)]
    return Outcome("warned", " | ".join(said)) if said else Outcome("differs", "; ".join(found[:MOST_NAMED]))


def raised_plainly(pattern: Pattern, plan: trimtab.Plan) -> list[Any]:
    """Return the errors of plain loops in a plan's precision: on whole batches, and on its micro-batches."""
    loop = pattern.loop_of(plan)
    return [plain(pattern.name, each) for each in (loop, replace(loop, parts=plan.num_micro_batches))]


@functools.cache
def plain(name: str, loop: Loop) -> dict[str, Any] | str:
    """Return the values after plain training, or the error that it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return values(PATTERNS[name].train_plain(loop))
        except Exception as error:  # the plain loop decides what can be trained
            return f"{type(error).__name__}: {error}"


def values(script: Script) -> dict[str, Any]:
    """Return copies of parameters, buffers and the optimizer's tensors by name."""
    found = {}
    for prefix, module in {"model": script.model, **script.others}.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            found[f"{prefix}.{name}"] = tensor.detach().clone()
    for index, (_, state) in enumerate(optimizer_states(script.optimizer)):
        found |= {f"optimizer.{index}.{key}": copied(value) for key, value in state.items()}
    return found


def optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the state of each parameter, in the order of groups."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter, optimizer.state.get(parameter, {})


def copied(value: Any) -> Any:
    """Return a copy of a tensor, or the value."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def same(value: Any, other: Any) -> bool:
    """Return whether two values are the same to the bit."""
    if not isinstance(value, Tensor):
        return isinstance(other, type(value)) and (value is other or bool(value == other))
    return isinstance(other, Tensor) and value.shape == other.shape and torch.equal(value, other)


def states_of_generators() -> tuple[Any, ...]:
    """Return the states of torch's, NumPy's and Python's global generators."""
    kind, keys, *rest = numpy.random.get_state()
    return bytes(torch.get_rng_state().numpy()), kind, keys.tobytes(), tuple(rest), random.getstate()


def differences(found: dict[str, Any], expected: dict[str, Any], before: dict[str, Any], rounding: float) -> list[str]:
    """Return parameters and buffers that are further from the reference than rounding, the furthest first.

    A difference is relative to the distance that training moved the tensor. What hardly moved is compared with five
    units per step in the last place of its values instead.
    """
    far = []
    for name, reference in expected.items():
        if name.startswith("optimizer."):
            continue
        value = found.get(name)
        if not isinstance(value, Tensor) or value.shape != reference.shape or value.dtype != reference.dtype:
            far.append((float("inf"), f"{name} is missing or of another kind"))
            continue
        if not value.is_floating_point() and not value.is_complex():
            if not torch.equal(value, reference):
                far.append(
                    (float("inf"), f"{name} is {value.flatten()[:4].tolist()}, not {reference.flatten()[:4].tolist()}")
                )
            continue
        off, unit = float((value - reference).norm()), torch.finfo(reference.dtype).eps
        start = before.get(name)
        moved = (
            float((reference - start).norm()) if isinstance(start, Tensor) and start.shape == reference.shape else 0.0
        )
        limit = max(rounding * moved, 5 * STEPS * unit * float(reference.norm())) if rounding else 0.0
        if not off <= limit:
            share = off / moved if moved else float("inf")
            far.append((share, f"{name} is off by {share:.2g} of the distance that it moves"))
    return [text for _, text in sorted(far, reverse=True)]
