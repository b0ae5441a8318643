"""Search over candidates: the next phase to measure, as a pure function of the profile.

    modes      -> precision and memory layout together, at the largest micro-batch that fits by its trace; if no mode
                  runs, sizes of the unchanged loop follow, then all modes at the largest size that ran
    optimizer  -> the optimizer step alone, unchanged against fused
    head       -> the fastest mode with chunked logits
    sizes      -> smaller micro-batches, if the check allows splitting
    graphs     -> the fastest mode captured as a CUDA graph, if possibly launch-bound (`compiling`)
    compile    -> the fastest mode compiled, if the run is long enough to pay for the trial
    final      -> the reference against the top candidates of the cost model; decides

All phases but the last feed the cost model. They accept nothing, except a fused step: its gain is too small to show in
a whole step. If the top candidates exceed the budget, a further final follows with the corrected model. Replaying a
recorded profile gives the same phases. Before the final, blocks of the fastest candidate are measured if memory is
weighed or the candidate exceeds a memory limit, so that recomputation becomes an option (`recomputing`).

If the length of the run is known, measuring may take 1 % of the run or 20 seconds, but at most 5 % of short runs. If
the final would exceed that time, the search is over the time budget: unneeded sizes are skipped, compilation needs more
promise, and single changes are not tested by leaving them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trimtab.core.choice import Note
from trimtab.core.objective import PRECISIONS, Budget, Objective
from trimtab.planner import compile_policy
from trimtab.planner.cost_model import CostModel, head_tokens, sizes_to_consider
from trimtab.planner.search_space import WORTH_A_RUN, is_in_conflict, lightest, priced_candidates, put_first
from trimtab.planner.trial_statistics import over_budget, reason_unfit
from trimtab.plans.profile import ALONE, FINAL, SAME_BYTES, SLICED, Candidate, Profile, is_final
from trimtab.settings import FROM_TRACES, NOT_MODES, OWN_PHASE, SETTINGS
from trimtab.settings.precision import precision_refusal

STAGES = ("modes", "optimizer", "head", *OWN_PHASE, "sizes", "graphs", "compile", FINAL)
MOST_FINALS = 3
# Seconds that measuring may take, up to this fraction of a run.
MEASURING_S, MOST_OF_A_RUN = 20.0, 0.05
# Time reserved for a final: this many steps of the loop, or seconds if steps are short. A patient final may run
# _PATIENT_BLOCKS more blocks of at least _PATIENT_BLOCK_S seconds (benchmarks/micro/probing.py). A block of short steps
# takes BLOCK_S seconds.
_FINAL_STEPS, _FINAL_S = 20, 10.0
_PATIENT_BLOCKS, _PATIENT_BLOCK_S, BLOCK_S = 30, 0.15, 0.08
# Chunk sizes to try: these fractions of a micro-batch's tokens.
_CHUNK_SHARES, _SMALLEST_CHUNK, _MOST_BYTES = (4, 8), 64, 2**63


@dataclass(frozen=True)
class SearchPhase:
    """Search phase: candidates to run interleaved; the first is the incumbent.

    Args:
        control: run the incumbent twice, as the A/A control.
        accepts: the phase decides a choice and runs the blocks of a full verdict.
        drops: stop running candidates that lose their first blocks.
        is_brief: three rounds are enough; more would not rank launch-bound candidates better.
        fits_bytes: memory limit for which sizes are tried, the largest first; None: try all.
    """

    name: str
    candidates: tuple[Candidate, ...]
    control: bool = False
    accepts: bool = False
    drops: bool = True
    is_brief: bool = False
    fits_bytes: int | None = None

    def is_known(self, peaks: Sequence[int | None]) -> bool:
        """Return True if smaller sizes need not run, because a tried size before the last fits the limit.

        Smaller sizes are slower by the cost of additional micro-batches, which the last size shows.
        """
        return self.fits_bytes is not None and any(p is not None and p <= self.fits_bytes for p in peaks[1:-1])

    @property
    def orders(self) -> bool:
        """True if the phase only ranks candidates, with the proof left to the final.

        False for graphs and compile: captured or compiled candidates must be significantly faster to enter the final.
        """
        return not self.accepts and self.name not in ("graphs", "compile")


@dataclass(frozen=True)
class MemoryTraces:
    """Request to trace the peak memory of candidates as a function of the micro-batch size, without a run."""

    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class BlockMeasurements:
    """Request to measure the blocks of candidates' models for recomputation.

    Args:
        needed: candidates to measure if there is no time for all.
    """

    candidates: tuple[Candidate, ...]
    needed: tuple[Candidate, ...]


Measurement = MemoryTraces | BlockMeasurements | SearchPhase


def next_measurement(
    profile: Profile,
    objective: Objective,
    budget: Budget,
    *,
    always: bool = False,
    requested: Collection[Candidate] = (),
) -> Measurement | None:
    """Return the next measurement; None at the end of the search. A pure function, so a recorded profile replays it.

    Args:
        always: include measurements for other limits and for target devices.
        requested: candidates of earlier requests for traces, including candidates that could not be traced.
    """
    traces = tuple(c for c in next_traces(profile, objective, budget, always=always) if c not in requested)
    if traces:
        return MemoryTraces(traces)
    stage = next_stage(profile, objective, budget)
    if blocks := next_recomputables(profile, stage, objective, budget, always=always):
        hurried = replace(profile, over_time_budget=True)
        return BlockMeasurements(blocks, next_recomputables(hurried, stage, objective, budget, always=always))
    return stage


def next_stage(profile: Profile, objective: Objective, budget: Budget) -> SearchPhase | None:
    """Return the next phase to measure, or None at the end of the search."""
    budget = profile.limits(budget)
    for name in _order(profile):
        if not profile.stage(name) and not _is_left_out(name, profile, budget):
            candidates = _CANDIDATES[name](profile, budget)
            if len(candidates) > 1 or (name == "modes" and candidates):
                accepts = name == ALONE  # a whole step in a final would not show its gain
                is_brief = name in ("modes", SLICED) and compile_policy.takes_many_times_its_products(profile)
                fits = (budget.memory_bytes or _MOST_BYTES) if name == "sizes" and objective.memory == 0 else None
                return SearchPhase(name, candidates, accepts, accepts, is_brief=is_brief, fits_bytes=fits)
    return _next_final(profile, objective, budget)


def _order(profile: Profile) -> tuple[str, ...]:
    """Return the phases before the final; modes without a fitting size are retried at a size that runs."""
    first = ("modes", "sizes", SLICED) if profile.stage("modes") and not profile.ran("modes") else ("modes",)
    return (*first, *(name for name in STAGES[:-1] if name not in first))


def is_hurried(profile: Profile, spent_s: float, *, steps: int = 0, patient: bool = False) -> bool:
    """Return True if the remaining time budget is too short for anything but the final.

    Also reserves the time of `steps` steps of the loop, and if `patient` of more blocks of an undecided final.
    """
    if profile.run_s is None:
        return False
    step_s = profile.run_s / (profile.total_steps or 1)
    patience_s = _PATIENT_BLOCKS * max(_PATIENT_BLOCK_S, step_s) if patient else 0.0
    allowed = allowed_s(profile.run_s)
    final_s = max(min(_FINAL_S, allowed / 2), _FINAL_STEPS * step_s)
    return spent_s + final_s + steps * step_s + patience_s > allowed


def allowed_s(run_s: float) -> float:
    """Return the time budget for measuring a run of `run_s`, in seconds."""
    return max(min(MEASURING_S, MOST_OF_A_RUN * run_s), compile_policy.MEASURING * run_s)


def _is_left_out(name: str, profile: Profile, budget: Budget) -> bool:
    """Return True if "sizes", the phase that measures micro-batch sizes, can be skipped to save time.

    Only if the search is over its time budget, memory has no weight, and the largest size that fits is known; not if
    the limit splits the batch and another size may be faster: on CUDA, where small micro-batches launch more kernels,
    and for a chunked loss head, whose chunks leave room for a larger micro-batch.
    """
    if profile.stage("modes") and not profile.ran("modes"):
        return False
    if not profile.over_time_budget or name != "sizes" or profile.objective.memory > 0:
        return False
    is_split = budget.memory_bytes is not None and _fastest(profile).micro_batch < profile.loop.batch_size
    has_rivals = profile.device.kind == "cuda" or any(trial.block_s for trial in profile.stage("head"))
    return _is_told(profile, budget) and not (is_split and has_rivals)


def next_traces(
    profile: Profile, objective: Objective, budget: Budget, *, always: bool = False
) -> tuple[Candidate, ...]:
    """Return the candidates that need a memory trace for sizes at which they do not run.

    Without a memory limit or weight, counts from trials are enough. A profile to be decided under new limits, or for a
    target device, needs traces `always`.
    """
    budget = profile.limits(budget)
    if budget.memory_bytes is None and objective.memory == 0 and not always:
        return ()
    chunks = [trial.candidate for trial in profile.stage("head") if not trial.control]
    if chunks:  # for the fastest mode too, if the mode to capture differs
        fastest = _fastest(profile)
        chunks += [fastest.having(micro_batch=c.micro_batch, loss_chunk=c.loss_chunk) for c in chunks[1:]]
    others = [trial.candidate for name in OWN_PHASE for trial in profile.ran(name)]
    wanted = dict.fromkeys((*mode_candidates(profile), *chunks, *others))
    return tuple(c for c in wanted if not any(traced.candidate.alike(c, *SAME_BYTES) for traced in profile.traces))


def next_recomputables(
    profile: Profile, stage: SearchPhase | None, objective: Objective, budget: Budget, *, always: bool = False
) -> tuple[Candidate, ...]:
    """Return the candidates whose blocks must be measured before the next phase.

    Only before a final or the end of the search. The fastest candidate overall and the fastest that fits (or the
    lightest if none fits), if memory is weighed, if the profile is to be decided under new limits (`always`), or if the
    fastest exceeds the limit.
    """
    budget = profile.limits(budget)
    is_asked = budget.memory_bytes is not None or objective.memory > 0 or always
    if not is_asked or (stage is not None and not is_final(stage.name)):
        return ()
    known = priced_candidates(profile, budget)
    found = [p for p in known if not (p.has_failed or p.candidate.compiled or p.candidate.changes_blocks)]
    fitting = [point for point in found if point.refusal is None]
    if not found or (profile.over_time_budget and fitting):
        return ()
    fastest, *fit = (min(each, key=lambda p: p.cost.step_s or math.inf) for each in (found, fitting) if each)
    if fit and fit[0] == fastest and objective.memory == 0 and not always:
        return ()
    light = [] if fit else [min(found, key=lambda p: (p.cost.peak_bytes or math.inf, p.cost.step_s))]
    modes = CostModel(profile).modes

    def to_measure(candidate: Candidate) -> Candidate:
        kept = {name: getattr(candidate, name) for name in ("loss_chunk", *OWN_PHASE) if name not in FROM_TRACES}
        return next((mode.having(**kept) for mode in modes if mode.alike(candidate, *NOT_MODES)), candidate)

    wanted = dict.fromkeys(to_measure(point.candidate) for point in (fastest, *fit, *light))
    return tuple(candidate for candidate in wanted if profile.recomputable_of(candidate) is None)


def _next_final(profile: Profile, objective: Objective, budget: Budget) -> SearchPhase | None:
    rounds = profile.finals
    last = [trial for trial in profile.stage(rounds[-1]) if not trial.control] if rounds else []
    was_refuted = any(profile.refutation_of(trial.candidate) for trial in last)
    if not was_refuted and any(reason_unfit(profile, trial, budget) is None for trial in last):
        return None
    reference = profile.reference_candidate
    failed = {t.candidate for name in rounds for t in profile.stage(name) if reason_unfit(profile, t, budget)}
    found = [c for c in put_first(profile, objective, budget) if c not in failed]
    if was_refuted and {trial.candidate for trial in last}.issuperset(found):
        return None  # The last final decides without the refuted candidate.
    most = MOST_FINALS + len(profile.refused_by_proof)
    if found and len(rounds) == most - 1:  # last chance before reporting an infeasible budget
        found = list(dict.fromkeys((*found, *lightest(profile, budget))))
    if len(rounds) == most or (rounds and not found):
        return None
    if not found and any(trial.candidate == reference for trial in profile.trials):
        return None
    name = FINAL if not rounds else f"{FINAL} {len(rounds) + 1}"
    cost = CostModel(profile).predict(reference)
    must_leave = reference in failed or over_budget(cost.step_s, cost.peak_bytes, budget, cost.energy_j) is not None
    drops = objective.time == 1.0 and not must_leave  # A slower candidate may win by memory or energy.
    return SearchPhase(name, (reference, *found), control=bool(found), accepts=True, drops=drops)


def base_candidate(profile: Profile) -> Candidate:
    """Return the base of all modes: the reference, with freed memory kept (mallopt) if page faults add noise."""
    retains = SETTINGS["allocator"].refusal(profile) is None
    return profile.reference_candidate.having(allocator="retain" if retains else "keep")


def mode_candidates(profile: Profile) -> tuple[Candidate, ...]:
    """Return the loop's own mode, then all other precisions and layouts worth trying, at the loop's own size."""
    base = base_candidate(profile)
    if profile.loop.bitwise_only:
        return (base,)
    precisions = [p for p in PRECISIONS if precision_refusal(profile.device, p) is None]
    layouts = ("keep", "channels_last") if SETTINGS["memory_layout"].refusal(profile) is None else ("keep",)
    grid = [base.having(precision=p, memory_layout=layout) for p in precisions for layout in layouts]
    return (base, *(candidate for candidate in grid if candidate != base))


def _modes(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the modes at their largest size not known to exceed the budget; the whole batch if all are."""
    model, limit = CostModel(profile), budget.memory_bytes

    def fitting(candidate: Candidate) -> Candidate:
        sizes = (candidate.having(micro_batch=rows) for rows in sizes_to_consider(profile))
        return next((c for c in sizes if limit is None or model.may_fit(c, limit)), candidate)

    return tuple(map(fitting, mode_candidates(profile)))


def _sliced(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the modes at the largest size that ran; empty if none ran."""
    sizes = [trial.candidate.micro_batch for trial in profile.ran("sizes")]
    return tuple(each.having(micro_batch=sizes[0]) for each in mode_candidates(profile)) if sizes else ()


def _optimizer(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    first = _fastest(profile)
    if first.fused_optimizer or not profile.loop.supports_fused:
        return (first,)
    return first, first.having(fused_optimizer=True)


def _head(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the fastest mode and chunked versions; at a larger micro-batch if its own has too few tokens for chunks.

    Chunks may allow the whole batch under a limit that otherwise requires small micro-batches.
    """
    first, memory = compile_policy.to_record(profile, _fastest(profile)), profile.device.memory_bytes
    model, larger = CostModel(profile), (first.having(micro_batch=rows) for rows in sizes_to_consider(profile))
    for candidate in (first, *(each for each in larger if memory is None or model.may_fit(each, memory))):
        if chunks := chunk_candidates(profile, candidate):
            return candidate, *chunks, *_small_chunk(profile, first, chunks)
    return (first,)


def _own_phase(name: str, profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return a mode, and modes with other values of a setting that has no special rule.

    The fastest mode for which the setting has other values, without a conflict and not refused by a proof, or else the
    whole batch, if the setting makes it fit. The first candidate is the mode without these values, or the fastest mode
    that no proof refused.
    """
    setting, fastest, model = SETTINGS[name], _fastest(profile), CostModel(profile)
    if setting.refusal(profile) is not None:
        return (fastest,)
    rows, limit = profile.loop.batch_size, budget.memory_bytes or _MOST_BYTES
    modes = tuple(dict.fromkeys((fastest, *model.modes)))
    for base in dict.fromkeys((*modes, *(mode.having(micro_batch=rows) for mode in modes))):
        tried = [base.having(**{name: value}) for value in setting.candidates(profile, base)]
        tried = [each for each in tried if each != base and profile.refutation_of(each) is None]
        tried = [each for each in tried if not is_in_conflict(each, rows)]
        if base.micro_batch > fastest.micro_batch:
            device_bytes = profile.device.memory_bytes or _MOST_BYTES
            tried = [each for each in tried if model.may_fit(each, limit) and model.may_fit(base, device_bytes)]
        if tried:
            usable = (mode for mode in (base, *modes) if profile.refutation_of(mode) is None)
            return tuple(dict.fromkeys((next(usable, fastest), *tried)))
    return (fastest,)


def _small_chunk(profile: Profile, first: Candidate, beside: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return a candidate with chunks of a fourth of the unchunked size's tokens, if all given chunks are larger."""
    chunk = _chunk(head_tokens(profile, first), _CHUNK_SHARES[0])
    may_be_recorded = profile.device.kind == "cuda" and chunk >= _SMALLEST_CHUNK
    smallest = min(beside, key=lambda each: each.loss_chunk or math.inf)
    return (smallest.having(loss_chunk=chunk),) if may_be_recorded and chunk < (smallest.loss_chunk or 0) else ()


def chunk_candidates(profile: Profile, first: Candidate) -> tuple[Candidate, ...]:
    """Return a candidate with a chunked loss head: powers of two up to a fourth and an eighth of a step's tokens."""
    if SETTINGS["loss_chunk"].refusal(profile):
        return ()
    chunks = {_chunk(profile.loop.head_tokens or 0, share) for share in _CHUNK_SHARES}
    fitting = [chunk for chunk in chunks if _SMALLEST_CHUNK <= chunk < head_tokens(profile, first)]
    return tuple(first.having(loss_chunk=chunk) for chunk in sorted(fitting, reverse=True))


def _chunk(tokens: int, share: int) -> int:
    """Return the largest power of two that is at most a fraction 1/share of the tokens."""
    return (1 << (tokens // share).bit_length()) >> 1


def _sizes(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the fastest mode at a quarter of its size, or at all smaller sizes if the fitting size is unknown."""
    first = _fastest(profile)
    sizes = [rows for rows in sizes_to_consider(profile) if rows < first.micro_batch]
    few = bool(profile.ran("modes")) and _is_told(profile, budget)
    head = (trial.candidate.micro_batch for trial in profile.stage("head")[:1] if trial.block_s)
    larger = [rows for rows in head if rows > first.micro_batch]
    if not larger and profile.reference.accumulate > 1:  # The largest size that may fit, for a loop that accumulates.
        model, limit = CostModel(profile), budget.memory_bytes or _MOST_BYTES
        fit = (rows for rows in sizes_to_consider(profile) if model.may_fit(first.having(micro_batch=rows), limit))
        larger = [rows for rows in fit if rows > first.micro_batch][:1]
    sizes = [*larger, *(sizes[:2][-1:] if few else sizes)]
    return (first, *(first.having(micro_batch=rows) for rows in sizes))


def _is_told(profile: Profile, budget: Budget) -> bool:
    """Return True if the fitting size of the fastest mode is known."""
    limit = budget.memory_bytes
    return limit is None or bool(profile.traces) or CostModel(profile).is_within(_fastest(profile), limit)


def _fastest(profile: Profile) -> Candidate:
    """Return the fastest mode; the first tried mode if no other is faster by `WORTH_A_RUN`."""
    model = CostModel(profile)
    ran = (trial.candidate for name in ("modes", SLICED) for trial in profile.ran(name))
    tried = [candidate for candidate in ran if candidate in model.modes]
    if not tried:
        return next(iter(model.modes), base_candidate(profile))
    fastest, first = (model.predict(each).step_s or 0.0 for each in (model.modes[0], tried[0]))
    return model.modes[0] if fastest < WORTH_A_RUN * first else tried[0]


def compiling_refusal(profile: Profile) -> Note | None:
    """Return the reason not to try compilation, or None."""
    return compile_policy.compiling_refusal(profile, _fastest(profile))


_CANDIDATES: dict[str, Callable[[Profile, Budget], tuple[Candidate, ...]]] = {
    "modes": _modes,
    SLICED: _sliced,
    "optimizer": _optimizer,
    "head": _head,
    **{name: partial(_own_phase, name) for name in OWN_PHASE},
    "sizes": _sizes,
    "graphs": lambda profile, _: compile_policy.graph_candidates(profile, _fastest(profile)),
    "compile": lambda profile, _: compile_policy.compile_candidates(profile, _fastest(profile)),
}
