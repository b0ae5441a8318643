"""Cost model: seconds and bytes of a candidate's step, measured or predicted from a profile.

A step of k micro-batches takes `k * alpha + work + optimizer + head`. Trials of whole steps measure the work per
precision and layout; trials of several sizes measure `alpha`, the cost of an additional micro-batch; dedicated trials
measure the savings of a chunked loss head and of compilation; the optimizer step is timed separately. All times are
relative to the step of a single trial, so drift of the machine's speed between search phases does not bias comparisons
of whole steps, only the optimizer's fraction of a step.

Bytes are counted in a trial, or traced plus a margin. A step within the backward pass is traced too: each gradient is
freed after its update, so the saving depends on the moment of the peak. Compiled and captured models are not traced:
their bytes are those of a trial, adjusted by the traced difference of the plain model. Recomputation is predicted from
the chain of blocks, in compiled models too. For a target device without trials, seconds come from the roofline.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab.core.choice import is_by_compiler, is_recorded
from trimtab.core.hardware import DeviceSpec
from trimtab.core.memory_model import Line, Operation, Seen, StepWork
from trimtab.planner import recompute_candidates
from trimtab.planner.trial_statistics import ratio_by_longest
from trimtab.plans.profile import SAME_BYTES, SLICED, Candidate, Profile, TracedCandidate, Trial
from trimtab.settings import FROM_TRACES, NOT_MODES, OWN_PHASE, SAME_PEAK
from trimtab.settings.micro_batch import MOST_NARROW

# Roofline model (Williams et al. 2009): an operator's time is the maximum of its compute time and its memory time.

# Fractions of the peaks that large operators reach, and least seconds per operator.
COMPUTE, BANDWIDTH = 0.7, 0.8
STARTING_S = {"cuda": 4e-6, "cpu": 4e-6}


def step_seconds(work: StepWork, device: DeviceSpec, precision: str, rows: int, num_micro_batches: int) -> float | None:
    """Return the seconds of an optimizer step of micro-batches of `rows` samples; None if a peak is unknown.

    `precision` is that of matrix products; operators have their own, except that "tf32" is recorded as fp32.
    """
    micro_batch = seconds_of(work.micro_batch, device, precision, rows)
    step = seconds_of(work.step, device, precision, rows)
    return None if micro_batch is None or step is None else num_micro_batches * micro_batch + step


def seconds_of(operations: Iterable[Operation], device: DeviceSpec, precision: str, rows: int) -> float | None:
    """Return the seconds of some operators of a micro-batch; arguments as in `step_seconds`."""
    if not device.bandwidth_bytes_s:
        return None
    total = 0.0
    for operation in operations:
        flops, moved = _at(operation.flops, rows), _at(operation.moved_bytes, rows)
        computing_s = _computing_s(flops, operation.precision, device, precision)
        if computing_s is None:
            return None
        moving_s = moved / (BANDWIDTH * device.bandwidth_bytes_s)
        total += operation.count * max(computing_s / COMPUTE, moving_s, STARTING_S.get(device.kind, 0.0))
    return total


@dataclass(frozen=True)
class RooflineBound:
    """Lower bound on the seconds of operators, by a device's peaks (roofline; Williams et al. 2009)."""

    compute_s: float
    memory_s: float
    flops: float
    moved_bytes: float

    def times(self, factor: float) -> RooflineBound:
        """Return the bound for `factor` times the operators."""
        return RooflineBound(*(factor * each for each in (self.compute_s, self.memory_s, self.flops, self.moved_bytes)))


def roof_of(seen: Iterable[Seen], device: DeviceSpec, precision: str) -> RooflineBound | None:
    """Return the roofline of operators (kind, FLOP, bytes), as measured; None if a peak of the device is unknown."""
    if not device.bandwidth_bytes_s:
        return None
    compute_s = memory_s = all_flops = all_moved = 0.0
    for kind, flops, moved in seen:
        computing_s, moving_s = _computing_s(flops, kind, device, precision), moved / device.bandwidth_bytes_s
        if computing_s is None:
            return None
        if computing_s > moving_s:
            compute_s += computing_s
        else:
            memory_s += moving_s
        all_flops, all_moved = all_flops + flops, all_moved + moved
    return RooflineBound(compute_s, memory_s, all_flops, all_moved)


def _computing_s(flops: float, kind: str, device: DeviceSpec, precision: str) -> float | None:
    """Return the seconds of an operator's FLOP at full peak; None if the peak is unknown and FLOP is not 0."""
    peak = device.peak("tf32" if (precision, kind) == ("tf32", "fp32") else kind)
    if not peak and kind == "tf32":  # A convolution that torch runs in TF32 within an fp32 step, on an older device.
        peak = device.peak("fp32")
    if not peak:
        return None if flops > 0 else 0.0
    return flops / peak


def _at(line: Line, rows: int) -> float:
    base, slope = line
    return max(0.0, base + slope * rows)


# Micro-batch sizes to consider in a search.


def sizes_to_consider(profile: Profile) -> tuple[int, ...]:
    """Return the micro-batch sizes to consider, the largest first: the batch size and its repeated halves.

    Includes the micro-batch size of a loop that accumulates; if splitting changes the gradient, no other.
    """
    rows, own = profile.loop.batch_size, profile.reference_candidate.micro_batch
    if not profile.check.splittable:
        return (own,)
    sizes = {own, *(-(-rows // 2**i) for i in range(rows.bit_length() + 1))}
    return tuple(sorted(sizes, reverse=True))


def head_tokens(profile: Profile, candidate: Candidate) -> int:
    """Return the tokens per micro-batch at the loss head."""
    return (profile.loop.head_tokens or 0) * int(candidate.micro_batch) // profile.loop.batch_size


def is_in_chunks(profile: Profile, candidate: Candidate) -> bool:
    """Return True if chunks are smaller than the micro-batch or not used; otherwise chunking has no effect."""
    return candidate.loss_chunk is None or candidate.loss_chunk < head_tokens(profile, candidate)


# A traced peak is raised by this fraction, or by the worst excess of a trial over its trace, before limits apply.
MARGIN = 0.02
# Margins without any trial: for convolutions, whose workspaces are invisible to a trace; for the caching allocator on a
# GPU, which reserves more than tensors take; and for data-sheet seconds, which may be a fourth too small.
CONVOLUTIONS, ALLOCATOR, ROOFLINE = 0.15, 0.05, 1 / 3
# All settings of a candidate except its mode and the way to run the model.
BUT_WAY = tuple(name for name in NOT_MODES if name != "compiled")
# Search phases that compare values of a setting with a mode, and the setting: the source of its saving.
_PHASES = (
    ("optimizer", "fused_optimizer"),
    ("head", "loss_chunk"),
    *((name, name) for name in OWN_PHASE),
    ("graphs", "compiled"),
    ("compile", "compiled"),
)
_SAVING = tuple(dict.fromkeys(name for _, name in _PHASES))
# Search phases with whole steps; the first candidate of each is a mode (precision and layout).
_STAGES = ("modes", SLICED, "head", *OWN_PHASE, "sizes", "graphs", "compile")
# Fraction of blocks outside the interval, half of them below; and the relative error that nine of ten predictions stay
# within (counts in docs/memory.md).
_OUTSIDE, _MISSED = 0.05, 0.15
# Memory that a compiled model saves with smaller micro-batches, relative to the plain model: 0.29 for GPT-2 on an H200,
# from two samples to one (docs/LOG.md, 2026-11-27).
_LEFT_OUT = 1 / 3
_UNKNOWN_FAULTS = 0.04  # fraction of a step; enough to try keeping freed host memory


@dataclass(frozen=True)
class PredictedCost:
    """Predicted cost of a candidate's step.

    Args:
        step_s: seconds; None: no comparable trial.
        peak_bytes: peak memory; None: neither counted nor predicted.
        counted: True if the bytes were counted in a trial.
        margin: relative margin added to seconds before comparison with a limit.
        energy_j: joules; None: no meter reading in any trial.
    """

    step_s: float | None
    peak_bytes: int | None
    counted: bool = False
    margin: float = 0.0
    energy_j: float | None = None

    @property
    def limit_s(self) -> float | None:
        """Seconds with margin, for comparison with a limit."""
        return None if self.step_s is None else (1 + self.margin) * self.step_s


class CostModel:
    """Predictions of a candidate's cost from a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        ran = [profile.ran(stage) for stage in ("modes", SLICED)]
        like = next(filter(None, ran), profile.ran("sizes")[:1])
        self._unit = like[0] if like else None
        self._modes = {t.candidate: 1 / ratio_by_longest(t, self._unit, like) for t in like if self._unit}
        self._saved: dict[tuple[str, object], float] = {}
        for stage, name in _PHASES:
            self._saved |= self._against(stage, name)
        self._recorded = self._of_recorded()
        self._extra: dict[int, float] = {}
        self._extra = self._of_sizes()

    @property
    def modes(self) -> tuple[Candidate, ...]:
        """Tried modes (precision and memory layout), each at its tried size; the fastest first."""
        if not self._profile.trials:
            return tuple(dict.fromkeys(traced.candidate.having(loss_chunk=None) for traced in self._profile.traces))
        return tuple(sorted(self._modes, key=lambda candidate: self._modes[candidate]))

    def predict(self, candidate: Candidate) -> PredictedCost:
        """Return a candidate's cost."""
        relative, unit_s = self._relative(candidate), self._unit_s
        step_s = None if relative is None or unit_s is None else relative * unit_s
        if not self._profile.trials:
            step_s = self._by_roofline(candidate)
        counted = self._counted(candidate)
        peak = counted or self._traced(candidate) or self._scaled(candidate) or self._beside_counted(candidate)
        power_w = self._power_w(candidate)
        energy_j = None if step_s is None or power_w is None else power_w * step_s
        return PredictedCost(step_s, peak, counted is not None, self.seconds_margin, energy_j)

    def _scaled(self, candidate: Candidate) -> int | None:
        """Return the peak of a candidate with settings of `OWN_PHASE`; None without such settings or a known peak.

        The peak without each setting, plus the difference of the peaks that were counted with and without it. A saving
        is assumed to shrink with the micro-batch, an increase to be constant up to the tried size.
        """
        for name in OWN_PHASE:
            value, own = getattr(candidate, name), getattr(self._profile.reference_candidate, name)
            if value == own:
                continue
            if name in FROM_TRACES and (candidate.compiled or self.traced_bytes(candidate) is not None):
                continue
            peak = self.predict(candidate.having(**{name: own})).peak_bytes
            tried = (trial for trial in self._profile.ran(name) if getattr(trial.candidate, name) == value)
            if peak is None or (ours := next(tried, None)) is None or not ours.peak_bytes:
                return None
            if (bare := self._counted(ours.candidate.having(**{name: own}))) is None:
                return None
            more, share = ours.peak_bytes - bare, candidate.micro_batch / ours.candidate.micro_batch
            added: float = more * (max(1.0, share) if more > 0 else min(1.0, share))
            return math.ceil(peak + added + self.margin * abs(added))
        return None

    def _power_w(self, candidate: Candidate) -> float | None:
        """Return the power of the most similar trial; precision and layout first, which select the compute units."""
        metered = [t for t in reversed(self._profile.trials) if t.is_whole and t.watts and not t.control]

        def apart(trial: Trial) -> tuple[bool, int]:
            return not trial.candidate.alike(candidate, *NOT_MODES), len(trial.candidate.differences(candidate))

        near = min(metered, key=apart, default=None)
        return None if near is None else near.power_w

    def between(self, step_s: float) -> tuple[float, float] | None:
        """Return the interval of seconds that contains 95 % of blocks, given a prediction; None without trials.

        The interval comes from measured blocks divided by their predictions. The model was made from the same blocks,
        so the interval is at least as wide as the error of nine of ten predictions.
        """
        shares = list[float]()
        for trial in self._profile.trials:
            told_s = self.predict(trial.candidate).step_s if trial.is_whole else None
            shares += [block_s / told_s for block_s in trial.block_s] if told_s else []
        if not shares:
            return None
        shares.sort()
        outside = int(_OUTSIDE / 2 * len(shares))
        low, high = min(shares[outside], 1 / (1 + _MISSED)), max(shares[-1 - outside], 1 / (1 - _MISSED))
        return low * step_s, high * step_s

    def may_fit(self, candidate: Candidate, limit_bytes: int) -> bool:
        """Return True unless counted bytes, or traced bytes without a margin, exceed the limit."""
        found = self._counted(candidate) or self.traced_bytes(candidate)
        return found is None or found <= limit_bytes

    def is_within(self, candidate: Candidate, limit_bytes: int) -> bool:
        """Return True if the candidate's peak is known and within the limit."""
        found = self.predict(candidate).peak_bytes
        return found is not None and found <= limit_bytes

    def traced_bytes(self, candidate: Candidate) -> int | None:
        """Return the traced peak without a margin; None if not traced."""
        found = self._traced_bytes(candidate)
        is_wide = self._count(candidate) > MOST_NARROW and self._profile.reference.accumulate == 1
        return found + self._profile.loop.wide_gradient_bytes if found is not None and is_wide else found

    def _traced_bytes(self, candidate: Candidate) -> int | None:
        if candidate.changes_blocks:
            return self._chained_bytes(candidate)
        traced = self._trace_of(candidate)
        is_whole = self._count(candidate) == 1 and not self._profile.adapts_batch_size
        model = None if traced is None else traced.whole if is_whole else traced.sliced
        if candidate.step_in_backward and traced is not None:
            model = traced.early_fused if candidate.fused_optimizer else traced.early
        return None if model is None else model.peak_bytes(candidate.micro_batch)

    def _chained_bytes(self, candidate: Candidate) -> int | None:
        """Return the peak of a step with recomputation; the optimizer step needs as much memory as without."""
        bare = recompute_candidates.peak_bytes(self._profile, candidate)
        traced = self._trace_of(candidate.without_block_changes().having(compiled=False))
        if bare is None or traced is None or traced.step is None or candidate.step_in_backward:
            return bare
        return max(bare, traced.step.peak_bytes(candidate.micro_batch))

    @functools.cached_property
    def _unit_s(self) -> float | None:
        """Seconds of the unit step: a median over search phases, because a phase may be disturbed as a whole."""
        if self._unit is None or not self._unit.step_s:
            return None
        firsts = [
            t for name in _STAGES for t in self._profile.stage(name)[:1] if t.block_s and t.candidate in self._modes
        ]
        found = [(trial.step_s or 0.0) / self._modes[trial.candidate] for trial in firsts]
        return statistics.median(found) if found else self._unit.step_s

    def _relative(self, candidate: Candidate) -> float | None:
        if candidate.changes_blocks:
            return self._with_changed_blocks(candidate)
        for tried, relative in self._recorded.items():
            if tried.alike(candidate, *BUT_WAY):
                saved = self._parts_of(candidate, "compiled") - self._parts_of(tried, "compiled")
                return max(0.0, relative * self._longer(candidate, tried) - saved)
        for tried, relative in self._modes.items():
            if tried.alike(candidate, *NOT_MODES):
                sizes = self._extra_of(candidate) - self._extra_of(tried)
                saved = self._parts_of(candidate) - self._parts_of(tried)
                return max(0.0, relative + sizes - saved) * self._of_faults(candidate, tried)
        return None

    def _parts_of(self, candidate: Candidate, *but: str) -> float:
        """Return the savings of the settings compared with a mode, except `but`, relative to the unit step."""
        names = (name for name in _SAVING if name not in but)
        return sum(self._saved.get((name, getattr(candidate, name)), 0.0) for name in names)

    def _with_changed_blocks(self, candidate: Candidate) -> float | None:
        found = self._profile.recomputable_of(candidate)
        longer = recompute_candidates.added_time_fraction(self._profile, candidate)
        plain = self._relative(candidate.without_block_changes())
        measured = None if found is None else self._relative(found.candidate)
        if plain is None or measured is None or longer is None:
            return None
        eager = self._relative(candidate.having(recompute=None, compiled=False)) if candidate.compiled else plain
        # The blocks were measured in eager mode. Recomputation is assumed to speed up by the factor of the whole step.
        return plain + longer * measured * (plain / eager if eager else 1.0)

    def _of_faults(self, candidate: Candidate, tried: Candidate) -> float:
        """Return the factor on the step time from page faults, if the allocator modes of the two candidates differ."""
        share = self._profile.fault_share
        if candidate.allocator == tried.allocator:
            return 1.0
        share = _UNKNOWN_FAULTS if share is None else share
        return 1 / (1 - share) if tried.allocator == "retain" else 1 - share

    def saves(self, name: str, value: object) -> float:
        """Return the saving of a tried value, relative to the unit step."""
        return self._saved.get((name, value), 0.0)

    def fixed_s(self, candidate: Candidate) -> float | None:
        """Return the seconds of a step that do not depend on the samples of its micro-batches.

        That is the time that each additional micro-batch adds, for all of them; None if fewer than two sizes were
        timed.
        """
        points = sorted(self._extra.items())
        if len(points) < 2 or self._unit_s is None:
            return None
        (k, low), (m, high) = points[0], points[-1]
        return self._count(candidate) * max(0.0, (high - low) / (m - k)) * self._unit_s

    def fastest(self, also: Iterable[Candidate] = ()) -> float | None:
        """Return the seconds of the fastest tried mode, or of candidates in `also`, relative to the unit step."""
        found = (*self._modes.values(), *map(self._relative, also))
        return min((each for each in found if each), default=None)

    def _against(self, stage: str, name: str) -> dict[tuple[str, object], float]:
        trials, unit_s = self._profile.ran(stage), self._unit_s
        if len(trials) < 2 or not unit_s:
            return {}
        first, *others = trials
        own = self._own(first, unit_s)

        def without(trial: Trial) -> float:  # A model may be compiled in a mode different from the first trial's.
            bare = replace(trial.candidate, **{name: getattr(first.candidate, name)})
            return self._modes.get(bare, own) if first.is_whole else own

        return {
            (name, getattr(t.candidate, name)): without(t) - own / ratio_by_longest(t, first, trials) for t in others
        }

    def _own(self, first: Trial, unit_s: float) -> float:
        in_units = (first.step_s or 0.0) / unit_s
        return self._modes.get(first.candidate, in_units) if first.is_whole else in_units

    def _of_recorded(self) -> dict[Candidate, float]:
        """Return the times of captured steps at their tried size, relative to the unit step."""
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
        """Return the added time per number of micro-batches, relative to the unit step; 0 for the first size tried."""
        trials = self._profile.ran("sizes")
        if not trials:
            return {}
        first, relative = trials[0], self._relative(trials[0].candidate)
        if relative is None:
            return {}
        return {self._count(t.candidate): relative * (1 / ratio_by_longest(t, first, trials) - 1) for t in trials}

    def _extra_of(self, candidate: Candidate) -> float:
        """Return the added time of a number of micro-batches by linear interpolation between tried sizes."""
        count, points = self._count(candidate), sorted(self._extra.items())
        if not points:
            return 0.0
        if len(points) == 1:
            return points[0][1]
        pairs = list(itertools.pairwise(points))
        (k, low), (m, high) = next((pair for pair in pairs if count <= pair[1][0]), pairs[-1])
        slope = (high - low) / (m - k)
        if count > m:  # a saving by cache fit does not grow without bound
            return high + max(0.0, slope) * (count - m)
        return low + (slope if count >= k else max(0.0, slope)) * (count - k)

    def _longer(self, candidate: Candidate, tried: Candidate) -> float:
        """Return the factor on a captured step's time at a different size: the plain model's ratio, at least 1.

        Larger micro-batches get no credit, because a captured step never waits for launches.
        """
        mode = next((mode for mode in self._modes if mode.alike(tried, *NOT_MODES)), None)
        bare = 0.0 if mode is None else self._modes[mode] - self._extra_of(mode)
        ours, theirs = (bare + self._extra_of(each) for each in (candidate, tried))
        return max(1.0, ours / theirs) if theirs > 0 and self._count(candidate) > self._count(tried) else 1.0

    def _count(self, candidate: Candidate) -> int:
        return math.ceil(self._profile.loop.batch_size / int(candidate.micro_batch))

    def _counted(self, candidate: Candidate) -> int | None:
        """Return the bytes counted in a trial; the allocator mode and a fused step hardly change memory."""
        alike = [t for t in self._weighed() if t.candidate.alike(candidate, *SAME_PEAK)]
        same = [t for t in alike if t.candidate.fused_optimizer == candidate.fused_optimizer]
        # In the backward pass, the temporary tensors of an unfused update are held beside the activations.
        if not same and candidate.step_in_backward and self.traced_bytes(candidate) is not None:
            return None
        return next((trial.peak_bytes for trial in reversed(same or alike)), None)

    def _weighed(self) -> list[Trial]:
        return [trial for trial in self._profile.trials if not trial.control and trial.peak_bytes is not None]

    def _beside_counted(self, candidate: Candidate) -> int | None:
        """Return a peak predicted from a counted trial of the same compiled or captured model, because no trace exists.

        The plain model's traced difference is added: an increase with a margin, a third of a decrease if compiled.
        """
        if not candidate.compiled or candidate.changes_blocks:
            return None
        if candidate.step_in_backward:
            return self._compiled_early(candidate)
        bare = self.traced_bytes(candidate.having(compiled=False))
        alike = [
            t for t in self._weighed() if t.candidate.alike(candidate, *BUT_WAY) and not t.candidate.changes_blocks
        ]
        if bare is None or not alike:
            return None
        near = min(reversed(alike), key=lambda trial: abs(self._count(trial.candidate) - self._count(candidate)))
        tried = self.traced_bytes(near.candidate.having(compiled=False))
        if tried is None:
            return None
        share = 1 + self.margin if bare > tried else _LEFT_OUT if is_by_compiler(candidate.compiled) else 1.0
        return math.ceil((near.peak_bytes or 0) + share * (bare - tried))

    def _compiled_early(self, candidate: Candidate) -> int | None:
        """Return the peak of a compiled model with updates in the backward pass, from the peak with updates after it.

        The compiled backward of a whole model returns all gradients at once, so nothing is saved. Compiled blocks save
        as much as the plain model.
        """
        late = candidate.having(step_in_backward=False)
        peak = self.predict(late).peak_bytes
        plain, early = (self.traced_bytes(each.having(compiled=False)) for each in (late, candidate))
        if peak is None or candidate.compiled is True:
            return peak
        return None if plain is None or early is None else peak + early - plain

    def _traced(self, candidate: Candidate) -> int | None:
        bare = self.traced_bytes(candidate)
        margin = self.chain_margin if candidate.changes_blocks else self.margin
        return None if bare is None else math.ceil(bare * (1 + margin))

    def _by_roofline(self, candidate: Candidate) -> float | None:
        if candidate.changes_blocks:
            found = self._profile.recomputable_of(candidate)
            longer = recompute_candidates.added_time_fraction(self._profile, candidate)
            plain = self._by_roofline(candidate.without_block_changes())
            return None if found is None or plain is None or longer is None else plain + longer * found.step_s
        traced = self._trace_of(candidate)
        if traced is None or traced.work is None:
            return None
        device, rows = self._profile.device, candidate.micro_batch
        return step_seconds(traced.work, device, candidate.precision, rows, self._count(candidate))

    def _trace_of(self, candidate: Candidate) -> TracedCandidate | None:
        for ignored in (("allocator", "micro_batch", *FROM_TRACES), (*SAME_BYTES, *FROM_TRACES)):
            for traced in self._profile.traces:
                if traced.candidate.alike(candidate, *ignored):
                    return traced
        return None

    @functools.cached_property
    def margin(self) -> float:
        """Relative margin on traced peaks: the worst excess of a trial over its trace, at least `MARGIN`.

        Without trials, at least the uncertainty of convolution workspaces and of a GPU's allocator.
        """
        if self._profile.trials:
            plain = (trial for trial in self._weighed() if not trial.candidate.changes_blocks)
            found = ((trial.peak_bytes or 0, self.traced_bytes(trial.candidate)) for trial in plain)
            return max([MARGIN, *(counted / bare - 1 for counted, bare in found if bare)])
        untold = ALLOCATOR if self._profile.device.kind == "cuda" else MARGIN
        return max(untold, CONVOLUTIONS) if self._profile.loop.has_workspaces else untold

    @property
    def seconds_margin(self) -> float:
        """Relative margin on predicted seconds before comparison with a limit."""
        return 0.0 if self._profile.trials else ROOFLINE

    @functools.cached_property
    def chain_margin(self) -> float:
        """Margin on the peak of a step with recomputation: the worst excess over a chain's peak, at least `margin`."""
        found = ((t.peak_bytes, self._chained_bytes(t.candidate)) for t in self._weighed())
        return max([self.margin, *((counted or 0) / bare - 1 for counted, bare in found if bare)])
