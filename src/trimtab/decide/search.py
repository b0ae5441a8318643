"""Which candidates to measure next: a pure function of the profile.

    modes      -> precision and memory layout together, each at the largest micro-batch that is traced to fit; where
                  none of these runs, sizes of the loop as it is come next, then all modes in the largest that ran
    optimizer  -> the optimizer's step alone, as it is against fused
    head       -> the fastest mode, its logits a chunk at a time
    sizes      -> slices of the batch, where the check allows splitting
    graphs     -> the fastest mode recorded and launched whole, where it may wait for its launches (`compiling`)
    compile    -> the fastest mode compiled, where the run is long enough to pay for the trial
    final      -> the reference against those that the cost model of all this puts first: they decide

All but the last tell the cost model what it is made of; nothing is accepted for them but a fused step, whose gain
drowns in that of a whole one. Where what was put first turns out to break the budget, the model has learned, and there
is another final. Replaying a recorded profile gives the same stages.

Before the final the blocks of the fastest are measured where it breaks a limit on memory, or memory counts: computing
some of them again is one more choice (`recomputing`).

Where the length of the run is known, measuring may take a hundredth of it, or twenty seconds, of runs of minutes a
twentieth. As soon as the final would go beyond that the search is hurried: sizes that nothing needs are left out, and
the compiler where it promises too little for the time, and no doubted change is tried without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import PRECISIONS, Budget, Objective
from trimtab.core.profile import ALONE, FINAL, SLICED, Candidate, Profile, is_final
from trimtab.decide import compiling
from trimtab.decide.cost_model import BUT_MODE, CostModel
from trimtab.decide.readings import WORTH_SAVING, over_budget, unfit
from trimtab.decide.sizes import halvings, head_tokens
from trimtab.decide.space import WORTH_A_RUN, lightest, points, put_first

# Where page faults promise less than this, they are left alone.
WORTH_RETAINING = 0.02
# Below this multiple of fp32's matrix-product speed a precision is not tried: no faster there, it only adds casts.
SCREEN = 1.2
STAGES = ("modes", "optimizer", "head", "sizes", "graphs", "compile", FINAL)
MOST_FINALS = 3
# Seconds that measuring may take of a run of which they are no more than this share.
MEASURING_S, MOST_OF_A_RUN = 20.0, 0.05
# Steps of the loop that a final takes, in time, and seconds where they are short; how many more blocks a patient one
# may run, and what one takes at the least (benchmarks/probing.py).
_FINAL_STEPS, _FINAL_S = 20, 10.0
_PATIENT_BLOCKS, BLOCK_S = 30, 0.15
# Chunks of a loss head that are tried: these shares of a micro-batch's tokens.
_CHUNK_SHARES, _SMALLEST_CHUNK, _MOST_BYTES = (4, 8), 64, 2**63


@dataclass(frozen=True)
class Stage:
    """Candidates to run interleaved; the first is the incumbent.

    Args:
        control: whether the first is run a second time (A/A). accepts: whether a choice is made by it, which takes as
            many blocks as a verdict does. drops: whether who loses its first blocks is run no further. is_brief:
            whether three laps are all it takes: more of what may wait for the host put no more of it in order.
        fits_bytes: limit that sizes are tried for, the largest first; None: all are.
    """

    name: str
    candidates: tuple[Candidate, ...]
    control: bool = False
    accepts: bool = False
    drops: bool = True
    is_brief: bool = False
    fits_bytes: int | None = None

    def is_known(self, peaks: Sequence[int | None]) -> bool:
        """Return whether sizes below those of such peaks need not be run: the one before the last fits.

        They are slower by what a micro-batch costs, which the last one shows.
        """
        return self.fits_bytes is not None and any(p is not None and p <= self.fits_bytes for p in peaks[1:-1])

    @property
    def orders(self) -> bool:
        """Whether it only puts its candidates in order, and what comes first is proved elsewhere.

        What is recorded or compiled is not even put into the final where it was not clearly faster (`compiling`).
        """
        return not self.accepts and self.name not in ("graphs", "compile")


def next_stage(profile: Profile, objective: Objective, budget: Budget) -> Stage | None:
    """Return the next stage to measure, or None when the search is over."""
    budget = profile.limits(budget)
    for name in _order(profile):
        if not profile.stage(name) and not _is_left_out(name, profile, budget):
            candidates = _CANDIDATES[name](profile, budget)
            if len(candidates) > 1 or (name == "modes" and candidates):
                accepts = name == ALONE  # whose gain no final would show
                is_brief = name in ("modes", SLICED) and compiling.takes_many_times_its_products(profile)
                fits = (budget.memory_bytes or _MOST_BYTES) if name == "sizes" and objective.memory == 0 else None
                return Stage(name, candidates, accepts, accepts, is_brief=is_brief, fits_bytes=fits)
    return _next_final(profile, objective, budget)


def _order(profile: Profile) -> tuple[str, ...]:
    """Return the names of the stages before the final: modes that ran in no size are asked again in one that does."""
    first = ("modes", "sizes", SLICED) if profile.stage("modes") and not profile.ran("modes") else ("modes",)
    return (*first, *(name for name in STAGES[:-1] if name not in first))


def is_hurried(profile: Profile, spent_s: float, *, steps: int = 0, patient: bool = False) -> bool:
    """Return whether measuring that took so long has no time left beside its final, and `steps` of the loop.

    Args:
        patient: whether the final may run more blocks where it is in doubt.
    """
    if profile.run_s is None:
        return False
    step_s = profile.run_s / (profile.total_steps or 1)
    patience_s = _PATIENT_BLOCKS * max(BLOCK_S, step_s) if patient else 0.0
    allowed = allowed_s(profile.run_s)
    final_s = max(min(_FINAL_S, allowed / 2), _FINAL_STEPS * step_s)
    return spent_s + final_s + steps * step_s + patience_s > allowed


def allowed_s(run_s: float) -> float:
    """Return the seconds that measuring aims to stay within, of a run of so many."""
    return max(min(MEASURING_S, MOST_OF_A_RUN * run_s), compiling.MEASURING * run_s)


def _is_left_out(name: str, profile: Profile, budget: Budget) -> bool:
    """Return whether a stage can be done without: sizes where they are told, and a smaller one would not be better.

    Where a limit has split the batch what that costs is asked, if chunks of a larger micro-batch may cost less, or
    launches of many.
    """
    if profile.stage("modes") and not profile.ran("modes"):
        return False
    if not profile.hurried or name != "sizes" or profile.objective.memory > 0:
        return False
    is_split = budget.memory_bytes is not None and _fastest(profile).micro_batch < profile.loop.batch_rows
    has_rivals = profile.device.kind == "cuda" or any(trial.block_s for trial in profile.stage("head"))
    return _is_told(profile, budget) and not (is_split and has_rivals)


def next_traces(
    profile: Profile, objective: Objective, budget: Budget, *, always: bool = False
) -> tuple[Candidate, ...]:
    """Return the candidates whose peak has to be told for sizes at which they are not run, and is not yet.

    Where memory neither is limited nor counts, what is counted in trials is enough; but a profile that is to be decided
    under other limits, or for another device, needs them `always`.
    """
    budget = profile.limits(budget)
    if budget.memory_bytes is None and objective.memory == 0 and not always:
        return ()
    chunks = [trial.candidate for trial in profile.stage("head") if not trial.control]
    if chunks:  # of the fastest mode too, where what would be recorded is another
        fastest = _fastest(profile)
        chunks += [replace(fastest, micro_batch=c.micro_batch, loss_chunk=c.loss_chunk) for c in chunks[1:]]
    wanted = dict.fromkeys((*mode_candidates(profile), *chunks))
    ignored = ("micro_batch", "allocator", "fused_optimizer")
    return tuple(c for c in wanted if not any(traced.candidate.alike(c, *ignored) for traced in profile.traces))


def next_recomputables(
    profile: Profile, stage: Stage | None, objective: Objective, budget: Budget, *, always: bool = False
) -> tuple[Candidate, ...]:
    """Return the candidates whose blocks have to be measured before the next stage, and are not yet.

    Before a final, or the end of the search, when all else is known.

    The fastest of all, and the fastest that fits, or the lightest where none does: where memory counts or is to be
    decided about under other limits (`always`), or where the limit is broken by the fastest.
    """
    budget = profile.limits(budget)
    is_asked = budget.memory_bytes is not None or objective.memory > 0 or always
    if not is_asked or (stage is not None and not is_final(stage.name)):
        return ()
    known = points(profile, budget)
    found = [p for p in known if not (p.has_failed or p.candidate.compiled or p.candidate.recompute)]
    fitting = [point for point in found if point.refusal is None]
    if not found or (profile.hurried and fitting):
        return ()
    fastest, *fit = (min(each, key=lambda p: p.cost.step_s or math.inf) for each in (found, fitting) if each)
    if fit and fit[0] == fastest and objective.memory == 0 and not always:
        return ()
    light = [] if fit else [min(found, key=lambda p: (p.cost.peak_bytes or math.inf, p.cost.step_s))]
    wanted = dict.fromkeys(_to_measure(profile, point.candidate) for point in (fastest, *fit, *light))
    return tuple(candidate for candidate in wanted if profile.recomputable_of(candidate) is None)


def _to_measure(profile: Profile, candidate: Candidate) -> Candidate:
    """Return a candidate in the size in which its precision and layout were tried."""
    alike = (mode for mode in CostModel(profile).modes if mode.alike(candidate, *BUT_MODE))
    return next((replace(mode, loss_chunk=candidate.loss_chunk) for mode in alike), candidate)


def _next_final(profile: Profile, objective: Objective, budget: Budget) -> Stage | None:
    rounds = profile.finals
    last = [trial for trial in profile.stage(rounds[-1]) if not trial.control] if rounds else []
    was_refuted = any(profile.refutation_of(trial.candidate) for trial in last)
    if not was_refuted and any(unfit(profile, trial, budget) is None for trial in last):
        return None
    reference = profile.reference_candidate
    failed = {t.candidate for name in rounds for t in profile.stage(name) if unfit(profile, t, budget)}
    found = [c for c in put_first(profile, objective, budget) if c not in failed]
    if was_refuted and {trial.candidate for trial in last}.issuperset(found):
        return None  # the last final decides without the refuted candidate
    most = MOST_FINALS + len(profile.refuted)
    if found and len(rounds) == most - 1:  # before it is said that nothing fits
        found = list(dict.fromkeys((*found, *lightest(profile, budget))))
    if len(rounds) == most or (rounds and not found):
        return None
    if not found and any(trial.candidate == reference for trial in profile.trials):
        return None
    name = FINAL if not rounds else f"{FINAL} {len(rounds) + 1}"
    cost = CostModel(profile).predict(reference)
    must_leave = reference in failed or over_budget(cost.step_s, cost.peak_bytes, budget, cost.energy_j) is not None
    drops = objective.time == 1.0 and not must_leave  # a slower one may win by what else counts
    return Stage(name, (reference, *found), control=bool(found), accepts=True, drops=drops)


def base_candidate(profile: Profile) -> Candidate:
    """Return what the modes are tried beside: the reference, its memory retained where page faults are noise in all."""
    retains = profile.loop.can_retain and retaining_refusal(profile) is None
    return replace(profile.reference_candidate, allocator="retain" if retains else "keep")


def mode_candidates(profile: Profile) -> tuple[Candidate, ...]:
    """Return the loop, then each other precision and layout worth a try, at the loop's own size."""
    base = base_candidate(profile)
    if profile.loop.bitwise_only:
        return (base,)
    precisions = [p for p in PRECISIONS if precision_refusal(profile.device, p) is None]
    is_candidate = profile.loop.has_convolutions and profile.loop.layout != "channels_last"
    layouts = ("keep", "channels_last") if is_candidate and not profile.loop.layout_hazard else ("keep",)
    grid = [replace(base, precision=p, memory_layout=layout) for p in precisions for layout in layouts]
    return (base, *(candidate for candidate in grid if candidate != base))


def _modes(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return them each at its largest size that is not known to break the budget; at the whole batch where none is."""
    model, limit = CostModel(profile), budget.memory_bytes

    def fitting(candidate: Candidate) -> Candidate:
        sizes = (replace(candidate, micro_batch=rows) for rows in halvings(profile))
        return next((c for c in sizes if limit is None or model.may_fit(c, limit)), candidate)

    return tuple(map(fitting, mode_candidates(profile)))


def _sliced(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the modes in the largest size that ran; none where nothing did."""
    sizes = [trial.candidate.micro_batch for trial in profile.ran("sizes")]
    return tuple(replace(each, micro_batch=sizes[0]) for each in mode_candidates(profile)) if sizes else ()


def _optimizer(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    first = _fastest(profile)
    if first.fused_optimizer or not profile.loop.supports_fused:
        return (first,)
    return first, replace(first, fused_optimizer=True)


def _head(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the fastest mode, then in chunks; of the largest micro-batch where that of its own has no more than one.

    Of what would be recorded, where that is another mode. With chunks the whole batch may fit a limit that makes
    micro-batches of it small without. What the device itself has no memory for is not run to find out.
    """
    first, memory = compiling.to_record(profile, _fastest(profile)), profile.device.memory_bytes
    model, larger = CostModel(profile), (replace(first, micro_batch=rows) for rows in halvings(profile))
    for candidate in (first, *(each for each in larger if memory is None or model.may_fit(each, memory))):
        if chunks := chunk_candidates(profile, candidate):
            return candidate, *chunks, *_small_chunk(profile, first, chunks)
    return (first,)


def _small_chunk(profile: Profile, first: Candidate, beside: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return a candidate in chunks of a fourth of the tokens that fit without, where those beside it are larger.

    What is recorded or compiled may need its memory at that size.
    """
    chunk = _chunk(head_tokens(profile, first), _CHUNK_SHARES[0])
    may_be_recorded = profile.device.kind == "cuda" and chunk >= _SMALLEST_CHUNK
    smallest = min(beside, key=lambda each: each.loss_chunk or math.inf)
    return (replace(smallest, loss_chunk=chunk),) if may_be_recorded and chunk < (smallest.loss_chunk or 0) else ()


def chunk_candidates(profile: Profile, first: Candidate) -> tuple[Candidate, ...]:
    """Return a candidate with its loss head in chunks: powers of two, to a fourth and an eighth of a step's tokens."""
    if chunking_refusal(profile):
        return ()
    chunks = {_chunk(profile.loop.head_tokens or 0, share) for share in _CHUNK_SHARES}
    fitting = [chunk for chunk in chunks if _SMALLEST_CHUNK <= chunk < head_tokens(profile, first)]
    return tuple(replace(first, loss_chunk=chunk) for chunk in sorted(fitting, reverse=True))


def _chunk(tokens: int, share: int) -> int:
    """Return the power of two that is no more than a share of some tokens."""
    return (1 << (tokens // share).bit_length()) >> 1


def _sizes(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the fastest mode in a quarter of its size; in all sizes where it has to shrink by what no trace tells.

    And in the larger one that its head was tried with, as its chunks are of that, or that a limit may allow.
    """
    first = _fastest(profile)
    sizes = [rows for rows in halvings(profile) if rows < first.micro_batch]
    few = bool(profile.ran("modes")) and _is_told(profile, budget)
    head = (trial.candidate.micro_batch for trial in profile.stage("head")[:1] if trial.block_s)
    larger = [rows for rows in head if rows > first.micro_batch] or _larger(profile, first, budget)
    sizes = [*larger, *(sizes[:2][-1:] if few else sizes)]
    return (first, *(replace(first, micro_batch=rows) for rows in sizes))


def _larger(profile: Profile, first: Candidate, budget: Budget) -> list[int]:
    """Return the largest size above that of the fastest mode of a loop that accumulates; none where none may fit."""
    if profile.reference.accumulate == 1:
        return []
    model, limit = CostModel(profile), budget.memory_bytes or _MOST_BYTES
    fit = [rows for rows in halvings(profile) if model.may_fit(replace(first, micro_batch=rows), limit)]
    return [rows for rows in fit if rows > first.micro_batch][:1]


def _is_told(profile: Profile, budget: Budget) -> bool:
    """Return whether it is known at which size the fastest mode fits."""
    limit = budget.memory_bytes
    return limit is None or bool(profile.traces) or CostModel(profile).is_within(_fastest(profile), limit)


def _fastest(profile: Profile) -> Candidate:
    """Return the fastest mode, or the first that was tried where no other is faster by what is worth a run."""
    model = CostModel(profile)
    ran = (trial.candidate for name in ("modes", SLICED) for trial in profile.ran(name))
    tried = [candidate for candidate in ran if candidate in model.modes]
    if not tried:
        return next(iter(model.modes), base_candidate(profile))
    fastest, first = (model.predict(each).step_s or 0.0 for each in (model.modes[0], tried[0]))
    return model.modes[0] if fastest < WORTH_A_RUN * first else tried[0]


def _recorded(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    return compiling.graph_candidates(profile, _fastest(profile))


def _compiled(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    return compiling.compile_candidates(profile, _fastest(profile))


def compiling_refusal(profile: Profile) -> str | None:
    """Return why the model is not compiled on trial, or None."""
    return compiling.compiling_refusal(profile, _fastest(profile))


def precision_refusal(device: DeviceSpec, precision: str) -> str | None:
    """Return why a precision is not worth a trial on a device, or None.

    A dtype without hardware support can make one step last minutes, so it is screened by its matrix products first.
    """
    if precision == "tf32" and device.kind != "cuda":
        return f"tf32 does not exist on {device.kind}"
    ours, base = device.peak(precision), device.peak("fp32")
    if precision != "fp32" and ours is not None and base is not None and ours < SCREEN * base:
        return f"not tried: {precision} matrix products run at {ours / base:.2g}x the speed of fp32 on this device"
    return None


def retaining_refusal(profile: Profile) -> str | None:
    """Return why retaining freed memory is not worth a trial, or None.

    What it can bring is estimated beforehand, from the time that a step's page faults take.
    """
    share = profile.fault_share
    if share is None or share / (1 - share) >= WORTH_RETAINING:
        return None
    faults = profile.loop.faults_per_step or 0
    return f"not tried: {faults:,.0f} page faults take about {100 * share:.2g}% of a step"


def chunking_refusal(profile: Profile) -> str | None:
    """Return why the loss head is not tried in chunks, or None. What it can save are the logits, twice at the least."""
    loop = profile.loop
    if loop.bitwise_only:
        return loop.bitwise_only
    if not loop.head_tokens or not loop.head_words:
        return "the model has no trimtab.nn.LossHead, whose logits could be made a chunk at a time"
    logits = 2 * 4 * loop.head_tokens * loop.head_words
    peaks = [trial.peak_bytes for trial in profile.trials if trial.peak_bytes]
    if peaks and logits < WORTH_SAVING * max(peaks):
        return f"not tried: the logits are about {100 * logits / max(peaks):.2g}% of the peak"
    return None


_CANDIDATES: dict[str, Callable[[Profile, Budget], tuple[Candidate, ...]]] = {
    "modes": _modes,
    SLICED: _sliced,
    "optimizer": _optimizer,
    "head": _head,
    "sizes": _sizes,
    "graphs": _recorded,
    "compile": _compiled,
}
