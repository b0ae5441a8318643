"""Compiling the model: whether it is tried, in which precision and layout, and whether it pays.

On a processor it is tried where the run spares its seconds, as any other trial. On a GPU a step that is not compiled
may spend most of its time moving what its kernels could keep, or launching them: there it is tried wherever what it is
likely to save pays for it, and also in a mode that looks no faster yet, as the host is what bounds them all.
Where a step takes many times what its products do, recording its kernels and launching them whole is tried too, of the
model as it is and of the compiled one: what is recorded once costs next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

from trimtab.core.compiled import COMPILED_GRAPHS, CUDA_GRAPHS, Compiled, is_by_compiler, is_recorded
from trimtab.core.profile import Candidate, Profile, Trial
from trimtab.core.units import format_seconds
from trimtab.decide.cost_model import BUT_MODE, CostModel
from trimtab.decide.readings import figures, speed_ratio
from trimtab.decide.sizes import halvings, is_in_chunks

# Of a run, the share that measuring may take; and seconds that compiling takes, at the least, for what is not tiny.
MEASURING, COMPILING_S = 0.01, 20.0
# Compiling has to save this many times the seconds it takes.
WORTH_COMPILING = 2.0
# Of what a step takes beyond its products, the share that compiling is likely to save, and the seconds that takes: of
# GPT-2's steps on an H200 it saved 0.73, and 0.52 of recorded ones, in 23 s; of ResNet-50's, recorded, 0.3 in 43 s
# (docs/LOG.md, 2026-11-26 and 27).
_LIKELY, _LIKELY_CONVOLVED = (0.5, 20.0), (0.3, 40.0)
_UNKNOWN = 0.5  # of a step whose least time is not known, what could be saved
# Modes this many times as slow as the fastest may be held up by the host: of 128 small images ResNet-50's steps took an
# H200 25 to 33 ms in each, while kernels of one in bf16 take it 10 (docs/kernels.md).
_HELD_UP = 1.3
# A step that takes so many times its products at the device's peak may wait for its host: GPT-2's of 32 rows, compiled,
# took an H200 twice as long, ResNet-50's of 128 small images 20 times.
_LAUNCHED = 4.0


def graph_candidates(profile: Profile, fastest: Candidate) -> tuple[Candidate, ...]:
    """Return the fastest mode, and what is recorded on trial beside it, if anything is."""
    if profile.loop.is_compiled or profile.loop.bitwise_only or not _may_wait(profile, fastest):
        return (fastest,)
    return fastest, replace(to_compile(profile, fastest), compiled=CUDA_GRAPHS)


def compile_candidates(profile: Profile, fastest: Candidate) -> tuple[Candidate, ...]:
    """Return the fastest mode, and what is compiled on trial beside it, if anything is: recorded, where that pays."""
    if compiling_refusal(profile, fastest):
        return (fastest,)
    mode, recorded = to_compile(profile, fastest), unpaid(profile, CUDA_GRAPHS) is None
    ways: tuple[Compiled, ...] = (CUDA_GRAPHS, COMPILED_GRAPHS) if recorded else (True,)
    return fastest, *(replace(mode, compiled=way) for way in ways)


def _may_wait(profile: Profile, fastest: Candidate) -> bool:
    """Return whether, on a GPU, one launch may do for a step that seems to wait for its launches."""
    step_s, least_s = _seconds(profile, fastest)
    return profile.device.kind == "cuda" and step_s >= _LAUNCHED * (least_s or 0.0)


def takes_many_times_its_products(profile: Profile) -> bool:
    """Return whether, before anything is tried, the loop's own step on a GPU is so long that it may wait for its host.

    By its phases, and by what its products take at the peak of its precision; torch convolves in TF32 by default. One
    that moves much is as long: which of its modes is faster shows in three laps.
    """
    own = profile.reference.precision
    found = [profile.device.peak(each) for each in ((own, "tf32") if profile.loop.has_convolutions else (own,))]
    peak, step_s = max(filter(None, found), default=None), math.fsum(profile.phases_s.values())
    if profile.device.kind != "cuda" or peak is None or not profile.loop.flops_per_step:
        return False
    return step_s >= _LAUNCHED * profile.loop.flops_per_step / peak


def to_record(profile: Profile, fastest: Candidate) -> Candidate:
    """Return the mode that is recorded on trial, where that is; else the fastest."""
    waits = not profile.loop.is_compiled and _may_wait(profile, fastest)
    return to_compile(profile, fastest) if waits else fastest


def to_compile(profile: Profile, fastest: Candidate) -> Candidate:
    """Return the fastest mode; on a GPU the one with the fastest products of those that are about as fast.

    Where they wait for their launches, which of these is faster does not show: then in channels_last, in which its
    units convolve, and in bf16, whose gradients need no loss scale, unless the loop has one.
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
    """Return the modes of those that are about as fast whose products are the fastest; the fastest mode first."""
    model, device = CostModel(profile), profile.device
    if device.kind != "cuda":
        return [fastest]

    def products(mode: Candidate) -> float:
        return device.peak(mode.precision) or 0.0

    limit_s = _HELD_UP * (model.predict(fastest).step_s or 0.0)
    near = [fastest, *(mode for mode in model.modes if (model.predict(mode).step_s or 0.0) <= limit_s)]
    most = max(map(products, near))
    return [mode for mode in near if products(mode) == most]


def compiling_refusal(profile: Profile, fastest: Candidate) -> str | None:
    """Return why the model is not compiled on trial, or None."""
    if profile.loop.is_compiled:
        return "already compiled"
    if profile.loop.bitwise_only:
        return profile.loop.bitwise_only
    if profile.run_s is None:
        return "not tried: how long the run is was not said (total_steps)"
    if is_promising(profile, fastest):
        return None
    if MEASURING * profile.run_s < COMPILING_S:
        spares = f"spares {format_seconds(MEASURING * profile.run_s)} for trials"
        return f"not tried: a run of {format_seconds(profile.run_s)} {spares}, and compiling takes longer"
    return "not tried: measuring had taken what the run spares for it" if profile.hurried else None


def is_promising(profile: Profile, fastest: Candidate) -> bool:
    """Return whether, on a GPU, what compiling is likely to save of the run is what it has to, for what it takes.

    It could save what a step takes beyond its products at the device's peak: kernels that are fused move less, and are
    fewer to launch; of a step that is recorded already, of what that takes.
    """
    if profile.device.kind != "cuda":
        return False
    step_s, least_s = _seconds(profile, fastest)
    if (recorded_s := _recorded_s(profile)) is not None:
        step_s = recorded_s
    least_s = (1 - _UNKNOWN) * step_s if least_s is None else least_s
    share, takes_s = _LIKELY_CONVOLVED if profile.loop.has_convolutions else _LIKELY
    return share * (step_s - least_s) * (profile.total_steps or 0) >= WORTH_COMPILING * takes_s


def _recorded_s(profile: Profile) -> float | None:
    """Return the seconds of a recorded step that is not compiled, in the best size within the limit; None: none is."""
    if unpaid(profile, CUDA_GRAPHS) is not None:
        return None
    model, limit = CostModel(profile), profile.limits(profile.budget).memory_bytes
    tried = next(trial.candidate for trial in profile.stage("graphs") if trial.candidate.compiled == CUDA_GRAPHS)
    chunks = {None, *(trial.candidate.loss_chunk for trial in profile.stage("head") if trial.block_s)}
    sizes = [replace(tried, micro_batch=rows, loss_chunk=chunk) for rows in halvings(profile) for chunk in chunks]
    found = [each for each in sizes if is_in_chunks(profile, each) and (limit is None or model.is_within(each, limit))]
    return min((model.predict(each).step_s or math.inf for each in found), default=None)


def _seconds(profile: Profile, fastest: Candidate) -> tuple[float, float | None]:
    """Return what a step of the fastest mode takes, and its products at the device's peak; None: not known."""
    precision = _with_fastest_products(profile, fastest)[0].precision
    flops, peak = profile.loop.flops_per_step, profile.device.peak(precision)
    return CostModel(profile).predict(fastest).step_s or 0.0, flops / peak if flops and peak else None


def stage_of(value: Compiled) -> str:
    """Return the stage in which a way to run the model is tried first."""
    return "graphs" if value == CUDA_GRAPHS else "compile"


def unpaid(profile: Profile, value: Compiled) -> str | None:
    """Return why a model does not run in a way that was tried, by its trial, or None.

    It has to pay beside the model as it is, and beside what is recorded without being compiled, where that is in its
    stage.
    """
    trials = [trial for trial in profile.stage(stage_of(value)) if not trial.control]
    ours = next((trial for trial in trials if trial.candidate.compiled == value), None)
    if ours is None:
        return "not tried"
    if ours.error or not (trials[0].step_s and ours.block_s):
        return ours.error or "not compared with the loop as it is"
    rivals = (trial for trial in trials if trial is not ours and trial.block_s)
    return next(filter(None, (_unpaid(profile, ours, rival) for rival in rivals)), None)


def _unpaid(profile: Profile, ours: Trial, rival: Trial) -> str | None:
    speed, way = speed_ratio(ours, rival), ours.candidate.compiled
    said = f"{figures(speed)} of {rival.candidate.describe()}" if rival.candidate.compiled else figures(speed)
    if is_recorded(way) and speed.low <= 1:
        return f"not clearly faster: {said}"
    if profile.total_steps is None and not is_by_compiler(way):
        return None  # a few steps' time, however long the run is
    saves_s = (rival.step_s or 0.0) * (1 - 1 / speed.mean) * (profile.total_steps or 0)
    took_s = ours.compile_s or 0.0
    if saves_s <= WORTH_COMPILING * took_s:
        saves = f"saves {format_seconds(saves_s)} of the run" if saves_s > 0 else "saves nothing"
        return f"{saves}, and took {format_seconds(took_s)}: {said}"
    return None


def tried(profile: Profile) -> tuple[Trial, ...]:
    """Return the trials of what is compiled or recorded."""
    found = (trial for stage in ("graphs", "compile") for trial in profile.stage(stage))
    return tuple(trial for trial in found if trial.candidate.compiled and not trial.control)


def paying(profile: Profile, mode: Candidate | None = None) -> tuple[Compiled, ...]:
    """Return in which ways but its own the model runs that were tried and pay.

    Args:
        mode: the precision and layout that they are asked of; None: of any.
    """
    found = (trial.candidate for trial in tried(profile))
    ways = dict.fromkeys(each.compiled for each in found if mode is None or each.alike(mode, *BUT_MODE))
    return tuple(way for way in ways if unpaid(profile, way) is None)
