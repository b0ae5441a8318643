"""A plan as text: the screen of `print(plan)`, and the full explanation of `plan.explain()`."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trimtab.core.choice import Choice, Effect, MeasuredCost
from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.units import format_bytes, format_seconds
from trimtab.settings import SETTINGS

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan

UNPROVED_SPLIT = "not proved to keep the gradient of the whole batch"

MOST_LINES, MOST_COLUMNS = 20, 80
_FEWEST_COLUMNS = 40
_REMARK_LINES = (4, 2, 1)  # Most lines of a remark, fewer if the screen is full.
_MOST_ADVICE = 2
# A difference in peak memory below this fraction is not reported in the headline.
_WORTH_NAMING = 0.02
_INTERVAL = re.compile(r" \((?:95%|n=)[^()]*\)")


def headline(plan: Plan) -> str:
    """Return speed, memory and numerics against the baseline in a line."""
    if not plan.changes:
        if plan.target_device:
            return f"No change: nothing is predicted to be better on {plan.target_device}"
        return "No change: nothing was significantly better than your loop"
    if plan.baseline is None and plan.predicted is None:
        return "Set by hand, neither measured nor proved"
    where = [f"predicted on {plan.target_device}"] if plan.baseline is None and plan.target_device else []
    text = ", ".join([*where, *_speed(plan), *_memory(plan), _numerics(plan)])
    return text[0].upper() + text[1:]


def screen(plan: Plan, columns: int | None = None) -> str:
    """Return the plan on a screen: headline, costs, changes with reasons, proof and pay-back; at most 20 lines.

    Args:
        columns: width; None for the terminal's, at most 80.
    """
    import shutil  # Loads many modules, which reading a plan does not need.

    width = max(_FEWEST_COLUMNS, min(columns or shutil.get_terminal_size((MOST_COLUMNS, 24)).columns, MOST_COLUMNS))
    before = [*_wrapped(headline(plan), width), *_table(plan, width)]
    changes = [f"{SETTINGS[name].title_of(getattr(plan, name).value)}: {_reason(plan, name)}" for name in plan.changes]
    for limit in _REMARK_LINES:
        after = [line for text in _remarks(plan) for line in _wrapped(text, width, limit)]
        if len(before) + len(after) + len(changes) + 2 <= MOST_LINES:
            break
    room = MOST_LINES - len(before) - len(after) - 2  # two empty lines
    lines = [_item(each, width, 2) for each in changes]
    if sum(map(len, lines)) > room:
        lines = [_item(each, width, 1) for each in changes]
    shown = [line for item in lines for line in item]
    if len(shown) > room:
        shown = [*shown[: room - 1], f"  and {len(shown) - room + 1} further changes"]
    return "\n".join([*before, *([""] if shown else []), *shown, *([""] if after else []), *after])


def _speed(plan: Plan) -> Iterator[str]:
    speed = plan.speed
    if speed is not None and plan.verified is not None:
        low, high = plan.verified
        yield _times(speed) + (" (not significant)" if low <= 1 <= high else "")
    elif speed is not None:
        yield _times(speed) + " (predicted, not run)"


def _times(speed: float) -> str:
    """Return a speed ratio in words, such as "1.9x faster"; a speed below 1 is the time of a step."""
    if speed >= 1.005:
        return f"{speed:.3g}x faster" if speed < 10 else f"{speed:.0f}x faster"
    return "equally fast" if speed > 0.995 else f"{1 / speed:.3g}x the time"


def _memory(plan: Plan) -> Iterator[str]:
    ours = (plan.measured and plan.measured.peak_bytes) or (plan.predicted and plan.predicted.peak_bytes)
    theirs = plan.baseline and plan.baseline.peak_bytes
    if not ours or not theirs:
        return
    less = 1 - ours / theirs
    if less >= _WORTH_NAMING:
        yield f"{100 * less:.0f} % less memory"
    elif less <= -_WORTH_NAMING:
        yield f"{-100 * less:.0f} % more memory"


def _numerics(plan: Plan) -> str:
    changed = [(name, choice) for name, choice in plan.choices() if choice.changed]
    training = [SETTINGS[name].title for name, choice in changed if choice.effect is Effect.TRAINING]
    if training:
        return f"changes the training ({', '.join(training)})"
    if plan.splits and plan.check is None:
        return f"split {UNPROVED_SPLIT}"
    if any(choice.effect is Effect.ROUNDING or name == "micro_batch" for name, choice in changed):
        return "same results up to rounding"
    return "bitwise the same results"


def _table(plan: Plan, width: int) -> list[str]:
    """Return time, memory and energy of a step of the baseline and of the plan."""
    ours = plan.measured or plan.predicted
    loop, is_known = plan.reference.describe().removeprefix("declared "), all(map(math.isfinite, plan.verified or ()))
    measured = [] if plan.baseline is None else [("your loop", plan.baseline, f"{loop}, {_rows(plan)}")]
    if ours is not None and plan.changes:
        note = "95 %: {:.3g}x to {:.3g}x".format(*plan.verified) if plan.verified and is_known else ""
        note = f"predicted on {plan.target_device}" if plan.target_device else note
        measured.append(("this plan", ours, note))
    lines = []
    for label, cost, note in measured:
        energy = "" if cost.energy_j is None else f", {plan.meter.told(cost.energy_j)}"
        text = f"  {label}: {format_seconds(cost.step_s)} per step, {format_bytes(cost.peak_bytes)}{energy}"
        whole = f"{text} ({note})" if note else text
        lines.append(whole if len(whole) <= width else text[:width])
    return lines


def _reason(plan: Plan, name: str) -> str:
    return _INTERVAL.sub("", getattr(plan, name).reason)


def _item(text: str, width: int, lines: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent="  ",
        subsequent_indent="    ",
        max_lines=lines,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _wrapped(text: str, width: int, lines: int = 2) -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent="  ", max_lines=lines, placeholder=" ...", break_on_hyphens=False
    )


def _remarks(plan: Plan) -> Iterator[str]:
    """Yield what is left alone, the proof, the first advice, the pay-back and where the rest is."""
    if plan.baseline is None and plan.predicted is None:
        return
    kept = [(name, choice) for name, choice in plan.choices() if not choice.changed and SETTINGS[name].is_searched]
    if kept:
        names = [SETTINGS[name].title + (" (not proved)" if _is_unproved(choice) else "") for name, choice in kept]
        yield f"left alone: {', '.join(names)}"
    if plan.proof is not None and plan.changes:
        agreed = f"gradients and {plan.proof.tensors} tensors agree after two steps with and without the plan"
        yield f"proof: {agreed if plan.proof.holds else plan.proof.reason}"
    if plan.meter.left_out:
        yield f"energy: {plan.meter.describe()}"
    yield from (f"note: {note.text}" for note in plan.notes if note.code == "timing.processor_time")
    yield from (f"advice: {note.text}" for note in plan.advice[:_MOST_ADVICE])
    if plan.planning_s:
        yield f"planning took {format_seconds(plan.planning_s)}{_payback(plan)}"
    more = len(plan.advice) - _MOST_ADVICE
    yield "details" + (f" and {more} more advice" if more > 0 else "") + ": plan.explain(), --explain"


def _is_unproved(choice: Choice) -> bool:
    return any(code.startswith("proof.") for code in (choice.code, *(each.code for each in choice.rejected)))


def _payback(plan: Plan) -> str:
    """Return the steps until the plan has saved the time of planning."""
    ours = plan.measured or plan.predicted
    if not plan.changes or plan.baseline is None or ours is None or plan.target_device:
        return ""
    saved_s = plan.baseline.step_s - ours.step_s
    if saved_s <= 0:
        return ""
    is_short = any(note.code == "planning.short_run" for note in plan.notes)
    steps = f"{math.ceil(plan.planning_s / saved_s):,} steps"
    return f"; pays back after {steps}" + (", more than your run has" if is_short else "")


def explanation(plan: Plan) -> str:
    """Return every setting with its reason, all rejected alternatives, checks, advice and notes."""
    lines = [_verdict(plan), "", f"baseline: {plan.reference.describe()} loop, {_rows(plan)} per step"]
    lines.append(
        _cost("baseline, predicted" if plan.target_device else "baseline, measured", plan.baseline, plan.meter)
    )
    lines.append(_cost("this plan, predicted", plan.predicted, plan.meter))
    if plan.measured is not None:
        lines.append(_cost("this plan, measured", plan.measured, plan.meter))
    if plan.peak_margin is not None:
        lines.append(
            f"peak memory: traced, plus a margin of {100 * plan.peak_margin:.2g}% for memory that a trace does not "
            "show; not calibrated"
        )
    if plan.seconds_margin is not None:
        lines.append(
            f"step time: from the data sheet of the device; {100 * plan.seconds_margin:.2g}% is added before "
            "comparison with a limit; not calibrated"
        )
    if plan.meter != NO_METER:
        lines.append(f"energy: {plan.meter.describe()}")
    lines.append("")
    for name, choice in plan.choices():
        lines += _choice(name, choice)
    if plan.check is not None:
        refused = (
            "only the loop's own micro-batch is allowed" if plan.splits_as_the_loop else "splitting is not allowed"
        )
        verdict = "splitting the batch keeps the gradient" if plan.check.splittable else refused
        lines += ["", f"check: {verdict}: {plan.check.reason}"]
    if plan.proof is not None:
        lines.append(f"proof: {plan.proof.reason}")
    if plan.timing_noise is not None:
        noise = f"{100 * plan.timing_noise:.2g}%"
        lines.append(f"timing noise: identical runs of the loop differed by up to {noise} in the trials")
    if plan.stands_between is not None:
        low, high = plan.stands_between
        lines.append(f"objective: the same plan is chosen for memory weights from {low:.2g} to {high:.2g}")
    lines += [f"advice: {each.text}" for each in plan.advice]
    lines += [f"note: {note.text}" for note in plan.notes]
    if plan.planning_s:
        search = f", including {format_seconds(plan.search_s)} of search for the tuned plan" if plan.search_s else ""
        lines.append(f"planning took {format_seconds(plan.planning_s)}{search}")
    return "\n".join(lines)


def _verdict(plan: Plan) -> str:
    if not plan.changes and plan.target_device:
        return f"Change nothing: no settings are predicted to be better on {plan.target_device}. No step was run."
    if plan.check is None and plan.proof is None and plan.predicted is None and plan.measured is None:
        split = f" The split into micro-batches is {UNPROVED_SPLIT}." if plan.splits else ""
        return f"Change {plan.changes_in_words or 'nothing'}: set by hand, neither measured nor proved.{split}"
    if not plan.changes:
        return "Change nothing: no setting was significantly better than the unchanged loop."
    text = f"Change {plan.changes_in_words} ({plan.plan_kind} plan)"
    if plan.baseline and plan.measured and plan.verified:
        of = f"of the {plan.reference.describe()} loop"
        text += f": {plan.speed:.2f}x the speed {of} in trials{_certainty(plan.verified)}"
    elif plan.baseline and plan.predicted:
        where = f" on {plan.target_device}" if plan.target_device else ""
        ran = "not run" if plan.measured is None else "not compared with the loop in paired runs"
        text += f": {plan.baseline.step_s / plan.predicted.step_s:.2f}x the speed{where}, predicted and {ran}"
    if plan.splits and plan.check is None:
        text += f". The split into micro-batches is {UNPROVED_SPLIT}"
    return text + "."


def _rows(plan: Plan) -> str:
    if plan.check is not None and plan.check.code == "batch.samples_unknown":
        return "an unknown number of samples"
    return f"{plan.batch_size} samples" + (f" on each of {plan.num_ranks} ranks" if plan.num_ranks > 1 else "")


def _certainty(verified: tuple[float, float] | None) -> str:
    if verified is None or not all(map(math.isfinite, verified)):
        return ""
    low, high = verified
    doubt = "" if low > 1 or high < 1 else ", not significant"
    return f" (95% {low:.2f} to {high:.2f}{doubt})"


def _cost(label: str, cost: MeasuredCost | None, meter: MeterFacts) -> str:
    if cost is None:
        return f"{label.partition(',')[0]}: not measured"
    between = ""
    if cost.between_s is not None:
        between = " ({} to {})".format(*map(format_seconds, cost.between_s))
    energy = "" if cost.energy_j is None else f", energy {meter.told(cost.energy_j)}"
    peak = format_bytes(cost.peak_bytes)
    return f"{label}: {format_seconds(cost.step_s)} per step{between}, peak memory {peak}{energy}"


def _choice(name: str, choice: Choice) -> list[str]:
    sign = "*" if choice.changed else " "
    lines = [f"{sign} {name.replace('_', ' '):<20} {choice.value!s:<14} [{choice.effect}] {choice.reason}"]
    return lines + [f"      not {loser.value}: {loser.reason}" for loser in choice.rejected]
