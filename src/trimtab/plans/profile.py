"""A profile: facts about a loop, and trials of candidate settings. The only input of the planner."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.core import validation
from trimtab.core.block_costs import BlockChainModel
from trimtab.core.choice import Note, Proof, RefusedByProof, Scalar, SplitCheck, is_recorded
from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec, HostLink
from trimtab.core.memory_model import Operation, PeakMemoryModel, StepWork
from trimtab.core.objective import ASSUMED_REFERENCE, Budget, Objective, Reference
from trimtab.settings import FROM_TRACES, SAME_PEAK, SEARCHED

PROFILE_SCHEMA = 11
# Search phase that times the optimizer step alone.
ALONE = "optimizer"
# Search phase that tries precisions and memory formats again in micro-batches, if no candidate ran on a whole batch.
SLICED = "modes in slices"
# Error of a trial that ran out of memory.
OUT_OF_MEMORY = "out of memory"
RAN_OUT = "trial.out_of_memory"  # `Trial.code` of a trial that ran out of memory.
# Factor on the loop's own peak when it serves as the memory limit: a repeated measurement varies by about 1%.
OWN_PEAK = 1.02
# Name of the first deciding search phase; later ones append a number.
FINAL = "final"


# Settings that a memory model of a candidate holds for: it is a function of the micro-batch, and others hardly matter.
SAME_BYTES = ("micro_batch", *SAME_PEAK)


def is_final(stage: str) -> bool:
    """Return True if a search phase of this name decides."""
    return stage.startswith(FINAL)


# One field per searched setting, from `trimtab.settings.SEARCHED`; all but the micro-batch have a default.
_Values: Any = dataclasses.make_dataclass(
    "_Values",
    [
        ("micro_batch", int),
        *((name, each.value_type, each.default) for name, each in SEARCHED.items() if name != "micro_batch"),
    ],
    frozen=True,
)


@dataclass(frozen=True)
class Candidate(_Values):  # type: ignore[misc]
    """Values of the searched settings that are tried together: `Candidate(32, precision="bf16")`."""

    def having(self, **values: Scalar) -> Candidate:
        """Return the candidate with other values for some settings."""
        return replace(self, **values)

    @property
    def changes_blocks(self) -> bool:
        """True if blocks recompute activations, or keep them in host memory."""
        return self.recompute is not None or self.offload is not None

    def without_block_changes(self) -> Candidate:
        """Return the candidate with all activations kept on the device."""
        return self.having(recompute=None, offload=None)

    def differences(self, other: Candidate) -> tuple[str, ...]:
        """Return the names of the settings that differ between two candidates."""
        return tuple(name for name in SEARCHED if getattr(self, name) != getattr(other, name))

    def alike(self, other: Candidate, *but: str) -> bool:
        """Return True if two candidates differ in no setting other than `but`."""
        return all(name in but or getattr(self, name) == getattr(other, name) for name in SEARCHED)

    def describe(self) -> str:
        """Return a short label: the values that differ from a setting's default, then the micro-batch."""
        last_first = sorted(SEARCHED, key=lambda name: name == "micro_batch")
        labels = (SEARCHED[name].label(getattr(self, name)) for name in last_first)
        return ", ".join(label for label in labels if label)


@dataclass(frozen=True)
class Trial:
    """One candidate's measurements, interleaved with the others of its search phase.

    Args:
        stage: name of the search phase; trials of a phase are paired by block index.
        block_s: seconds per step, one figure per interleaved block; in the phase "optimizer", of the optimizer step
            alone.
        peak_bytes: peak bytes of a step, measured in a separate pass; None if not measured.
        error: reason for a failed trial, or None.
        control: True for the A/A control (the best candidate so far, measured a second time).
        compile_s: extra seconds of the first steps for compilation or graph capture; None if neither applies.
        unused_bytes: part of the peak that the allocator reserved without a tensor in it; None if unknown.
        watts: mean power, one figure per window of a second or more; () without a meter.
        code: stable identifier of the error, such as "trial.out_of_memory" or "trial.too_slow"; "" without an error.
    """

    stage: str
    candidate: Candidate
    block_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    error: str | None = None
    control: bool = False
    compile_s: float | None = None
    unused_bytes: int | None = None
    watts: tuple[float, ...] = ()
    code: str = ""

    def __post_init__(self) -> None:
        validation.not_negative(self, "peak_bytes", "unused_bytes")

    @property
    def is_whole(self) -> bool:
        """True if whole steps were timed, False for the optimizer step alone."""
        return self.stage != ALONE

    @property
    def failure(self) -> Note | None:
        """The error with its code; None for a successful trial."""
        if not self.error:
            return None
        # Trials of profiles of schema 10 have no code.
        return Note(self.code or (RAN_OUT if self.error == OUT_OF_MEMORY else "trial.failed"), self.error)

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step (of the optimizer step alone if not `is_whole`); None for a failed trial."""
        return statistics.median(self.block_s) if self.block_s else None

    @property
    def power_w(self) -> float | None:
        """Median watts; None if not measured."""
        return statistics.median(self.watts) if self.watts else None

    @property
    def energy_j(self) -> float | None:
        """Joules per step; None if not measured."""
        return None if self.step_s is None or self.power_w is None else self.step_s * self.power_w


@dataclass(frozen=True)
class TracedCandidate:
    """Peak memory of a candidate's step as a function of the micro-batch size, traced without a run.

    Args:
        whole: peak of a step with a single micro-batch.
        sliced: peak of a step with several micro-batches, which hold accumulated gradients; None if the batch cannot
            be split.
        step: peak of the optimizer step alone, without activations.
        early: peak of a step with a single micro-batch and updates within the backward pass; None if not traced.
        early_fused: the same with a fused optimizer.
    """

    candidate: Candidate
    whole: PeakMemoryModel
    sliced: PeakMemoryModel | None = None
    work: StepWork | None = None
    step: PeakMemoryModel | None = None
    early: PeakMemoryModel | None = None
    early_fused: PeakMemoryModel | None = None


@dataclass(frozen=True)
class RecomputableBlocks:
    """Blocks of a candidate's model with their recomputation costs.

    Args:
        candidate: settings of the measurement. Bytes hold for any micro-batch, allocator and fused optimizer.
        blocks: names of the blocks, in forward order.
        whole: chain of a step with a single micro-batch; None if unknown.
        sliced: chain of a step with several micro-batches, which hold accumulated gradients; None if unknown.
        step_s: seconds of the whole step without recomputation, predicted if nothing was run.
        schedules: schedules of least recomputation, for several fractions of the memory of a whole batch's step.
        refusal: reason for missing chains, or "".
        code: stable identifier of the refusal, such as "recompute.no_blocks", or "".
        has_buffers: True if a block has buffers, so that it cannot be compiled and recomputed.
        early: chain of a step with a single micro-batch and updates within the backward pass; None if not traced.
    """

    candidate: Candidate
    blocks: tuple[str, ...] = ()
    whole: BlockChainModel | None = None
    sliced: BlockChainModel | None = None
    step_s: float = 0.0
    schedules: tuple[str, ...] = ()
    refusal: str = ""
    code: str = ""
    has_buffers: bool = False
    early: BlockChainModel | None = None


@dataclass(frozen=True)
class TracedBlocks:
    """Blocks of a candidate's model, traced for target devices.

    Args:
        candidate: the settings; its micro-batch is ignored.
        blocks, whole, sliced: as of `RecomputableBlocks`, without seconds.
        forwards: operators of each block's forward.
        kept: all operators of a micro-batch that keeps all blocks.
        in_part: the same with only the expensive parts of blocks kept; () if not possible.
    """

    candidate: Candidate
    blocks: tuple[str, ...]
    whole: BlockChainModel
    sliced: BlockChainModel
    forwards: tuple[tuple[Operation, ...], ...]
    kept: tuple[Operation, ...]
    in_part: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class ProvedCandidate:
    """A candidate with the result of its proof."""

    candidate: Candidate
    proof: Proof


@dataclass(frozen=True)
class PaddingCount:
    """Padding tokens counted in some batches.

    Args:
        tokens, padding: number of token positions, and of these the padding.
        fixed: padding in columns without any token of the batch; a collate function that pads to the longest sample of
            the batch would not create these columns.
        num_batches: number of batches with a count.
        source: "attention_mask", or "labels" if padding was recognized by ignored labels over a repeated token.
        library: "trl" or "transformers" if the loop uses it, or "".
    """

    tokens: int
    padding: int
    fixed: int
    num_batches: int
    source: str
    library: str = ""

    def __post_init__(self) -> None:
        validation.not_negative(self, "tokens", "padding", "fixed", "num_batches")

    @property
    def fraction(self) -> float:
        """Fraction of the token positions that is padding."""
        return self.padding / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class LoopFacts:
    """Properties of the loop before planning.

    Args:
        num_parameters, parameter_bytes: of the whole model.
        trainable_parameters: number of parameters with gradients.
        optimizer: class name.
        batch_size: samples per optimizer step.
        terms_per_step: number of terms that the loss averages over (samples or tokens, without padding).
        flops_per_step: counted forward and backward FLOP of one optimizer step, including the model's own
            recomputation; None if not counted.
        has_convolutions, supports_fused, is_fused: determine the settings to try.
        has_workspaces: True with convolutions of any dimension, whose operators use memory outside of tensors.
        layout: memory format of the parameters, "contiguous" or "channels_last".
        layout_hazard: reason why channels_last is unsafe for this model, or "".
        can_retain: True if the host allocator can keep freed memory.
        faults_per_step: page faults of a step, from memory returned to the system and requested again; None if
            unknown.
        is_compiled: True if the loop already compiles the model or a part of it.
        scores_bytes: bytes that a step keeps of softmaxes over square score matrices, as unfused attention does.
        logits: rows and columns of the largest logits in the loss.
        padding_saves_s: seconds per step that padding the columns of these logits would save, from timed matrix
            products; None if not timed.
        longest: elements of the largest batch drawn, relative to the example batch; None if none was drawn.
        fused_refusal: reason for not using the optimizer's fused implementation, or "".
        bitwise_only: reason for trying only settings that keep gradients bitwise equal, such as gradient hooks; or
            "".
        head_tokens, head_words: rows and columns of a step's logits, if their loss can be computed in chunks.
        head_refusal: reason why it cannot although the model has a large linear layer, or "".
        kinds_of_blocks: number of kinds of the model's blocks, relative to the number of blocks, so that 1/12 means 12
            equal blocks; None if no kind repeats.
        wide_gradient_bytes: additional bytes of gradients that are accumulated in fp32 for half-precision weights.
        padding: padding tokens in the drawn batches, or in the example batch; None if not recognizable.
        by_parameter_refusal: reason why the optimizer cannot step on one parameter at a time within the backward pass,
            or "".
    """

    num_parameters: int
    trainable_parameters: int
    parameter_bytes: int
    optimizer: str
    batch_size: int
    terms_per_step: float
    terms: str
    flops_per_step: float | None
    has_convolutions: bool
    supports_fused: bool
    is_fused: bool
    layout: str
    is_compiled: bool = False
    can_retain: bool = False
    layout_hazard: str = ""
    faults_per_step: float | None = None
    fault_s: float | None = None
    head_tokens: int | None = None
    head_words: int | None = None
    scores_bytes: int = 0
    logits: tuple[int, int] | None = None
    padding_saves_s: float | None = None
    has_workspaces: bool = False
    longest: float | None = None
    fused_refusal: str = ""
    bitwise_only: str = ""
    head_refusal: str = ""
    kinds_of_blocks: float | None = None
    wide_gradient_bytes: int = 0
    padding: PaddingCount | None = None
    by_parameter_refusal: str = "the profile does not record if the optimizer can step on one parameter at a time"


@dataclass(frozen=True)
class LoaderTrial:
    """Training steps on batches of a copy of the user's DataLoader, timed by the wall clock.

    Args:
        num_workers, prefetch_factor, pin_memory: settings of the copy; `prefetch_factor` is None without workers.
        step_s: mean seconds per step, including the wait for the batch.
        starts_s: seconds from the start of an epoch to the first batch.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    step_s: float
    starts_s: float


@dataclass(frozen=True)
class LoaderTrials:
    """Comparison of the user's DataLoader with copies that have other settings.

    Args:
        alone_s: mean seconds of the same steps on batches that are already in memory.
        own: the user's settings; `step_s` is the mean of two measurements, before and after the others, if there is a
            `best`.
        noise_s: larger difference of the two measurements of `own` and of `best` (A/A control).
        others: the other settings tried, in order.
        num_steps: steps counted for each, before rounding up to a multiple of the number of workers.
        epoch: batches of an epoch.
        is_persistent: True if the user's workers persist between epochs.
        best: the fastest of `others`; `step_s` is the mean of two measurements. None if its gain was small, or if the
            time did not suffice for a second measurement.
    """

    alone_s: float
    own: LoaderTrial
    noise_s: float
    others: tuple[LoaderTrial, ...]
    num_steps: int
    epoch: int
    is_persistent: bool = False
    best: LoaderTrial | None = None


@dataclass(frozen=True)
class Profile:
    """All measurements behind a plan; JSON, so that a plan can be chosen later and on another machine.

    Args:
        objective, budget: determined which candidates were tried.
        total_steps: optimizer steps of the whole run; None if unknown.
        adapts_batch_size: True if windows may span several batches; all peaks are then of such windows.
        over_time_budget: True if the search was cut short to leave time for the final trials.
        traces: traces of this device's operators.
        target_device_traces, target_device_blocks: traces of CUDA's operators, for target devices.
        recomputables: measured blocks, if memory is limited or weighted.
        notes: figures and settings that could not be measured or tried, with the reasons.
        proofs: proofs of candidates about to be chosen.
        refused_by_proof: settings that a proof refused for this loop.
        loader: settings of the DataLoader compared in training steps; None if no comparison was made.
        host_link: bandwidth between the device and pinned host memory; None if not measured.
    """

    device: DeviceSpec
    loop: LoopFacts
    check: SplitCheck
    reference: Reference = ASSUMED_REFERENCE
    trials: tuple[Trial, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    profiling_s: float = 0.0
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    traces: tuple[TracedCandidate, ...] = ()
    target_device_traces: tuple[TracedCandidate, ...] = ()
    target_device_blocks: tuple[TracedBlocks, ...] = ()
    recomputables: tuple[RecomputableBlocks, ...] = ()
    total_steps: int | None = None
    adapts_batch_size: bool = False
    over_time_budget: bool = False
    meter: MeterFacts = NO_METER
    notes: tuple[Note, ...] = ()
    proofs: tuple[ProvedCandidate, ...] = ()
    refused_by_proof: tuple[RefusedByProof, ...] = ()
    loader: LoaderTrials | None = None
    host_link: HostLink | None = None
    schema: int = PROFILE_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != PROFILE_SCHEMA:
            raise FormatError("profile.schema", got=repr(self.schema), expected=str(PROFILE_SCHEMA))

    def with_trials(self, trials: tuple[Trial, ...]) -> Profile:
        """Return the profile with additional trials."""
        return replace(self, trials=self.trials + trials)

    def stage(self, name: str) -> tuple[Trial, ...]:
        """Return the trials of a search phase, in order."""
        return tuple(trial for trial in self.trials if trial.stage == name)

    def ran(self, name: str) -> tuple[Trial, ...]:
        """Return the successful trials of a search phase, without its control."""
        return tuple(trial for trial in self.stage(name) if trial.block_s and not trial.control)

    def error_of(self, candidate: Candidate) -> Note | None:
        """Return the error of a candidate's trials, or None.

        A candidate with a refuted setting returns the finding of the proof. A candidate without a trial inherits an
        out-of-memory error from a candidate that needs no more memory, regardless of the allocator.
        """
        if (refutation := self.refutation_of(candidate)) is not None:
            return refutation
        own = [trial for trial in self.trials if trial.candidate == candidate]
        failed = next((trial.failure for trial in own if trial.failure), None)
        if failed is not None or any(trial.is_whole and trial.block_s for trial in own):
            return failed
        return next((t.failure for t in self._ran_out if _needs_as_much(candidate, t.candidate)), None)

    @functools.cached_property
    def _ran_out(self) -> tuple[Trial, ...]:
        return tuple(t for t in self.trials if t.failure is not None and t.failure.code == RAN_OUT and t.is_whole)

    def is_refuted(self, setting: str, value: Scalar) -> bool:
        """Return True if a proof refused a value of a setting, with or without a remedy."""
        return any(each.setting == setting and each.value == value for each in self.refused_by_proof)

    def refutation_of(self, candidate: Candidate) -> Note | None:
        """Return the reason why a proof refused a setting of a candidate, or None."""
        return next((Note(each.code, each.reason) for each in self.refusals_of(candidate)), None)

    def refusals_of(self, candidate: Candidate) -> Iterator[RefusedByProof]:
        """Yield the refusals by a proof that apply to a candidate."""
        splits = candidate.micro_batch < self.loop.batch_size
        for each in self.refused_by_proof:
            is_named = splits if each.setting == "micro_batch" else getattr(candidate, each.setting) == each.value
            if is_named and not each.is_remedied(candidate):
                yield each

    def proof_of(self, candidate: Candidate) -> Proof | None:
        """Return the result of a candidate's proof, or None if it was not proved."""
        return next((each.proof for each in reversed(self.proofs) if each.candidate == candidate), None)

    def power_w(self, candidate: Candidate) -> float | None:
        """Return the most recent median watts of a candidate's whole steps, in any trial or control, or None."""
        read = (t.power_w for t in reversed(self.trials) if t.candidate == candidate and t.is_whole and t.watts)
        return next(read, None)

    def recomputable_of(self, candidate: Candidate) -> RecomputableBlocks | None:
        """Return the costs of a candidate's blocks, measured in eager mode; None if they do not apply."""
        ignored = (
            *SAME_BYTES,
            *FROM_TRACES,
            "recompute",
            "offload",
            *([] if is_recorded(candidate.compiled) else ["compiled"]),
        )
        alike = (each for each in self.recomputables if each.candidate.alike(candidate, *ignored))
        return next((each for each in alike if not (each.has_buffers and candidate.compiled)), None)

    def for_device(self, device: DeviceSpec) -> Profile:
        """Return the profile for a target device: loop facts without measurements or traces of this device."""
        loop = replace(self.loop, can_retain=False, faults_per_step=None, fault_s=None, layout_hazard="")
        there = replace(self, device=device, loop=loop, trials=(), phases_s={}, traces=(), recomputables=())
        there = replace(there, loader=None, host_link=None)
        return replace(there, over_time_budget=False, meter=NO_METER)

    @property
    def finals(self) -> tuple[str, ...]:
        """Names of the final search phases that ran, in order."""
        return tuple(dict.fromkeys(trial.stage for trial in self.trials if is_final(trial.stage)))

    @property
    def reference_candidate(self) -> Candidate:
        """The user's loop as a candidate; if it accumulates gradients, its micro-batch is one of its batches."""
        return Candidate(**{name: setting.in_loop(self) for name, setting in SEARCHED.items()})

    @property
    def own_peak_bytes(self) -> int | None:
        """Largest measured peak of the user's loop; None if not measured."""
        own = self.reference_candidate
        whole = [trial for trial in self.trials if trial.is_whole and trial.candidate.alike(own, "allocator")]
        return max((trial.peak_bytes for trial in whole if trial.peak_bytes is not None), default=None)

    def limits(self, budget: Budget) -> Budget:
        """Return a budget with the default memory limit: the loop's own peak if it accumulates gradients.

        Such a loop accumulates to save memory.
        """
        own = self.own_peak_bytes
        if self.reference.accumulate == 1 or budget.memory is not None or own is None:
            return budget
        return replace(budget, memory=math.ceil(OWN_PEAK * own))

    @property
    def run_s(self) -> float | None:
        """Predicted seconds of the whole run without a plan, from the step timed by phase; None if unknown."""
        step_s = sum(self.phases_s.values())
        return None if self.total_steps is None or step_s <= 0 else self.total_steps * step_s

    @property
    def fault_share(self) -> float | None:
        """Fraction of a step spent on page faults; None if they were not counted."""
        step_s = sum(seconds for name, seconds in self.phases_s.items() if name != "data")
        if self.loop.faults_per_step is None or self.loop.fault_s is None or step_s <= 0:
            return None
        return min(0.99, self.loop.faults_per_step * self.loop.fault_s / step_s)


def _needs_as_much(ours: Candidate, theirs: Candidate) -> bool:
    """Return True if a candidate needs at least as much memory as another."""
    is_alike = ours.alike(theirs, *SAME_BYTES)
    # An unfused optimizer step holds more memory.
    is_alike = is_alike and ours.fused_optimizer <= theirs.fused_optimizer
    return is_alike and ours.micro_batch >= theirs.micro_batch
