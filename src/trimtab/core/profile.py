"""What was measured: facts about a loop, and trials of candidate settings. The planner reads nothing else."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trimtab.core import checks
from trimtab.core.chain import ChainModel
from trimtab.core.choice import Proof, Refuted
from trimtab.core.compiled import Compiled, in_words
from trimtab.core.energy import NO_METER, MeterFacts
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.notes import Note
from trimtab.core.objective import ASSUMED_REFERENCE, Budget, Objective, Reference
from trimtab.core.peak_model import PeakModel
from trimtab.core.plan import Check, Scalar
from trimtab.core.work import Operation, StepWork

PROFILE_SCHEMA = 10
# The stage that times a part of a step alone.
ALONE = "optimizer"
# The stage that asks modes again in slices of the batch, where none ran whole.
SLICED = "modes in slices"
# The error of a trial that memory ran out in.
OUT_OF_MEMORY = "out of memory"
# A limit of the loop's own peak is this many times it: counted again, a peak repeats to about 1%.
OWN_PEAK = 1.02
# What the stages that decide are called, the first of them; others have a number behind it.
FINAL = "final"


def is_final(stage: str) -> bool:
    """Whether a stage of this name decides."""
    return stage.startswith(FINAL)


@dataclass(frozen=True)
class Candidate:
    """Tier-S settings that are tried together."""

    precision: str
    memory_layout: str
    fused_optimizer: bool
    micro_batch: int
    allocator: str = "keep"
    loss_chunk: int | None = None
    compiled: Compiled = False
    recompute: str | None = None

    def differences(self, other: Candidate) -> tuple[str, ...]:
        """Return the names of the fields in which the two differ."""
        return tuple(name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(other, name))

    def alike(self, other: Candidate, *but: str) -> bool:
        """Return whether the two differ in nothing, or in nothing but these fields."""
        return set(self.differences(other)) <= set(but)

    def describe(self) -> str:
        """Return a short label."""
        layout = "" if self.memory_layout == "keep" else f", {self.memory_layout}"
        fused = ", fused" if self.fused_optimizer else ""
        retain = "" if self.allocator == "keep" else ", memory retained"
        chunk = "" if self.loss_chunk is None else f", loss in chunks of {self.loss_chunk}"
        compiled = f", {in_words(self.compiled)}" if self.compiled else ""
        again = "" if self.recompute is None else f", recomputing {self.recompute}"
        return f"{self.precision}{layout}{fused}{retain}{chunk}{compiled}{again}, micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Trial:
    """One candidate, run interleaved with the others of its stage.

    Args:
        stage: name of the stage; trials of one stage are paired by block index.
        candidate: the settings.
        block_s: seconds per step, one figure per interleaved block; in the stage "optimizer" of that alone.
        peak_bytes: peak bytes of a step, measured in a separate pass; None when not measured.
        error: why the trial could not run, or None.
        control: whether this is the A/A control (the incumbent a second time).
        compile_s: seconds that its first steps took beyond the next one, where it is compiled or recorded; else None.
        unused_bytes: of the peak, what the allocator held in pieces that no tensor was in; None: not known.
        watts: that were drawn while it ran, one figure per window of a second or more; (): there was no meter.
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

    def __post_init__(self) -> None:
        checks.not_negative(self, "peak_bytes", "unused_bytes")

    @property
    def is_whole(self) -> bool:
        """Whether whole steps were timed, and not a part of one alone."""
        return self.stage != ALONE

    @property
    def step_s(self) -> float | None:
        """Median seconds of what was timed (`is_whole`), or None when the trial could not run."""
        return _median(self.block_s)

    @property
    def power_w(self) -> float | None:
        """Median watts, or None where they were not measured."""
        return _median(self.watts)

    @property
    def energy_j(self) -> float | None:
        """Joules per step, or None where they were not measured."""
        return None if self.step_s is None or self.power_w is None else self.step_s * self.power_w


def _median(figures: tuple[float, ...]) -> float | None:
    ordered, middle = sorted(figures), len(figures) // 2
    if not ordered:
        return None
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True)
class Traced:
    """Peak bytes of a candidate's step by the rows of its micro-batches, traced without running it.

    Args:
        candidate: its micro-batch means nothing here. whole: of a step of one micro-batch. sliced: of several, whose
            gradients are held from one to the next; None where the batch is not split. work: what its operators do.
        step: of its optimizer's step alone, whatever the forward and backward hold.
    """

    candidate: Candidate
    whole: PeakModel
    sliced: PeakModel | None = None
    work: StepWork | None = None
    step: PeakModel | None = None


@dataclass(frozen=True)
class Recomputable:
    """The blocks of a candidate's model as recomputing them is decided upon.

    Args:
        candidate: with which seconds were taken; bytes are those of any micro-batch, allocator and fused step.
        blocks: their names, in the order they run in. whole: of a step of one micro-batch; sliced: of several, whose
            gradients are held from one to the next; None where it cannot be told.
        step_s: of the whole step that keeps all, which the chains' seconds are a share of; where nothing is run, as
            predicted.
        schedules: of least recomputation, for some shares of what the whole batch's step takes where all is kept.
        refusal: why it cannot be told, or "".
    """

    candidate: Candidate
    blocks: tuple[str, ...] = ()
    whole: ChainModel | None = None
    sliced: ChainModel | None = None
    step_s: float = 0.0
    schedules: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class TracedBlocks:
    """The blocks of a candidate's model, traced for devices that are not here.

    Args:
        candidate: its micro-batch means nothing here. blocks, whole, sliced: as of `Recomputable`, without seconds.
        forwards: operators of each block's forward. kept: of a micro-batch, all of it, whose blocks are kept;
            in_part: of one whose blocks keep their dear parts, or none where they cannot.
    """

    candidate: Candidate
    blocks: tuple[str, ...]
    whole: ChainModel
    sliced: ChainModel
    forwards: tuple[tuple[Operation, ...], ...]
    kept: tuple[Operation, ...]
    in_part: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class ProvedCandidate:
    """A candidate with the outcome of its proof."""

    candidate: Candidate
    proof: Proof


@dataclass(frozen=True)
class LoopFacts:
    """The loop as it was found.

    Args:
        num_parameters, parameter_bytes: of the whole model; trainable_parameters: those with gradients.
        optimizer: class name.
        batch_rows: rows per optimizer step; terms_per_step: what the loss averages over (rows or tokens, padding not
            counted); terms: its name.
        flops_per_step: counted forward and backward FLOP of one optimizer step, as the model runs (recomputation that
            it does by itself is counted); None: not counted.
        has_convolutions, supports_fused, is_fused: what decides which settings are worth a trial.
        has_workspaces: whether it has convolutions of any dimension, whose operators take memory that no tensor shows.
        layout: "contiguous" or "channels_last", as the parameters lie now.
        layout_hazard: why channels_last is not safe here, or "".
        can_retain: whether the host allocator can be told to keep freed memory.
        faults_per_step, fault_s: page faults of a step, which takes memory back that it had handed back, and seconds of
            one; None: not known.
        is_compiled: whether the model, or a part of it, is compiled as the loop has it.
        scores_bytes: bytes a step keeps of softmaxes over square scores, which attention that is written out makes.
        logits: rows and columns of the largest that a loss is made of. padding_saves_s: seconds a step would save with
            their columns padded, as its products were timed; None: not timed.
        longest: elements of the largest batch that was drawn, in those of the example; None: none was.
        fused_refusal: why a fused step that the optimizer has does not count as supported, or "".
        bitwise_only: why only settings that change no bit of a gradient are tried, such as gradient hooks; or "".
        head_tokens, head_words: rows and columns of the logits of a step, where the model has a `trimtab.nn.LossHead`.
    """

    num_parameters: int
    trainable_parameters: int
    parameter_bytes: int
    optimizer: str
    batch_rows: int
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


@dataclass(frozen=True)
class Profile:
    """Everything a plan is decided from; JSON, so it can be decided elsewhere and later.

    Args:
        objective, budget, total_steps: what the trials were chosen for; steps of the whole run, None where not known.
        frees_batch: whether windows may span several batches; peaks are then of those that do, the reference's too.
        hurried: whether measuring had no time left beside its final, and the search was cut short.
        traces: of this device's operators. elsewhere_traces and elsewhere_blocks: of CUDA's, for devices not here.
        recomputables: blocks that were measured, where memory asks for less of it.
        meter: what counted joules, or why nothing did.
        notes: figures and settings that could not be measured or tried, with the reasons.
        proofs: of candidates that were about to be chosen. refuted: settings that a proof refused for this loop.
    """

    device: DeviceSpec
    loop: LoopFacts
    check: Check
    reference: Reference = ASSUMED_REFERENCE
    trials: tuple[Trial, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    profiling_s: float = 0.0
    objective: Objective = field(default_factory=Objective)
    budget: Budget = field(default_factory=Budget)
    traces: tuple[Traced, ...] = ()
    elsewhere_traces: tuple[Traced, ...] = ()
    elsewhere_blocks: tuple[TracedBlocks, ...] = ()
    recomputables: tuple[Recomputable, ...] = ()
    total_steps: int | None = None
    frees_batch: bool = False
    hurried: bool = False
    meter: MeterFacts = NO_METER
    notes: tuple[Note, ...] = ()
    proofs: tuple[ProvedCandidate, ...] = ()
    refuted: tuple[Refuted, ...] = ()
    schema: int = PROFILE_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != PROFILE_SCHEMA:
            raise FormatError("profile.schema", given=repr(self.schema), expected=str(PROFILE_SCHEMA))

    def with_trials(self, trials: tuple[Trial, ...]) -> Profile:
        """Return a profile that holds these trials too."""
        return replace(self, trials=self.trials + trials)

    def stage(self, name: str) -> tuple[Trial, ...]:
        """Return the trials of one stage, in the order they were asked for."""
        return tuple(trial for trial in self.trials if trial.stage == name)

    def ran(self, name: str) -> tuple[Trial, ...]:
        """Return those of a stage that ran, but for its control."""
        return tuple(trial for trial in self.stage(name) if trial.block_s and not trial.control)

    def error_of(self, candidate: Candidate) -> str | None:
        """Return what a candidate failed with in any of its trials, or None.

        Of one that did not run itself, where memory ran out in no more rows, that, whatever the allocator's mode. Of a
        candidate with a refuted setting, what its proof found.
        """
        if (refutation := self.refutation_of(candidate)) is not None:
            return refutation
        own = [trial for trial in self.trials if trial.candidate == candidate]
        failed = next((trial.error for trial in own if trial.error), None)
        if failed is not None or any(trial.is_whole and trial.block_s for trial in own):
            return failed
        return next((t.error for t in self._ran_out if _needs_as_much(candidate, t.candidate)), None)

    @functools.cached_property
    def _ran_out(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.error == OUT_OF_MEMORY and trial.is_whole)

    def is_refuted(self, setting: str, value: Scalar) -> bool:
        """Return whether a proof refused a value of a setting."""
        return any(each.setting == setting and each.value == value for each in self.refuted)

    def refutation_of(self, candidate: Candidate) -> str | None:
        """Return why a proof refused a setting of a candidate, or None."""
        splits = candidate.micro_batch < self.loop.batch_rows
        for each in self.refuted:
            if splits if each.setting == "micro_batch" else getattr(candidate, each.setting) == each.value:
                return each.reason
        return None

    def proof_of(self, candidate: Candidate) -> Proof | None:
        """Return the outcome of a candidate's proof, or None if it was not proved."""
        return next((each.proof for each in reversed(self.proofs) if each.candidate == candidate), None)

    def power_w(self, candidate: Candidate) -> float | None:
        """Return the watts of a candidate's whole steps, as they were read last in any trial or control; or None."""
        read = (t.power_w for t in reversed(self.trials) if t.candidate == candidate and t.is_whole and t.watts)
        return next(read, None)

    def recomputable_of(self, candidate: Candidate) -> Recomputable | None:
        """Return what was measured of the blocks of a candidate's model, or None."""
        ignored = ("micro_batch", "allocator", "fused_optimizer", "recompute")
        return next((each for each in self.recomputables if each.candidate.alike(candidate, *ignored)), None)

    def elsewhere(self, device: DeviceSpec) -> Profile:
        """Return what it says of a device that is not here: nothing that was measured, and no traces yet."""
        loop = replace(self.loop, can_retain=False, faults_per_step=None, fault_s=None, layout_hazard="")
        there = replace(self, device=device, loop=loop, trials=(), phases_s={}, traces=(), recomputables=())
        return replace(there, hurried=False, meter=NO_METER)

    @property
    def finals(self) -> tuple[str, ...]:
        """The names of the finals that were run, in order."""
        return tuple(dict.fromkeys(trial.stage for trial in self.trials if is_final(trial.stage)))

    @property
    def reference_candidate(self) -> Candidate:
        """The user's loop as a candidate: in micro-batches of one batch each where it accumulates."""
        rows = math.ceil(self.loop.batch_rows / self.reference.accumulate)
        return Candidate(self.reference.precision, "keep", self.loop.is_fused, rows)

    @property
    def own_peak_bytes(self) -> int | None:
        """Peak bytes of a step of the user's loop, the most that was counted in its trials; None if it was not."""
        own = self.reference_candidate
        whole = [trial for trial in self.trials if trial.is_whole and trial.candidate.alike(own, "allocator")]
        return max((trial.peak_bytes for trial in whole if trial.peak_bytes is not None), default=None)

    def limits(self, budget: Budget) -> Budget:
        """Return a budget with its default limit on memory.

        A loop that accumulates does so to save memory: without a limit of the user's, its own peak is the limit.
        """
        own = self.own_peak_bytes
        if self.reference.accumulate == 1 or budget.memory is not None or own is None:
            return budget
        return replace(budget, memory=math.ceil(OWN_PEAK * own))

    @property
    def run_s(self) -> float | None:
        """Seconds of the whole run as the loop is, by the step that was timed by phase; None where not known."""
        step_s = sum(self.phases_s.values())
        return None if self.total_steps is None or step_s <= 0 else self.total_steps * step_s

    @property
    def fault_share(self) -> float | None:
        """Share of a step that its page faults take, or None where they were not counted."""
        step_s = sum(seconds for name, seconds in self.phases_s.items() if name != "data")
        if self.loop.faults_per_step is None or self.loop.fault_s is None or step_s <= 0:
            return None
        return min(0.99, self.loop.faults_per_step * self.loop.fault_s / step_s)


def _needs_as_much(ours: Candidate, theirs: Candidate) -> bool:
    """Return whether a candidate needs the memory that another does, or more of it."""
    is_alike = ours.alike(theirs, "micro_batch", "allocator", "fused_optimizer")
    is_alike = is_alike and ours.fused_optimizer <= theirs.fused_optimizer  # a step that is not fused holds more
    return is_alike and ours.micro_batch >= theirs.micro_batch
