"""The profile of a loop: facts, phases, counted FLOP, and the trials that the search requests."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trimtab.core.choice import SplitCheck
from trimtab.core.energy_reading import NO_METER
from trimtab.core.errors import LoopError, ModelError, OptimizerError, TrimtabError
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.progress import silent
from trimtab.energy.meter_selection import SelectedMeter, with_idle
from trimtab.measure import timing
from trimtab.measure.machine import device_spec, environment
from trimtab.measure.timing import PhaseClock, loaded_machine_clock, time_call
from trimtab.planner.recommendations import WORTH_ADVICE, padded_vocabulary
from trimtab.planner.search import BlockMeasurements, MemoryTraces, is_hurried, next_measurement
from trimtab.planner.search_space import put_first
from trimtab.planner.statistics import rank_interval
from trimtab.plans.profile import (
    Candidate,
    LoopFacts,
    PaddingCount,
    Profile,
    RecomputableBlocks,
    TracedBlocks,
    TracedCandidate,
    is_final,
)
from trimtab.profiling.block_profile import measure_recomputable, num_steps
from trimtab.profiling.candidate_traces import trace_candidates, trace_for_others
from trimtab.profiling.gradient_equivalence import check_splitting
from trimtab.profiling.loader_trials import LEAST_LOST_S, compare_loaders
from trimtab.profiling.loop_facts import count_step, is_of_loss, loop_facts, require_plain_step, with_tested_step
from trimtab.profiling.measurement_notes import (
    CallbackError,
    Notes,
    describe,
    progress_with_callback_errors,
    report_not_restorable,
)
from trimtab.profiling.padding import PaddingCounter, text_library
from trimtab.profiling.plan_proof import with_proof
from trimtab.profiling.sample_batches import SampledBatches, draw_some, waiting_s
from trimtab.profiling.smoke_test import CrashTest
from trimtab.profiling.target_device import trace_blocks_for_others
from trimtab.profiling.training_loop import TrainingLoop, one_at_a_time, own_loss
from trimtab.profiling.trials import TrialPower, run_stage
from trimtab.settings.loss_chunk import PlainHeadUse, count_head_tokens, plain_head_use
from trimtab.state import process_state
from trimtab.state.loop_state import LoopState, unchanged_by
from trimtab.state.peak_memory import forget_peak, is_profiled
from trimtab.techniques.compiled_call import is_compiled
from trimtab.techniques.host_transfers import CudaTransfers, measure_host_link
from trimtab.techniques.memory_format import channels_last_hazard
from trimtab.techniques.mixed_precision import autocast
from trimtab.training.accumulation import drop_gradients
from trimtab.training.out_of_memory import is_out_of_memory
from trimtab.training.user_hooks import ForwardHookCollector, GradientHook, gradient_hooks, in_words, require_plannable
from trimtab.training.window_snapshot import bytes_to_begin_anew

P = ParamSpec("P")
R = TypeVar("R")
MIN_WORDS = 4_096  # With fewer columns, the head's time is negligible.
_TOKENS, _PAIRS = 512, 6
NUM_BLOCKS = 6
_PHASE_STEPS, _PHASES_S = 3, 3.0
# Limit on comparing settings of the DataLoader: seconds, or a fraction of the planning time so far if this is longer.
_LOADER_S, _LOADER_PART = 1.0, 0.05
_NO_TIME = "the planning time was used up before the blocks were measured"


def split_check_and_hooks(
    subject: TrainingLoop, precision: str, notes: Notes, start: LoopState
) -> tuple[SplitCheck, tuple[GradientHook, ...]]:
    """Return the verdict on splitting the batch, and the gradient hooks of the model and its forward.

    Splitting is refused for a model with hooks, and, with a note, if the check itself fails.

    Raises:
        LossError: the loop's plain forward or backward fails, or its result is not a loss.
        OptimizerError: the optimizer step fails, or the backward takes steps.
    """
    require_plannable(hooks := gradient_hooks(subject.trained))
    hooks += _hooks_of_own_step(subject, precision)
    start.restore()
    try:
        check = check_splitting(subject, precision, start)
        if hooks:
            reason = f"the model has {in_words(hooks)}, which would receive the gradients of micro-batches"
            check = replace(check, splittable=False, reason=reason, code="split.hooks")
        return check, hooks
    except Exception as error:
        if isinstance(error, TrimtabError) and not is_of_loss(error):
            raise
        require_plain_step(subject, precision)
        notes.add("splitting.not_checked", "the splitting check failed", error)
        return SplitCheck(False, f"the splitting check failed ({describe(error)})", code="split.not_checked"), hooks


def _hooks_of_own_step(subject: TrainingLoop, precision: str) -> tuple[GradientHook, ...]:
    """Run a plain step on the example batch and return the gradient hooks that the forward registered."""
    watch = ForwardHookCollector()
    try:
        with contextlib.nullcontext() if is_compiled(subject.model) else watch:
            loss, *_ = subject.loss(precision=precision)
        versions = [(name, p, p._version) for name, p in subject.trained.named_parameters()]
        loss.backward()
    except Exception:  # An error of the user's forward, which the splitting check will raise again and report.
        return ()
    if changed := [name for name, p, version in versions if p._version != version]:
        raise OptimizerError(
            "optimizer",
            got=f"{len(changed)} parameters that change in the backward",
            expected="parameters that change only in optimizer.step()",
            problem=f"The backward changes {len(changed)} parameters (the first is {changed[0]}), so planning cannot "
            "repeat a backward from the same weights.",
            hint="Update parameters in optimizer.step(), or train without planning: "
            "trimtab.start(model, optimizer, trimtab.Plan.fixed(batch_size)).",
            code="optimizer.steps_in_backward",
        )
    try:
        subject.optimizer.step()
    except Exception as error:
        if not is_out_of_memory(error):
            name = type(subject.optimizer).__name__
            raise OptimizerError(
                "optimizer",
                got=describe(error),
                expected="an optimizer whose step() takes no argument",
                problem=f"{name}.step() failed after the backward ({describe(error)}).",
                hint="Run loss_fn(model, batch).backward() and optimizer.step() yourself, and correct the error. An "
                "optimizer whose step() takes a closure cannot be planned (docs/own_loop.md).",
                code="optimizer.step_failed",
            ) from error
    else:
        drop_gradients(subject.optimizer, between_steps=True)
    return tuple(watch.found)


def padding_saves_s(model: nn.Module, words: int, tokens: int, precision: str) -> float | None:
    """Return the seconds per step that padding the head's columns would save; 0 if not significant.

    Timed on random features and weights, a few hundred tokens at a time, forward and backward. None if no padding is
    needed, no linear layer has this many outputs, or memory runs out.
    """
    head = next((each for each in model.modules() if isinstance(each, nn.Linear) and each.out_features == words), None)
    if head is None or words < MIN_WORDS or words == padded_vocabulary(words):
        return None
    device, few = head.weight.device, min(tokens, _TOKENS)

    def products(rows: Tensor, weight: Tensor) -> None:
        with autocast(precision, device):
            logits = nn.functional.linear(rows, weight)
        torch.autograd.grad(logits, [rows, weight], torch.ones_like(logits))

    try:
        rows, *weights = (
            torch.randn(n, head.in_features, device=device, requires_grad=True)
            for n in (few, words, padded_vocabulary(words))
        )
        seconds: list[tuple[float, float]] = []
        for index in range(1 + _PAIRS):
            order = (1, 0) if index % 2 else (0, 1)
            taken = {i: time_call(functools.partial(products, rows, weights[i]), device) for i in order}
            seconds.append((taken[0], taken[1]))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
    counted = seconds[1:]  # The first round is a warm-up.
    is_clear = rank_interval([ours / padded for ours, padded in counted]).low > 1
    return statistics.median(ours - padded for ours, padded in counted) * tokens / few if is_clear else 0.0


def _with_typed_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a planning function so that every error but those of the progress callback is a `TrimtabError`."""

    @functools.wraps(function)
    def typed(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except CallbackError as end:
            raise end.error from None
        except TrimtabError:
            raise
        except Exception as error:
            raise ModelError(
                "plan",
                got=(got := describe(error)),
                expected="a loop that can be measured",
                problem=f"Planning failed with an unexpected error ({got}), whose traceback is shown above.",
                hint="Start a plan with your own settings instead: trimtab.Plan.fixed(batch_size).",
                code="planning.failed",
            ) from error

    return typed


@one_at_a_time
@process_state.separate_heaps()
@_with_typed_errors
def profile_loop(
    subject: TrainingLoop,
    reference: Reference,
    objective: Objective,
    budget: Budget,
    *,
    data: Iterable[Any] | None = None,
    total_steps: int | None = None,
    num_blocks: int = NUM_BLOCKS,
    traces: bool = False,
    metered: SelectedMeter | None = None,
    progress: Callable[[str], None] = silent,
) -> Profile:
    """Measure a loop and the candidates that the search requests; the loop is restored bit for bit, also on error.

    Concurrent calls wait for their turn. A failed measurement is left out, with a note in the profile.

    Raises:
        LossError: the loop's plain forward or backward fails.
        ModelError: parameters are not initialized, or cannot be restored.
        LoopError: a profiler session is active on this thread.
    """
    _require_measurable(subject.trained)
    start, notes = time.perf_counter(), Notes()
    progress = progress_with_callback_errors(progress)
    is_asked = objective.energy > 0 or budget.energy is not None
    metered = with_idle(metered) if metered is not None and is_asked else metered
    power = None if metered is None or metered.facts.is_absent else TrialPower(metered.meter, is_asked)
    loaded, loss_fn = loaded_machine_clock(subject.device), own_loss(subject.loss_fn)
    # The snapshot is made within, because it includes the number of threads.
    with loaded as fraction, unchanged_by(loss_fn, subject.trained, subject.optimizer) as snapshot:
        if fraction is not None:
            _note_load(fraction, notes)
        drawn = SampledBatches() if data is None else draw_some(subject, data, notes)
        subject = replace(subject, second=drawn.batch)
        progress("checking that splitting the batch keeps the gradient")
        check, hooks = split_check_and_hooks(subject, reference.precision, notes, snapshot)
        if check.splittable:
            kept = functools.partial(bytes_to_begin_anew, subject.trained)
            what = "the memory that a run holds for repeating a step was not measured"
            subject = replace(subject, start_bytes=notes.attempt("memory.not_counted", what, kept, 0))
        padding = notes.attempt(
            "padding.not_counted", "padding was not counted", lambda: _padding(subject, data, drawn), None
        )
        profile = Profile(
            device_spec(subject.device),
            replace(_facts(subject, reference.precision, notes, hooks), longest=drawn.longest, padding=padding),
            check,
            reference,
            environment=environment(has_gpu=subject.device.type == "cuda"),
            objective=objective,
            budget=budget,
            total_steps=total_steps,
            adapts_batch_size=subject.adapts_batch_size,
            meter=NO_METER if metered is None else metered.facts,
        )
        searching = _Search(subject, snapshot, notes, progress, num_blocks, power, start, traces)
        profile = _search_restarting_under_load(searching, profile)
        if drawn.seconds is not None:
            profile = searching.with_loader(profile, data, drawn.seconds)
        report_not_restorable(snapshot.not_restorable(), notes)
    forget_peak(subject.device)  # The peak of candidates; a run measures its own.
    if drawn.seconds is not None and profile.phases_s:
        waits_s = waiting_s(drawn.seconds, profile.phases_s, data)
        profile = replace(profile, phases_s={"data": waits_s, **profile.phases_s})
    return replace(profile, notes=notes.found, profiling_s=time.perf_counter() - start)


def _require_measurable(model: nn.Module) -> None:
    if is_profiled():
        raise LoopError(
            "profiler",
            got="an active torch.profiler session on this thread",
            expected="no profiler session",
            problem="A torch.profiler session is active on this thread, so all timings would include its overhead.",
            hint="Plan before the session starts or after it has ended.",
            code="planning.profiler_active",
        )
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                "model",
                got=f"{name} without a shape",
                expected="initialized parameters and buffers",
                problem=f"{name} belongs to a lazy module and has no shape yet.",
                hint="Run one forward under torch.no_grad(), build the optimizer, and then plan.",
                code="model.uninitialized",
            )


class _LoadBegan(Exception):
    """Other processes began to load the machine while steps were timed by the wall clock."""


def _note_load(fraction: float, notes: Notes) -> None:
    threads = torch.get_num_threads()
    notes.record(
        "timing.processor_time",
        f"other processes left each thread {100 * fraction:.0f}% of a processor, so steps were timed by processor time "
        f"on {threads} thread{'s' * (threads > 1)}; a step takes longer while they run, and "
        f"torch.set_num_threads({threads}) reduces this",
    )


def _search_restarting_under_load(search: _Search, profile: Profile) -> Profile:
    """Search, and restart by processor time if other processes begin to load the machine meanwhile."""
    try:
        return search.run(profile)
    except _LoadBegan:
        search.progress("other processes load the machine: measuring again by processor time")
    subject = search.subject
    with (
        loaded_machine_clock(subject.device) as fraction,
        unchanged_by(own_loss(subject.loss_fn), subject.trained, subject.optimizer) as snapshot,
    ):
        if fraction is not None:
            _note_load(fraction, search.notes)
        restarted = replace(search, snapshot=snapshot, start=time.perf_counter(), watches_load=False)
        return restarted.run(replace(profile, device=device_spec(subject.device)))


@dataclass
class _Search:
    """The measurements requested by the planner; `start` is the time when planning began."""

    subject: TrainingLoop
    snapshot: LoopState
    notes: Notes
    progress: Callable[[str], None]
    num_blocks: int
    power: TrialPower | None
    start: float
    traces: bool
    watches_load: bool = True
    guard: CrashTest = field(init=False)

    def run(self, profile: Profile) -> Profile:
        none: tuple[dict[str, float], float | None] = ({}, None)
        phases, num_faults = self.notes.attempt(
            "phases.not_timed",
            "the phases of a step were not timed",
            lambda: measure_phases(self.subject, profile.reference_candidate),
            none,
        )
        fault_s = timing.fault_s() if profile.loop.can_retain else None
        facts = replace(profile.loop, faults_per_step=num_faults, fault_s=fault_s)
        gc.collect()  # Objects in reference cycles, such as a loader's workers, may take long to end in a fork.
        self.guard = CrashTest(self.subject, profile.reference_candidate)
        profile = self._with_padding(self._search(replace(profile, loop=facts, phases_s=phases)))
        return self._with_traces_for_others(profile) if self.traces else profile

    def _search(self, profile: Profile) -> Profile:
        requested: set[Candidate] = set()
        while True:
            self.snapshot.restore()  # Also undoes changes that the checks before the first phase left in the loss.
            if self.watches_load and timing.load_began(self.subject.device):
                raise _LoadBegan
            spent_s = time.perf_counter() - self.start
            profile = replace(profile, over_time_budget=profile.over_time_budget or is_hurried(profile, spent_s))
            wanted = next_measurement(
                profile, profile.objective, profile.budget, always=self.traces, requested=requested
            )
            if wanted is None:
                profile, is_over = with_proof(self.subject, profile, self.progress, self.snapshot, self.notes)
                if is_over:
                    return profile
            elif isinstance(wanted, MemoryTraces):
                requested.update(wanted.candidates)
                found = trace_candidates(self.subject, wanted.candidates, self.progress, self.guard, self.notes)
                profile = replace(profile, traces=profile.traces + found)
            elif isinstance(wanted, BlockMeasurements):
                profile = self._with_blocks(profile, wanted, spent_s)
            else:
                is_last = is_final(wanted.name)
                hurries = profile.over_time_budget or (is_last and is_hurried(profile, spent_s, patient=True))
                trials = run_stage(
                    self.subject,
                    wanted,
                    self.num_blocks,
                    self.progress,
                    profile.trials,
                    patient=not hurries,
                    guard=self.guard,
                    power=self.power,
                    run_s=(profile.run_s or 0.0) if is_last else 0.0,
                    notes=self.notes,
                )
                profile = profile.with_trials(trials)

    def _with_blocks(self, profile: Profile, blocks: BlockMeasurements, spent_s: float) -> Profile:
        """Return the profile with candidates' blocks measured: all, or those needed if there is no time for all."""
        step_s = (profile.run_s or 0.0) / (profile.total_steps or 1)
        hurries = is_hurried(profile, spent_s, steps=len(blocks.candidates) * num_steps(step_s))
        needed = blocks.needed if hurries else blocks.candidates

        def measured(candidate: Candidate) -> RecomputableBlocks:
            if candidate not in needed:
                return RecomputableBlocks(candidate, refusal=_NO_TIME, code="recompute.no_time")
            self.progress(f"measuring blocks: {candidate.describe()}")
            return measure_recomputable(self.subject, candidate, splits=profile.check.splittable, notes=self.notes)

        profile = replace(profile, recomputables=(*profile.recomputables, *map(measured, blocks.candidates)))
        device = self.subject.device
        if device.type != "cuda" or profile.host_link is not None or not needed:
            return profile
        seconds_of = functools.partial(timing.least_seconds, device=device)
        what = "activations were not offloaded, because the bandwidth between host and device was not measured"
        measure = functools.partial(measure_host_link, CudaTransfers(device), seconds_of)
        return replace(profile, host_link=self.notes.attempt("offload.not_measured", what, measure, None))

    def with_loader(self, profile: Profile, data: Any, drawing_s: float) -> Profile:
        """Return the profile with settings of the DataLoader compared, if waiting takes a notable part of a step.

        The steps are those of the best settings so far, except compilation, which would take long again.
        """
        waits_s, step_s = waiting_s(drawing_s, profile.phases_s, data), sum(profile.phases_s.values())
        is_small = waits_s < max(LEAST_LOST_S, WORTH_ADVICE * (waits_s + step_s))
        limit_s = max(_LOADER_S, _LOADER_PART * (time.perf_counter() - self.start))
        is_short = profile.total_steps is not None and profile.total_steps * waits_s < limit_s
        if not step_s or is_small or is_short or profile.over_time_budget or isinstance(data, list | tuple):
            return profile
        self.progress("comparing settings of the DataLoader")
        best = _best_so_far(profile).having(compiled=profile.reference_candidate.compiled)
        found = self.notes.attempt(
            "loader.not_tried",
            "other settings of the DataLoader were not tried",
            lambda: compare_loaders(self.subject, best, data, drawing_s, limit_s, self.notes),
            None,
        )
        self.snapshot.restore()
        return replace(profile, loader=found)

    def _with_padding(self, profile: Profile) -> Profile:
        """Return the profile with the time that a padded vocabulary would save, in the best precision so far."""
        if profile.loop.logits is None or profile.over_time_budget:
            return profile
        best = _best_so_far(profile)
        rows, words = profile.loop.logits
        found = self.notes.attempt(
            "padding.not_timed",
            "a padded vocabulary was not timed",
            lambda: padding_saves_s(self.subject.model, words, rows, best.precision),
            None,
        )
        return replace(profile, loop=replace(profile.loop, padding_saves_s=found))

    def _with_traces_for_others(self, profile: Profile) -> Profile:
        steps = self.notes.attempt(
            "traces.not_made",
            "steps were not traced for other devices",
            lambda: trace_for_others(self.subject, profile, self.progress),
            tuple[TracedCandidate, ...](),
        )
        blocks = self.notes.attempt(
            "traces.not_made",
            "blocks were not traced for other devices",
            lambda: trace_blocks_for_others(self.subject, [each.candidate for each in steps], profile, self.progress),
            tuple[TracedBlocks, ...](),
        )
        return replace(profile, target_device_traces=steps, target_device_blocks=blocks)


def _best_so_far(profile: Profile) -> Candidate:
    return [*put_first(profile, profile.objective, profile.limits(profile.budget)), profile.reference_candidate][0]


def _padding(subject: TrainingLoop, data: Any, drawn: SampledBatches) -> PaddingCount | None:
    """Return the padding of the drawn batches, or of the example batch if none was drawn."""
    counter = drawn.padding
    if counter is None:
        counter = PaddingCounter()
        counter.add(subject.batch if subject.example is None else subject.example)
    return counter.result(text_library(subject.model, data))


def measure_phases(subject: TrainingLoop, candidate: Candidate) -> tuple[dict[str, float], float | None]:
    """Return a candidate's seconds per step by phase (slicing, forward, backward, optimizer), and the page faults.

    "slicing" splits the batch into micro-batches and moves them to the device. The first step is not counted, and long
    steps are repeated less often. State is restored.
    """
    with LoopState(subject.trained, subject.optimizer), subject.start(candidate) as run:
        subject.step(run)
        clock, faults, steps = PhaseClock(subject.device), [timing.num_faults()], 0
        while steps == 0 or (steps < _PHASE_STEPS and sum(clock.seconds.values()) * (1 + 1 / steps) <= _PHASES_S):
            micros = iter(run.window(subject.batch))
            while True:
                with clock.phase("slicing"):
                    micro = next(micros, None)
                if micro is None:
                    break
                with clock.phase("forward"), run.autocast():
                    result = subject.loss_fn(run.model, micro)
                with clock.phase("backward"):
                    run.backward(result)
            with clock.phase("optimizer"):
                run.step()
            faults.append(timing.num_faults())
            steps += 1
    phases = {name: seconds / steps for name, seconds in clock.seconds.items()}
    # The median, because the first step may still fault in memory that later steps keep.
    each = [after - before for before, after in itertools.pairwise(faults) if after is not None and before is not None]
    return phases, statistics.median(each) if each else None


def _facts(subject: TrainingLoop, precision: str, notes: Notes, hooks: tuple[GradientHook, ...]) -> LoopFacts:
    model, optimizer = subject.model, subject.optimizer
    with contextlib.ExitStack() as stack:
        heads = notes.attempt(
            "loss_head.not_watched",
            "chunked loss heads were not tried, because the loss head could not be observed",
            lambda: stack.enter_context(count_head_tokens(model)),
            dict[nn.Linear, int](),
        )
        counts = count_step(subject, precision, notes)
    plain = notes.attempt(
        "loss_head.not_watched",
        "chunks of the last layer's logits were not tried, because the layer could not be observed",
        lambda: plain_head_use(model, lambda: subject.loss(precision=precision)),
        PlainHeadUse({}),
    )
    hazard = notes.attempt(
        "memory_layout.not_checked",
        "channels_last was not tried",
        lambda: channels_last_hazard(model),
        "the modules of the model could not be inspected",
    )
    return replace(
        with_tested_step(loop_facts(subject.trained, optimizer, subject.rows, heads | plain.tokens, hooks), optimizer),
        head_refusal=plain.refusal,
        terms_per_step=counts.terms,
        terms=counts.kind,
        flops_per_step=counts.flops,
        scores_bytes=counts.seen.kept_bytes,
        logits=counts.seen.logits,
        layout_hazard=hazard,
        can_retain=subject.device.type == "cpu" and process_state.can_retain(),
    )
