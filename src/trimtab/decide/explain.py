"""Explanations of a plan: the reason for every setting and for rejected alternatives, from a profile's trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.core import compile_mode
from trimtab.core.objective import PRECISIONS, Budget
from trimtab.core.plan import Rejected, Scalar
from trimtab.core.profile import ALONE, SLICED, Candidate, Profile, Trial, is_final
from trimtab.decide import search
from trimtab.decide.compile_policy import stage_of, unpaid
from trimtab.decide.cost_model import PredictedCost
from trimtab.decide.recompute_candidates import in_words
from trimtab.decide.search_space import WORTH_FUSING, PricedCandidate, fusing_share
from trimtab.decide.selection import FinalOutcome
from trimtab.decide.statistics import Interval, is_gain, resolution
from trimtab.decide.trial_statistics import control_interval, figures, resolves, saved, speed_ratio, unfit

_APART = "the optimizer's step alone"
_BY_PARTS = "put first by what the trials of its parts predict"


@dataclass(frozen=True)
class Explanations:
    """Explanation of a plan's choices.

    Args:
        profile: measurements.
        found: all considered points.
        winner: chosen candidate.
        outcome: result of the deciding final; None if the cost model decided.
        budget: limits.
    """

    profile: Profile
    found: Sequence[PricedCandidate]
    winner: Candidate
    outcome: FinalOutcome | None
    budget: Budget

    def reason(self, name: str) -> str:
        """Return the reason for a setting's value."""
        if not self.profile.trials:
            return self._predicted(name)
        if getattr(self.winner, name) != getattr(self.profile.reference_candidate, name):
            return self._changed(name)
        refuted = next((each.reason for each in self.profile.refuted if each.setting == name), None)
        return self._kept(name) if refuted is None else f"unchanged: {refuted}"

    def losers(self, name: str) -> tuple[Rejected, ...]:
        """Return the rejected values of a setting with the reason from the trial most similar to the winner."""
        chosen: Scalar = getattr(self.winner, name)
        found: dict[Scalar, str] = {}
        for trial in self._others(name):
            found.setdefault(getattr(trial.candidate, name), self._why_not(trial, name))
        if not self.profile.trials or name == "recompute":
            found |= {value: why for value, why in self._predicted_others(name) if value not in found}
        if name == "precision":
            refusals = ((p, search.precision_refusal(self.profile.device, p)) for p in PRECISIONS)
            refused = {p: reason or self.profile.loop.bitwise_only for p, reason in refusals}
            found |= {p: reason for p, reason in refused.items() if reason and p not in found}
        before: Scalar = getattr(self.profile.reference_candidate, name)
        if before != chosen:
            untold = name == "fused_optimizer" and not self.profile.trials
            why = "not traced" if untold else "the reference; slower, or over the budget, by what is predicted"
            found.setdefault(before, why)
        if name == "micro_batch":
            found |= {rows: why for rows, why in self._refused_sizes() if rows not in found}
        return tuple(Rejected(value, reason) for value, reason in found.items() if value != chosen)

    def _predicted(self, name: str) -> str:
        """Return the reason for a value on a target device without trials."""
        if name == "recompute":
            return self._recomputed() if self.winner.recompute else f"as the loop has it: {self._not_recomputed()}"
        if getattr(self.winner, name) != getattr(self.profile.reference_candidate, name):
            if name == "fused_optimizer":
                return "as it was traced: what the loop's own step takes there no trace tells"
            must = self._refusal_of_reference() if name in ("micro_batch", "loss_chunk") else None
            return f"put first by its trace and the peaks of {self.profile.device.name}" + (f"; {must}" if must else "")
        if name == "micro_batch" and not self.profile.check.splittable:
            return f"the user's batch: {self.profile.check.reason}"
        if name == "loss_chunk" and all(traced.candidate.loss_chunk is None for traced in self.profile.traces):
            return (
                search.chunking_refusal(self.profile) or "as the loop has it: not traced in chunks, as memory is ample"
            )
        if name in ("memory_layout", "allocator", "compiled"):
            return "as the loop has it: no data sheet tells what another is worth"
        return "as the loop has it: nothing traced is predicted to be better"

    def _changed(self, name: str) -> str:
        must = self.outcome.must_leave if self.outcome is not None else self._refusal_of_reference()
        needed = f"the loop as it is cannot stay ({must}): " if must is not None and name == "micro_batch" else ""
        if name == "fused_optimizer":
            return needed + self._fused()
        if name == "recompute":
            return self._recomputed()
        if together := self._compiled_at_once(name):
            return together
        rival = next((trial for trial in self._others(name) if self._is_only(trial, name)), None)
        if rival is not None and rival.block_s and (speed := self._speed_over(rival)) is not None:
            return needed + self._worth(speed, rival, name)
        if name == "allocator":
            share = self.profile.fault_share
            said = "page faults are not counted" if share is None else f"page faults take {100 * share:.2g}% of a step"
            return f"{needed}{said}"
        return needed + _BY_PARTS

    def _compiled_at_once(self, name: str) -> str:
        """Return the measured effect of compilation for settings that changed with it; "" if not applicable."""
        trials = self.profile.stage(stage_of(self.winner.compiled))
        rival = next((trial for trial in trials if not trial.candidate.compiled), None)
        ours = None if rival is None else self._own(rival.stage)
        if not self.winner.compiled or rival is None or ours is None or not rival.block_s:
            return ""
        changed = ours.candidate.differences(rival.candidate)
        said = f"{ours.candidate.describe()}, at {figures(speed_ratio(ours, rival))} of {rival.candidate.describe()}"
        return said if name in changed and len(changed) > 1 else ""

    def _recomputed(self) -> str:
        """Return the recomputed blocks and the alternative without recomputation."""
        found, own = self.profile.recomputable_of(self.winner), self._cost_of_winner()
        said = "" if found is None else in_words(found, self.winner)
        plain = [p for p in self.found if p.candidate.recompute is None and p.refusal is None and p.cost.step_s]
        if own is None or not own.step_s or not plain:
            return f"{said}; nothing fits without"
        best = min(plain, key=lambda point: point.cost.step_s or math.inf)
        longer = (best.cost.step_s or 0.0) / own.step_s
        return f"{said}; without, {best.candidate.describe()} is predicted at {longer:.2f}x the time"

    def _not_recomputed(self) -> str:
        found = self.profile.recomputable_of(replace(self.winner, compiled=False))
        asks = self.budget.memory_bytes is not None or self.profile.objective.memory > 0
        if found is None:
            why = "measuring was cut short" if self.profile.hurried else "the fastest fits"
            looked = "measured" if self.profile.trials else "traced"
            return f"its blocks were not {looked}, as {why}" if asks else "less memory is not asked for"
        if self.winner.compiled:
            return f"not tried in a model {compile_mode.in_words(self.winner.compiled)}"
        again = [p for p in self.found if p.candidate.recompute is not None and p.refusal is None]
        return found.refusal or (
            "none of it fits" if not again else "nothing that recomputes is predicted to be better"
        )

    def _cost_of_winner(self) -> PredictedCost | None:
        return next((point.cost for point in self.found if point.candidate == self.winner), None)

    def _worth(self, speed: Interval, rival: Trial, name: str) -> str:
        ours = self._own(rival.stage)
        less = 0.0 if ours is None or None in (ours.peak_bytes, rival.peak_bytes) else saved(ours, rival)
        text = f"{figures(speed)} of {_value(rival.candidate, name)}"
        if ours is not None and (times := self._times_energy(ours, rival)):
            text += f", at {times} its energy"
        if less >= 0.05:
            return f"{100 * less:.0f}% less peak memory at {text}"
        return f"{_BY_PARTS}, though in a trial of its own at {text}" if speed.mean < 1 else text

    def _figures(self, speed: Interval, trial: Trial) -> str:
        """Return a trial's speed in words, with its energy if energy is weighed."""
        ours = self._own(trial.stage)
        times = None if ours is None else self._times_energy(trial, ours)
        return figures(speed) + (f", at {times} the energy" if times else "")

    def _times_energy(self, ours: Trial, theirs: Trial) -> str | None:
        if self.profile.objective.energy == 0 or not (ours.energy_j and theirs.energy_j):
            return None
        return f"{ours.energy_j / theirs.energy_j:.3g}x"

    def _fused(self) -> str:
        """Return the measured effect of a fused optimizer step, timed separately."""
        trials = [trial for trial in self.profile.stage(ALONE) if not trial.control and trial.block_s]
        ours = next((t for t in trials if t.candidate.fused_optimizer == self.winner.fused_optimizer), None)
        if ours is None or ours is trials[0]:
            return "put first by what is traced of its memory"
        share = f"{100 * fusing_share(self.profile):.2g}% of a whole step"
        return f"{_APART} at {figures(speed_ratio(ours, trials[0]))}, {share}"

    def _kept(self, name: str) -> str:
        others = list(self._others(name))
        is_compiled = any(compile_mode.is_by_compiler(each.candidate.compiled) for each in others)
        if not others or (name == "compiled" and not is_compiled):
            return self._untried(name)
        if all(trial.stage == ALONE for trial in others):
            return f"as the loop has it: {self._why_not(others[0], name)}"
        in_final = [trial for trial in others if is_final(trial.stage)]
        if not in_final:
            return "as the loop has it: nothing tried is predicted to be better by enough to be run against it"
        if self.outcome is not None and self.outcome.unread:
            return f"as the loop has it: {self.outcome.unread}"
        if self.profile.objective.time != 1.0:
            return "as the loop has it: by the weights given nothing tried is clearly better"
        control = None if self.outcome is None else self.outcome.control
        resolved = resolution(control)
        if not math.isfinite(resolved):
            return f"as the loop has it: {resolves(control)}"
        speeds = [speed for trial in in_final if (speed := self._speed_of(trial)) is not None]
        if all(speed.mean - 1 <= resolved for speed in speeds):
            return f"as the loop has it: nothing tried gains more than the {100 * resolved:.2g}% that can be resolved"
        return "as the loop has it: nothing tried is clear of the noise"

    def _why_not(self, trial: Trial, name: str) -> str:
        """Return the reason why a trial's value was rejected."""
        value = getattr(trial.candidate, name)
        for each in self.profile.refuted:
            if each.setting == name and (each.value == value or name == "micro_batch"):
                return each.reason
        if trial.is_whole and (refusal := unfit(self.profile, trial, self.budget)) is not None:
            return refusal
        if trial.error is not None:
            return trial.error
        speed = self._speed_of(trial)
        if _is_another_way(name, trial) and (refusal := unpaid(self.profile, trial.candidate.compiled)):
            return refusal
        if speed is None:
            return "not compared with what was chosen"
        said, control = self._figures(speed, trial), control_interval(self.profile, trial.stage)
        if trial.stage == ALONE:
            said = f"{_APART} at {said}"
            if is_gain(speed, control):
                share = f"{100 * fusing_share(self.profile):.2g}% for {100 * WORTH_FUSING:.0f}%"
                return f"too little of a whole step, {share}: {said}"
        if speed.high < 1:
            return f"slower: {said}"
        if control is None:
            return f"not put first: {said}"
        return f"no gain: {said}; {resolves(control)}"

    def _others(self, name: str) -> Iterator[Trial]:
        """Yield trials of alternative values of a setting, the most similar to the winner first."""
        stages = [SLICED, *search.STAGES[:-1], *self.profile.finals]
        chosen = getattr(self.winner, name)
        trials = [t for t in self.profile.trials if not t.control and getattr(t.candidate, name) != chosen]
        is_fusing = name == "fused_optimizer"
        apart = [t for t in trials if is_final(t.stage) or t.is_whole != is_fusing]
        apart = [t for t in apart if t.error is not None or self._own(t.stage) is not t or _is_another_way(name, t)]
        yield from sorted(apart, key=lambda t: (len(t.candidate.differences(self.winner)), -stages.index(t.stage)))

    def _is_only(self, trial: Trial, name: str) -> bool:
        """Return True if the trial's phase also ran the same candidate with the winner's value of the setting."""
        ours = self._own(trial.stage)
        return ours is not None and ours.candidate.differences(trial.candidate) == (name,)

    def _own(self, stage: str) -> Trial | None:
        """Return the phase's trial most similar to the winner."""
        trials = [trial for trial in self.profile.stage(stage) if not trial.control and trial.block_s]
        return min(trials, key=lambda trial: len(trial.candidate.differences(self.winner)), default=None)

    def _speed_over(self, rival: Trial) -> Interval | None:
        ours = self._own(rival.stage)
        return None if ours is None or not rival.block_s else speed_ratio(ours, rival)

    def _speed_of(self, trial: Trial) -> Interval | None:
        ours = self._own(trial.stage)
        return None if ours is None or ours is trial or not trial.block_s else speed_ratio(trial, ours)

    def _refusal_of_reference(self) -> str | None:
        reference = self.profile.reference_candidate
        return next((point.refusal for point in self.found if point.candidate == reference), None)

    def _predicted_others(self, name: str) -> Iterator[tuple[Scalar, str]]:
        """Yield alternative values of a setting with predicted costs, all other settings equal to the winner's."""
        own = self._cost_of_winner()
        for point in self.found:
            if own is None or not own.step_s or point.candidate.differences(self.winner) != (name,):
                continue
            longer = (point.cost.step_s or 0.0) / own.step_s
            larger = (point.cost.peak_bytes or 0) / (own.peak_bytes or 1)
            took = f"predicted at {longer:.2f}x the time and {larger:.2f}x the memory"
            if own.energy_j and point.cost.energy_j:
                took += f" and {point.cost.energy_j / own.energy_j:.2f}x the energy"
            yield getattr(point.candidate, name), point.refusal or took

    def _refused_sizes(self) -> Iterator[tuple[Scalar, str]]:
        """Yield the winner's micro-batch sizes that exceed the budget."""
        for point in self.found:
            if point.refusal is not None and point.candidate.alike(self.winner, "micro_batch"):
                yield point.candidate.micro_batch, point.refusal

    def _untried(self, name: str) -> str:
        loop, check = self.profile.loop, self.profile.check
        if name == "micro_batch":
            if self.profile.reference.accumulate > 1:
                size = self.profile.reference_candidate.micro_batch
                own = f"a batch of the loop, which accumulates: {size} samples"
                return own if check.splittable else f"{own}; other sizes are refused: {check.reason}"
            if loop.batch_rows == 1 and check.code != "batch.samples_unknown":
                return "the user's batch: it has one row"
            why = ", as measuring was cut short" if self.profile.hurried else ""
            untried = f"smaller micro-batches were not tried{why}"
            return f"as the loop has it: {untried}" if check.splittable else f"the user's batch: {check.reason}"
        if name in ("precision", "memory_layout") and loop.bitwise_only:
            return f"as the loop has it: {loop.bitwise_only}"
        if name == "memory_layout" and loop.layout_hazard:
            return "channels_last is not safe: " + loop.layout_hazard
        if name == "memory_layout":
            return "already channels_last" if loop.layout == "channels_last" else "the model has no convolutions"
        if name == "fused_optimizer":
            unfused = f"{loop.optimizer} as it is here has no fused step to switch on"
            return "already fused" if loop.is_fused else loop.bitwise_only or loop.fused_refusal or unfused
        if name == "allocator" and loop.can_retain:
            refused = search.retaining_refusal(self.profile)
            return f"as the loop has it: {refused or 'retaining memory was not tried'}"
        if name == "allocator":
            return "only host memory under glibc can be retained"
        if name == "compiled":
            return f"as the loop has it: {search.compiling_refusal(self.profile) or 'not tried'}"
        if name == "loss_chunk":
            return search.chunking_refusal(self.profile) or "as the loop has it"
        if name == "recompute":
            return f"as the loop has it: {self._not_recomputed()}"
        return "as the loop has it"


def _is_another_way(name: str, trial: Trial) -> bool:
    """Return True if the trial runs a compiled or captured model, a valid comparison even if close to the winner."""
    return name == "compiled" and bool(trial.candidate.compiled)


def _value(candidate: Candidate, name: str) -> str:
    value = getattr(candidate, name)
    if name == "loss_chunk":
        return "the head as the loop has it" if value is None else f"chunks of {value}"
    if name == "compiled":
        return f"the model {compile_mode.in_words(candidate.compiled) or 'as it is'}"
    return f"micro-batch {value}" if name == "micro_batch" else f"{value}"
