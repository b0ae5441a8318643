"""Recommendations for changes by the user."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimtab.core.choice import MeasuredCost, Note
from trimtab.core.units import format_bytes, format_seconds
from trimtab.planner.cost_model import CostModel
from trimtab.planner.loader_settings import best_settings, is_worth_persisting, step_counts
from trimtab.planner.statistics import resolution
from trimtab.planner.trial_statistics import control_interval, speed_ratio
from trimtab.plans.profile import Candidate, PaddingCount, Profile

# Least fractions worth a recommendation. WORTH_ADVICE: of step time (waiting for data), peak memory (attention scores)
# or batch elements. WORTH_PADDING: of step time. WORTH_PIECES: of reserved memory.
WORTH_ADVICE, WORTH_PADDING, WORTH_PIECES = 0.05, 0.01, 0.1
# Resolution of the A/A control above which the machine counts as busy; least speed of a rival worth another look.
BUSY, WORTH_ANOTHER_LOOK = 0.1, 1.05
_MORE_WORKERS = "Increase `num_workers` of the DataLoader, and on a GPU set `pin_memory=True`."
MULTIPLE = 64  # Matrix units and their kernels are fastest at sizes that are multiples of this.


def padded_vocabulary(words: int) -> int:
    """Return the vocabulary size rounded up to a multiple of `MULTIPLE`."""
    return -(-words // MULTIPLE) * MULTIPLE


def advice_of(
    profile: Profile, reference: MeasuredCost | None, chosen: MeasuredCost | None, winner: Candidate
) -> tuple[Note, ...]:
    """Return the recommendations, with measured gains if available."""
    data = (*_data(profile), *_loader(profile), *_padding(profile, chosen, winner))
    found = (*_noise(profile, winner), *data, *_attention(profile, reference), *_vocabulary(profile, chosen))
    return (*found, *_pieces(profile, winner), *_power_limit(profile))


def _noise(profile: Profile, winner: Candidate) -> Iterator[Note]:
    """Recommend planning again if timing was noisy and a rival was faster on average, but not significantly."""
    if not profile.finals or winner != profile.reference_candidate:
        return
    stage = profile.finals[-1]
    reference, *others = profile.stage(stage)
    apart = resolution(control_interval(profile, stage))
    rivals = [trial for trial in others if not trial.control and trial.block_s and reference.block_s]
    fastest = max((speed_ratio(trial, reference).mean for trial in rivals), default=1.0)
    if math.isfinite(apart) and apart > BUSY and fastest > WORTH_ANOTHER_LOOK:
        yield Note(
            "machine.busy",
            f"Timing was noisy: identical runs of the loop differed by up to {100 * apart:.0f}%, so the mean speed-up "
            f"of {fastest:.2f}x of the fastest settings is not significant. Plan again on an idle machine.",
        )


def _data(profile: Profile) -> Iterator[Note]:
    longest = profile.loop.longest or 0.0
    if longest > 1 + WORTH_ADVICE:
        yield Note(
            "batch.longer_drawn",
            f"The loader yielded a batch with {longest:.2f} times the elements of the measured batch, so such a step "
            "needs more time and memory than planned. Pass the longest batch as `longest_batch`.",
        )
    data, whole = profile.phases_s.get("data", 0.0), sum(profile.phases_s.values())
    if profile.loader is None and whole > 0 and data / whole > WORTH_ADVICE:
        share = f"{100 * data / whole:.0f}%"
        yield Note(
            "data.waiting",
            f"The step waits for data for {share} of its time. {_MORE_WORKERS}",
        )


def _loader(profile: Profile) -> Iterator[Note]:
    """Recommend DataLoader settings with measured faster training steps, or report the waiting time."""
    if (found := profile.loader) is None:
        return
    own, lost_s, best = found.own, found.own.step_s - found.alone_s, best_settings(found)
    cost = f"The loader costs {format_seconds(lost_s)} of a {format_seconds(own.step_s)} step."
    if best is None:
        tried = f"None of the {len(found.others)} other settings tried had a significant gain."
        rest = f"{tried} Reduce the work per sample, for example by preprocessing the dataset once."
        if lost_s > WORTH_ADVICE * own.step_s:
            yield Note("data.waiting", f"{cost} {rest if found.others else _MORE_WORKERS}")
        return
    gain_s = own.step_s - best.step_s
    if best.pin_memory == own.pin_memory:  # Without faster copies to the device, a larger gain than the cost is noise.
        gain_s = min(gain_s, lost_s)
    arguments = [f"num_workers={best.num_workers}"]
    if best.num_workers:
        arguments.append(f"prefetch_factor={best.prefetch_factor}")
        arguments += ["persistent_workers=True"] if is_worth_persisting(found, best) else []
    arguments += ["pin_memory=True"] if best.pin_memory else []
    num_steps = 2 * step_counts(best.num_workers, found.num_steps)[1]  # in two rounds
    yield Note(
        "loader.settings",
        f"{cost} DataLoader({', '.join(arguments)}) saves {format_seconds(gain_s)} per step "
        f"(measured in {num_steps} steps).",
    )


def _padding(profile: Profile, chosen: MeasuredCost | None, winner: Candidate) -> Iterator[Note]:
    """Recommend batches without padding if the time of the step is predicted to shrink with its tokens."""
    count, step_s = profile.loop.padding, {k: v for k, v in profile.phases_s.items() if k != "data"}
    if count is None or chosen is None or not sum(step_s.values()):
        return
    per_token = sum(step_s.get(name, 0.0) for name in ("forward", "backward")) / sum(step_s.values())
    fixed_s = CostModel(profile).fixed_s(winner)
    saved_s = count.fraction * max(0.0, per_token * chosen.step_s - (fixed_s or 0.0))
    if saved_s <= WORTH_ADVICE * chosen.step_s:
        return
    basis = "from steps of several sizes" if fixed_s is not None else "if its time is proportional to the tokens"
    ours, less = format_seconds(chosen.step_s), format_seconds(chosen.step_s - saved_s)
    yield Note(
        "batch.padding",
        f"{100 * count.fraction:.0f}% of the tokens in {count.num_batches} batch{'es' * (count.num_batches > 1)} are "
        f"padding (counted). Without padding, a {ours} step would take {less} (predicted {basis}). "
        f"{_without_padding(profile, count)}",
    )


def _without_padding(profile: Profile, count: PaddingCount) -> str:
    """Return the change to remove the padding with the libraries of the loop."""
    if 2 * count.fixed > count.padding:
        return 'Pad each batch to its longest sample, as padding=True or "longest" of a Transformers tokenizer does.'
    grouped = 'TrainingArguments(train_sampling_strategy="group_by_length")'
    if count.library == "trl":
        return f"Use SFTConfig(packing=True) of TRL, or {grouped}."
    if count.library == "transformers" and profile.device.kind == "cuda":
        flat = 'DataCollatorWithFlattening with attn_implementation="flash_attention_2"'
        return f"Use Transformers' {flat}, or {grouped}."
    if count.library == "transformers":
        return f"Use {grouped} of Transformers, which batches samples of similar length."
    return "Batch samples of similar length, for example with a batch sampler that sorts by length."


def _attention(profile: Profile, reference: MeasuredCost | None) -> Iterator[Note]:
    scores, peak = profile.loop.scores_bytes, reference and reference.peak_bytes
    if peak and scores > WORTH_ADVICE * peak:
        kept = f"{format_bytes(scores)}, {100 * scores / peak:.0f}% of the peak memory"
        yield Note(
            "attention.unfused",
            f"The model's attention keeps its score matrices for backward: {kept}. Use "
            "`torch.nn.functional.scaled_dot_product_attention`, which keeps none.",
        )


def _pieces(profile: Profile, winner: Candidate) -> Iterator[Note]:
    """Recommend expandable segments if much reserved memory of the winner lies in unused pieces."""
    known = [t for t in profile.trials if t.candidate == winner and t.peak_bytes and t.unused_bytes is not None]
    unused, whole = (known[-1].unused_bytes or 0, known[-1].peak_bytes or 1) if known else (0, 1)
    if unused > WORTH_PIECES * whole:
        size = f"{format_bytes(unused)} ({100 * unused / whole:.0f}%) of the memory reserved by a step"
        yield Note(
            "memory.fragmented",
            f"{size} is fragmented and holds no tensor. Set PYTORCH_ALLOC_CONF=expandable_segments:True.",
        )


def _power_limit(profile: Profile) -> Iterator[Note]:
    """Recommend a lower power limit if energy is weighed. Only the machine's owner may set it, never trimtab."""
    if profile.objective.energy == 0 and profile.budget.energy is None:
        return
    for limit in profile.meter.limits:
        lowest = "" if limit.lowest_w is None else f" (at least {limit.lowest_w:.0f} W)"
        settable = limit.lowest_w is None or limit.lowest_w < limit.watts
        if settable:
            yield Note(
                "power.limit",
                f"The power limit of {limit.device} is {limit.watts:.0f} W. A lower limit{lowest} usually reduces the "
                "joules per step and increases the step time; it was not tried. Set a lower limit and plan again.",
            )


def _vocabulary(profile: Profile, chosen: MeasuredCost | None) -> Iterator[Note]:
    logits, saves_s = profile.loop.logits, profile.loop.padding_saves_s or 0.0
    if logits and chosen and saves_s > WORTH_PADDING * chosen.step_s:
        words, share = logits[1], f"{100 * saves_s / chosen.step_s:.1f}%"
        yield Note(
            "vocabulary.unpadded",
            f"The vocabulary has {words:,} entries. Pad it to {padded_vocabulary(words):,}, a multiple of {MULTIPLE}: "
            "the matrix "
            f"products of the head were then faster by {share} of a step, timed on a few hundred tokens.",
        )
