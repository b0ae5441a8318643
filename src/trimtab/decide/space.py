"""The finite space a plan is chosen from, what each point of it is expected to cost, and which come first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.core.objective import Budget, Cost, Objective
from trimtab.core.profile import SLICED, Candidate, Profile, is_final
from trimtab.decide import recomputing
from trimtab.decide.compiling import paying, tried
from trimtab.decide.cost_model import CostModel, Predicted
from trimtab.decide.readings import (
    FREE_SPEED,
    WORTH_SAVING,
    control_interval,
    over_budget,
    over_own_peak,
    speed_ratio,
    unfit,
    unknown_energy,
)
from trimtab.decide.sizes import halvings, is_in_chunks
from trimtab.decide.statistics import is_gain

# The optimizer's step is timed alone, where a gain is clear that a whole step would not show: what it saves of one has
# to be this share.
WORTH_FUSING = 0.01
# A candidate that is predicted to be no better than this is not run against the loop.
WORTH_A_RUN = 0.99
# A change is doubted, and the candidate without it run too, where it is predicted to bring no more than this.
DOUBTED = 1.1
_MOST_DOUBTED = 3


@dataclass(frozen=True)
class Point:
    """A candidate and its expected cost; `refusal` says why it cannot be chosen, `has_failed` that it did not run."""

    candidate: Candidate
    cost: Predicted
    refusal: str | None = None
    has_failed: bool = False


def points(profile: Profile, budget: Budget) -> tuple[Point, ...]:
    """Return every candidate whose time can be told."""
    model, reference = CostModel(profile), profile.reference_candidate
    tried = (trial.candidate for trial in profile.trials if trial.candidate.recompute is not None)
    own = (reference,) if _is_told(profile, reference) else ()
    candidates = dict.fromkeys((*own, *tried, *_combined(profile, model, budget)))
    costs = {candidate: model.predict(candidate) for candidate in candidates}
    return tuple(
        Point(c, cost, _refusal(profile, c, cost, budget), profile.error_of(c) is not None)
        for c, cost in costs.items()
        if cost.step_s
    )


def _is_told(profile: Profile, reference: Candidate) -> bool:
    """Return whether the loop's own optimizer's step is known: where nothing was tried, it is if it was traced."""
    traced = {each.candidate.fused_optimizer for each in profile.traces}
    return bool(profile.trials) or reference.fused_optimizer in traced


def _combined(profile: Profile, model: CostModel, budget: Budget) -> Iterator[Candidate]:
    chunks = {trial.candidate.loss_chunk for trial in profile.stage("head") if trial.block_s}
    fused = {profile.reference_candidate.fused_optimizer} if not fuses(profile) else {True}
    if not profile.trials:  # nothing was tried: by what was traced
        chunks = {traced.candidate.loss_chunk for traced in profile.traces}
        fused = {traced.candidate.fused_optimizer for traced in profile.traces}
    for mode in model.modes:
        compiles = (False, *paying(profile, mode))
        for allocator in sorted({mode.allocator, "keep"}, reverse=True):
            for chunk in sorted({None, *chunks}, key=lambda value: value or math.inf, reverse=True):
                for rows, is_fused, compiled in itertools.product(halvings(profile), fused, compiles):
                    part = replace(mode, micro_batch=rows, fused_optimizer=is_fused)
                    part = replace(part, allocator=allocator, loss_chunk=chunk, compiled=compiled)
                    if not is_in_chunks(profile, part):
                        continue  # all at once, of which no trace of chunks tells
                    yield part
                    for schedule in recomputing.schedules(profile, part, budget, model.chain_margin):
                        yield replace(part, recompute=schedule)


def fuses(profile: Profile) -> bool:
    """Return whether the optimizer's step alone is clearly faster fused, by enough of a whole step."""
    trials = [trial for trial in profile.stage("optimizer") if not trial.control]
    if profile.is_refuted("fused_optimizer", True) or len(trials) < 2 or not all(trial.block_s for trial in trials):
        return False
    own, fused = trials
    is_clear = is_gain(speed_ratio(fused, own), control_interval(profile, "optimizer"))
    return is_clear and fusing_share(profile) >= WORTH_FUSING


def fusing_share(profile: Profile) -> float:
    """Return what a fused step saves of a whole one, the fastest that was tried and pays."""
    model, ways = CostModel(profile), paying(profile)
    also = (trial.candidate for trial in tried(profile) if trial.block_s and trial.candidate.compiled in ways)
    return model.saves("fused_optimizer", True) / (model.fastest(also) or 1.0)


def _refusal(profile: Profile, candidate: Candidate, cost: Predicted, budget: Budget) -> str | None:
    if (died := profile.error_of(candidate)) is not None:
        return died
    final = [t for t in profile.trials if is_final(t.stage) and t.candidate == candidate and not t.control]
    if final:
        return unfit(profile, final[-1], budget)
    if budget.memory_bytes is not None and cost.peak_bytes is None:
        return "its peak memory is neither counted nor traced"
    if unknown := unknown_energy(cost.energy_j, budget):
        return unknown
    refusal = over_budget(cost.step_s, cost.peak_bytes, budget, cost.energy_j)
    refusal = refusal or over_own_peak(profile, cost.peak_bytes, budget)
    if refusal is None and cost.margin:
        refusal = over_budget(cost.limit_s, None, budget)
        return refusal and f"predicted, with {100 * cost.margin:.2g}% on top: {refusal}"
    return refusal if refusal is None or cost.counted else f"predicted: {refusal}"


def put_first(profile: Profile, objective: Objective, budget: Budget) -> tuple[Candidate, ...]:
    """Return who is run against the reference: the best of all, the lightest as fast, the best less a doubted change.

    Nobody where nothing is predicted to be better; the nearest of all where nothing meets the budget.
    """
    found = points(profile, budget)
    reference = next((p for p in found if p.candidate == profile.reference_candidate), None)
    fitting = [point for point in found if point.refusal is None]
    if not fitting:
        near = nearest(found, budget)
        return () if near is None or near == reference else (near.candidate,)
    scores = {point.candidate: score(point, objective, reference or fitting[0]) for point in fitting}
    best = simplest(fitting, scores, profile.reference_candidate)
    stays = reference is not None and reference.refusal is None
    chosen = [] if stays and reference and not is_worth_a_change(best, reference, objective) else [best]
    lightest = _lightest(_of_told_sizes(fitting, best, profile), best)
    chosen += [lightest] if lightest is not None else []
    chosen += _without_recomputing(fitting, scores, chosen)
    chosen += _with_head_whole(fitting, chosen)
    chosen += _of_sizes_that_ran(fitting, scores, chosen, profile)
    chosen += _doubted(fitting, best, scores, profile) if chosen and not profile.hurried else []
    return tuple(dict.fromkeys(p.candidate for p in chosen if p.candidate != profile.reference_candidate))


def lightest(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return who is predicted to need least memory of all that may fit; nobody where none may."""
    fitting = [point for point in points(profile, budget) if point.refusal is None]
    light = min(fitting, key=lambda point: point.cost.peak_bytes or math.inf, default=None)
    return () if light is None else (light.candidate,)


def _without_recomputing(
    fitting: Sequence[Point], scores: Mapping[Candidate, float], chosen: Sequence[Point]
) -> list[Point]:
    """Return the best that recomputes nothing, where the best does: it is proved beside it, and may fail alone."""
    plain = [point for point in fitting if point.candidate.recompute is None]
    if not plain or not chosen or chosen[0].candidate.recompute is None:
        return []
    return [min(plain, key=lambda point: scores[point.candidate])]


def _with_head_whole(fitting: Sequence[Point], chosen: Sequence[Point]) -> list[Point]:
    """Return the best with its loss head whole, where it is compiled and in chunks: these were tried of the model as it
    is, what is compiled without them, and a compiler may make of the head by itself what they do.
    """
    if not chosen or not chosen[0].candidate.compiled or chosen[0].candidate.loss_chunk is None:
        return []
    whole = replace(chosen[0].candidate, loss_chunk=None)
    return [point for point in fitting if point.candidate == whole]


def _of_sizes_that_ran(
    fitting: Sequence[Point], scores: dict[Candidate, float], chosen: Sequence[Point], profile: Profile
) -> list[Point]:
    """Return the best of a size that its modes ran in, where none ran whole: the best of all may be one that does not.

    It is proved beside a larger one.
    """
    ran = max((t.candidate.micro_batch for t in profile.ran(SLICED)), default=math.inf)
    safe = [point for point in fitting if point.candidate.micro_batch <= ran]
    if not chosen or not safe or chosen[0].candidate.micro_batch <= ran:
        return []
    return [simplest(safe, {p.candidate: scores[p.candidate] for p in safe}, profile.reference_candidate)]


def score(point: Point, objective: Objective, reference: Point) -> float:
    """Return C in units of the reference's cost; infinite where a weighted term of it is not known."""
    costs = (p.cost for p in (point, reference))
    ours, theirs = (Cost(cost.step_s or math.inf, cost.peak_bytes, cost.energy_j) for cost in costs)
    if objective.memory > 0 and None in (ours.memory_bytes, theirs.memory_bytes):
        return math.inf
    if objective.energy > 0 and None in (ours.energy_j, theirs.energy_j):
        return math.inf
    return objective.score(ours, theirs)


def nearest(found: Sequence[Point], budget: Budget) -> Point | None:
    """Return who breaks its worst limit least, of those that break one and did not fail; then the fastest."""
    known = [p for p in found if budget.memory_bytes is None or p.cost.peak_bytes is not None]
    known = [p for p in known if unknown_energy(p.cost.energy_j, budget) is None]
    alive = [p for p in known if p.refusal is not None and not p.has_failed]

    def excess(point: Point) -> tuple[float, float]:
        step_s, peak = point.cost.step_s or 0.0, point.cost.peak_bytes or 0
        memory = peak / budget.memory_bytes if budget.memory_bytes else 0.0
        limit_s, energy_j = point.cost.limit_s or 0.0, point.cost.energy_j or 0.0
        energy = energy_j / budget.energy if budget.energy else 0.0
        return max(memory, energy, limit_s / budget.time if budget.time else 0.0, 1.0), step_s

    return min(alive, key=excess, default=None)


def front(found: Sequence[Point], *, with_energy: bool = False) -> tuple[Point, ...]:
    """Return those that nobody beats in both time and memory, and energy where that counts; the fastest first.

    What is not known of a point cannot be weighed against others: it is on no front that it counts for. Of
    those that can be chosen; and, with why they cannot, of all that ran or may run.
    """
    fitting = _unbeaten([point for point in found if point.refusal is None], with_energy)
    alive = [point for point in found if not point.has_failed]
    refused = [point for point in _unbeaten(alive, with_energy) if point.refusal is not None]
    return tuple(sorted((*fitting, *refused), key=_by_time))


def _by_time(point: Point) -> tuple[float, int, float]:
    return point.cost.step_s or 0.0, point.cost.peak_bytes or 0, point.cost.energy_j or 0.0


def _unbeaten(found: Sequence[Point], with_energy: bool) -> tuple[Point, ...]:
    known = [point for point in found if point.cost.step_s is not None and point.cost.peak_bytes is not None]
    known = [point for point in known if not with_energy or point.cost.energy_j is not None]
    front: list[Point] = []
    for point in sorted(known, key=_by_time):  # whoever is after is no faster
        _, size, energy_j = _by_time(point)
        sparing = (each for each in front if not with_energy or (each.cost.energy_j or 0.0) <= energy_j)
        if all(size < (each.cost.peak_bytes or 0) for each in sparing):
            front.append(point)
    return tuple(front)


def stands_between(found: Sequence[Point], chosen: Candidate, reference: Candidate) -> tuple[float, float] | None:
    """Return the memory weights, as shares of time's and memory's together, at which nobody that fits beats a choice.

    None where costs are not known, or there is no such weight: by a final it may win though its mean does not.
    """
    known = [p for p in found if p.cost.step_s is not None and p.cost.peak_bytes is not None]
    costs = {p.candidate: (p.cost.step_s or 0.0, float(p.cost.peak_bytes or 0)) for p in known}
    if chosen not in costs or not all(costs.get(reference, (0.0, 0.0))):
        return None
    (own_s, own), (unit_s, unit) = costs[chosen], costs[reference]
    low, high = 0.0, 1.0
    for point in known:
        if point.refusal is not None or point.candidate == chosen:
            continue
        seconds, size = costs[point.candidate]
        longer, larger = (seconds - own_s) / unit_s, (size - own) / unit
        if longer == larger:  # at every weight alike
            low = low if longer >= 0 else math.inf
        elif longer > larger:
            high = min(high, longer / (longer - larger))
        else:
            low = max(low, longer / (longer - larger))
    return (low, high) if low <= high else None


def is_worth_a_change(best: Point, reference: Point, objective: Objective) -> bool:
    """Return whether a point is predicted to be better than the reference by what is worth a run."""
    return score(best, objective, reference) < WORTH_A_RUN * score(reference, objective, reference)


def simplest(fitting: Sequence[Point], scores: Mapping[Candidate, float], reference: Candidate) -> Point:
    """Return the best, or who is as good to what is worth a run and changes less."""
    limit = min(scores.values()) / WORTH_A_RUN
    near = [point for point in fitting if scores[point.candidate] <= limit]
    return min(near, key=lambda point: (len(point.candidate.differences(reference)), scores[point.candidate]))


def _lightest(fitting: Sequence[Point], best: Point) -> Point | None:
    """Return who needs least memory among those that are as fast as the best, if it saves enough."""
    if best.cost.peak_bytes is None or best.cost.step_s is None:
        return None
    limit_s, limit = best.cost.step_s / FREE_SPEED, (1 - WORTH_SAVING) * best.cost.peak_bytes
    as_fast = [p for p in fitting if (p.cost.step_s or 0.0) <= limit_s and p.cost.peak_bytes is not None]
    light = [point for point in as_fast if (point.cost.peak_bytes or 0) <= limit]
    return min(light, key=lambda point: (point.cost.peak_bytes or 0, point.cost.step_s), default=None)


def _of_told_sizes(fitting: Sequence[Point], best: Point, profile: Profile) -> list[Point]:
    """Return who is of the best's size at least, where no smaller one was tried: what it takes was not told."""
    is_told = not profile.trials or bool(profile.stage("sizes"))
    return [point for point in fitting if is_told or point.candidate.micro_batch >= best.candidate.micro_batch]


def _doubted(fitting: Sequence[Point], best: Point, scores: dict[Candidate, float], profile: Profile) -> list[Point]:
    """Return the best less one of its changes, each time one that is predicted to bring little."""
    reference = profile.reference_candidate
    changed = [name for name in best.candidate.differences(reference) if name != "fused_optimizer"]
    without = [replace(best.candidate, **{name: getattr(reference, name)}) for name in changed]
    doubted = [p for p in fitting if p.candidate in without and scores[p.candidate] < DOUBTED * scores[best.candidate]]
    return sorted(doubted, key=lambda point: scores[point.candidate])[:_MOST_DOUBTED]
