"""Decisions on torch.compile and CUDA graphs: candidates to try, with precision and layout, and their payback.

On a CPU, compilation is tried if the run has the time, like any trial. On a GPU, an uncompiled step may spend most of
its time on kernel launches, or on memory traffic that fusion avoids. Compilation is then tried if the likely saving
exceeds the cost, possibly in a mode (precision and memory layout) that is not the fastest yet, because launches bound
all modes alike. If a step takes many times as long as its matrix products, CUDA graph capture is also tried, both for
the plain and for the compiled model: capture costs almost nothing.

A model of equal blocks can also be compiled by block, in a fraction of the time, so that compiling pays in shorter
runs. Both ways are tried if the run has the time for both; the whole model must then save more than its longer
compilation.
"""

from __future__ import annotations

import math

from trimtab.core.choice import (
    COMPILED_BLOCKS,
    COMPILED_GRAPHS,
    CUDA_GRAPHS,
    Compiled,
    Note,
    is_by_compiler,
    is_recorded,
)
from trimtab.core.units import format_seconds
from trimtab.planner.cost_model import CostModel, is_in_chunks, sizes_to_consider
from trimtab.planner.trial_statistics import speed_in_words, speed_ratio
from trimtab.plans.profile import Candidate, Profile, Trial
from trimtab.settings import NOT_MODES

# Fraction of a run that measuring may take; least seconds of compilation for a model that is not tiny.
MEASURING, COMPILING_S = 0.01, 20.0
# Compiling one block takes at least this fraction of the time for the whole model. Measured without the start of the
# compiler, 12 layers: docs/measured.md.
_LEAST_PART = 0.25
# Compilation must save this multiple of its own time.
WORTH_COMPILING = 2.0
# Likely saving of compilation, as a fraction of the step time beyond matrix products, and its seconds. Measured: GPT-2
# on an H200, 0.73 of plain steps and 0.52 of captured ones in 23 s; ResNet-50, captured, 0.3 in 43 s (docs/LOG.md,
# 2026-11-26 and 27).
_LIKELY, _LIKELY_CONVOLVED = (0.5, 20.0), (0.3, 40.0)
_UNKNOWN = 0.5  # fraction of the step that compilation could save, if the least time is unknown
# Modes up to this factor slower than the fastest may be bound by launches. ResNet-50's steps on 128 small images took
# 25 to 33 ms on an H200 in all modes, and the kernels alone 10 ms in bf16 (docs/kernels.md).
_HELD_UP = 1.3
# A step this many times as long as its products at peak may be bound by launches. Measured on an H200: compiled GPT-2
# with 32 samples took 2 times as long, ResNet-50 on 128 small images 20 times.
_LAUNCHED = 4.0


def graph_candidates(profile: Profile, fastest: Candidate) -> tuple[Candidate, ...]:
    """Return the fastest mode, and a captured candidate if capture is worth a trial."""
    if profile.loop.is_compiled or profile.loop.bitwise_only or not _may_wait(profile, fastest):
        return (fastest,)
    return fastest, to_compile(profile, fastest).having(compiled=CUDA_GRAPHS)


def compile_candidates(profile: Profile, fastest: Candidate) -> tuple[Candidate, ...]:
    """Return the fastest mode, and compiled candidates if compilation is worth a trial.

    The compiled candidates are captured as CUDA graphs too if capture paid.
    """
    if compiling_refusal(profile, fastest):
        return (fastest,)
    mode, recorded = to_compile(profile, fastest), reason_not_to_compile(profile, CUDA_GRAPHS) is None
    ways: tuple[Compiled, ...] = (CUDA_GRAPHS, COMPILED_GRAPHS) if recorded else _affordable(profile, fastest)
    return fastest, *(mode.having(compiled=way) for way in ways)


def _affordable(profile: Profile, fastest: Candidate) -> tuple[Compiled, ...]:
    """Return the ways to compile that the run has the time to try."""
    ways: tuple[Compiled, ...] = (True,) if profile.loop.kinds_of_blocks is None else (COMPILED_BLOCKS, True)
    has_time = not profile.over_time_budget
    allowed_s = MEASURING * (profile.run_s or 0.0)

    def is_affordable(way: Compiled) -> bool:
        part = _part_of_compiling(profile, way)
        return is_promising(profile, fastest, part) or (has_time and allowed_s >= part * COMPILING_S)

    return tuple(filter(is_affordable, ways))


def _part_of_compiling(profile: Profile, way: Compiled) -> float:
    """Return the expected compilation time, relative to compiling the whole model."""
    return max(_LEAST_PART, profile.loop.kinds_of_blocks or 1.0) if way == COMPILED_BLOCKS else 1.0


def _may_wait(profile: Profile, fastest: Candidate) -> bool:
    """Return True if a step on a GPU may be bound by kernel launches."""
    step_s, least_s = _seconds(profile, fastest)
    return profile.device.kind == "cuda" and step_s >= _LAUNCHED * (least_s or 0.0)


def takes_many_times_its_products(profile: Profile) -> bool:
    """Return True if the loop's own step on a GPU may be bound by kernel launches, judged before any trial.

    Compares the phase times with the matrix products at the peak of the loop's precision; torch runs convolutions in
    TF32 by default. A step bound by memory traffic looks the same, and three rounds are enough to rank its modes.
    """
    own = profile.reference.precision
    found = [profile.device.peak(each) for each in ((own, "tf32") if profile.loop.has_convolutions else (own,))]
    peak, step_s = max(filter(None, found), default=None), math.fsum(profile.phases_s.values())
    if profile.device.kind != "cuda" or peak is None or not profile.loop.flops_per_step:
        return False
    return step_s >= _LAUNCHED * profile.loop.flops_per_step / peak


def to_record(profile: Profile, fastest: Candidate) -> Candidate:
    """Return the mode to capture, if a step may be bound by launches; otherwise the fastest mode."""
    waits = not profile.loop.is_compiled and _may_wait(profile, fastest)
    return to_compile(profile, fastest) if waits else fastest


def to_compile(profile: Profile, fastest: Candidate) -> Candidate:
    """Return the mode to compile: the fastest; on a GPU the fastest products decide among modes of similar speed.

    Launch-bound modes hide their difference in speed. Then channels_last is preferred (the layout of convolution
    kernels), and bf16 (no loss scaling) unless the loop uses fp16.
    """
    found = _with_fastest_products(profile, fastest)
    if not _may_wait(profile, fastest):
        return found[0]
    half = "fp16" if profile.reference.precision == "fp16" else "bf16"
    is_known = bool(profile.device.peak(half))

    def rank(mode: Candidate) -> tuple[bool, bool]:
        return mode.memory_layout != "channels_last", is_known and mode.precision != half

    return min(found, key=rank)


def _with_fastest_products(profile: Profile, fastest: Candidate) -> list[Candidate]:
    """Return the modes of similar speed with the fastest matrix products; the fastest mode first."""
    model, device = CostModel(profile), profile.device
    if device.kind != "cuda":
        return [fastest]

    def products(mode: Candidate) -> float:
        return device.peak(mode.precision) or 0.0

    limit_s = _HELD_UP * (model.predict(fastest).step_s or 0.0)
    near = [fastest, *(mode for mode in model.modes if (model.predict(mode).step_s or 0.0) <= limit_s)]
    most = max(map(products, near))
    return [mode for mode in near if products(mode) == most]


def compiling_refusal(profile: Profile, fastest: Candidate) -> Note | None:
    """Return the reason not to try compilation, or None."""
    if profile.loop.is_compiled:
        return Note("compile.already", "the model is already compiled")
    if profile.loop.bitwise_only:
        return Note("loop.bitwise_only", profile.loop.bitwise_only)
    if profile.run_s is None:
        return Note("compile.run_length_unknown", "not tried: the length of the run is unknown; pass total_steps")
    if _affordable(profile, fastest):
        return None
    may_take_s = MEASURING * profile.run_s
    if may_take_s < COMPILING_S * _part_of_compiling(profile, COMPILED_BLOCKS):
        spares = f"allows {format_seconds(may_take_s)} for trials ({100 * MEASURING:g}%)"
        text = f"not tried: a run of {format_seconds(profile.run_s)} {spares}, and compilation takes longer"
        return Note("compile.run_too_short", text)
    return Note("search.over_time", "not tried: the search was over the time budget for measuring")


def is_promising(profile: Profile, fastest: Candidate, part: float = 1.0) -> bool:
    """Return True if, on a GPU, the likely saving of compilation over the run justifies `part` of its time.

    Compilation can save step time beyond the matrix products at peak: fused kernels move less memory and need fewer
    launches. If a captured step was measured, the saving is relative to the captured step.
    """
    if profile.device.kind != "cuda":
        return False
    step_s, least_s = _seconds(profile, fastest)
    if (recorded_s := _recorded_s(profile)) is not None:
        step_s = recorded_s
    least_s = (1 - _UNKNOWN) * step_s if least_s is None else least_s
    share, takes_s = _LIKELY_CONVOLVED if profile.loop.has_convolutions else _LIKELY
    return share * (step_s - least_s) * (profile.total_steps or 0) >= WORTH_COMPILING * part * takes_s


def _recorded_s(profile: Profile) -> float | None:
    """Return the seconds of a captured, uncompiled step at the best size within the limit; None if it did not pay."""
    if reason_not_to_compile(profile, CUDA_GRAPHS) is not None:
        return None
    model, limit = CostModel(profile), profile.limits(profile.budget).memory_bytes
    tried = next(trial.candidate for trial in profile.stage("graphs") if trial.candidate.compiled == CUDA_GRAPHS)
    chunks = {None, *(trial.candidate.loss_chunk for trial in profile.stage("head") if trial.block_s)}
    sizes = [
        tried.having(micro_batch=rows, loss_chunk=chunk) for rows in sizes_to_consider(profile) for chunk in chunks
    ]
    found = [each for each in sizes if is_in_chunks(profile, each) and (limit is None or model.is_within(each, limit))]
    return min((model.predict(each).step_s or math.inf for each in found), default=None)


def _seconds(profile: Profile, fastest: Candidate) -> tuple[float, float | None]:
    """Return the seconds of the fastest mode's step, and of its products at peak; None if unknown."""
    precision = _with_fastest_products(profile, fastest)[0].precision
    flops, peak = profile.loop.flops_per_step, profile.device.peak(precision)
    return CostModel(profile).predict(fastest).step_s or 0.0, flops / peak if flops and peak else None


def stage_of(value: Compiled) -> str:
    """Return the search phase that first tries a way to run the model."""
    return "graphs" if value == CUDA_GRAPHS else "compile"


def reason_not_to_compile(profile: Profile, value: Compiled) -> Note | None:
    """Return the reason why a way to run the model did not pay in its trial, or None.

    Compared with the plain model, and with the models of the same phase that took less time to compile or capture.
    """
    trials = [trial for trial in profile.stage(stage_of(value)) if not trial.control]
    ours = next((trial for trial in trials if trial.candidate.compiled == value), None)
    if ours is None:
        return Note("setting.not_tried", "not tried")
    if ours.failure or not (trials[0].step_s and ours.block_s):
        return ours.failure or Note("trial.not_compared", "not compared with the unchanged loop")
    rivals = (trial for trial in trials if trial is not ours and trial.block_s and _takes_s(trial) <= _takes_s(ours))
    return next(filter(None, (_unpaid(profile, ours, rival) for rival in rivals)), None)


def _takes_s(trial: Trial) -> float:
    return trial.compile_s or 0.0


def _unpaid(profile: Profile, ours: Trial, rival: Trial) -> Note | None:
    speed, way = speed_ratio(ours, rival), ours.candidate.compiled
    compared = (
        f"{speed_in_words(speed)} of {rival.candidate.describe()}"
        if rival.candidate.compiled
        else speed_in_words(speed)
    )
    if is_recorded(way) and speed.low <= 1:
        return Note("trial.no_gain", f"not significantly faster: {compared}")
    if profile.total_steps is None and not is_by_compiler(way):
        return None  # Capture takes a few steps' time, so the length of the run does not matter.
    saves_s = (rival.step_s or 0.0) * (1 - 1 / speed.mean) * (profile.total_steps or 0)
    took_s = _takes_s(ours) - _takes_s(rival)
    if saves_s <= WORTH_COMPILING * took_s:
        saves = f"saves {format_seconds(saves_s)} of the run" if saves_s > 0 else "saves no time"
        return Note("compile.does_not_pay", f"{saves}, and compilation took {format_seconds(took_s)} more: {compared}")
    return None


def tried(profile: Profile) -> tuple[Trial, ...]:
    """Return the trials of compiled or captured models."""
    found = (trial for stage in ("graphs", "compile") for trial in profile.stage(stage))
    return tuple(trial for trial in found if trial.candidate.compiled and not trial.control)


def paying_modes(profile: Profile, mode: Candidate | None = None) -> tuple[Compiled, ...]:
    """Return the ways to run the model that were tried and pay, except the plain model; for all modes, or for one."""
    found = (trial.candidate for trial in tried(profile))
    ways = dict.fromkeys(each.compiled for each in found if mode is None or each.alike(mode, *NOT_MODES))
    return tuple(way for way in ways if reason_not_to_compile(profile, way) is None)
