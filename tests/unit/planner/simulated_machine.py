"""A machine that is only arithmetic: it answers each stage of the search with trials from a cost function."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trimtab.core.block_costs import BlockChain, BlockChainModel, BlockCost, ExpensivePart
from trimtab.core.choice import COMPILED_BLOCKS, SplitCheck, is_by_compiler
from trimtab.core.hardware import DeviceSpec, HostLink
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.recompute_schedule import KeptBlock, Schedule, schedule_of
from trimtab.planner.offload_cost import predict_offload
from trimtab.planner.plan_choice import choose
from trimtab.planner.recompute_cost import predict
from trimtab.planner.recompute_solver import by_shares
from trimtab.planner.search import BlockMeasurements, MemoryTraces, next_measurement
from trimtab.planner.search import SearchPhase as Trials
from trimtab.planner.trial_statistics import MIN_BLOCKS, has_lost
from trimtab.plans.plan import Plan
from trimtab.plans.profile import ALONE, Candidate, LoopFacts, Profile, RecomputableBlocks, TracedCandidate, Trial
from trimtab.settings import SEARCHED

MIB = 2**20
SPLITTABLE = SplitCheck(True, "an unequal split changes the gradient by 1e-07, relative (limit 0.0001)", 1e-7)
CPU = DeviceSpec("a processor", "cpu", 2**34, {"fp32": 1e11, "bf16": 2e11, "fp16": 1e9}, None, "made up", 4)
GPU = DeviceSpec("an accelerator", "cuda", 2**36, {}, None, "unknown")
LOOP = LoopFacts(
    num_parameters=1000,
    trainable_parameters=1000,
    parameter_bytes=4000,
    optimizer="AdamW",
    batch_size=64,
    terms_per_step=64,
    terms="rows",
    flops_per_step=1e9,
    has_convolutions=True,
    supports_fused=True,
    is_fused=False,
    layout="contiguous",
    can_retain=True,
)
BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
# A loss head with logits worth a look: 64 rows of 128 tokens, a vocabulary of 8,192.
HEAD = {"head_tokens": 64 * 128, "head_words": 8192}


@dataclass
class Machine:
    """What a step costs, by default the same whatever is tried.

    Args:
        speed: value of a setting -> how many times faster a step is ("bf16", "channels_last", "retain", "norm").
        split_s: seconds that each micro-batch after the first adds to a step of 1 s.
        fused_speed: how many times faster the optimizer's step alone is, fused; it is a tenth of the step.
        head_speed: chunk -> how many times faster the loss head is; it is 0.3 of the step. head_saves: chunk ->
            share of the peak.
        compiled_speed: how many times faster a step is compiled; compile_s: seconds that takes. blocks_speed,
            compile_blocks_s: the same, compiled by block.
        fixed_bytes, row_bytes: the peak is fixed + row * micro-batch. weight: value of a setting -> factor on it.
        noise: relative deviation of a block. drift: that of the machine, shared by the arms of a block.
        fails: (stage, candidate) -> why a trial cannot run, or None. unit: seconds in a second.
        traces: whether its steps can be traced; traced: what that finds, of what a step really takes.
        forward_s: of its four blocks together, whose activations are four fifths of what a row takes; None: it has no
        blocks. watts: drawn while a candidate runs; None: there is no meter.
        chain_told: what is told of a step that recomputes, of what it really takes.
        link: bandwidth between device and host; None: it is not measured.
        gradient_bytes: part of the peak that a step within the backward pass frees. early_speed: how many times faster
            such a step is.
    """

    speed: dict[str, float] = field(default_factory=dict)
    split_s: float = 0.1
    fused_speed: float = 1.0
    head_speed: dict[int, float] = field(default_factory=dict)
    head_saves: dict[int, float] = field(default_factory=dict)
    compiled_speed: float = 1.0
    compile_s: float = 30.0
    blocks_speed: float = 1.0
    compile_blocks_s: float = 5.0
    fixed_bytes: int = 100 * MIB
    row_bytes: int = 10 * MIB
    weight: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0
    drift: float = 0.0
    fails: Callable[[str, Candidate], str | None] = lambda stage, candidate: None
    step_of: Callable[[str, Candidate], float] | None = None
    unit: float = 1.0
    num_blocks: int = 5
    seed: int = 0
    traces: bool = True
    traced: float = 1.0
    forward_s: float | None = None
    chain_told: float = 1.0
    link: HostLink | None = None
    gradient_bytes: int = 0
    early_speed: float = 1.0
    watts: Callable[[Candidate], float] | None = None
    stages: list[Trials] = field(default_factory=list)
    measured_blocks: list[Candidate] = field(default_factory=list)
    rows: int = LOOP.batch_size

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def step_s(self, stage: str, candidate: Candidate) -> float:
        """Return the true seconds per step, or of a part of it alone."""
        optimizer_s = 0.1 / (self.fused_speed if candidate.fused_optimizer else 1.0)
        head_s = 0.3 / self.head_speed.get(candidate.loss_chunk or 0, 1.0)
        if stage == ALONE:
            return optimizer_s * self.unit
        if self.step_of is not None:
            return self.step_of(stage, candidate) * self.unit
        seconds = 0.9
        for value in (candidate.precision, candidate.memory_layout, candidate.allocator, candidate.fp32_modules):
            seconds /= self.speed.get(value, 1.0)
        seconds += optimizer_s + head_s - 0.3
        if candidate.compiled:
            seconds /= self.blocks_speed if candidate.compiled == COMPILED_BLOCKS else self.compiled_speed
        if candidate.step_in_backward:
            seconds /= self.early_speed
        seconds += self._recomputed_s(candidate)
        if candidate.offload is not None:
            cost = predict_offload(self._chain(candidate, self.rows).stages, candidate.offload, self.link)
            seconds += cost.waiting_s
        return (seconds + self.split_s * (math.ceil(self.rows / candidate.micro_batch) - 1)) * self.unit

    def _price_s(self, candidate: Candidate) -> float | None:
        """Return what a way to run the model takes once: recording is next to nothing."""
        if not candidate.compiled:
            return None
        if candidate.compiled == COMPILED_BLOCKS:
            return self.compile_blocks_s
        return self.compile_s if is_by_compiler(candidate.compiled) else 0.2

    def peak_bytes(self, candidate: Candidate) -> int:
        """Return the true peak."""
        factor = self.weight.get(candidate.precision, 1.0) * self.weight.get(candidate.memory_layout, 1.0)
        factor *= self.weight.get(candidate.fp32_modules, 1.0)
        factor *= 1 - self.head_saves.get(candidate.loss_chunk or 0, 0.0)
        if candidate.recompute is not None:
            chain = self._chain(candidate, candidate.micro_batch)
            return chain.held_bytes + predict(chain.stages, _whole(candidate)).peak_bytes
        if candidate.offload is not None:
            chain = self._chain(candidate, candidate.micro_batch)
            return chain.held_bytes + predict_offload(chain.stages, candidate.offload, self.link).peak_bytes
        freed = self.gradient_bytes if candidate.step_in_backward else 0
        return int(factor * (self.fixed_bytes + self.row_bytes * candidate.micro_batch)) - freed

    def _recomputed_s(self, candidate: Candidate) -> float:
        if candidate.recompute is None:
            return 0.0
        return predict(self._chain(candidate, self.rows).stages, _whole(candidate)).recompute_s

    def _chain(self, candidate: Candidate, rows: int) -> BlockChain:
        fixed, whole = (
            self.peak_bytes(replace(candidate, micro_batch=each, recompute=None, offload=None)) for each in (0, rows)
        )
        unit = (whole - fixed) // 10
        seconds = (self.forward_s or 0.0) / 4 * rows / self.rows
        part = ExpensivePart(unit, unit // 4, seconds / 10)
        block = BlockCost(seconds, unit // 5, 2 * unit, 2 * unit, unit, unit // 4, parts=(part,))
        last = BlockCost(0.0, 0, 3 * unit // 2, 3 * unit // 2, 3 * unit // 2, unit // 2, is_linked=False)
        return BlockChain((*[block] * 3, replace(block, is_linked=False), last), fixed)

    def blocks(self, candidate: Candidate) -> RecomputableBlocks:
        """Return what measuring blocks finds, as `calibrate.recomputation` does."""
        self.measured_blocks.append(candidate)
        if self.forward_s is None or self.rows < 3:
            return RecomputableBlocks(candidate, refusal="the model has no blocks")
        few, whole = (self._chain(candidate, rows) for rows in (self.rows // 2, self.rows))
        few, whole = (_scaled(chain, self.chain_told) for chain in (few, whole))
        model = BlockChainModel(few, whole, (self.rows // 2, self.rows))
        step_s = self.step_s("sizes", candidate) / self.unit
        return RecomputableBlocks(candidate, BLOCKS, model, model, step_s, by_shares(whole))

    def run(self, stage: Trials) -> tuple[Trial, ...]:
        """Return a stage's trials, as `calibrate.trials.run_stage` does."""
        assert len(set(stage.candidates)) == len(stage.candidates)
        self.stages.append(stage)
        num_blocks = self.num_blocks if stage.accepts else 3
        drifts = [self._rng.lognormvariate(0, self.drift) for _ in range(num_blocks)]
        arms = [(candidate, False) for candidate in stage.candidates]
        arms += [(stage.candidates[0], True)] if stage.control else []
        trials: list[Trial] = []
        for candidate, control in arms:
            trials.append(self._trial(stage, candidate, control, drifts))
            if stage.is_known([trial.peak_bytes for trial in trials]):
                break
        first, *others = trials
        return first, *(self._dropped(stage, first, trial) for trial in others)

    @staticmethod
    def _dropped(stage: Trials, first: Trial, trial: Trial) -> Trial:
        """Return a trial with as many blocks as it gets to run."""
        ours, theirs = trial.block_s[:MIN_BLOCKS], first.block_s[:MIN_BLOCKS]
        can_lose = stage.drops and ours and not trial.control
        lost = can_lose and has_lost(replace(trial, block_s=ours), replace(first, block_s=theirs))
        return replace(trial, block_s=ours) if lost else trial

    def _trial(self, stage: Trials, candidate: Candidate, control: bool, drifts: list[float]) -> Trial:
        error = self.fails(stage.name, candidate)
        if error is not None:
            return Trial(stage.name, candidate, (), None, error, control)
        step_s = self.step_s(stage.name, candidate)
        blocks = tuple(step_s * drift * self._rng.lognormvariate(0, self.noise) for drift in drifts)
        peak = None if control or stage.name == "optimizer" else self.peak_bytes(candidate)
        found = Trial(stage.name, candidate, blocks, peak, None, control, self._price_s(candidate))
        if self.watts is None or stage.name == ALONE:
            return found
        return replace(found, watts=tuple(self.watts(candidate) for _ in range(5)))

    def trace(self, candidate: Candidate) -> TracedCandidate:
        """Return what a trace finds, as `calibrate.tracing` does."""
        one, none = (self.peak_bytes(replace(candidate, micro_batch=rows)) for rows in (1, 0))
        model = PeakMemoryModel(((self.traced * none, self.traced * (one - none)),))
        step = PeakMemoryModel(((self.traced * none, 0.0),))
        early = PeakMemoryModel(((self.traced * (none - self.gradient_bytes), self.traced * (one - none)),))
        return TracedCandidate(candidate, model, model, step=step, early=early, early_fused=early)


def _scaled(chain: BlockChain, factor: float) -> BlockChain:
    names = ("output_bytes", "saved_bytes", "forward_bytes", "dropping_bytes", "backward_bytes")
    stages = (replace(s, **{name: int(factor * getattr(s, name)) for name in names}) for s in chain.stages)
    return BlockChain(tuple(stages), int(factor * chain.held_bytes))


def _whole(candidate: Candidate) -> Schedule:
    return (*schedule_of(candidate.recompute or "", len(BLOCKS)), KeptBlock(len(BLOCKS)))


def measured(
    machine: Machine,
    *,
    budget: Budget | None = None,
    objective: Objective | None = None,
    device: DeviceSpec = CPU,
    check: SplitCheck = SPLITTABLE,
    reference: Reference | None = None,
    always: bool = False,
    total_steps: int | None = None,
    over_time_budget: bool = False,
    **facts: object,
) -> Profile:
    """Return the profile the search makes of the machine; `always`: with traces, whatever it is for."""
    loop = replace(LOOP, **facts)
    machine.rows = loop.batch_size
    phases_s = {"forward": 0.9, "optimizer": 0.1}
    objective, budget = objective or Objective(), budget or Budget()
    profile = Profile(
        device,
        loop,
        check,
        reference or Reference(),
        phases_s=phases_s,
        profiling_s=12.5,
        objective=objective,
        budget=budget,
        total_steps=total_steps,
        over_time_budget=over_time_budget,
    )
    return searched(machine, profile, always=always)


def searched(machine: Machine, profile: Profile, *, always: bool = False) -> Profile:
    """Return the profile with the measurements that the search still asks for."""
    requested: set[Candidate] = set()
    while True:
        wanted = next_measurement(profile, profile.objective, profile.budget, always=always, requested=requested)
        if wanted is None:
            return profile
        if isinstance(wanted, MemoryTraces):
            requested.update(wanted.candidates)
            found = tuple(map(machine.trace, wanted.candidates)) if machine.traces else ()
            profile = replace(profile, traces=profile.traces + found)
        elif isinstance(wanted, BlockMeasurements):
            blocks = tuple(map(machine.blocks, wanted.candidates))
            profile = replace(profile, recomputables=profile.recomputables + blocks, host_link=machine.link)
        else:
            assert len(machine.stages) < 10, "the search does not end"
            profile = profile.with_trials(machine.run(wanted))


def planned(
    machine: Machine, *, budget: Budget | None = None, objective: Objective | None = None, **facts: object
) -> Plan:
    """Return the plan for the machine."""
    profile = measured(machine, budget=budget, objective=objective, **facts)
    return choose(profile, objective or Objective(), budget or Budget())


def values(plan: Plan) -> tuple[object, ...]:
    """Return what a plan chose."""
    return tuple(choice.value for _, choice in plan.choices())


def candidate_of(plan: Plan) -> Candidate:
    """Return a plan's choices as the candidate they were tried as."""
    return Candidate(**{name: getattr(plan, name).value for name in SEARCHED})
