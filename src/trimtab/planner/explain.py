"""Explanations of a plan: the reason for every setting and for rejected alternatives, from a profile's trials."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.core import choice
from trimtab.core.choice import Note, RefusedByProof, Rejected, Scalar
from trimtab.core.objective import PRECISIONS, Budget
from trimtab.planner import search
from trimtab.planner.compile_policy import reason_not_to_compile, stage_of
from trimtab.planner.cost_model import PredictedCost
from trimtab.planner.recompute_candidates import in_words, offload_in_words
from trimtab.planner.search_space import WORTH_A_RUN, WORTH_FUSING, PricedCandidate, fusing_share
from trimtab.planner.selection import FinalOutcome
from trimtab.planner.statistics import Interval, is_gain, resolution
from trimtab.planner.trial_statistics import (
    control_interval,
    reason_unfit,
    resolution_in_words,
    saved_memory_fraction,
    speed_in_words,
    speed_ratio,
)
from trimtab.plans.profile import ALONE, SLICED, Candidate, Profile, Trial, is_final
from trimtab.settings import SETTINGS
from trimtab.settings.base import UNCHANGED
from trimtab.settings.precision import precision_refusal

_APART = "the optimizer step alone"
_OF_BLOCKS = ("recompute", "offload")  # Predicted from the model's blocks.
_BY_PARTS = "predicted to be best from trials of the single settings"

# Settings whose effect a trace and a data sheet show.
_TRACED = ("micro_batch", "precision", "fused_optimizer", "loss_chunk", "recompute")
_NOT_PREDICTED_BETTER = Note("predicted.no_gain", "no alternative is predicted to be better")


@dataclass(frozen=True)
class Explanations:
    """Explanation of a plan's choices."""

    profile: Profile
    found: Sequence[PricedCandidate]
    winner: Candidate
    outcome: FinalOutcome | None
    budget: Budget

    def reason(self, name: str) -> Note:
        """Return the reason for a setting's value."""
        if not self.profile.trials:
            return self._predicted(name)
        if getattr(self.winner, name) != getattr(self.profile.reference_candidate, name):
            return self._changed(name)
        refused = (each for each in self.profile.refused_by_proof if each.setting == name)
        found = (Note(each.code, each.reason) for each in refused if not each.is_remedied(self.winner))
        return _unchanged(next(found, None) or self._kept(name))

    def rejected(self, name: str) -> tuple[Rejected, ...]:
        """Return the rejected values of a setting with the reason from the trial most similar to the winner."""
        chosen: Scalar = getattr(self.winner, name)
        found: dict[Scalar, Note] = {}
        for trial in self._others(name):
            found.setdefault(getattr(trial.candidate, name), self._why_not(trial, name))
        if not self.profile.trials or name in _OF_BLOCKS:
            found |= {value: why for value, why in self._predicted_others(name) if value not in found}
        if name == "precision":
            refusals = ((p, precision_refusal(self.profile.device, p)) for p in PRECISIONS)
            refused = {p: refusal or self._bitwise_only() for p, refusal in refusals}
            found |= {p: refusal for p, refusal in refused.items() if refusal and p not in found}
        before: Scalar = getattr(self.profile.reference_candidate, name)
        if before != chosen:
            untold = name == "fused_optimizer" and not self.profile.trials
            worse = Note("predicted.worse", "the baseline: predicted to be slower or over the budget")
            found.setdefault(before, Note("trace.missing", "not traced") if untold else worse)
        if name == "micro_batch":
            found |= {rows: why for rows, why in self._refused_sizes() if rows not in found}
        return tuple(Rejected(value, why.text, why.code) for value, why in found.items() if value != chosen)

    def _bitwise_only(self) -> Note | None:
        why = self.profile.loop.bitwise_only
        return Note("loop.bitwise_only", why) if why else None

    def _predicted(self, name: str) -> Note:
        """Return the reason for a value on a target device without trials."""
        if name == "recompute":
            return self._recomputed() if self.winner.recompute else _unchanged(self._not_recomputed())
        if getattr(self.winner, name) != getattr(self.profile.reference_candidate, name):
            if name == "fused_optimizer":
                return Note("trace.fused", "as traced; the unfused optimizer step was not traced for this device")
            must = self._refusal_of_reference() if name in ("micro_batch", "loss_chunk") else None
            text = f"predicted to be best from its trace and the data sheet of {self.profile.device.name}"
            return Note("predicted.best", text + (f"; the baseline is not possible: {must}" if must else ""))
        if name == "micro_batch" and not self.profile.check.splittable:
            return _unchanged(Note(self.profile.check.code, self.profile.check.reason))
        if name == "loss_chunk" and all(traced.candidate.loss_chunk is None for traced in self.profile.traces):
            ample = Note("memory.ample", "the logits need not be chunked, because the whole batch fits")
            return _unchanged(SETTINGS["loss_chunk"].refusal(self.profile) or ample)
        if name not in _TRACED:
            return _unchanged(Note("trace.no_effect", "a data sheet does not show the effect of this setting"))
        return _unchanged(_NOT_PREDICTED_BETTER)

    def _changed(self, name: str) -> Note:
        must = self.outcome.must_leave if self.outcome is not None else self._refusal_of_reference()
        if must is None or name != "micro_batch":
            return self._gained(name)
        gained = self._gained(name)
        return replace(gained, text=f"the baseline is not possible ({must}): {gained.text}")

    def _gained(self, name: str) -> Note:
        if name == "fused_optimizer":
            return self._fused()
        if name in _OF_BLOCKS:
            return self._recomputed() if name == "recompute" else self._offloaded()
        needed = self._refused(name, getattr(self.profile.reference_candidate, name))
        if needed is not None and needed.remedy is not None and needed.remedy.setting == name:
            return Note("proof.remedy", needed.remedy.reason or f"without this change {needed.reason}")
        if together := self._compiled_at_once(name):
            return together
        rival = next((trial for trial in self._others(name) if self._is_only(trial, name)), None)
        if rival is not None and rival.block_s and (ours := self._own(rival.stage)) is not None:
            return self._worth(ours, rival, name)
        if name == "allocator":
            share = self.profile.fault_share
            if share is None:
                return Note("allocator.faults_unknown", "page faults could not be counted")
            return Note("allocator.many_faults", f"page faults take {100 * share:.2g}% of a step")
        return Note("predicted.best", _BY_PARTS)

    def _compiled_at_once(self, name: str) -> Note | None:
        """Return the measured effect of compilation for settings that changed with it; None if not applicable."""
        trials = self.profile.stage(stage_of(self.winner.compiled))
        rival = next((trial for trial in trials if not trial.candidate.compiled), None)
        ours = None if rival is None else self._own(rival.stage)
        if not self.winner.compiled or rival is None or ours is None or not rival.block_s:
            return None
        changed = ours.candidate.differences(rival.candidate)
        text = (
            f"{ours.candidate.describe()}: {speed_in_words(speed_ratio(ours, rival))} of {rival.candidate.describe()}"
        )
        return Note("trial.faster", text) if name in changed and len(changed) > 1 else None

    def _recomputed(self) -> Note:
        """Return the recomputed blocks and the alternative without recomputation."""
        found = self.profile.recomputable_of(self.winner)
        blocks = "" if found is None else in_words(found, self.winner)
        return self._without_setting("recompute", blocks)

    def _offloaded(self) -> Note:
        """Return the offloaded blocks and the alternative without offload."""
        return self._without_setting("offload", offload_in_words(self.profile, self.winner))

    def _without_setting(self, name: str, blocks: str) -> Note:
        """Return the changed blocks, and the fastest settings without the change."""
        own, title = self._cost_of_winner(), SETTINGS[name].title
        plain = [p for p in self.found if getattr(p.candidate, name) is None and p.refusal is None and p.cost.step_s]
        if own is None or not own.step_s or not plain:
            return Note(f"{name}.needed", f"{blocks}; without {title}, no settings fit the budget")
        best = min(plain, key=lambda point: point.cost.step_s or math.inf)
        longer = (best.cost.step_s or 0.0) / own.step_s
        text = f"without {title}, {best.candidate.describe()} is predicted at {longer:.2f}x the time"
        return Note(f"{name}.faster", f"{blocks}; {text}")

    def _not_recomputed(self) -> Note:
        found = self.profile.recomputable_of(self.winner.having(compiled=False))
        asks = self.budget.memory_bytes is not None or self.profile.objective.memory > 0
        if found is None:
            if not asks:
                return Note("recompute.not_needed", "memory is neither limited nor weighted")
            if self.profile.over_time_budget:
                return Note("search.over_time", "not tried: the search was over the time budget for measuring")
            # The blocks of other settings were to be measured, and perhaps could not be.
            refused = next((each for each in self.profile.recomputables if each.refusal), None)
            if refused is not None:
                return Note(refused.code or "recompute.refused", refused.refusal)
            return Note("recompute.not_needed", "not tried: the fastest settings fit the memory limit")
        if choice.is_recorded(self.winner.compiled):
            return Note("recompute.recorded", "not tried together with CUDA graphs")
        if self.winner.compiled and found.has_buffers:
            return Note("recompute.compiled_buffers", "blocks with buffers are not recomputed in a compiled model")
        if found.refusal:
            return Note(found.code or "recompute.refused", found.refusal)
        again = [p for p in self.found if p.candidate.recompute is not None and p.refusal is None]
        return _NOT_PREDICTED_BETTER if again else Note("budget.memory", "no schedule fits the budget")

    def _cost_of_winner(self) -> PredictedCost | None:
        return next((point.cost for point in self.found if point.candidate == self.winner), None)

    def _worth(self, ours: Trial, rival: Trial, name: str) -> Note:
        speed = speed_ratio(ours, rival)
        less = 0.0 if None in (ours.peak_bytes, rival.peak_bytes) else saved_memory_fraction(ours, rival)
        text = self._figures(speed, ours, rival, f" of {SETTINGS[name].phrase(getattr(rival.candidate, name))}")
        if less >= 0.05:
            return Note("trial.less_memory", f"{100 * less:.0f}% less peak memory at {text}")
        if speed.mean < 1:
            return Note("predicted.best", f"{_BY_PARTS}; tried alone: {text}")
        if speed.low <= 1 and self.outcome is not None and len(self.winner.differences(rival.candidate)) > 1:
            return Note("trial.together", f"chosen together with the other changes; alone, not significant: {text}")
        return Note("trial.faster", text)

    def _figures(self, speed: Interval, ours: Trial, theirs: Trial, of: str = "") -> str:
        """Return a speed in words, with the energy if it is weighed."""
        text = speed_in_words(speed) + of
        if self.profile.objective.energy == 0 or not (ours.energy_j and theirs.energy_j):
            return text
        return f"{text}, {ours.energy_j / theirs.energy_j:.3g}x the energy"

    def _fused(self) -> Note:
        """Return the measured effect of a fused optimizer step, timed separately."""
        trials = [trial for trial in self.profile.stage(ALONE) if not trial.control and trial.block_s]
        ours = next((t for t in trials if t.candidate.fused_optimizer == self.winner.fused_optimizer), None)
        if ours is None or ours is trials[0]:
            return Note("trace.less_memory", "less peak memory, by its trace")
        share = f"{100 * fusing_share(self.profile):.2g}% of a whole step"
        return Note("trial.faster", f"{_APART}: {speed_in_words(speed_ratio(ours, trials[0]))}, which saves {share}")

    def _kept(self, name: str) -> Note:
        """Return the reason for keeping the user's value."""
        others = list(self._others(name))
        is_compiled = any(choice.is_by_compiler(each.candidate.compiled) for each in others)
        if not others or (name == "compiled" and not is_compiled):
            return self._untried(name)
        if all(trial.stage == ALONE for trial in others):
            return self._why_not(others[0], name)
        in_final = [trial for trial in others if is_final(trial.stage)]
        if not in_final:
            least = f"{100 * (1 - WORTH_A_RUN):.0f}%"
            return Note("predicted.no_gain", f"no alternative is predicted to be better by {least} or more")
        if self.outcome is not None and self.outcome.unread:
            return self.outcome.unread
        if self.profile.objective.time != 1.0:
            return Note("trial.no_gain", "no alternative was significantly better by the objective")
        control = None if self.outcome is None else self.outcome.control
        resolved = resolution(control)
        if not math.isfinite(resolved):
            return Note("trial.no_control", resolution_in_words(control))
        speeds = [speed for trial in in_final if (speed := self._speed_of(trial)) is not None]
        if all(speed.mean - 1 <= resolved for speed in speeds):
            text = f"no alternative gained more than {100 * resolved:.2g}%, the resolution of the A/A control"
            return Note("trial.no_gain", text)
        return Note("trial.not_significant", "no alternative was significantly faster")

    def _why_not(self, trial: Trial, name: str) -> Note:
        """Return the reason why a trial's value was rejected."""
        if refused := self._refused(name, getattr(trial.candidate, name)):
            return Note(refused.code, refused.reason)
        if trial.is_whole and (refusal := reason_unfit(self.profile, trial, self.budget)) is not None:
            return refusal
        if (failure := trial.failure) is not None:
            return failure
        own, speed = self._own(trial.stage), self._speed_of(trial)
        if _is_another_way(name, trial) and (refusal := reason_not_to_compile(self.profile, trial.candidate.compiled)):
            return refusal
        if speed is None or own is None:
            return Note("trial.not_compared", "not compared with the chosen value")
        measured, control = self._figures(speed, trial, own), control_interval(self.profile, trial.stage)
        if trial.stage == ALONE:
            measured = f"{_APART}: {measured}"
            if is_gain(speed, control):
                share = f"saves {100 * fusing_share(self.profile):.2g}% of a whole step, less than "
                share += f"{100 * WORTH_FUSING:.0f}%"
                return Note("trial.small_gain", f"{share}: {measured}")
        if speed.high < 1:
            return Note("trial.slower", f"slower: {measured}")
        if control is None:
            return Note("predicted.worse", f"not among the fastest in a short trial: {measured}")
        return Note("trial.no_gain", f"no gain: {measured}; {resolution_in_words(control)}")

    def _refused(self, name: str, value: Scalar) -> RefusedByProof | None:
        """Return the refusal that a value of a setting brings about in the winner, by itself or as a missing remedy."""
        for each in self.profile.refusals_of(self.winner.having(**{name: value})):
            if name == each.setting or (each.remedy is not None and name == each.remedy.setting):
                return each
        return None

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
        """Return True if the trial's phase also ran the same candidate with the winner's value of the setting.

        That candidate may also have the remedies without which a proof refuses the winner's value.
        """
        if (ours := self._own(trial.stage)) is None:
            return False
        named = (each for each in self.profile.refused_by_proof if each.setting == name)
        remedies = {each.remedy.setting for each in named if each.remedy and each.is_remedied(ours.candidate)}
        return set(ours.candidate.differences(trial.candidate)) - remedies == {name}

    def _own(self, stage: str) -> Trial | None:
        """Return the phase's trial most similar to the winner."""
        trials = [trial for trial in self.profile.stage(stage) if not trial.control and trial.block_s]
        return min(trials, key=lambda trial: len(trial.candidate.differences(self.winner)), default=None)

    def _speed_of(self, trial: Trial) -> Interval | None:
        ours = self._own(trial.stage)
        return None if ours is None or ours is trial or not trial.block_s else speed_ratio(trial, ours)

    def _refusal_of_reference(self) -> Note | None:
        reference = self.profile.reference_candidate
        return next((point.refusal for point in self.found if point.candidate == reference), None)

    def _predicted_others(self, name: str) -> Iterator[tuple[Scalar, Note]]:
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
            yield getattr(point.candidate, name), point.refusal or Note("predicted.worse", took)

    def _refused_sizes(self) -> Iterator[tuple[Scalar, Note]]:
        """Yield the micro-batch sizes that exceed the budget with all other settings of the winner."""
        for point in self.found:
            if point.refusal is not None and point.candidate.alike(self.winner, "micro_batch"):
                yield point.candidate.micro_batch, point.refusal

    def _untried(self, name: str) -> Note:
        """Return the reason why no alternative of a setting was tried."""
        if name == "recompute":
            return self._not_recomputed()
        refuse = search.compiling_refusal if name == "compiled" else SETTINGS[name].refusal
        is_priced = any(getattr(point.candidate, name) is not None for point in self.found)
        untried = _NOT_PREDICTED_BETTER if name == "offload" and is_priced else None
        return refuse(self.profile) or untried or Note("setting.not_tried", "not tried")


def _unchanged(why: Note) -> Note:
    """Return the reason for keeping the user's value."""
    return Note(why.code or UNCHANGED, f"unchanged: {why.text}")


def _is_another_way(name: str, trial: Trial) -> bool:
    """Return True if the trial runs a compiled or captured model, a valid comparison even if close to the winner."""
    return name == "compiled" and bool(trial.candidate.compiled)
