"""Search space of a plan: all candidates with predicted costs, and the ranking of candidates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.core.choice import FrontPoint, Note, Scalar
from trimtab.core.objective import Budget, Cost, Objective
from trimtab.planner import recompute_candidates
from trimtab.planner.compile_policy import paying_modes, tried
from trimtab.planner.cost_model import CostModel, PredictedCost, is_in_chunks, sizes_to_consider
from trimtab.planner.statistics import is_gain
from trimtab.planner.trial_statistics import (
    CLEARLY_SLOWER,
    FREE_SPEED,
    WORTH_SAVING,
    control_interval,
    over_budget,
    over_own_peak,
    reason_unfit,
    speed_ratio,
    unknown_energy,
)
from trimtab.plans.profile import Candidate, Profile, is_final
from trimtab.settings import OWN_PHASE, SEARCHED, SETTINGS
from trimtab.settings.conflicts import CONFLICTS, find_conflict

# The optimizer step is timed alone, so that small gains are significant; the saving must be this fraction of a whole
# step.
WORTH_FUSING = 0.01
# A candidate must be predicted to be better than this ratio to be compared with the loop.
WORTH_A_RUN = 0.99
# A change with a smaller predicted gain is doubted: the candidate without it also runs.
DOUBTED = 1.1
# Conflicts of searched settings; the search makes thousands of candidates.
_CONFLICTS = tuple(conflict for conflict in CONFLICTS if SEARCHED.keys() & set(conflict.settings))
_MOST_DOUBTED = 3


@dataclass(frozen=True)
class PricedCandidate:
    """A candidate with its predicted cost.

    Args:
        refusal: reason against choosing the candidate, or None.
        has_failed: the candidate failed to run.
    """

    candidate: Candidate
    cost: PredictedCost
    refusal: Note | None = None
    has_failed: bool = False

    @property
    def shown(self) -> FrontPoint:
        """The point as a plan's report shows it."""
        cost, why = self.cost, self.refusal or Note("", "")
        size = cost.peak_bytes or 0
        return FrontPoint(self.candidate.describe(), cost.step_s or 0.0, size, why.text, cost.energy_j, why.code)


def priced_candidates(profile: Profile, budget: Budget) -> tuple[PricedCandidate, ...]:
    """Return all candidates with known time."""
    model, reference = CostModel(profile), profile.reference_candidate
    tried = (trial.candidate for trial in profile.trials if trial.candidate.changes_blocks)
    own = (reference,) if _is_told(profile, reference) else ()
    candidates = dict.fromkeys((*own, *tried, *_combined(profile, model, budget)))
    costs = {candidate: model.predict(candidate) for candidate in candidates}
    return tuple(
        PricedCandidate(c, cost, _refusal(profile, c, cost, budget), profile.error_of(c) is not None)
        for c, cost in costs.items()
        if cost.step_s
    )


def _is_told(profile: Profile, reference: Candidate) -> bool:
    """Return True if the cost of the loop's own optimizer step is known; without trials, if it was traced."""
    traced = {each.candidate.fused_optimizer for each in profile.traces}
    return bool(profile.trials) or reference.fused_optimizer in traced


def _combined(profile: Profile, model: CostModel, budget: Budget) -> Iterator[Candidate]:
    chunks = {trial.candidate.loss_chunk for trial in profile.stage("head") if trial.block_s}
    fused = {profile.reference_candidate.fused_optimizer} if not fused_step_is_faster(profile) else {True}
    if not profile.trials:  # without trials, candidates come from the traces
        chunks = {traced.candidate.loss_chunk for traced in profile.traces}
        fused = {traced.candidate.fused_optimizer for traced in profile.traces}
    others = tuple(_others(profile))
    for mode in model.modes:
        compiles = (False, *paying_modes(profile, mode))
        for allocator in sorted({mode.allocator, "keep"}, reverse=True):
            for chunk in sorted({None, *chunks}, key=lambda value: value or math.inf, reverse=True):
                grid = itertools.product(sizes_to_consider(profile), fused, compiles, others)
                for rows, is_fused, compiled, more in grid:
                    part = mode.having(micro_batch=rows, fused_optimizer=is_fused, allocator=allocator)
                    part = part.having(loss_chunk=chunk, compiled=compiled, **more)
                    if is_in_conflict(part, profile.loop.batch_size):
                        continue
                    if not is_in_chunks(profile, part):
                        continue  # not chunked in effect, and no trace of chunks applies
                    yield part
                    for schedule in recompute_candidates.schedules(profile, part, budget, model.chain_margin):
                        yield part.having(recompute=schedule)
                    if not compiled:
                        for number in recompute_candidates.offloads(profile, part, budget, model.chain_margin):
                            yield part.having(offload=number)


def is_in_conflict(candidate: Candidate, batch_size: int, **shared: Scalar) -> bool:
    """Return True if no plan can have a candidate's values, on one process or with the sharding settings `shared`."""
    if not _CONFLICTS:
        return False
    values = {name: getattr(candidate, name, setting.default) for name, setting in SETTINGS.items()}
    return find_conflict(values | {"num_ranks": 1, "batch_size": batch_size} | shared, _CONFLICTS) is not None


def _others(profile: Profile) -> Iterator[dict[str, Scalar]]:
    """Yield all combinations of the tried values of settings without a special rule."""
    values = []
    for name in OWN_PHASE:
        tried = (getattr(trial.candidate, name) for trial in profile.stage(name) if trial.block_s)
        values.append(dict.fromkeys((getattr(profile.reference_candidate, name), *tried)))
    for combination in itertools.product(*values):
        yield dict(zip(OWN_PHASE, combination, strict=True))


def fused_step_is_faster(profile: Profile) -> bool:
    """Return True if a fused optimizer step is significantly faster, by a sufficient fraction of a whole step."""
    trials = [trial for trial in profile.stage("optimizer") if not trial.control]
    if profile.is_refuted("fused_optimizer", True) or len(trials) < 2 or not all(trial.block_s for trial in trials):
        return False
    own, fused = trials
    is_clear = is_gain(speed_ratio(fused, own), control_interval(profile, "optimizer"))
    return is_clear and fusing_share(profile) >= WORTH_FUSING


def fusing_share(profile: Profile) -> float:
    """Return the saving of a fused step as a fraction of the fastest whole step that was tried and pays."""
    model, ways = CostModel(profile), paying_modes(profile)
    also = (trial.candidate for trial in tried(profile) if trial.block_s and trial.candidate.compiled in ways)
    return model.saves("fused_optimizer", True) / (model.fastest(also) or 1.0)


def _refusal(profile: Profile, candidate: Candidate, cost: PredictedCost, budget: Budget) -> Note | None:
    if (died := profile.error_of(candidate)) is not None:
        return died
    final = [t for t in profile.trials if is_final(t.stage) and t.candidate == candidate and not t.control]
    if final:
        return reason_unfit(profile, final[-1], budget)
    if budget.memory_bytes is not None and cost.peak_bytes is None:
        return Note("memory.unknown", "the peak memory is unknown: neither measured nor traced")
    if unknown := unknown_energy(cost.energy_j, budget):
        return unknown
    refusal = over_budget(cost.step_s, cost.peak_bytes, budget, cost.energy_j)
    refusal, how = refusal or over_own_peak(profile, cost.peak_bytes, budget), "predicted"
    if refusal is None and cost.margin:
        refusal, how = over_budget(cost.limit_s, None, budget), f"predicted with a margin of {100 * cost.margin:.2g}%"
    elif cost.counted:
        return refusal
    return refusal and replace(refusal, text=f"{refusal.text} ({how})")


def put_first(profile: Profile, objective: Objective, budget: Budget) -> tuple[Candidate, ...]:
    """Return the candidates to compare with the reference: the best, the lightest at equal speed, and simpler variants.

    Empty if no candidate is predicted to be better; the nearest candidate if none meets the budget.
    """
    found = priced_candidates(profile, budget)
    reference = next((p for p in found if p.candidate == profile.reference_candidate), None)
    fitting = [point for point in found if point.refusal is None]
    if not fitting:
        near = nearest_refused(found, budget)
        return () if near is None or near == reference else (near.candidate,)
    scores = {point.candidate: score(point, objective, reference or fitting[0]) for point in fitting}
    best = simplest_candidate(fitting, scores, profile.reference_candidate)
    stays = reference is not None and reference.refusal is None
    chosen = [] if stays and reference and not is_worth_a_change(best, reference, objective) else [best]
    # Without a trial of sizes, the cost of smaller micro-batches is unknown.
    are_told = not profile.trials or bool(profile.stage("sizes"))
    told = [p for p in fitting if are_told or p.candidate.micro_batch >= best.candidate.micro_batch]
    lightest = _lightest(told, best)
    chosen += [lightest] if lightest is not None else []
    if chosen and chosen[0].candidate.changes_blocks:  # Recomputation or offload may fail its proof.
        plain = [point for point in fitting if not point.candidate.changes_blocks]
        chosen += [min(plain, key=lambda point: scores[point.candidate])] if plain else []
    if chosen and chosen[0].candidate.compiled and chosen[0].candidate.loss_chunk:  # Compilers may chunk by themselves.
        chosen += [point for point in fitting if point.candidate == chosen[0].candidate.having(loss_chunk=None)]
    chosen += _doubted(fitting, best, scores, profile) if chosen and not profile.over_time_budget else []
    return tuple(dict.fromkeys(p.candidate for p in chosen if p.candidate != profile.reference_candidate))


def lightest(profile: Profile, budget: Budget) -> tuple[Candidate, ...]:
    """Return the fitting candidate with the least predicted memory; empty if none fits."""
    fitting = [point for point in priced_candidates(profile, budget) if point.refusal is None]
    light = min(fitting, key=lambda point: point.cost.peak_bytes or math.inf, default=None)
    return () if light is None else (light.candidate,)


def score(point: PricedCandidate, objective: Objective, reference: PricedCandidate) -> float:
    """Return the score C relative to the reference; infinite if a weighted term is unknown."""
    costs = (p.cost for p in (point, reference))
    ours, theirs = (Cost(cost.step_s or math.inf, cost.peak_bytes, cost.energy_j) for cost in costs)
    if objective.memory > 0 and None in (ours.memory_bytes, theirs.memory_bytes):
        return math.inf
    if objective.energy > 0 and None in (ours.energy_j, theirs.energy_j):
        return math.inf
    return objective.score(ours, theirs)


def nearest_refused(found: Sequence[PricedCandidate], budget: Budget) -> PricedCandidate | None:
    """Return the refused point with the least excess over a limit, without failures; ties go to the fastest."""
    known = [p for p in found if budget.memory_bytes is None or p.cost.peak_bytes is not None]
    known = [p for p in known if unknown_energy(p.cost.energy_j, budget) is None]
    alive = [p for p in known if p.refusal is not None and not p.has_failed]

    def excess(point: PricedCandidate) -> tuple[float, float]:
        step_s, peak = point.cost.step_s or 0.0, point.cost.peak_bytes or 0
        memory = peak / budget.memory_bytes if budget.memory_bytes else 0.0
        limit_s, energy_j = point.cost.limit_s or 0.0, point.cost.energy_j or 0.0
        energy = energy_j / budget.energy if budget.energy else 0.0
        return max(memory, energy, limit_s / budget.time if budget.time else 0.0, 1.0), step_s

    return min(alive, key=excess, default=None)


def front(found: Sequence[PricedCandidate], *, with_energy: bool = False) -> tuple[PricedCandidate, ...]:
    """Return the Pareto front in time and memory, and energy if relevant; the fastest first.

    Points with unknown values are excluded. Contains the front of all admissible points, and refused points on the
    front of all points without a failure.
    """
    fitting = _unbeaten([point for point in found if point.refusal is None], with_energy)
    alive = [point for point in found if not point.has_failed]
    refused = [point for point in _unbeaten(alive, with_energy) if point.refusal is not None]
    return tuple(sorted((*fitting, *refused), key=_by_time))


def _by_time(point: PricedCandidate) -> tuple[float, int, float]:
    return point.cost.step_s or 0.0, point.cost.peak_bytes or 0, point.cost.energy_j or 0.0


def _unbeaten(found: Sequence[PricedCandidate], with_energy: bool) -> tuple[PricedCandidate, ...]:
    known = [point for point in found if point.cost.step_s is not None and point.cost.peak_bytes is not None]
    known = [point for point in known if not with_energy or point.cost.energy_j is not None]
    front: list[PricedCandidate] = []
    for point in sorted(known, key=_by_time):  # Later points are not faster.
        _, size, energy_j = _by_time(point)
        sparing = (each for each in front if not with_energy or (each.cost.energy_j or 0.0) <= energy_j)
        if all(size < (each.cost.peak_bytes or 0) for each in sparing):
            front.append(point)
    return tuple(front)


def stands_between(
    found: Sequence[PricedCandidate], chosen: Candidate, reference: Candidate
) -> tuple[float, float] | None:
    """Return the range of memory weights at which no fitting point beats the choice.

    Weights are fractions of the total weight of time and memory. None if costs are unknown or the range is empty: a
    final may decide for a candidate against its mean.
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
        if longer == larger:  # The same comparison holds at every weight.
            low = low if longer >= 0 else math.inf
        elif longer > larger:
            high = min(high, longer / (longer - larger))
        else:
            low = max(low, longer / (longer - larger))
    return (low, high) if low <= high else None


def is_worth_a_change(best: PricedCandidate, reference: PricedCandidate, objective: Objective) -> bool:
    """Return True if a point is predicted to be better than the reference by at least `WORTH_A_RUN`."""
    return score(best, objective, reference) < WORTH_A_RUN * score(reference, objective, reference)


def simplest_candidate(
    fitting: Sequence[PricedCandidate], scores: Mapping[Candidate, float], reference: Candidate
) -> PricedCandidate:
    """Return the point with the fewest changes among those nearly as good as the best."""
    limit = min(scores.values()) / WORTH_A_RUN
    near = [point for point in fitting if scores[point.candidate] <= limit]
    return min(near, key=lambda point: (len(point.candidate.differences(reference)), scores[point.candidate]))


def _lightest(fitting: Sequence[PricedCandidate], best: PricedCandidate) -> PricedCandidate | None:
    """Return the point with the least memory among points as fast as the best; None if the saving is too small."""
    if not best.cost.peak_bytes or best.cost.step_s is None:
        return None
    limit = (1 - WORTH_SAVING) * best.cost.peak_bytes
    lighter = [p for p in fitting if p.cost.peak_bytes is not None and p.cost.peak_bytes <= limit]
    for least_speed in (FREE_SPEED, CLEARLY_SLOWER):  # Predictions are noisy: the final decides.
        light = [p for p in lighter if (p.cost.step_s or 0.0) <= best.cost.step_s / least_speed]
        if light:
            break
    return min(light, key=lambda point: (point.cost.peak_bytes or 0, point.cost.step_s), default=None)


def _doubted(
    fitting: Sequence[PricedCandidate], best: PricedCandidate, scores: dict[Candidate, float], profile: Profile
) -> list[PricedCandidate]:
    """Return variants of the best point without a single change, for changes with little predicted gain."""
    reference = profile.reference_candidate
    changed = [name for name in best.candidate.differences(reference) if name != "fused_optimizer"]
    without = [replace(best.candidate, **{name: getattr(reference, name)}) for name in changed]
    doubted = [p for p in fitting if p.candidate in without and scores[p.candidate] < DOUBTED * scores[best.candidate]]
    return sorted(doubted, key=lambda point: scores[point.candidate])[:_MOST_DOUBTED]
