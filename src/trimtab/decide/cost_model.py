"""Seconds and bytes of a step for any candidate: as they were measured, else predicted from a profile's parts.

A step of k micro-batches takes `k * alpha + work + optimizer + head`. Work of each precision and layout is what trials
of whole steps took; `alpha`, what one more micro-batch costs, is read off trials of several sizes; what a loss head in
chunks and compiling save are a trial's; the optimizer's step is timed alone. All is in units of one trial's step: a
machine whose speed drifts between stages moves no whole step against another, though the optimizer's share of one.
Bytes are those counted of a trial, else traced ones with a margin; of what is compiled or recorded, which is not
traced, those of its trial and what the model as it is takes more or less. What recomputing blocks takes and saves is
told from their chain. Where nothing was tried, on a device that is not here, seconds are those of its roofline.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab.core.compiled import is_by_compiler, is_recorded
from trimtab.core.profile import SLICED, Candidate, Profile, Traced, Trial
from trimtab.decide import recomputing
from trimtab.decide.readings import ratio_by_longest
from trimtab.decide.roofline import step_seconds

# A traced peak is held against a limit with this much on top, or with what the worst trial took beyond its trace.
MARGIN = 0.02
# And where nothing was tried: of a loop with convolutions, whose workspaces no tensor shows; on a GPU, whose allocator
# holds more than tensors take; and on top of seconds by a data sheet that are held against a limit, as where
# they are a fourth too little.
CONVOLUTIONS, ALLOCATOR, ROOFLINE = 0.15, 0.05, 1 / 3
# Of a candidate, all but its precision and layout.
BUT_MODE = ("fused_optimizer", "micro_batch", "allocator", "loss_chunk", "compiled", "recompute")
# And but the way in which its model runs.
BUT_WAY = tuple(name for name in BUT_MODE if name != "compiled")
# Stages of whole steps, each of which begins with a mode.
_STAGES = ("modes", SLICED, "head", "sizes", "graphs", "compile")
# Share of blocks that an interval leaves out, half of them below; and by how much nine of ten predictions were too long
# or too short, at the most (docs/memory.md has of how many it holds).
_OUTSIDE, _MISSED = 0.05, 0.15
# Of what fewer rows take less of the model as it is, the share that a compiled one takes less: 0.29 of GPT-2 on an
# H200, from two rows to one (docs/LOG.md, 2026-11-27).
_LEFT_OUT = 1 / 3
_UNKNOWN_FAULTS = 0.04  # share of a step: enough to have memory retained on trial


@dataclass(frozen=True)
class Predicted:
    """What a candidate's step is expected to take.

    Args:
        step_s: seconds; None: nothing like it was tried. peak_bytes: None: neither counted nor told. counted:
            whether the bytes are a trial's. margin: by what seconds are raised before they are held against a limit.
        energy_j: joules; None: no meter, or no trial that it was read in.
    """

    step_s: float | None
    peak_bytes: int | None
    counted: bool = False
    margin: float = 0.0
    energy_j: float | None = None

    @property
    def limit_s(self) -> float | None:
        """Return the seconds that are held against a limit."""
        return None if self.step_s is None else (1 + self.margin) * self.step_s


class CostModel:
    """What a profile says of candidates."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        ran = [profile.ran(stage) for stage in ("modes", SLICED)]
        like = next(filter(None, ran), profile.ran("sizes")[:1])
        self._unit = like[0] if like else None
        self._modes = {t.candidate: 1 / ratio_by_longest(t, self._unit, like) for t in like if self._unit}
        self._saved = self._against("optimizer", "fused_optimizer") | self._against("head", "loss_chunk")
        self._saved |= self._against("graphs", "compiled") | self._against("compile", "compiled")
        self._recorded = self._of_recorded()
        self._extra: dict[int, float] = {}
        self._extra = self._of_sizes()

    @property
    def modes(self) -> tuple[Candidate, ...]:
        """Precisions and layouts that ran, each at the size it was tried at; the fastest first."""
        if not self._profile.trials:
            return tuple(dict.fromkeys(replace(traced.candidate, loss_chunk=None) for traced in self._profile.traces))
        return tuple(sorted(self._modes, key=lambda candidate: self._modes[candidate]))

    def predict(self, candidate: Candidate) -> Predicted:
        """Return a candidate's cost."""
        relative, unit_s = self._relative(candidate), self._unit_s
        step_s = None if relative is None or unit_s is None else relative * unit_s
        if not self._profile.trials:
            step_s = self._by_roofline(candidate)
        counted = self._counted(candidate)
        peak = counted or self._traced(candidate) or self._beside_counted(candidate)
        power_w = self._power_w(candidate)
        energy_j = None if step_s is None or power_w is None else power_w * step_s
        return Predicted(step_s, peak, counted is not None, self.seconds_margin, energy_j)

    def _power_w(self, candidate: Candidate) -> float | None:
        """Return the watts drawn while what is nearest to it ran: of its precision and layout, which units compute."""
        metered = [t for t in reversed(self._profile.trials) if t.is_whole and t.watts and not t.control]

        def apart(trial: Trial) -> tuple[bool, int]:
            return not trial.candidate.alike(candidate, *BUT_MODE), len(trial.candidate.differences(candidate))

        near = min(metered, key=apart, default=None)
        return None if near is None else near.power_w

    def between(self, step_s: float) -> tuple[float, float] | None:
        """Return between which seconds a step lies that is predicted to take so many. None: nothing was run.

        Where blocks of trials lay beside what is predicted of them, but for one of twenty; by these it is made, too, so
        that it is no narrower than what nine of ten predictions missed by.
        """
        shares = self._shares
        if not shares:
            return None
        outside = int(_OUTSIDE / 2 * len(shares))
        low, high = min(shares[outside], 1 / (1 + _MISSED)), max(shares[-1 - outside], 1 / (1 - _MISSED))
        return low * step_s, high * step_s

    @functools.cached_property
    def _shares(self) -> list[float]:
        """Return what blocks of trials took, as shares of what is predicted of them."""
        shares = list[float]()
        for trial in self._profile.trials:
            step_s = self.predict(trial.candidate).step_s if trial.is_whole else None
            shares += [block_s / step_s for block_s in trial.block_s] if step_s else []
        return sorted(shares)

    def may_fit(self, candidate: Candidate, limit_bytes: int) -> bool:
        """Return whether nothing is known that speaks against it: counted bytes, or traced ones without a margin."""
        found = self._counted(candidate) or self.traced_bytes(candidate)
        return found is None or found <= limit_bytes

    def is_within(self, candidate: Candidate, limit_bytes: int) -> bool:
        """Return whether its peak is known, and within a limit."""
        found = self.predict(candidate).peak_bytes
        return found is not None and found <= limit_bytes

    def traced_bytes(self, candidate: Candidate) -> int | None:
        """Return the peak as it was traced, without a margin; None where it was not."""
        if candidate.recompute is not None:
            return self._chained_bytes(candidate)
        traced = self._trace_of(candidate)
        is_whole = self._count(candidate) == 1 and not self._profile.frees_batch
        model = None if traced is None else traced.whole if is_whole else traced.sliced
        return None if model is None else model.peak_bytes(candidate.micro_batch)

    def _chained_bytes(self, candidate: Candidate) -> int | None:
        """Return the peak of a step by its chain: its optimizer's step is as it is whatever is recomputed."""
        bare = recomputing.peak_bytes(self._profile, candidate)
        traced = self._trace_of(replace(candidate, recompute=None))
        if bare is None or traced is None or traced.step is None:
            return bare
        return max(bare, traced.step.peak_bytes(candidate.micro_batch))

    @functools.cached_property
    def _unit_s(self) -> float | None:
        """Return the seconds of the unit: a median, as a stage that was disturbed as a whole is one of several."""
        if self._unit is None or not self._unit.step_s:
            return None
        firsts = [
            t for name in _STAGES for t in self._profile.stage(name)[:1] if t.block_s and t.candidate in self._modes
        ]
        found = [(trial.step_s or 0.0) / self._modes[trial.candidate] for trial in firsts]
        return statistics.median(found) if found else self._unit.step_s

    def _relative(self, candidate: Candidate) -> float | None:
        """Return a candidate's seconds in units of the first trial's."""
        if candidate.recompute is not None:
            return self._recomputing(candidate)
        for tried, relative in self._recorded.items():
            if tried.alike(candidate, *BUT_WAY):
                saved = self._parts_of(candidate, "compiled") - self._parts_of(tried, "compiled")
                return max(0.0, relative * self._longer(candidate, tried) - saved)
        for tried, relative in self._modes.items():
            if tried.alike(candidate, *BUT_MODE):
                sizes = self._extra_of(candidate) - self._extra_of(tried)
                saved = self._parts_of(candidate) - self._parts_of(tried)
                return max(0.0, relative + sizes - saved) * self._of_faults(candidate, tried)
        return None

    def _parts_of(self, candidate: Candidate, *but: str) -> float:
        """Return what its parts save, in units of the first trial's."""
        names = (name for name in ("fused_optimizer", "loss_chunk", "compiled") if name not in but)
        return sum(self._saved.get((name, getattr(candidate, name)), 0.0) for name in names)

    def _recomputing(self, candidate: Candidate) -> float | None:
        found, longer = self._profile.recomputable_of(candidate), recomputing.longer(self._profile, candidate)
        plain = self._relative(replace(candidate, recompute=None))
        measured = None if found is None else self._relative(found.candidate)
        return None if plain is None or measured is None or longer is None else plain + longer * measured

    def _of_faults(self, candidate: Candidate, tried: Candidate) -> float:
        """Return the factor by which the page faults of a step that hands its memory back make it longer."""
        share = self._profile.fault_share
        if candidate.allocator == tried.allocator:
            return 1.0
        share = _UNKNOWN_FAULTS if share is None else share
        return 1 / (1 - share) if tried.allocator == "retain" else 1 - share

    def saves(self, name: str, value: object) -> float:
        """Return what a value that was tried against another saves, in units of the first trial's step."""
        return self._saved.get((name, value), 0.0)

    def fastest(self, also: Iterable[Candidate] = ()) -> float | None:
        """Return the seconds of the fastest mode that was tried, in units of the first trial's.

        Args:
            also: what counts beside the modes: those that were compiled or recorded.
        """
        found = (*self._modes.values(), *map(self._relative, also))
        return min((each for each in found if each), default=None)

    def _against(self, stage: str, name: str) -> dict[tuple[str, object], float]:
        trials, unit_s = self._profile.ran(stage), self._unit_s
        if len(trials) < 2 or not unit_s:
            return {}
        first, *others = trials
        own = self._own(first, unit_s)

        def without(trial: Trial) -> float:
            """Return what is to be saved of: a model may be compiled in another mode than the first's."""
            bare = replace(trial.candidate, **{name: getattr(first.candidate, name)})
            return self._modes.get(bare, own) if first.is_whole else own

        return {
            (name, getattr(t.candidate, name)): without(t) - own / ratio_by_longest(t, first, trials) for t in others
        }

    def _own(self, first: Trial, unit_s: float) -> float:
        """Return what the first of a stage takes, in units of the first trial's."""
        in_units = (first.step_s or 0.0) / unit_s
        return self._modes.get(first.candidate, in_units) if first.is_whole else in_units

    def _of_recorded(self) -> dict[Candidate, float]:
        """Return what recorded steps took, in units of the first trial's, each in the size it was tried at."""
        found: dict[Candidate, float] = {}
        if not (unit_s := self._unit_s):
            return found
        for name in ("graphs", "compile"):
            for trial in (trials := self._profile.ran(name))[1:]:
                if is_recorded(trial.candidate.compiled):
                    own = self._own(trials[0], unit_s)
                    found[trial.candidate] = own / ratio_by_longest(trial, trials[0], trials)
        return found

    def _of_sizes(self) -> dict[int, float]:
        """Return for numbers of micro-batches what they add to a step, in units of one: nothing for the first tried."""
        trials = self._profile.ran("sizes")
        if not trials:
            return {}
        first, relative = trials[0], self._relative(trials[0].candidate)
        if relative is None:
            return {}
        return {self._count(t.candidate): relative * (1 / ratio_by_longest(t, first, trials) - 1) for t in trials}

    def _extra_of(self, candidate: Candidate) -> float:
        """Return what a number of micro-batches adds, on straight lines through those that were tried."""
        count, points = self._count(candidate), sorted(self._extra.items())
        if not points:
            return 0.0
        if len(points) == 1:
            return points[0][1]
        pairs = list(itertools.pairwise(points))
        (k, low), (m, high) = next((pair for pair in pairs if count <= pair[1][0]), pairs[-1])
        slope = (high - low) / (m - k)
        if count > m:  # what more of them save by fitting a cache they do not save without end
            return high + max(0.0, slope) * (count - m)
        return low + (slope if count >= k else max(0.0, slope)) * (count - k)

    def _longer(self, candidate: Candidate, tried: Candidate) -> float:
        """Return how many times as long a recorded step takes in another size: as the model as it is, if that is more.

        Of larger ones nothing is told: what the model as it is waits for its host less there, it does not wait at all.
        """
        mode = next((mode for mode in self._modes if mode.alike(tried, *BUT_MODE)), None)
        bare = 0.0 if mode is None else self._modes[mode] - self._extra_of(mode)
        ours, theirs = (bare + self._extra_of(each) for each in (candidate, tried))
        return max(1.0, ours / theirs) if theirs > 0 and self._count(candidate) > self._count(tried) else 1.0

    def _count(self, candidate: Candidate) -> int:
        return math.ceil(self._profile.loop.batch_rows / candidate.micro_batch)

    def _counted(self, candidate: Candidate) -> int | None:
        """Return the bytes counted of a trial, which neither the allocator's mode nor a fused step moves much."""
        alike = [t for t in self._weighed() if t.candidate.alike(candidate, "allocator", "fused_optimizer")]
        same = [t for t in alike if t.candidate.fused_optimizer == candidate.fused_optimizer]
        return next((trial.peak_bytes for trial in reversed(same or alike)), None)

    def _weighed(self) -> list[Trial]:
        return [trial for trial in self._profile.trials if not trial.control and trial.peak_bytes is not None]

    def _beside_counted(self, candidate: Candidate) -> int | None:
        """Return a peak told by one counted of a step that ran in the same way, compiled or recorded: none is traced.

        Raised by what the model as it is takes more of the other size, with a margin, or lowered by what it takes less:
        of what is compiled, which keeps less of each row, by a third of that.
        """
        if not candidate.compiled or candidate.recompute is not None:
            return None
        bare = self.traced_bytes(replace(candidate, compiled=False))
        alike = [t for t in self._weighed() if t.candidate.alike(candidate, *BUT_WAY) and not t.candidate.recompute]
        if bare is None or not alike:
            return None
        near = min(reversed(alike), key=lambda trial: abs(self._count(trial.candidate) - self._count(candidate)))
        tried = self.traced_bytes(replace(near.candidate, compiled=False))
        if tried is None:
            return None
        share = 1 + self.margin if bare > tried else _LEFT_OUT if is_by_compiler(candidate.compiled) else 1.0
        return math.ceil((near.peak_bytes or 0) + share * (bare - tried))

    def _traced(self, candidate: Candidate) -> int | None:
        bare = self.traced_bytes(candidate)
        margin = self.margin if candidate.recompute is None else self.chain_margin
        return None if bare is None else math.ceil(bare * (1 + margin))

    def _by_roofline(self, candidate: Candidate) -> float | None:
        """Return seconds on a device where nothing was tried."""
        if candidate.recompute is not None:
            found, longer = self._profile.recomputable_of(candidate), recomputing.longer(self._profile, candidate)
            plain = self._by_roofline(replace(candidate, recompute=None))
            return None if found is None or plain is None or longer is None else plain + longer * found.step_s
        traced = self._trace_of(candidate)
        if traced is None or traced.work is None:
            return None
        device, rows = self._profile.device, candidate.micro_batch
        return step_seconds(traced.work, device, candidate.precision, rows, self._count(candidate))

    def _trace_of(self, candidate: Candidate) -> Traced | None:
        for ignored in (("allocator", "micro_batch"), ("allocator", "micro_batch", "fused_optimizer")):
            for traced in self._profile.traces:
                if traced.candidate.alike(candidate, *ignored):
                    return traced
        return None

    @functools.cached_property
    def margin(self) -> float:
        """What a traced peak is raised by: the worst that a trial took beyond its trace, and no less than `MARGIN`.

        Where nothing was tried, no less than what is not known of convolutions and a GPU's allocator.
        """
        if self._profile.trials:
            return max([MARGIN, *self._misses()])
        untold = ALLOCATOR if self._profile.device.kind == "cuda" else MARGIN
        return max(untold, CONVOLUTIONS) if self._profile.loop.has_workspaces else untold

    @property
    def seconds_margin(self) -> float:
        """What predicted seconds are raised by before they are held against a limit."""
        return 0.0 if self._profile.trials else ROOFLINE

    @functools.cached_property
    def chain_margin(self) -> float:
        """As `margin`, of a step that recomputes, by all that was weighed and has a chain; and no less than it."""
        found = ((t.peak_bytes, self._chained_bytes(t.candidate)) for t in self._weighed())
        return max([self.margin, *((counted or 0) / bare - 1 for counted, bare in found if bare)])

    def _misses(self) -> Iterable[float]:
        for trial in self._weighed():
            bare = None if trial.candidate.recompute else self.traced_bytes(trial.candidate)
            if bare:
                yield (trial.peak_bytes or 0) / bare - 1
