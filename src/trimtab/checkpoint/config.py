"""User settings for checkpoints, and compatibility of a checkpoint with the environment of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.checkpoint.atomic_directory import RunMetadata, committed_folders, manifest_of, run_metadata
from trimtab.checkpoint.train_state import AdditionalState
from trimtab.core import validation
from trimtab.core.errors import DamagedError, FormatError, ValueGivenError
from trimtab.core.serialization import from_jsonable
from trimtab.measure.gradient_norms import is_flat_sharded, is_sharded
from trimtab.measure.machine import device_name, environment
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS
from trimtab.state.process_state import fp32_places
from trimtab.training.metadata_exchange import MetadataExchange

RESUMES = ("auto", "never", "always")
FAILURES = ("stop", "warn")
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
_THREADS, _BETWEEN = "threads", ", "


@dataclass(frozen=True)
class Checkpoints:
    """Settings for saving a run: `trimtab.start(..., checkpoints=Checkpoints("runs/mine"))`.

    With `every_steps` and `every_s` both None, the run is saved only by `run.checkpoint()` and on a signal.

    Args:
        folder: Folder used by this run only; created if necessary.
        every_steps: Windows between two checkpoints.
        every_s: Seconds between two checkpoints; the save follows the next window. With several ranks, rank 0's clock
            counts, and it is not checked after every window.
        keep_last: Number of checkpoints to keep. Older ones are deleted after a newer one is on disk.
        resume: "auto" resumes from the newest undamaged checkpoint, or starts a new run if the folder has none;
            "always" requires a checkpoint; "never" requires a folder without checkpoints.
        accepts: Names of changes since the save that may affect results and are accepted (and recorded): torch,
            threads, device, fp32, ranks, plan, optimizer (its class), data.
        also: Further objects to save, by name, such as a scheduler or an average of the weights. Each needs
            `state_dict()` and `load_state_dict()`.
        on_failure: Reaction to a failed save. "stop" raises. "warn" warns, continues training and retries when the next
            save is due. Lines of the record and of the decision log wait in memory meanwhile.
        background: True to write in a thread during training, from a copy in CPU memory.
        follows: Folder of a run to repeat: batch-size decisions are read from its log.

    Raises:
        ValueGivenError: A value is out of range.
    """

    folder: Path | str
    every_steps: int | None = None
    every_s: float | None = 600.0
    keep_last: int = 2
    resume: str = "auto"
    accepts: tuple[str, ...] = ()
    also: Mapping[str, Any] = field(default_factory=dict)
    on_failure: str = "stop"
    background: bool = False
    follows: Path | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path) or not str(self.folder):
            hint = "Pass the folder in which this run keeps its checkpoints."
            raise ValueGivenError("checkpoints.folder", got=repr(self.folder), expected="a path", hint=hint)
        object.__setattr__(self, "folder", Path(self.folder))
        if self.every_steps is not None:
            validation.integer("checkpoints.every_steps", self.every_steps)
        if self.every_s is not None:
            validation.number("checkpoints.every_s", self.every_s, low=0, open_low=True)
        validation.integer("checkpoints.keep_last", self.keep_last)
        validation.one_of("checkpoints.resume", self.resume, RESUMES)
        validation.one_of("checkpoints.on_failure", self.on_failure, FAILURES)
        names = (self.accepts,) if isinstance(self.accepts, str) else self.accepts
        accepts = tuple(validation.one_of("checkpoints.accepts", name, ACCEPTED) for name in names)
        object.__setattr__(self, "accepts", accepts)
        AdditionalState(self.also)

    def saved_plan(self) -> Plan | None:
        """Return the plan of the newest checkpoint, or None without a checkpoint.

        Raises:
            FormatError: The checkpoint belongs to another trimtab version, or is temporarily unreadable.
        """
        said = self._saved()
        return None if said is None else from_jsonable(Plan, said.plan)

    def saved_samples(self) -> int:
        """Return the number of samples consumed at the newest checkpoint, or 0 without a checkpoint."""
        said = self._saved()
        return 0 if said is None else said.rows

    def require_as_asked(self) -> None:
        """Check that `resume` matches the presence of checkpoints. Integrity is verified later, by `start`.

        Raises:
            FormatError: `resume` is "always" without a checkpoint, or "never" with one.
        """
        there = committed_folders(self.path)
        if self.resume == "always" and not there:
            raise FormatError(
                "checkpoints.resume",
                got="always",
                problem=f'resume="always" requires a checkpoint, but {self.path} contains none.',
                hint='Check the path, or use resume="auto" to start a new run if there is no checkpoint.',
                code="checkpoint.missing",
            )
        if self.resume == "never" and there:
            raise FormatError(
                "checkpoints.resume",
                got="never",
                problem=f'resume="never" requires a folder without checkpoints, but {self.path} contains '
                f"{there[0].name}.",
                hint='Choose another folder, or use resume="auto" to resume from the checkpoint.',
                code="checkpoint.exists",
            )

    def _saved(self) -> RunMetadata | None:
        if self.resume == "never":
            return None
        for folder in committed_folders(self.path):
            with contextlib.suppress(DamagedError):
                return run_metadata(folder, manifest_of(folder))
        return None

    @property
    def path(self) -> Path:
        """The folder as a `Path`."""
        return Path(self.folder)


# Environment facts with an effect on results, and changes since the save.


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


def _differing_names(one: str, other: str) -> set[str]:
    """Return the names of the parts in which the texts of two plans differ.

    A setting that was added after a checkpoint was saved is missing in its text and had its default then.
    """
    defaults = {f"{name}={setting.default}" for name, setting in SETTINGS.items()}
    apart = set(one.split(_BETWEEN)) ^ set(other.split(_BETWEEN))
    return {part.partition("=")[0] for part in apart - defaults}


def _named(plan: str, names: Collection[str]) -> str:
    """Return the parts of a plan's text with some names."""
    return _BETWEEN.join(part for part in plan.split(_BETWEEN) if part.partition("=")[0] in names)


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the differing facts as name -> (saved, current); of a plan, only the differing fields.

    Facts missing on either side are ignored.
    """
    found = {name: (saved[name], now[name]) for name in saved if name in now and saved[name] != now[name]}
    if _THREADS in found:
        # Each rank is compared with the rank that it resumes from; a single count applies to all ranks.
        had, has = (text.split(_BETWEEN) for text in found[_THREADS])
        if all(has[rank % len(has)] == had[rank % len(had)] for rank in range(int(now["ranks"]))):
            del found[_THREADS]
    if "plan" in found:
        then, now_planned = found.pop("plan")
        if names := _differing_names(then, now_planned):
            found["plan"] = _named(then, names), _named(now_planned, names)
    return found


def require_accepted(found: Mapping[str, tuple[str, str]], accepts: Collection[str]) -> None:
    """Raise `ValueGivenError` for a change without acceptance by name."""
    for name, (fact, hint) in _CHANGES.items():
        if name in found and name not in accepts:
            then, now = found[name]
            raise ValueGivenError(
                f"resume: {name}",
                got=now,
                expected=then,
                problem=f"{fact} has changed since the checkpoint was saved, from {then} to {now}.",
                hint=f'{hint}, or accept the change: Checkpoints(..., accepts=("{name}",)).',
                code=f"resume.{name}_differs",
            )


def require_supported(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, exchange: MetadataExchange, *, background: bool
) -> None:
    """Raise `ValueGivenError` if the ranks' setup does not support checkpoints."""
    supported = "DistributedDataParallel, fully_shard (FSDP2), or a plan with a zero_stage and torch's engine"
    num, job = exchange.num_ranks, torch.distributed.get_world_size() if exchange.has_peers else 1
    if num < job:
        is_one = num == 1
        raise ValueGivenError(
            "checkpoints",
            got="a model without a distributed wrapper" if is_one else f"{num} ranks",
            expected="" if is_one else f"{job} ranks",
            problem=f"Only {num} of the job's {job} ranks train this model, so the ranks cannot write one checkpoint.",
            hint=f"Use {supported}, or train in one process."
            if is_one
            else "Use DistributedDataParallel(model) without process_group, or start a separate job for each model.",
            code="checkpoints.ranks_not_joined" if is_one else "checkpoints.part_of_job",
        )
    if background and (num > 1 or is_sharded(model)):
        raise ValueGivenError(
            "checkpoints.background",
            got="True",
            expected="False",
            problem="Background saves are not supported with several ranks or a sharded model.",
            hint="Use Checkpoints(..., background=False).",
            code="checkpoints.background_unsupported",
        )
    unsupported = {
        "DeepSpeed's shards": plan.engine.value == "deepspeed",
        "FSDP1 (FullyShardedDataParallel)": is_flat_sharded(model),
        "a ZeroRedundancyOptimizer": type(optimizer).__name__ == "ZeroRedundancyOptimizer",
    }
    if num > 1 and (name := next((name for name, is_used in unsupported.items() if is_used), "")):
        raise ValueGivenError(
            "checkpoints",
            got=name,
            expected=supported,
            problem=f"Checkpoints do not support {name}.",
            hint=f"Use {supported}.",
            code="checkpoints.sharding_unsupported",
        )
