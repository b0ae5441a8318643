"""Compiling the model: whether it is tried, in which precision and layout, and whether it pays.

On a processor it is tried where the run spares its seconds, as any other trial. On a GPU a step that is not compiled
may spend most of its time moving what its kernels could keep, or launching them: there it is tried wherever a tenth of
what it could save pays for that, and also in a mode that looks no faster yet, as the host is what bounds them all.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.core.profile import Candidate, Profile
from trimtab.core.units import format_seconds
from trimtab.decide.cost_model import BUT_MODE, CostModel
from trimtab.decide.readings import figures, speed_ratio

# Of a run, the share that measuring may take; and seconds that compiling takes, at the least, for what is not tiny.
MEASURING, COMPILING_S = 0.01, 20.0
# Compiling has to save this many times the seconds it takes.
WORTH_COMPILING = 2.0
# Of what compiling could save, the share that trying it may take; and of a step whose least time is not known, what
# could be saved.
_PRICE, _UNKNOWN = 0.1, 0.5
# Modes this many times as slow as the fastest may be held up by the host: of 128 small images ResNet-50's steps took an
# H200 25 to 33 ms in each, while kernels of one in bf16 take it 10 (docs/kernels.md).
_HELD_UP = 1.3


def compile_candidates(profile: Profile, fastest: Candidate) -> tuple[Candidate, ...]:
    """Return the fastest mode, and what is compiled on trial beside it, if anything is."""
    if compiling_refusal(profile, fastest):
        return (fastest,)
    return fastest, replace(_to_compile(profile, fastest), compiled=True)


def _to_compile(profile: Profile, fastest: Candidate) -> Candidate:
    """Return the fastest mode; on a GPU the one with the fastest products of those that are about as fast."""
    model, device = CostModel(profile), profile.device
    if device.kind != "cuda":
        return fastest

    def products(mode: Candidate) -> float:
        return device.peak(mode.precision) or 0.0

    limit_s = _HELD_UP * (model.predict(fastest).step_s or 0.0)
    near = [mode for mode in model.modes if (model.predict(mode).step_s or 0.0) <= limit_s]
    return max((fastest, *near), key=products)  # of equals the first: the fastest


def compiling_refusal(profile: Profile, fastest: Candidate) -> str | None:
    """Return why the model is not compiled on trial, or None."""
    if profile.loop.is_compiled:
        return "already compiled"
    if profile.run_s is None:
        return "not tried: how long the run is was not said (total_steps)"
    if is_promising(profile, fastest):
        return None
    if MEASURING * profile.run_s < COMPILING_S:
        spares = f"spares {format_seconds(MEASURING * profile.run_s)} for trials"
        return f"not tried: a run of {format_seconds(profile.run_s)} {spares}, and compiling takes longer"
    return "not tried: measuring had taken what the run spares for it" if profile.hurried else None


def is_promising(profile: Profile, fastest: Candidate) -> bool:
    """Return whether, on a GPU, a tenth of what compiling could save of the run pays for trying it.

    It could save what a step takes beyond its products at the device's peak: kernels that are fused move less, and are
    fewer to launch.
    """
    if profile.device.kind != "cuda":
        return False
    step_s = CostModel(profile).predict(fastest).step_s or 0.0
    flops, peak = profile.loop.flops_per_step, profile.device.peak(_to_compile(profile, fastest).precision)
    least_s = flops / peak if flops and peak else (1 - _UNKNOWN) * step_s
    return _PRICE * (step_s - least_s) * (profile.total_steps or 0) >= COMPILING_S


def unpaid_compiling(profile: Profile) -> str | None:
    """Return why the model is not compiled, by its trial, or None."""
    trials = [trial for trial in profile.stage("compile") if not trial.control]
    if len(trials) < 2:
        return "not tried"
    own, compiled = trials
    if compiled.error or not (own.step_s and compiled.block_s):
        return compiled.error or "not compared with the loop as it is"
    saves_s = own.step_s * (1 - 1 / speed_ratio(compiled, own).mean) * (profile.total_steps or 0)
    took_s = compiled.compile_s or 0.0
    if saves_s <= WORTH_COMPILING * took_s:
        saves = f"saves {format_seconds(saves_s)} of the run" if saves_s > 0 else "saves nothing"
        return f"{saves}, and took {format_seconds(took_s)}: {figures(speed_ratio(compiled, own))}"
    return None


def is_compiled_mode(profile: Profile, mode: Candidate) -> bool:
    """Return whether a precision and layout was compiled on trial, and that pays."""
    tried = (trial.candidate for trial in profile.stage("compile") if trial.candidate.compiled)
    return any(each.alike(mode, *BUT_MODE) for each in tried) and not unpaid_compiling(profile)
