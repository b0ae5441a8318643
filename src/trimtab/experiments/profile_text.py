"""A profile as text."""

from __future__ import annotations

from trimtab.core.units import format_bytes, format_count, format_joules, format_seconds
from trimtab.plans.profile import Profile


def profile_text(profile: Profile) -> str:
    """Return the facts, phases, utilisation and trials of a profile as text."""
    loop, device = profile.loop, profile.device
    lines = [
        f"{device.name}, {device.num_threads or 'no'} threads; {profile.reference.describe()}",
        f"{format_count(loop.num_parameters)} parameters, {loop.optimizer}, {loop.batch_size} samples and "
        f"{format_count(loop.terms_per_step)} {loop.terms} per step",
        *_utilisation(profile),
        "",
        "phases of a reference step:",
        *(f"  {name:<12} {format_seconds(seconds)}" for name, seconds in profile.phases_s.items()),
        "",
        "trials:",
    ]
    for trial in profile.trials:
        label = f"  {trial.stage:<12} {trial.candidate.describe()}{' (A/A control)' if trial.control else ''}"
        alone = "" if trial.is_whole else f" ({trial.stage} only)"
        energy = "" if trial.energy_j is None else f", {format_joules(trial.energy_j)} at {trial.power_w:.3g} W"
        peak = format_bytes(trial.peak_bytes)
        result = trial.error or f"{format_seconds(trial.step_s)}{alone}, peak {peak}{energy}"
        lines.append(f"{label:<70} {result}")
    splitting = "keeps the gradient" if profile.check.splittable else "is not possible"
    lines += ["", f"splitting the batch {splitting}: {profile.check.reason}"]
    lines.append(f"energy: {profile.meter.describe()}")
    lines.append(f"profiling took {format_seconds(profile.profiling_s)}")
    return "\n".join(lines)


def _utilisation(profile: Profile) -> list[str]:
    first = profile.trials[0]
    flops = profile.loop.flops_per_step
    if flops is None or first.step_s is None:
        return ["FLOP: not counted"]
    rate = flops / first.step_s
    mfu = profile.device.utilisation(rate, profile.reference.precision)
    share = "MFU unknown (unknown peak FLOP/s)" if mfu is None else f"MFU {100 * mfu:.0f}% of {profile.device.source}"
    return [f"{format_count(flops)}FLOP per step, {format_count(rate)}FLOP/s, {share}"]
