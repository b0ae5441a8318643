"""The world a run is in: what its numbers depend on besides its own state, and what of that has changed since."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.measure.machine import device_name, environment
from trimtab.measure.process_state import fp32_places

# What a resumed run is refused for unless it is accepted by name, with what else could be done about it.
WAYS_OUT = {
    "torch": "Install the torch that it was saved with",
    "threads": "torch.set_num_threads as it was",
    "device": "Train where it was trained",
    "fp32": "Leave torch's fp32 precision as it was",
    "ranks": "Start as many ranks",
    "plan": "Start it with the plan that is in its checkpoint",
    "optimizer": "Give the optimizer that it was saved with",
}
ACCEPTED = (*WAYS_OUT, "data")  # which is looked at once there is a loader (`runtime.data_position`)
_SAID_ALONE = (
    "cpu",
    "gpu",
    "cuda",
    "numpy",
    "python",
    "os",
    "trimtab",
    "sources",
)  # changes that are noted, and refused for nothing


def device_of(model: nn.Module) -> str:
    """Return what kind of device a model is on, with a GPU's own name: another model of GPU rounds otherwise."""
    device = next(model.parameters()).device
    return f"cuda ({device_name(device)})" if device.type == "cuda" else device.type


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, and of those that it holds as `optimizer`: a host's wrapper steps one.

    Groups and state of one class look like another's, which would train on by them as something else. Its module is
    left out: one of a script, or of a task's file, has another where the project lies elsewhere.
    """
    name = type(optimizer).__qualname__
    inner = getattr(optimizer, "optimizer", None)
    is_wrapper = isinstance(inner, torch.optim.Optimizer) and inner is not optimizer
    return f"{name} of {class_of(inner)}" if is_wrapper else name


# Choices that came when runs had been kept without them, None where the loop's own stands: then they are not told.
_LATER = ("weight_decay",)
_THREADS, _BETWEEN = "threads", ", "


def world_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    devices: Sequence[str],
    threads: Sequence[str] = (),
) -> dict[str, str]:
    """Return what a run's numbers depend on: versions, threads, devices, types, ranks, classes, and the plan's values.

    Args:
        devices: of each rank, as `device_of` names it. threads: of each rank, in digits; (): of the one that is here.
    """
    here = environment()
    if threads:
        here |= {_THREADS: _BETWEEN.join(threads if len(set(threads)) > 1 else threads[:1])}
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    told = (name for name in Plan.marks() if name not in _LATER or getattr(plan, name).value is not None)
    values = (f"{name}={getattr(plan, name).value}" for name in told)
    facts = {name: here[name] for name in ("torch", _THREADS, *_SAID_ALONE) if name in here}
    return facts | {
        "device": " and ".join(sorted(set(devices))),
        "dtype": ", ".join(kinds),
        "fp32": ", ".join(place.fp32_precision for place in fp32_places()),
        "ranks": str(len(devices)),
        "optimizer": class_of(optimizer),
        "plan": f"batch_rows={plan.batch_rows}, batch_rule={plan.batch_rule}, " + ", ".join(values),
    }


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what differs, of what both know: name -> (then, now)."""
    found = {name: (saved[name], now[name]) for name in saved if name in now and saved[name] != now[name]}
    if _THREADS in found and _has_each_its_threads(*found[_THREADS], int(now["ranks"])):
        del found[_THREADS]
    return found


def _has_each_its_threads(then: str, now: str, ranks: int) -> bool:
    """Return whether every rank has as many as the one that it goes on from; one number is that of all of them."""
    had, has = then.split(_BETWEEN), now.split(_BETWEEN)
    return all(has[rank % len(has)] == had[rank % len(had)] for rank in range(ranks))


def require_accepted(found: Mapping[str, tuple[str, str]], accepts: Collection[str]) -> None:
    """Raise `ValueGivenError` for what has changed and was not accepted by name.

    Of a plan the message shows the fields that differ.
    """
    for name, way_out in WAYS_OUT.items():
        if name in found and name not in accepts:
            then, now = _differing(*found[name]) if name == "plan" else found[name]
            raise ValueGivenError(
                f"resume: {name}",
                given=now,
                expected=f"{then}, as the run was saved with",
                way_out=f'{way_out}, or accept the change: Checkpoints(..., accepts=("{name}",)).',
            )


def accepted(names: object) -> tuple[str, ...]:
    """Return the names of changes that are accepted; raises `ValueGivenError` for one that is none."""
    given = (names,) if isinstance(names, str) else tuple(names)  # type: ignore[arg-type]
    return tuple(checks.one_of("checkpoints.accepts", name, ACCEPTED) for name in given)


def in_words(found: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the changes for a record."""
    shown = {name: _differing(*both) if name == "plan" else both for name, both in found.items()}
    return {name: f"{then} -> {now}" for name, (then, now) in shown.items()}


def parted(found: Mapping[str, tuple[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return changes in words: those that had to be accepted, and those that are noted alone."""
    words = in_words(found)
    asked = {name: change for name, change in words.items() if name in WAYS_OUT}
    return asked, {name: change for name, change in words.items() if name not in WAYS_OUT}


def _differing(then: str, now: str) -> tuple[str, str]:
    pairs = list(zip(then.split(", "), now.split(", "), strict=False))
    apart = [pair for pair in pairs if pair[0] != pair[1]] or pairs
    return ", ".join(pair[0] for pair in apart), ", ".join(pair[1] for pair in apart)
