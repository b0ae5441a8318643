"""Loop, options and arms of an experiment."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.api import Metering
from trimtab.core import validation
from trimtab.core.energy_reading import NO_METER
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import to_jsonable
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.experiments import loop_setup, loops
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.loops import DataStream, Loop, StepResult
from trimtab.experiments.paired_run import Arm, BlockMeter, PairedRun, RunLength, block_meter, measure_step
from trimtab.experiments.plan_changes import changes_of
from trimtab.experiments.result_folder import ResultFolder
from trimtab.experiments.result_table import LOSS, ResultTable, Row
from trimtab.experiments.step_check import check_step
from trimtab.experiments.task_loops import STRICT, Setup, TaskLoops
from trimtab.experiments.task_plans import refuse_on_ranks, require_fits, require_same_task, task_of_rank
from trimtab.experiments.time_to_target import QualityMetric
from trimtab.measure import timing
from trimtab.measure.machine import device_spec, environment
from trimtab.planner.multi_rank_plan import for_replicas
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT
from trimtab.plans.plan import Plan
from trimtab.profiling.plan_cache import parts_of_key, plain_value
from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import Task
from trimtab.techniques.cuda_graphs import steps_to_launch
from trimtab.training.apply_plan import WINDOWS
from trimtab.training.split_conditions import warn_of_unproved_split

STEPS, PAIRS = 100, 5
_LEAD_STEPS = 1


@dataclass(frozen=True)
class RunOptions:
    """Options of a comparison for all arms.

    Args:
        steps: optimizer steps of an arm per pair; None for `STEPS`, or with `to_end` for the task's steps.
        pairs: paired runs with different seeds: five for a verdict, eight for a claim.
        to_end: True to train a task to the end of the budget with all evaluations, for times to targets.
        evaluate_every: optimizer steps between evaluations. Seconds of training then count from the first step. None:
            a single evaluation at the end.
        metric: the evaluation for judging the training, with targets.
        cap_s, baseline_cap_s: limits on the training seconds of an arm and of the baseline.
        out: folder for the completed parts; None to keep none.
        metering: source of energy figures; by default the available meters.
        command: command line, recorded in the result.
        progress: called with a line of text and the completed fraction.
        together: the ranks of the job; every rank makes the same call.
    """

    steps: int | None = None
    pairs: int = PAIRS
    to_end: bool = False
    evaluate_every: int | None = None
    metric: QualityMetric | None = None
    cap_s: float = math.inf
    baseline_cap_s: float | None = None
    out: Path | None = None
    metering: Metering | None = None
    command: str = ""
    progress: Progress = silent
    together: Coordinator = ALONE

    def __post_init__(self) -> None:
        if self.steps is not None:
            validation.integer("steps", self.steps, low=3)
        validation.integer("pairs", self.pairs, high=1000)
        if self.evaluate_every is not None:
            validation.integer("evaluate_every", self.evaluate_every)
        for name in ("cap_s", "baseline_cap_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueGivenError(name, got=f"{value:g}", expected="seconds above zero", code="cap.not_positive")
        if self.baseline_cap_s is not None and self.baseline_cap_s < self.cap_s:
            raise ValueGivenError(
                "baseline_cap_s",
                got=f"{self.baseline_cap_s:g} s",
                expected=f"at least the limit of all arms, {self.cap_s:g} s",
                code="cap.too_small",
            )

    def of_task(self, task: Task | None) -> RunOptions:
        """Return the options with steps, evaluations and metric of a task, if it is trained to the end."""
        if not self.to_end:
            return self
        if task is None:
            raise ValueGivenError(
                "to_end",
                problem="A function setup(seed) has no end of training.",
                hint="Pass steps, and evaluate_every for evaluations.",
                code="to_end.not_task",
            )
        metric = QualityMetric(task.metric.name, task.metric.higher_is_better, task.metric.unit, task.targets)
        every = self.evaluate_every or max(1, task.eval_every_samples // task.batch_size)
        steps = self.steps or -(-task.budget_samples // task.batch_size)
        return replace(self, steps=steps, evaluate_every=every, metric=self.metric or metric)

    @property
    def length(self) -> RunLength:
        """The length of every paired run."""
        return RunLength(self.steps or STEPS, self.evaluate_every, self.cap_s, self.baseline_cap_s)


@dataclass(frozen=True)
class Arms:
    """The arms of a comparison, with plans, changes and precisions for the result."""

    arms: list[Arm] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    changes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rivals: dict[str, str] = field(default_factory=dict)
    precisions: dict[str, str] = field(default_factory=dict)

    def plain(self, name: str, setup: Setup, reference: Reference, *, samples: int | None = None) -> None:
        """Add a loop as the user wrote it."""
        self.arms.append(Arm(name, _referring(setup, reference, name), loops.plain_steps, samples=samples))
        self.precisions[name] = reference.precision

    def planned(
        self, name: str, setup: Setup, reference: Reference, plan: Plan, *, samples: int | None, horizon: int | None
    ) -> None:
        """Add a loop with a plan; `horizon` are the samples of a plan's learning-rate schedule."""
        if not self.plans and plan.splits and not plan.proves_splitting:
            # The first plan has every change of the others.
            warn_of_unproved_split(plan, loop_setup.build(setup, 0, name).model)
        how = {"total_samples": horizon} if plan.schedule.value != "user" else {}
        steps = partial(_planned_steps, plan=plan, options=how)
        hides = plan.engine.value == "deepspeed"
        lead = _LEAD_STEPS + settling_steps_of(plan)
        self.arms.append(
            Arm(name, _referring(setup, reference, name), steps, lead, samples=samples, hides_memory=hides)
        )
        self.plans[name] = plan
        self.changes[name] = changes_of(plan, reference)
        self.precisions[name] = str(plan.precision.value)


def _planned_steps(
    loop: Loop, batches: Iterator[Any], *, plan: Plan, options: Mapping[str, Any]
) -> Iterator[StepResult]:
    return loops.planned_steps(loop, batches, plan, **options)


def fingerprint_of(setup: Setup, name: str, batch: Any = None) -> str:
    """Return a digest of a loop: model, optimizer settings, functions, and the source files of the functions."""
    loop = loop_setup.build(setup, loop_setup.PLANNING_SEED, name)
    own = [*((setup,) if inspect.isfunction(setup) else ()), loop.evaluate, loop.after_step, loop.step, loop.loss_fn]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in loop.optimizer.param_groups]
    arguments = {"functions": [None if each is None else plain_value(each) for each in own]}
    parts = parts_of_key(loop.model, loop.optimizer, loop.loss_fn, batch, arguments)
    kept = {key: part for key, part in parts.items() if key not in ("sources", "environment", "device", "fp32")}
    kept |= {"groups": to_jsonable(plain_options({"groups": groups})), "accumulate": loop.accumulate}
    kept["files"] = sorted({_digest_of_file(each) for each in (*own, type(loop.model)) if each is not None})
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _digest_of_file(defined: Any) -> str:
    """Return a digest of the source file of a function or class; "" without a file, as in a notebook."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(getattr(defined, "__func__", defined)))
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def settling_steps_of(plan: Plan) -> int:
    """Return the steps before the steady state of a loop with a plan; several with CUDA graphs or compilation."""
    return steps_to_launch(plan.compiled.value) or (WINDOWS if plan.compiled.value else 1)


@dataclass(frozen=True)
class Subject:
    """The compared loop: a function, or a task with the function of the task's loop."""

    name: str
    setup: Setup
    options: RunOptions
    task_loops: TaskLoops | None = None

    @classmethod
    def of(cls, setup: Setup | Task, name: str, options: RunOptions) -> Subject:
        """Return the subject of a function or task."""
        if not isinstance(setup, Task):
            return cls(name, setup, options.of_task(None))
        made = TaskLoops(setup)
        return cls(setup.name, made.setup, options.of_task(setup), made)

    @property
    def task(self) -> Task | None:
        """The task; None for a function."""
        return None if self.task_loops is None else self.task_loops.task

    @property
    def folder(self) -> ResultFolder:
        """The output folder."""
        return ResultFolder(self.options.out, self.options.together)

    @property
    def budget_samples(self) -> int | None:
        """Training samples of an arm of a task; None for a function."""
        return None if self.task is None else self.options.length.steps * self.task.batch_size

    def horizon(self, plan: Plan) -> int | None:
        """Return the samples of a plan's schedule; None for a plan with the user's schedule."""
        if plan.schedule.value == "user" or self.task is not None:
            return self.budget_samples
        steps = self.options.length.steps + _LEAD_STEPS + settling_steps_of(plan)
        accumulate = loop_setup.build(self.setup, loop_setup.PLANNING_SEED, self.name).accumulate
        return steps * accumulate * plan.batch_size * self.options.together.num_ranks

    def require_ready_for_ranks(self, *, adapts: bool = False, recipes: bool = False) -> None:
        """Check the loop for training on all ranks of the job. Collective.

        Raises:
            ValueGivenError: the loop's own step does not reduce gradients, the task differs between ranks, or an option
                needs one process.
        """
        num_ranks = self.options.together.num_ranks
        if num_ranks > 1 and self.task is not None:
            refuse_on_ranks(self.task, num_ranks, adapts=adapts, recipes=recipes)
            if self.task_loops is not None:
                require_same_task(self.task, self.task_loops.data)
        elif num_ranks > 1:
            loop_setup.require_reduced(self.setup, self.name)

    def reference(self) -> Reference:
        """Return the precision and clipping of the baseline, after the check of step against loss."""
        reference = loop_setup.observed_reference(self.setup, 0, self.name)
        if self.options.together.num_ranks == 1:
            check_step(self.setup, reference, self.name)
        else:
            self.require_ready_for_ranks()
        return reference

    def settings(self, reference: Reference, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of the measured parts, except machine and versions."""
        length = self.options.length
        found = {"name": self.name, "length": to_jsonable(length), "reference": to_jsonable(reference), **own}
        found |= {"ranks": self.options.together.num_ranks, "loop": self.fingerprint()}
        found["watts"] = None if self.options.metering is None else self.options.metering.watts
        found["plan"] = None if found.get("plan") is None else to_jsonable(found["plan"])
        if self.task_loops is not None:
            found["data"] = self.task_loops.data.source.sha256
        return found

    def fingerprint(self) -> str:
        """Return a digest of the loop without data, as `fingerprint_of`."""
        return fingerprint_of(self.setup, self.name, None if self.task is None else self.task.batch_size)

    def plan(self, reference: Reference, plan: Plan | None, planning: Mapping[str, Any]) -> Plan:
        """Return the given plan, or make one."""
        ranks = self.options.together.num_ranks
        if plan is not None:
            found = for_replicas(plan, ranks)
            if self.task is not None:
                require_fits(task_of_rank(self.task, ranks), found, ranks)
            return found
        return self.folder.part("plan", Plan, partial(self.made_plan, self.setup, reference, planning))

    def notes_on(self, plan: Plan) -> list[str]:
        """Return caveats about a given plan for the loop of a function."""
        if self.task is not None:
            return []
        loop = loop_setup.build(self.setup, loop_setup.PLANNING_SEED, self.name)
        stream = DataStream(loop.loader, loop_setup.PLANNING_SEED)
        samples = loop.batching.read(next(stream)).samples
        stream.close()
        if samples in (None, plan.batch_size):
            return []
        return [f"The plan was made for batches of {plan.batch_size} samples, but the first batch has {samples}."]

    def made_plan(self, setup: Setup, reference: Reference, planning: Mapping[str, Any]) -> Plan:
        loop = loop_setup.build(setup, loop_setup.PLANNING_SEED, self.name)
        self.options.together.draw_apart(loop_setup.PLANNING_SEED)
        own: dict[str, Any] = {} if self.task is None else {"total_steps": self.task.planned_steps}
        own |= {"metering": self.options.metering, "progress": self.options.progress}
        return loop_setup.plan_of(loop, reference, **{**own, **planning})

    def add_recipe(self, recipe: str, made: Arms, planning: Mapping[str, Any]) -> None:
        """Add a recipe of the task, and for the hand-tuned recipe also the loop with a plan made for it."""
        task, own_loops = self.task, self.task_loops
        assert task is not None
        assert own_loops is not None
        if recipe == STRICT:
            strict = _referring(self.setup, task.reference, recipe)
            made.arms.append(Arm(recipe, strict, loops.strict_steps))
            made.precisions[recipe] = "fp32"
            return
        setup = own_loops.recipe(recipe)
        own = task.recipes.get(recipe)
        reference = loop_setup.observed_reference(setup, 0, recipe)
        samples = None if own is None else min(own.budget_samples, self.budget_samples or own.budget_samples)
        made.plain(recipe, setup, reference, samples=samples)
        if recipe == "strong":
            same = {name: value for name, value in planning.items() if name != "adapt"}
            plan = self.folder.part("plan-strong", Plan, partial(self.made_plan, setup, reference, same))
            title = f"plan for {recipe}"
            made.planned(title, setup, reference, plan, samples=samples, horizon=samples)
            made.rivals[title] = recipe

    def run(self, title: str, made: Arms, kind: str, reference: Reference, notes: Sequence[str] = ()) -> Comparison:
        """Measure all arms, and return the result."""
        options, folder, together = self.options, self.folder, self.options.together
        failures = dict[str, str]()
        device = loop_setup.build(self.setup, 0, self.name).device
        with process_kept():
            steps = folder.part("steps", MeasuredPart, partial(self._measure, made.arms, failures))
        failures |= steps.failures
        running = [arm for arm in made.arms if arm.name not in failures]
        meter, facts = block_meter(device, options.metering, together) if running else (None, NO_METER)
        parts = [steps.table]
        begun = sum(folder.has(f"pair-{seed}") for seed in range(options.pairs))
        with free_threads(device, together.num_ranks) as load:
            for seed in range(options.pairs):
                run_pair = partial(self._run_pair, running, seed, dict(failures), meter)
                part = folder.part(f"pair-{seed}", MeasuredPart, run_pair)
                failures |= part.failures
                parts.append(part.table)
        said = [*notes, *load, *self._notes(parts[1:], begun, made.arms[0].name)]
        if together.num_ranks > 1 and self.task is None and loop_setup.shares_batches(self.setup, self.name, together):
            said.append(
                "The first batch is equal on all ranks, and its samples count once for each. Divide the loader "
                "with trimtab.shard(loader)."
            )
        return Comparison(
            title,
            tuple(arm.name for arm in made.arms),
            options.length.steps,
            parts[0].joined(parts[1:]),
            made.plans,
            reference,
            environment(),
            failures,
            tuple(said),
            options.metric,
            made.changes,
            made.rivals,
            made.precisions,
            "samples" if self.task is None else self.task.terms,
            1.0 if self.task is None else float(self.task.terms_per_sample),
            device_spec(device),
            facts,
            together.num_ranks,
            self.name,
            {} if self.task_loops is None else dict(to_jsonable(self.task_loops.data.source)),
            options.command,
            time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
            kind,
        )

    def _run_pair(
        self, running: Sequence[Arm], seed: int, failures: dict[str, str], meter: BlockMeter | None
    ) -> MeasuredPart:
        options, arms = self.options, [arm for arm in running if arm.name not in failures]
        told = partial(_told, options.progress, seed, options.pairs)
        how: dict[str, Any] = {"failures": failures, "progress": told, "together": options.together, "meter": meter}
        rows = PairedRun([arms[0], arms[0].again(), *arms[1:]], seed, options.length, **how).run()
        return MeasuredPart(ResultTable.of(rows), failures)

    def _measure(self, arms: Sequence[Arm], failures: dict[str, str]) -> MeasuredPart:
        rows, own = list[Row](), dict(failures)
        for arm in arms:
            self.options.progress(f"peak memory of {arm.name}", 0.0)
            is_baseline = arm is arms[0]
            rows += measure_step(arm, is_baseline=is_baseline, failures=own, together=self.options.together)
        return MeasuredPart(ResultTable.of(rows), own)

    def _notes(self, tables: Sequence[ResultTable], begun: int, baseline: str) -> Iterator[str]:
        options = self.options
        if options.pairs < MIN_PAIRS_FOR_VERDICT:
            pairs = "one pair" if options.pairs == 1 else f"{options.pairs} pairs"
            yield f"{pairs}: a verdict needs {MIN_PAIRS_FOR_VERDICT}."
        if not any(table.select(LOSS, baseline) for table in tables):
            yield "The step of the baseline returns no loss, so losses were not compared."
        if begun:
            yield f"{begun} of {options.pairs} pairs were read from {options.out}."
        if self.task_loops is not None and self.task_loops.placement:
            yield self.task_loops.placement
        if options.together.num_ranks > 1:
            yield f"measured on {options.together.num_ranks} ranks; the baseline is in DistributedDataParallel"
        if options.together.crowded:
            yield f"The ranks share {options.together.crowded}, so their times do not measure scaling."


@dataclass(frozen=True)
class MeasuredPart:
    """Measured values of a part of a comparison, with the errors of all failed arms until then. A JSON value."""

    table: ResultTable
    failures: Mapping[str, str] = field(default_factory=dict)


def _told(progress: Progress, seed: int, pairs: int, text: str, done: float | None = None) -> None:
    progress(f"{text} of {pairs}", (seed + (done or 0.0)) / pairs)


def _referring(setup: Setup, reference: Reference, name: str) -> Setup:
    return lambda seed: replace(loop_setup.build(setup, seed, name), reference=reference)


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Restore random generators and global modes after the block."""
    outside = ProcessState.capture()
    try:
        yield
    finally:
        outside.restore()


@contextlib.contextmanager
def free_threads(device: torch.device, num_ranks: int) -> Iterator[list[str]]:
    """Run the block on as many threads as other processes leave processors; yields a note if they are fewer.

    A thread without a processor holds up all others at the end of each parallel operation, so that a step on all
    threads takes several times its usual seconds.
    """
    threads = torch.get_num_threads()
    fraction = timing.processor_fraction(threads) if device.type == "cpu" and num_ranks == 1 else 1.0
    if fraction >= timing.LOADED:
        yield []
        return
    free = max(1, int(fraction * threads))
    torch.set_num_threads(free)
    try:
        yield [
            f"Other processes left each thread {100 * fraction:.0f}% of a processor, so all loops ran on {free} "
            f"thread{'s' * (free > 1)}."
        ]
    finally:
        torch.set_num_threads(threads)


def plain_options(planning: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of planning as values for JSON."""
    return {name: plain_value(value) for name, value in planning.items()}
