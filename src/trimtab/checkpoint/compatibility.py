"""Compatibility of a checkpoint: environment facts with an effect on results, and changes since the save."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.measure.machine import device_name, environment
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS
from trimtab.state.process_state import fp32_places

# Changes that prevent resuming unless accepted by name: the changed fact, and the hint of the error.
_CHANGES = {
    "torch": ("The version of torch", "Install the saved version of torch"),
    "threads": ("The number of CPU threads", "Call torch.set_num_threads() with the saved number"),
    "device": ("The device", "Train on the saved type of device"),
    "fp32": ("torch's fp32_precision", "Restore the saved settings of torch.backends"),
    "ranks": ("The number of ranks", "Start the saved number of ranks"),
    "plan": ("The plan", "Use the saved plan, Checkpoints.saved_plan()"),
    "optimizer": ("The class of the optimizer", "Build the optimizer with the saved class"),
}
MUST_MATCH = tuple(_CHANGES)
ACCEPTED = (*MUST_MATCH, "data")  # "data" is checked when the loader is known (`training.data_position`)
# Changes that are recorded and never prevent resuming.
_SAID_ALONE = ("cpu", "gpu", "cuda", "numpy", "python", "os", "trimtab", "sources")


def device_of(model: nn.Module) -> str:
    """Return the device type of a model, with the GPU's name, because GPU models round differently."""
    device = next(model.parameters()).device
    return f"cuda ({device_name(device)})" if device.type == "cuda" else device.type


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of an optimizer, including the inner class of a trainer's wrapper (attribute `optimizer`).

    A different class could load groups and state of the same form and silently train differently. The module name is
    left out, because the name of a script depends on the location of the project.
    """
    name = type(optimizer).__qualname__
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer) and inner is not optimizer:
        return f"{name} of {class_of(inner)}"
    return name


_THREADS, _BETWEEN = "threads", ", "


def world_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, devices: Sequence[str], threads: Sequence[str] = ()
) -> dict[str, str]:
    """Return the facts that affect a run's results: versions, threads, devices, dtypes, ranks, optimizer class, plan.

    Args:
        devices: Result of `device_of` on each rank.
        threads: Number of threads on each rank, as text; empty for the current process only.
    """
    here = environment()
    if threads:
        here |= {_THREADS: _BETWEEN.join(threads if len(set(threads)) > 1 else threads[:1])}
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    values = (f"{name}={value}" for name, value in plan.values.items())
    facts = {name: here[name] for name in ("torch", _THREADS, *_SAID_ALONE) if name in here}
    return facts | {
        "device": " and ".join(sorted(set(devices))),
        "dtype": ", ".join(kinds),
        "fp32": ", ".join(place.fp32_precision for place in fp32_places()),
        "ranks": str(len(devices)),
        "optimizer": class_of(optimizer),
        "plan": f"batch_size={plan.batch_size}, batch_rule={plan.batch_rule}, " + ", ".join(values),
    }


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the differing facts as name -> (saved, current). Facts missing on either side are ignored."""
    found = {name: (saved[name], now[name]) for name in saved if name in now and saved[name] != now[name]}
    if "plan" in found and _changed_items(found["plan"][0]) == _changed_items(found["plan"][1]):
        del found["plan"]
    if _THREADS in found:
        # Each rank is compared with the rank that it resumes from; a single count applies to all ranks.
        had, has = (text.split(_BETWEEN) for text in found[_THREADS])
        if all(has[rank % len(has)] == had[rank % len(had)] for rank in range(int(now["ranks"]))):
            del found[_THREADS]
    return found


def _changed_items(plan: str) -> set[str]:
    """Return the parts of a plan's text that differ from a setting's default.

    A setting that was added after a checkpoint was saved is missing in its text and had its default then.
    """
    return set(plan.split(_BETWEEN)) - {f"{name}={setting.default}" for name, setting in SETTINGS.items()}


def require_accepted(found: Mapping[str, tuple[str, str]], accepts: Collection[str]) -> None:
    """Raise `ValueGivenError` for a change without acceptance by name.

    For a plan, the message shows only the differing fields.
    """
    for name, (fact, hint) in _CHANGES.items():
        if name in found and name not in accepts:
            then, now = _differing(*found[name]) if name == "plan" else found[name]
            raise ValueGivenError(
                f"resume: {name}",
                got=now,
                expected=then,
                problem=f"{fact} has changed since the checkpoint was saved, from {then} to {now}.",
                hint=f'{hint}, or accept the change: Checkpoints(..., accepts=("{name}",)).',
                code=f"resume.{name}_differs",
            )


def accepted_changes(names: object) -> tuple[str, ...]:
    """Return the names of accepted changes; raises `ValueGivenError` for an unknown name."""
    given = (names,) if isinstance(names, str) else tuple(names)  # type: ignore[arg-type]
    return tuple(validation.one_of("checkpoints.accepts", name, ACCEPTED) for name in given)


def in_words(found: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the changes as text, for a record."""
    shown = {name: _differing(*both) if name == "plan" else both for name, both in found.items()}
    return {name: f"{then} -> {now}" for name, (then, now) in shown.items()}


def split_changes(found: Mapping[str, tuple[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dictionaries of changes as text: changes in need of acceptance, and changes to be recorded only."""
    words = in_words(found)
    asked = {name: change for name, change in words.items() if name in MUST_MATCH}
    return asked, {name: change for name, change in words.items() if name not in MUST_MATCH}


def _differing(then: str, now: str) -> tuple[str, str]:
    pairs = list(zip(then.split(", "), now.split(", "), strict=False))
    apart = [pair for pair in pairs if pair[0] != pair[1]] or pairs
    return ", ".join(pair[0] for pair in apart), ", ".join(pair[1] for pair in apart)
