"""Which candidates to measure next, and what the measurements say: a pure function of the profile.

    allocator  -> freed host memory handed back, or retained: page faults are noise in all that comes after
    precision  -> precision and memory layout together (they interact)
    optimizer  -> the optimizer's step alone, as it is against fused
    micro_batch -> slices of the user's batch, where the check allows splitting
    verify     -> the reference against the winner, once more

Each stage starts from the winner of the one before; a stage without alternatives is left out. Replaying a recorded
profile gives the same stages and the same winner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import PRECISIONS, Budget, Cost, Objective
from trimtab.core.profile import Candidate, Profile, Trial
from trimtab.core.units import format_bytes, format_seconds
from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain, ratio_interval, resolution

# A smaller micro-batch is taken for its memory alone only if it costs at most this much speed (interval's lower end)
# and saves at least this share of the peak.
FREE_SPEED = 0.99
WORTH_SAVING = 0.05
# The optimizer's step is timed alone, where a gain is clear that a whole step would not show: what it saves of one has
# to be this share.
WORTH_FUSING = 0.01
# Where page faults promise less than this, they are left alone.
WORTH_RETAINING = 0.02
# After this many blocks a stage may drop who lost each of them; what it accepts takes as many as any verdict.
MIN_BLOCKS = 3
# Below this multiple of fp32's matrix-product speed a precision is not tried: no faster there, it only adds casts.
SCREEN = 1.2
CONTROLLED = ("allocator", "precision", "micro_batch")
STAGES = ("allocator", "precision", "optimizer", "micro_batch", "verify")


@dataclass(frozen=True)
class Stage:
    """Candidates to run interleaved; the first is the incumbent. `control` asks for it a second time (A/A)."""

    name: str
    candidates: tuple[Candidate, ...]
    control: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a stage decided: the winner, and for every candidate but the incumbent its speed ratio and its reason."""

    winner: Candidate
    incumbent: Candidate
    reasons: dict[Candidate, str]
    ratios: dict[Candidate, Interval]


def reference_candidate(profile: Profile) -> Candidate:
    """Return the user's loop as a candidate."""
    return Candidate(profile.reference.precision, "keep", profile.loop.is_fused, profile.loop.batch_rows)


def next_stage(profile: Profile, objective: Objective, budget: Budget) -> Stage | None:
    """Return the next stage to measure, or None when the search is over."""
    for name in STAGES:
        if profile.stage(name):
            continue
        incumbent = winner_before(profile, name, objective, budget)
        candidates = _CANDIDATES[name](profile, incumbent, budget)
        if len(candidates) > 1 or (name == "precision" and not profile.trials):  # the reference is run in any case
            return Stage(name, candidates, control=name in CONTROLLED)
    return None


def winner_before(profile: Profile, stage: str, objective: Objective, budget: Budget) -> Candidate:
    """Return the candidate that stands when a stage begins."""
    winner = reference_candidate(profile)
    for name in STAGES[: STAGES.index(stage)]:
        if profile.stage(name):
            winner = decide_stage(profile, name, objective, budget).winner
    return winner


def decide_stage(profile: Profile, name: str, objective: Objective, budget: Budget) -> Outcome:
    """Return a stage's outcome from its trials.

    The best clear gain over the incumbent wins; without one, the lightest trial of equal speed. An incumbent that
    cannot stay (it failed, or breaks the budget) leaves to the best trial that fits, gain or not. Where nothing fits,
    the stage is decided without the budget: a later one may still meet it.
    """
    incumbent, *rivals = [trial for trial in profile.stage(name) if not trial.control]
    refusals = {trial.candidate: unfit(profile, trial, name, budget) for trial in (incumbent, *rivals)}
    if all(refusals.values()) and budget != Budget():
        return decide_stage(profile, name, objective, Budget())
    control, must_leave = control_interval(profile, name), refusals[incumbent.candidate]
    fitting = [trial for trial in rivals if refusals[trial.candidate] is None]
    base = incumbent if incumbent.block_s or not fitting else fitting[0]
    reasons: dict[Candidate, str] = {c: text for c, text in refusals.items() if text and c != incumbent.candidate}
    ratios: dict[Candidate, Interval] = {}
    winner, best, lightest = incumbent, 0.0 if must_leave else 1.0, incumbent
    accepted: list[Trial] = []
    for trial in fitting:
        ratios[trial.candidate] = speed = speed_ratio(trial, base)
        score = _score_ratio(profile, trial, base, objective, name)
        share = _share_saved(profile, trial, base) if name == "optimizer" else None
        gain = is_gain(score, control) and (share is None or share >= WORTH_FUSING)
        free = _free_memory(trial, base, speed, name)
        saved = _saved(trial, base) if free else None
        reasons[trial.candidate] = _reason(speed, control, gain, saved=saved, share=share)
        accepted += [trial] if gain or must_leave else []
        if trial in accepted and score.mean > best:
            winner, best = trial, score.mean
        if free and (trial.peak_bytes or 0) < (lightest.peak_bytes or 0):
            lightest = trial
    if winner is incumbent and not must_leave:
        winner = lightest
    for trial in accepted:  # of settings changed together, one may bring nothing: it stays as it was
        fewer = _changed(trial, incumbent) < _changed(winner, incumbent)
        if fewer and not is_gain(more := _score_ratio(profile, winner, trial, objective, name), control):
            reasons[winner.candidate] = f"no gain beside {trial.candidate.describe()}: {more.mean:.3g}x of it"
            winner = trial
    if must_leave and winner is not incumbent:
        why = f"{incumbent.candidate.describe()} cannot stay ({must_leave})"
        reasons[winner.candidate] = f"{why}: {reasons[winner.candidate]}"
    return Outcome(winner.candidate, incumbent.candidate, reasons, ratios)


def control_interval(profile: Profile, stage: str) -> Interval | None:
    """Return an A/A control's ratio: a stage's incumbent against itself, or None where the control failed.

    A stage that runs none takes the first of another stage that can be read: the machine is the same.
    """
    own = profile.stage(stage)
    if any(trial.control for trial in own):
        return _control_of(own)
    others = (_control_of(profile.stage(name)) for name in CONTROLLED)
    return next((interval for interval in others if interval is not None), None)


def _control_of(trials: tuple[Trial, ...]) -> Interval | None:
    control = next((trial for trial in trials if trial.control), None)
    if control is None or min(len(control.block_s), len(trials[0].block_s)) < 2:
        return None
    return speed_ratio(control, trials[0])


def resolves(control: Interval | None) -> str:
    """Return in words what an A/A control resolves."""
    if not math.isfinite(resolution(control)):
        return "without an A/A control nothing can be resolved"
    return f"the A/A control resolves {100 * resolution(control):.2g}%"


def speed_ratio(ours: Trial, theirs: Trial) -> Interval:
    """Return how many times faster `ours` is, paired by block."""
    return ratio_interval([b / a for a, b in zip(ours.block_s, theirs.block_s, strict=False)])


def unfit(profile: Profile, trial: Trial, stage: str, budget: Budget) -> str | None:
    """Return why a trial cannot be chosen, or None."""
    if trial.error is not None:
        return trial.error
    if len(trial.block_s) < MIN_BLOCKS:
        return f"stopped after {len(trial.block_s)} blocks: {format_seconds(trial.step_s)} per step is far slower"
    return over_budget(profile, trial, stage, budget)


def over_budget(profile: Profile, trial: Trial, stage: str, budget: Budget) -> str | None:
    """Return which hard limit a trial breaks, or None.

    Memory binds once splitting the batch can no longer lower it: in the micro-batch stage, or everywhere when
    splitting is refused.
    """
    if stage == "optimizer":
        return None
    limit, peak = budget.memory_bytes, trial.peak_bytes
    final = stage in ("micro_batch", "verify") or not profile.check.splittable
    if final and limit is not None and peak is not None and peak > limit:
        return f"peak memory {format_bytes(peak)} is over the budget of {format_bytes(limit)}"
    step_s = trial.step_s
    if budget.time is not None and step_s is not None and step_s > budget.time:
        return f"{format_seconds(step_s)} per step is over the budget of {format_seconds(budget.time)}"
    return None


def _score_ratio(profile: Profile, trial: Trial, incumbent: Trial, objective: Objective, stage: str) -> Interval:
    """Return C(incumbent) / C(trial), paired by block, in units of the reference's cost.

    A reference that did not run has no cost: then in units of the incumbent's.
    """
    if stage == "optimizer" or objective.time == 1.0:
        return speed_ratio(trial, incumbent)
    base = profile.trials[0] if profile.trials[0].block_s else incumbent
    reference = Cost(base.step_s or 0.0, base.peak_bytes)
    ratios = [
        objective.score(Cost(theirs, incumbent.peak_bytes), reference)
        / objective.score(Cost(ours, trial.peak_bytes), reference)
        for ours, theirs in zip(trial.block_s, incumbent.block_s, strict=False)
    ]
    return ratio_interval(ratios)


def _changed(trial: Trial, incumbent: Trial) -> frozenset[str]:
    return frozenset(trial.candidate.differences(incumbent.candidate))


def _share_saved(profile: Profile, trial: Trial, base: Trial) -> float:
    """Return what a faster optimizer's step saves of a whole one, as that was timed before this stage."""
    before = STAGES[: STAGES.index("optimizer")]
    whole = [t for t in profile.trials if t.stage in before and t.candidate == base.candidate and t.step_s]
    phases_s = sum(seconds for name, seconds in profile.phases_s.items() if name != "data")
    own_s, ours_s = base.step_s or 0.0, trial.step_s or 0.0
    step_s = max((whole[-1].step_s if whole else None) or phases_s, own_s)
    return (own_s - ours_s) / step_s if step_s > 0 else 0.0


def _free_memory(trial: Trial, incumbent: Trial, speed: Interval, stage: str) -> bool:
    if stage != "micro_batch" or trial.peak_bytes is None or incumbent.peak_bytes is None:
        return False
    is_known = speed.n >= MIN_PAIRS_FOR_VERDICT and speed.low >= FREE_SPEED
    return is_known and _saved(trial, incumbent) >= WORTH_SAVING


def _saved(trial: Trial, incumbent: Trial) -> float:
    """Return the share of the incumbent's peak that a trial saves."""
    return 1 - (trial.peak_bytes or 0) / (incumbent.peak_bytes or 1)


def _reason(speed: Interval, control: Interval | None, gain: bool, *, saved: float | None, share: float | None) -> str:
    """Return what the figures say; `saved` of the peak, `share` of a whole step for the optimizer's."""
    figures = f"{speed.mean:.3g}x the speed (95% {speed.low:.3g} to {speed.high:.3g}, n={speed.n})"
    if share is not None:
        figures = f"the optimizer's step alone at {figures}, {100 * share:.2g}% of a whole step"
    if gain:
        return figures
    if share is not None and is_gain(speed, control):
        return f"too little of a whole step, below {100 * WORTH_FUSING:.0f}%: {figures}"
    if saved is not None:
        return f"{100 * saved:.0f}% less peak memory at {figures}"
    if speed.mean < 1 and speed.high < 1:
        return f"slower: {figures}"
    if speed.n < MIN_PAIRS_FOR_VERDICT:
        return f"no gain: {figures}; it takes {MIN_PAIRS_FOR_VERDICT} blocks to tell one"
    return f"no gain: {figures}; {resolves(control)}"


def _precision_candidates(profile: Profile, incumbent: Candidate, budget: Budget) -> tuple[Candidate, ...]:
    precisions = [p for p in PRECISIONS if precision_refusal(profile.device, p) is None]
    is_candidate = profile.loop.has_convolutions and profile.loop.layout != "channels_last"
    can_convert = is_candidate and not profile.loop.layout_hazard
    layouts = ("keep", "channels_last") if can_convert else ("keep",)
    grid = [replace(incumbent, precision=p, memory_layout=layout) for p in precisions for layout in layouts]
    return (incumbent, *(candidate for candidate in grid if candidate != incumbent))


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
    loop, step_s = profile.loop, sum(s for name, s in profile.phases_s.items() if name != "data")
    if loop.faults_per_step is None or loop.fault_s is None or step_s <= 0:
        return None
    share = min(0.99, loop.faults_per_step * loop.fault_s / step_s)
    if share / (1 - share) >= WORTH_RETAINING:
        return None
    return f"not tried: {loop.faults_per_step:,.0f} page faults take about {100 * share:.2g}% of a step"


def _allocator_candidates(profile: Profile, incumbent: Candidate, budget: Budget) -> tuple[Candidate, ...]:
    if not profile.loop.can_retain or retaining_refusal(profile):
        return (incumbent,)
    return incumbent, replace(incumbent, allocator="retain")


def _optimizer_candidates(profile: Profile, incumbent: Candidate, budget: Budget) -> tuple[Candidate, ...]:
    if incumbent.fused_optimizer or not profile.loop.supports_fused:
        return (incumbent,)
    return incumbent, replace(incumbent, fused_optimizer=True)


def _micro_batch_candidates(profile: Profile, incumbent: Candidate, budget: Budget) -> tuple[Candidate, ...]:
    if not profile.check.splittable:
        return (incumbent,)
    sizes = [-(-incumbent.micro_batch // 2**i) for i in range(1, 20)]
    wanted = sizes if _needs_less(profile, incumbent, budget) else sizes[:2]
    smaller = sorted({size for size in wanted if size < incumbent.micro_batch}, reverse=True)
    return (incumbent, *(replace(incumbent, micro_batch=size) for size in smaller))


def _needs_less(profile: Profile, incumbent: Candidate, budget: Budget) -> bool:
    """Return whether the incumbent has to shrink: it failed, or its peak is over the budget or unknown under one."""
    whole = [trial for trial in profile.trials if trial.is_whole and not trial.control]
    own = [t for t in whole if set(t.candidate.differences(incumbent)) <= {"fused_optimizer"}]
    if own and own[-1].error is not None:
        return True
    alike = [t for t in whole if set(t.candidate.differences(incumbent)) <= {"fused_optimizer", "allocator"}]
    peak = next((trial.peak_bytes for trial in reversed(alike) if trial.peak_bytes), None)
    return budget.memory_bytes is not None and (peak is None or peak > budget.memory_bytes)


def _verify_candidates(profile: Profile, incumbent: Candidate, budget: Budget) -> tuple[Candidate, ...]:
    return (reference_candidate(profile),) + (() if incumbent == reference_candidate(profile) else (incumbent,))


_CANDIDATES: dict[str, Callable[[Profile, Candidate, Budget], tuple[Candidate, ...]]] = {
    "allocator": _allocator_candidates,
    "precision": _precision_candidates,
    "optimizer": _optimizer_candidates,
    "micro_batch": _micro_batch_candidates,
    "verify": _verify_candidates,
}
