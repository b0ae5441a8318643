"""Estimates of an optimizer step on devices, without a run: time, peak memory, and the fastest settings that fit."""

from __future__ import annotations

import bisect
import contextlib
import logging
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from trimtab.api import profile_there
from trimtab.core import validation
from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.core.hardware import PEAKS, DeviceSpec, absent_device
from trimtab.core.memory_model import PeakMemoryModel, StepWork
from trimtab.core.objective import ASSUMED_REFERENCE, Budget, Reference
from trimtab.core.progress import Progress
from trimtab.core.recompute_schedule import RecomputedSegment, kept_in, schedule_of
from trimtab.core.units import format_bytes, format_count, format_seconds, parse_bytes
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import DataStream
from trimtab.experiments.named_models import SampleSize, named_model
from trimtab.experiments.task_plans import loop_of
from trimtab.measure.machine import device_spec
from trimtab.planner.cost_model import ROOFLINE, CostModel
from trimtab.planner.search_space import nearest_refused, priced_candidates, simplest_candidate
from trimtab.planner.target_device_candidates import (
    blocks_as_twin,
    recorded_traces,
    traced_for,
    twin_of,
    with_blocks,
)
from trimtab.plans.profile import Candidate, Profile, TracedBlocks, TracedCandidate
from trimtab.profiling.candidate_traces import MIN_SAMPLES, trace_elsewhere
from trimtab.profiling.target_device import trace_blocks
from trimtab.tasks import BUILT_IN, Task, load_task_or_setup
from trimtab.training.batch import BY_CONTAINERS

OPTIMIZERS = ("adamw", "sgd")
EVERY_DEVICE, THIS_MACHINE = "all", "cpu"
_MOST_SAMPLES = 2**20
_ALMOST_AS_FAST = 0.95  # far within the error of a step time from a data sheet
# Stands for all GPUs in the first trace: figures of a trace depend only on the kind of device.
_ANY_GPU = DeviceSpec("any GPU", "cuda", None, {"fp32": 1.0, "bf16": 2.0}, 1.0)


@dataclass(frozen=True)
class EstimatedLoop:
    """A loop to estimate.

    Args:
        parts: model, optimizer, loss function and example batch, on the CPU or as fake tensors.
        rows: samples per optimizer step.
        model: class and origin of the model.
        step: size of a step, and optimizer.
    """

    parts: tuple[Any, ...]
    rows: int
    model: str
    step: str
    reference: Reference = ASSUMED_REFERENCE


@dataclass(frozen=True)
class StepEstimate:
    """Predicted cost of an optimizer step.

    Args:
        step_s: seconds by the data sheet; None if a peak of the device is unknown.
        peak_bytes: traced peak memory, without a margin.
        recompute: recomputed blocks in words, or "".
    """

    precision: str
    micro_batch: int
    fused_optimizer: bool
    recompute: str
    step_s: float | None
    peak_bytes: int

    def settings(self) -> str:
        """Return the settings in words."""
        found = [self.precision, f"micro-batch {self.micro_batch}"]
        found += ["fused optimizer"] if self.fused_optimizer else []
        return ", ".join([*found, self.recompute] if self.recompute else found)


@dataclass(frozen=True)
class DeviceEstimate:
    """Estimate for a device.

    Args:
        limit_bytes: memory of the device, or the limit of the user.
        margin: fraction of the traced peak that has to stay free in addition.
        plain: the loop as it is, in one piece.
        plain_fits: True if the loop as it is fits.
        largest_batch: largest batch of the loop as it is that fits; 0 for none.
        best: fastest settings that fit, or None.
        nearest: settings nearest to the limit, if none fit.
        largest_micro_batch: largest micro-batch that fits in any precision, without recomputation; 0 for none.
    """

    device: str
    limit_bytes: int
    margin: float
    source: str
    plain: StepEstimate
    plain_fits: bool
    largest_batch: int
    best: StepEstimate | None
    nearest: StepEstimate | None
    largest_micro_batch: int

    def text(self) -> str:
        """Return the estimate on a few lines of at most 60 columns."""
        lines = [
            f"{self.device}, {format_bytes(self.limit_bytes)}",
            _line(f"plain loop ({self.plain.precision})", self.plain, fits=self.plain_fits),
        ]
        if self.best is not None:
            lines += [_line("fastest that fits", self.best, fits=True), *_settings(self.best)]
        elif self.nearest is not None:
            lines += [_line("nearest settings", self.nearest, fits=False), *_settings(self.nearest)]
            lines += [f"  largest micro-batch that fits: {self.largest_micro_batch or 'none'}"]
        lines += [f"  largest batch of the plain loop: {self.largest_batch or 'none fits'}"]
        return "\n".join(lines)

    def row(self) -> str:
        """Return the estimate as a row of a table, with the columns `_COLUMNS`."""
        found = self.best
        plain = f"{self.largest_batch:>7}{format_seconds(self.plain.step_s):>9}"
        start = f"{self.device[:14]:<15}{_gib(self.limit_bytes)}{plain}"
        if found is None:
            return f"{start}  nothing fits"
        again = "" if not found.recompute else " recompute"
        peak = f"{format_seconds(found.step_s):>9}{_gib(found.peak_bytes)}"
        return f"{start}{peak}  {found.precision} {found.micro_batch}{again}"


_COLUMNS = "device             GiB  batch    plain  fastest    GiB  settings"


def _gib(size: int) -> str:
    return f"{size / 2**30:>7.1f}"


def _line(name: str, step: StepEstimate, *, fits: bool) -> str:
    figures = f"{format_seconds(step.step_s):>8} {format_bytes(step.peak_bytes):>9}"
    return f"  {name:<18}{figures}  {'fits' if fits else 'does not fit'}"


def _settings(step: StepEstimate) -> list[str]:
    return textwrap.wrap(step.settings(), 60, initial_indent="    ", subsequent_indent="    ")


@dataclass(frozen=True)
class Estimate:
    """Estimates of a loop for devices.

    Args:
        model: class and origin of the model.
        step: size of a step, and optimizer.
    """

    model: str
    step: str
    num_parameters: int
    devices: tuple[DeviceEstimate, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the estimates as values for JSON."""
        about = {"model": self.model, "step": self.step, "num_parameters": self.num_parameters}
        return about | {"rows": self.devices}

    def __str__(self) -> str:
        first, margin = self.devices[0], max(each.margin for each in self.devices)
        note = f"Predicted, not run: steps may take {ROOFLINE:.0%} longer; {margin:.0%} of the memory stays free."
        if len(self.devices) == 1:
            return "\n".join([*self._title(), first.text(), note])
        plain = f"plain loop ({first.plain.precision}): {format_bytes(first.plain.peak_bytes)}"
        return "\n".join([*self._title(plain), _COLUMNS, *(each.row() for each in self.devices), note])

    def _title(self, *more: str) -> list[str]:
        parameters = f"{format_count(self.num_parameters)} parameters"
        return [*textwrap.wrap(f"{self.model}, {parameters}", 80), *textwrap.wrap("; ".join([self.step, *more]), 80)]


def estimate(
    name: str,
    devices: str,
    *,
    batch_size: int | None = None,
    length: int | None = None,
    image_size: int | None = None,
    optimizer: str | None = None,
    memory: int | str | None = None,
    progress: Progress,
) -> Estimate:
    """Return the predicted step of a loop on devices. Nothing is run, and parameters take no memory.

    Args:
        name: model for `named_model`, or a task or function `setup(seed)`, which have their own batch and optimizer.
        devices: names of known devices, separated by commas; "all"; or "cpu" for this machine.
        length, image_size: tokens or pixels of a sample; by default the model's own.
        optimizer: a name in `OPTIMIZERS`.
        memory: limit that replaces the memory of the devices.

    Raises:
        ValueGivenError: an unknown device, optimizer or model, or an option that the model does not support.
        ModelError: a step cannot be traced.
    """
    specs = [replace(spec, memory_bytes=_limit(spec, memory)) for spec in devices_named(devices)]
    with _without_warnings():
        size = SampleSize(
            8 if batch_size is None else validation.integer("--batch-size", batch_size), length, image_size
        )
        if ":" in name or name.endswith(".py") or name in BUILT_IN:
            loop = _loop_of_task(name, batch_size, size, optimizer)
        else:
            loop = _loop_of_model(name, size, optimizer or "adamw")
        progress("tracing the loop", 0.0)
        traced = TracedLoop(loop, progress)
        found = tuple(traced.on(spec) for spec in specs)
    return Estimate(loop.model, loop.step, traced.num_parameters, found)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence log messages of Transformers about defaults, which the report states itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def devices_named(names: str) -> list[DeviceSpec]:
    """Return devices by name: "all", "cpu" (this machine, measured), or names of the device table."""
    if names == EVERY_DEVICE:
        return [absent_device(row.match) for row in PEAKS]
    parts = [name.strip() for name in names.split(",")]
    return [device_spec(torch.device("cpu")) if each == THIS_MACHINE else absent_device(each) for each in parts]


def _limit(spec: DeviceSpec, memory: int | str | None) -> int:
    limit = spec.memory_bytes if memory is None else parse_bytes("--memory", memory)
    if limit is None:
        raise ValueGivenError(
            "--memory",
            problem=f"The memory of {spec.name} is unknown.",
            hint="Pass --memory with a size such as 16GiB.",
            code="option.required",
        )
    return limit


def _loop_of_model(name: str, size: SampleSize, optimizer: str) -> EstimatedLoop:
    chosen = validation.one_of("--optimizer", optimizer, OPTIMIZERS)
    # Traces need two sizes.
    found = named_model(name, replace(size, rows=max(size.rows, 2 * (MIN_SAMPLES - 1))))
    parameters = found.model.parameters()
    made = torch.optim.AdamW(parameters) if chosen == "adamw" else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    step = f"{size.rows} x {found.sample}, {'AdamW' if chosen == 'adamw' else 'SGD with momentum'}"
    return EstimatedLoop((found.model, made, found.loss_fn, found.batch), size.rows, found.source, step)


def _loop_of_task(name: str, batch_size: int | None, size: SampleSize, optimizer: str | None) -> EstimatedLoop:
    for option in ("--length", "--image-size"):
        size.refuse(option, f"{name} has its own batches")
    if optimizer is not None:
        raise ValueGivenError(
            "--optimizer",
            problem=f"--optimizer has no effect: {name} has its own optimizer.",
            hint="Remove --optimizer.",
            code="option.conflict",
        )
    found = load_task_or_setup(name)
    if isinstance(found, Task):
        task = found if batch_size is None else found.shortened(batch_size=batch_size)
        parts, rows, reference = loop_of(task, "cpu"), task.batch_size, task.reference
    else:
        loop = loop_setup.build(found, loop_setup.PLANNING_SEED, name)
        stream = DataStream(loop.loader, loop_setup.PLANNING_SEED)
        parts = loop.model, loop.optimizer, loop.loss_fn, next(stream)
        stream.close()
        rows = batch_size or BY_CONTAINERS.require(parts[-1], "batch")
        reference = loop.reference or ASSUMED_REFERENCE
    step = f"{rows} samples, {type(parts[1]).__name__}"
    return EstimatedLoop(parts, rows, f"{name}: {type(parts[0]).__name__}", step, reference)


class TracedLoop:
    """A loop with its traces, made once for each kind of device: GPU or CPU."""

    def __init__(self, loop: EstimatedLoop, progress: Progress) -> None:
        self._loop, self._progress = loop, progress
        self._bases: dict[str, Profile] = {}
        self._blocks: dict[tuple[str, Candidate], TracedBlocks | str] = {}

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        return sum(each.numel() for each in self._loop.parts[0].parameters())

    def on(self, device: DeviceSpec) -> DeviceEstimate:
        """Return the estimate for a device with a memory limit."""
        there = self._profile(device)
        model, reference, limit = CostModel(there), there.reference_candidate, device.memory_bytes or 0
        found = priced_candidates(there, there.budget)
        fitting = [point for point in found if point.refusal is None]
        near = None if fitting else nearest_refused(found, there.budget)
        best = near
        if fitting:
            best = simplest_candidate(fitting, {p.candidate: p.cost.step_s or 0.0 for p in fitting}, reference)
        chosen = None if best is None else _step(there, model, best.candidate)
        plain = next(each for each in there.traces if each.candidate.alike(reference, "allocator"))
        peaks = [each.whole for each in there.traces]
        largest = partial(_largest, limit_bytes=limit / (1 + model.margin))
        return DeviceEstimate(
            device.name,
            limit,
            model.margin,
            device.source,
            _step(there, model, reference),
            any(point.candidate == reference for point in fitting),
            largest([plain.whole]),
            chosen if fitting else None,
            None if fitting else chosen,
            largest(peaks),
        )

    def _profile(self, device: DeviceSpec) -> Profile:
        kind = device.kind
        if kind not in self._bases:
            how: dict[str, Any] = {"rows": self._loop.rows, "reference": self._loop.reference}
            spec = replace(device if kind == "cpu" else _ANY_GPU, memory_bytes=None)
            traced = profile_there(*self._loop.parts, spec, **how)
            plain = self._as_it_is(traced, kind)
            unfused = (_with_step_of(plain, each) for each in traced.traces if each.candidate.fused_optimizer)
            by_candidate = {each.candidate: each for each in (*traced.traces, *unfused, plain)}
            self._bases[kind] = replace(traced, target_device_traces=tuple(by_candidate.values()))
        base = self._bases[kind]
        there = replace(base.for_device(device), budget=Budget(device.memory_bytes))
        there = traced_for(there, recorded_traces(base))
        wanted = (there.reference_candidate, *(each.candidate.having(fused_optimizer=False) for each in there.traces))
        also = recorded_traces(base)(tuple(dict.fromkeys(wanted)))
        known = {each.candidate for each in there.traces}
        there = replace(there, traces=(*(each for each in also if each.candidate not in known), *there.traces))
        if not _may_gain_from_recomputing(there):
            return there
        return with_blocks(there, partial(self._traced_blocks, kind, splits=base.check.splittable))

    def _as_it_is(self, traced: Profile, kind: str) -> TracedCandidate:
        """Return the trace of the loop with its own optimizer step, in the implementation that torch uses there."""
        model, optimizer, loss_fn, batch = self._loop.parts
        groups = [g for g in optimizer.param_groups if "foreach" in g and g["foreach"] is None and not g.get("fused")]
        self._progress("tracing the plain loop", 0.2)
        for group in groups:
            group["foreach"] = kind == "cuda"
        try:
            found = trace_elsewhere(model, optimizer, loss_fn, batch, [traced.reference_candidate], kind=kind)
        finally:
            for group in groups:
                group["foreach"] = None
        if not found:
            raise ModelError(
                "batch",
                got="a batch that cannot be split into samples",
                expected="a batch with samples in the first dimension",
                hint="Pass a batch of tensors with the samples first.",
                code="batch.unsplittable",
            )
        return found[0]

    def _traced_blocks(self, kind: str, candidate: Candidate, *, splits: bool) -> TracedBlocks | str:
        key = kind, twin_of(candidate)
        if key not in self._blocks:
            self._progress(f"tracing blocks: {key[1].describe()}", 0.5)
            self._blocks[key] = trace_blocks(*self._loop.parts, key[1], splits=splits, kind=kind)
        found = self._blocks[key]
        return found if isinstance(found, str) else blocks_as_twin(found, candidate)


def _may_gain_from_recomputing(profile: Profile) -> bool:
    """Return True unless settings without recomputation fit and are about as fast as without a memory limit.

    Recomputation adds work, and tracing blocks takes half of the time of an estimate.
    """
    found = priced_candidates(profile, profile.budget)
    fitting = [point.cost.step_s or math.inf for point in found if point.refusal is None]
    fastest = min((point.cost.step_s or math.inf for point in found), default=math.inf)
    return not fitting or _ALMOST_AS_FAST * min(fitting) > fastest


def _with_step_of(plain: TracedCandidate, fused: TracedCandidate) -> TracedCandidate:
    """Return a trace with the optimizer step of another: parameters and their updates are fp32 in every precision."""
    whole, sliced = (
        PeakMemoryModel((*peaks.lines, *(plain.step.lines if plain.step else ())))
        for peaks in (fused.whole, fused.sliced)
    )
    work = None if fused.work is None or plain.work is None else StepWork(fused.work.micro_batch, plain.work.step)
    return TracedCandidate(fused.candidate.having(fused_optimizer=False), whole, sliced, work, plain.step)


def _step(profile: Profile, model: CostModel, candidate: Candidate) -> StepEstimate:
    cost = model.predict(candidate)
    return StepEstimate(
        candidate.precision,
        candidate.micro_batch,
        candidate.fused_optimizer,
        _recomputed(profile, candidate),
        cost.step_s,
        model.traced_bytes(candidate) or cost.peak_bytes or 0,
    )


def _recomputed(profile: Profile, candidate: Candidate) -> str:
    found = profile.recomputable_of(candidate)
    if found is None or candidate.recompute is None:
        return ""
    number = len(found.blocks)
    schedule = schedule_of(candidate.recompute, number)
    whole = sum(len(part.stages) for part in schedule if isinstance(part, RecomputedSegment))
    in_part = sum(kept.in_part for kept in kept_in(schedule))
    some = [f"{count} blocks{how}" for count, how in ((whole, ""), (in_part, " in part")) if count]
    return f"activation checkpointing of {' and '.join(some)} (of {number})"


def _largest(models: Sequence[PeakMemoryModel], limit_bytes: float) -> int:
    """Return the largest number of samples with a peak within the limit for any model; 0 for none."""
    over = [bisect.bisect_right(range(1, _MOST_SAMPLES), limit_bytes, key=model.peak_bytes) for model in models]
    return max(over, default=0)
