"""What changes are worth, of records whose truth is known: effects and interactions that were planted are found."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from race_records import climbing, record, timed

from trimtab.core.record import End, RunRecord
from trimtab.experiments.ablation.ablation_design import (
    PLAN,
    PLAN_AGAIN,
    REFERENCE,
    UNCHANGED,
    UNCHANGED_AGAIN,
    AblationDesign,
)
from trimtab.experiments.ablation.ablation_effects import AblationMeasurements, products
from trimtab.experiments.ablation.ablation_result import (
    ALONE,
    INTERACTION,
    MEMORY,
    QUALITY,
    THROUGHPUT,
    WHOLE,
    WITHIN,
    AblatedChange,
    ChangeEffect,
)
from trimtab.experiments.ablation.ablation_summary import NOTHING, headline, times
from trimtab.experiments.comparison.ratio_rows import quality_row
from trimtab.plans.plan import Plan

NAMES = ("micro_batch", "precision", "recompute")
# Logarithms of what each change is worth alone, in speed.
WORTH = {"micro_batch": math.log(0.9), "precision": math.log(1.5), "recompute": math.log(0.8)}
Speed = Callable[[frozenset[str]], float]


def speed(*together: tuple[frozenset[str], float]) -> Speed:
    """Return the logarithm of the speed of a set of changes: the sum of each, and of each set that acts together."""
    return lambda held: math.fsum(WORTH[n] for n in held) + math.fsum(x for pair, x in together if pair <= held)


def evidence(
    truth: Speed,
    *,
    design: AblationDesign | None = None,
    seeds: int = 8,
    noise: float = 0.005,
    peaks: Mapping[str, int] | None = None,
) -> AblationMeasurements:
    """Return races whose machine is another one for each seed, and whose arms differ from the truth by noise."""
    design, draw = design or AblationDesign(NAMES), random.Random(7)
    races = {}
    for seed in range(seeds):
        machine = draw.uniform(0.5, 2.0)
        held = {REFERENCE: frozenset(), **design.arms}
        held |= {again: design.arms[name] for again, name in design.controls.items()}
        races[seed] = {
            name: timed(machine * math.exp(-truth(changes) + draw.gauss(0, noise))) for name, changes in held.items()
        }
    return AblationMeasurements(
        design, races, peaks or {}, {name: name for name in races[0]}, "accuracy", True, "share"
    )


def changes(
    design: AblationDesign | None = None, plan_kind: str = "equivalent", **refusals: Mapping[str, str]
) -> tuple[AblatedChange, ...]:
    names = (design or AblationDesign(NAMES)).changes
    return tuple(AblatedChange(name, name.replace("_", " "), plan_kind, refusals.get(name, {})) for name in names)


def found(
    measured: AblationMeasurements, plan_kind: str = "equivalent", **refusals: Mapping[str, str]
) -> dict[tuple[str, str, str], ChangeEffect]:
    of = changes(measured.design, plan_kind, **refusals)
    each = [e for change in of for e in measured.effects(change)]
    each += measured.all_together(of)
    return {(e.change, e.setting, e.metric): e for e in each}


def test_changes_that_act_apart_are_worth_the_same_in_both_settings():
    effects = found(evidence(speed()))
    for name, worth in WORTH.items():
        for setting in (ALONE, WITHIN):
            effect = effects[name, setting, THROUGHPUT]
            assert effect.ratio.mean == pytest.approx(math.exp(worth), rel=0.01)
            assert effect.ratio.low < math.exp(worth) < effect.ratio.high
            assert effect.verdict.kind == ("gain" if worth > 0 else "harm")
        assert effects[name, INTERACTION, THROUGHPUT].ratio.mean == pytest.approx(1.0, rel=0.01)
        assert effects[name, INTERACTION, THROUGHPUT].verdict.kind == "none found"
    assert effects["", INTERACTION, THROUGHPUT].verdict.kind == "none found"


@pytest.mark.parametrize(("planted", "kind"), [(0.1, "more together"), (-0.1, "less together")])
def test_a_planted_interaction_is_found_where_it_is_and_nowhere_else(planted, kind):
    pair = frozenset({"precision", "recompute"})
    effects = found(evidence(speed((pair, planted))))
    for name in pair:
        effect = effects[name, INTERACTION, THROUGHPUT]
        assert effect.verdict.kind == kind
        assert effect.ratio.mean == pytest.approx(math.exp(planted), rel=0.01)
        assert effect.ratio.low < math.exp(planted) < effect.ratio.high
        alone, within = (effects[name, setting, THROUGHPUT].ratio for setting in (ALONE, WITHIN))
        assert within.mean / alone.mean == pytest.approx(effect.ratio.mean, rel=1e-9)
    assert effects["micro_batch", INTERACTION, THROUGHPUT].verdict.kind == "none found"
    assert effects["", INTERACTION, THROUGHPUT].verdict.kind == kind
    assert effects["", INTERACTION, THROUGHPUT].ratio.mean == pytest.approx(math.exp(planted), rel=0.02)


RUNGS = (0.3, 0.6, 0.99)


def learned(steps_s: Mapping[str, float], refusals: Mapping[str, Mapping[str, str]] | None = None, **plan: float):
    """Return the times of a plan of two changes, whose arms cross 0.3 in 3.5 steps of so many seconds, 0.6 in 6.5."""
    design = AblationDesign(("precision", "learning_rate_scale"))
    arms = [REFERENCE, *design.arms, *design.controls]
    values = [0.1 * at - 0.05 for at in range(1, 11)]

    def ran(step_s: float):
        return climbing([step_s * at for at in range(1, 11)], values)

    machines = (1.0, 1.001, 1.002, 0.999, 0.998)
    races = {seed: {name: ran(one * steps_s.get(name, 1.0)) for name in arms} for seed, one in enumerate(machines)}
    measured = AblationMeasurements(design, races, {}, {name: name for name in arms}, "accuracy", True, "share")
    kinds = {"precision": "equivalent", "learning_rate_scale": "tuned"}
    of = tuple(
        AblatedChange(name, name, plan_kind, (refusals or {}).get(name, {})) for name, plan_kind in kinds.items()
    )
    wanted = replace(Plan.fixed(8, precision="bf16", learning_rate_scale=2.0), **plan)
    return {(t.change, t.setting, t.row.target, t.row.charged): t.row for t in times(measured, wanted, of, RUNGS)}


def test_a_change_has_its_time_to_each_target_alone_and_in_the_plan():
    found = learned({"with_precision": 0.5, PLAN: 0.25, PLAN_AGAIN: 0.25})
    for target, steps in ((0.3, 3.5), (0.6, 6.5)):
        alone, within = found["precision", ALONE, target, False], found["precision", WITHIN, target, False]
        assert (alone.arm, alone.against, within.against) == ("with_precision", UNCHANGED, "with_learning_rate_scale")
        assert alone.ratio.mean == pytest.approx(2.0)
        assert within.ratio.mean == pytest.approx(4.0)
        assert alone.verdict.kind == within.verdict.kind == "gain"
        assert alone.arm_s[0] == pytest.approx(0.5 * steps)
        assert found["learning_rate_scale", WITHIN, target, False].ratio.mean == pytest.approx(2.0)
        assert found["", WHOLE, target, False].ratio.mean == pytest.approx(4.0)
    last = [row for (_, _, target, _), row in found.items() if target == 0.99]
    assert {row.verdict.code for row in last} == {"target.not_reached"}
    assert not any(charged for *_, charged in found)


def test_the_search_is_charged_to_what_it_found_and_to_the_plan():
    found = learned({PLAN: 0.5, PLAN_AGAIN: 0.5}, planning_s=10.0, search_s=3.0)
    whole, freed = found["", WHOLE, 0.6, True], found["learning_rate_scale", WITHIN, 0.6, True]
    assert whole.arm_s[0] == pytest.approx(10.0 + 0.5 * 6.5)
    assert freed.arm_s[0] == pytest.approx(3.0 + 0.5 * 6.5)
    assert whole.verdict.kind == "harm"
    assert {(change, setting) for change, setting, _, charged in found if charged} == {
        ("", WHOLE),
        ("learning_rate_scale", ALONE),
        ("learning_rate_scale", WITHIN),
    }
    found = learned({}, {"precision": {ALONE: "it needs the other"}})
    assert ("precision", ALONE, 0.3, False) not in found
    assert ("precision", WITHIN, 0.3, False) in found


def test_interactions_of_pairs():
    design = AblationDesign(("precision", "recompute"))
    measured = evidence(speed((frozenset(design.changes), 0.1)), design=design)
    effects = found(measured)
    one, other = (effects[name, INTERACTION, THROUGHPUT].ratio for name in design.changes)
    assert one.pairs == pytest.approx(other.pairs)
    assert ("", INTERACTION, THROUGHPUT) not in effects
    design = AblationDesign(NAMES)
    measured = evidence(speed((frozenset({"precision", "recompute"}), 0.1)), design=design)
    named = {change.name: change for change in changes(design)}
    pairs = [e for one, other in design.pairs for e in measured.pair_effects(named[one], named[other])]
    assert {(e.change, e.other): e.verdict.kind for e in pairs} == {
        ("micro_batch", "precision"): "none found",
        ("micro_batch", "recompute"): "none found",
        ("precision", "recompute"): "more together",
    }
    assert pairs[-1].ratio.mean == pytest.approx(math.exp(0.1), rel=0.01)
    design = AblationDesign(("precision",))
    effects = found(evidence(speed(), design=design))
    assert set(effects) == {("precision", ALONE, THROUGHPUT)}
    assert evidence(speed(), design=design).interaction_control is None


def test_an_effect_has_to_be_clear_of_its_control():
    pair = frozenset({"precision", "recompute"})
    clear, blurred = (evidence(speed((pair, 0.1)), noise=noise) for noise in (0.005, 0.15))
    widths = [each.interaction_control.high / each.interaction_control.low for each in (clear, blurred)]
    assert widths[0] < 1.02**2 < widths[1]
    assert found(clear)["precision", INTERACTION, THROUGHPUT].verdict.kind == "more together"
    assert found(blurred)["precision", INTERACTION, THROUGHPUT].verdict.kind == "none found"
    races = evidence(speed((frozenset({"micro_batch"}), -math.log(0.9) + 0.03))).races  # worth 3%
    slow = {seed: race | {PLAN_AGAIN: timed(1.2 * timed_s(race[PLAN]))} for seed, race in races.items()}
    labels = {name: name for name in slow[0]}
    effects = found(AblationMeasurements(AblationDesign(NAMES), slow, {}, labels, "accuracy", True, "share"))
    assert effects["micro_batch", ALONE, THROUGHPUT].verdict.kind == "gain"
    assert effects["micro_batch", WITHIN, THROUGHPUT].verdict.kind == "no gain"
    rows = list(evidence(speed()).control_rows())
    assert [(row.arm, row.against) for row in rows] == [(UNCHANGED_AGAIN, UNCHANGED), (PLAN_AGAIN, PLAN)]
    assert {row.verdict.kind for row in rows} <= {"no gain", "no verdict"}


def timed_s(run) -> float:
    return run.events[-1].detail["seconds"]


def test_what_failed_or_could_not_be_tried_has_no_verdict():
    effects = found(evidence(speed(), seeds=4))
    assert {e.verdict.kind for e in effects.values()} == {"no verdict"}
    assert all(e.ratio.n == 4 for e in effects.values())
    measured = evidence(speed())
    broken = dict(measured.races)
    broken[0] = broken[0] | {"without_precision": record(end="diverged")}
    peaks = {UNCHANGED: 1000, "with_precision": 600, "without_precision": 900, PLAN: 300}
    effects = found(AblationMeasurements(measured.design, broken, peaks, measured.labels, "accuracy", True, "share"))
    assert effects["precision", WITHIN, THROUGHPUT].verdict.kind == "no verdict"
    assert effects["precision", WITHIN, MEMORY].verdict.kind == "no verdict"
    assert effects["precision", INTERACTION, MEMORY].verdict.kind == "no verdict"
    assert effects["precision", ALONE, MEMORY].verdict.kind == "gain"
    verdict = effects["precision", WITHIN, THROUGHPUT].verdict
    assert verdict.code == "arm.failed"
    assert "without_precision failed in 1 of 8 runs" in verdict.sentence
    assert effects["precision", INTERACTION, THROUGHPUT].verdict.kind == "no verdict"
    assert effects["precision", INTERACTION, THROUGHPUT].ratio.n == 7
    assert effects["precision", ALONE, THROUGHPUT].verdict.kind == "gain"
    effects = found(evidence(speed()), precision={ALONE: "cannot stand alone: it needs another"})
    assert ("precision", ALONE, THROUGHPUT) not in effects
    assert ("precision", INTERACTION, THROUGHPUT) not in effects
    assert ("precision", WITHIN, THROUGHPUT) in effects
    assert ("", INTERACTION, THROUGHPUT) not in effects
    races = dict(evidence(speed(), seeds=3).races)
    races[1] = {name: run for name, run in races[1].items() if name != "with_precision"}
    assert len(products(races, [(PLAN, UNCHANGED, 1), ("with_precision", UNCHANGED, -1)])) == 2


def test_peaks_are_compared_as_counted_and_multiply_where_changes_act_apart():
    design = AblationDesign(("precision", "recompute"))
    peaks = {UNCHANGED: 1000, "with_precision": 600, "with_recompute": 500, PLAN: 300}
    effects = found(evidence(speed(), design=design, peaks=peaks))
    assert effects["precision", ALONE, MEMORY].ratio.mean == pytest.approx(0.6)
    assert effects["precision", WITHIN, MEMORY].ratio.mean == pytest.approx(0.6)
    assert effects["precision", ALONE, MEMORY].verdict.kind == "gain"
    assert effects["precision", INTERACTION, MEMORY].verdict.kind == "none found"
    both = found(evidence(speed(), design=design, peaks=peaks | {PLAN: 450}))
    assert both["precision", INTERACTION, MEMORY].ratio.mean == pytest.approx(1.5)
    assert both["precision", INTERACTION, MEMORY].verdict.kind == "less together"
    assert both["precision", WITHIN, MEMORY].ratio.counted


def test_quality_is_paired_by_seed_after_the_same_rows():
    design = AblationDesign(("precision", "learning_rate_scale"))
    ends = {UNCHANGED: 0.5, "with_precision": 0.5, "with_learning_rate_scale": 0.7, PLAN: 0.7}
    races = {
        seed: {name: climbing((1.0, 2.0), (0.1, end + 0.001 * seed)) for name, end in ends.items()} for seed in range(5)
    }
    measured = AblationMeasurements(design, races, {}, {name: name for name in ends}, "accuracy", True, "share")
    rate = AblatedChange("learning_rate_scale", "learning rate scale 3", "tuned")
    (alone,) = [e for e in measured.effects(rate) if (e.setting, e.metric) == (ALONE, QUALITY)]
    assert (alone.ratio.mean, alone.verdict.kind) == (pytest.approx(20.0), "gain")
    (kept,) = [
        e for e in measured.effects(AblatedChange("precision", "precision bf16", "equivalent")) if e.metric == QUALITY
    ][:1]
    assert (kept.ratio.mean, kept.verdict.kind) == (pytest.approx(0.0), "no gain")
    # A cap stops the slower arm early: where the other ended it had trained on more.
    names = (UNCHANGED, "with_precision", "with_learning_rate_scale", PLAN)
    races = {}
    for seed in range(5):
        whole = {name: climbing((1.0, 2.0), (0.1, 0.9 + 0.001 * seed)) for name in names}
        late = climbing((2.0,), (0.2 + 0.001 * seed,))
        races[seed] = whole | {"with_learning_rate_scale": replace(late, end=End("cap", {}))}
    measured = AblationMeasurements(design, races, {}, {name: name for name in names}, "accuracy", True, "share")
    (alone,) = [e for e in measured.effects(rate) if (e.setting, e.metric) == (ALONE, QUALITY)]
    assert alone.ratio.mean == pytest.approx(10.2)  # 0.202 for 0.1, each after its first evaluation


def test_quality_is_told_after_nearly_the_same_rows_where_windows_end_beyond_them():
    def run(at: Sequence[int], level: float) -> RunRecord:
        return record(blocks=[(max(at), 1.0)], evaluations=[(rows, 1.0, level * rows) for rows in at])

    races = {
        seed: {"theirs": run((400, 500, 600, 960), 0.001), "ours": run((440, 505, 650, 970), 0.0011)}
        for seed in range(5)
    }
    row = quality_row(races, "ours", "theirs", "tuned", "accuracy", True, "share", at_equal_samples=True)
    assert row.ratio.mean == pytest.approx(100 * (0.0011 * 970 - 0.001 * 960))
    unlike = {seed: race | {"ours": run((440, 550), 0.0011)} for seed, race in races.items()}
    assert quality_row(unlike, "ours", "theirs", "tuned", "accuracy", True, "share", at_equal_samples=True) is None


def ended(ends: Mapping[str, float], *, seeds: int = 5, noise: float = 0.002, brief: frozenset[str] = frozenset()):
    """Return the effects of a schedule and a rate whose arms end at so much accuracy, but for a seed's own level."""
    design, draw = AblationDesign(("schedule", "learning_rate_scale")), random.Random(3)
    arms = [REFERENCE, *design.arms, *design.controls]
    races = {}
    for seed in range(seeds):
        level = draw.uniform(-0.05, 0.05)
        ends_at = {name: ends.get(design.controls.get(name, name), 0.3) + level + draw.gauss(0, noise) for name in arms}
        races[seed] = {name: climbing([1.0, 2.0], [0.1, end]) for name, end in ends_at.items() if name not in brief}
        races[seed] |= {name: timed(1.0) for name in brief}
    measured = AblationMeasurements(design, races, {}, {name: name for name in arms}, "accuracy", True, "share")
    return design, measured, found(measured, plan_kind="tuned")


def test_what_changes_do_for_quality_together_and_apart_differs():
    """A schedule that costs four points alone and brings five beside the rate, as one that ends low does."""
    ends = {"with_schedule": 0.26, "with_learning_rate_scale": 0.41, PLAN: 0.46}
    design, measured, effects = ended(ends)
    for name in design.changes:
        effect = effects[name, INTERACTION, QUALITY]
        assert effect.verdict.kind == "more together"
        assert effect.ratio.mean == pytest.approx(9.0, abs=0.5)
        assert effect.ratio.low < 9.0 < effect.ratio.high
        alone, within = (effects[name, setting, QUALITY].ratio for setting in (ALONE, WITHIN))
        assert effect.ratio.pairs == pytest.approx([b - a for a, b in zip(alone.pairs, within.pairs, strict=True)])
    each = changes(design)
    sentence = headline(
        each, tuple(effects.values()), (*measured.whole("tuned"),), measured.interaction_control
    ).sentence
    more = r"More improvement .* by schedule and learning rate scale together: \+[89]\.\d\d points \(95% "
    assert re.search(more, sentence)
    assert sentence.count("improvement") == 1


@pytest.mark.parametrize(("higher_is_better", "sign"), [(True, 1), (False, -1)])
def test_in_percent_an_interaction_is_one_of_both_changes(higher_is_better, sign):
    """Half of the loop's metric alone, a third beside the other: by a ratio of 1.5, whichever is looked at first."""
    ends = {UNCHANGED: 0.6, "with_schedule": 0.3, "with_learning_rate_scale": 0.9, PLAN: 0.3}
    design, measured, _ = ended(ends, noise=0.0)
    relative = replace(measured, unit="relative", higher_is_better=higher_is_better)
    effects = found(relative, plan_kind="tuned")
    both = [effects[name, INTERACTION, QUALITY].ratio for name in design.changes]
    assert both[0].pairs == pytest.approx(both[1].pairs)
    assert both[0].mean == pytest.approx(sign * 100 * ((0.3 / 0.9) / (0.3 / 0.6) - 1), rel=0.2)
    assert both[0].low < both[0].mean < both[0].high


@pytest.mark.parametrize(
    ("ends", "seeds", "noise", "kind"),
    [
        ({"with_schedule": 0.34, "with_learning_rate_scale": 0.41, PLAN: 0.45}, 5, 0.0005, "none found"),
        ({"with_schedule": 0.34, "with_learning_rate_scale": 0.41, PLAN: 0.40}, 5, 0.002, "less together"),
        ({"with_schedule": 0.26, "with_learning_rate_scale": 0.41, PLAN: 0.46}, 4, 0.002, "no verdict"),
        ({"with_schedule": 0.34, "with_learning_rate_scale": 0.41, PLAN: 0.45}, 5, 0.03, "no verdict"),
    ],
)
def test_an_interaction_of_quality_is_told_where_it_is_clear(ends, seeds, noise, kind):
    _, _, effects = ended(ends, seeds=seeds, noise=noise)
    assert effects["schedule", INTERACTION, QUALITY].verdict.kind == kind


def test_interactions_of_quality_where_arms_ended_early_or_failed():
    # All learn alike; the loop with a schedule was slow, and ended after half of the rows.
    _, measured, _ = ended({}, noise=0.0)
    races = {seed: dict(race) for seed, race in measured.races.items()}
    for race in races.values():
        for name in race:
            race[name] = climbing([1.0, 2.0], [0.2, 0.4])
        race["with_schedule"] = climbing([1.0], [0.2])
    effects = found(replace(measured, races=races), plan_kind="equivalent")
    interaction = effects["learning_rate_scale", INTERACTION, QUALITY]
    assert (interaction.ratio.mean, interaction.verdict.kind) == (pytest.approx(0.0), "none found")
    _, measured, clear = ended({}, seeds=6, noise=0.0005)
    assert clear["schedule", INTERACTION, QUALITY].verdict.kind == "none found"
    for broken in (climbing([1.0, 2.0], [0.1, math.nan]), record(end="diverged")):
        races = {seed: dict(race) for seed, race in measured.races.items()}
        races[2]["with_schedule"] = broken
        effects = found(replace(measured, races=races), plan_kind="tuned")
        assert effects["schedule", INTERACTION, QUALITY].verdict.kind == "no verdict"
    _, _, effects = ended({}, brief=frozenset({"with_schedule"}))
    assert ("schedule", INTERACTION, QUALITY) not in effects
    assert ("schedule", INTERACTION, THROUGHPUT) in effects
    ends = {"with_schedule": 0.34, "with_learning_rate_scale": 0.41, PLAN: 0.45}
    design, measured, effects = ended(ends, noise=0.03)
    each = changes(design)
    verdict = headline(each, tuple(effects.values()), (*measured.whole("tuned"),), measured.interaction_control)
    assert "undecided" in verdict.sentence


def said(measured: AblationMeasurements, **refusals: Mapping[str, str]):
    each = changes(measured.design, **refusals)
    effects = tuple(found(measured, **refusals).values())
    return headline(each, effects, tuple(measured.whole("equivalent")), measured.interaction_control)


def test_the_headline_says_what_the_plan_the_dearest_change_and_their_interaction_are_worth():
    verdict = said(evidence(speed((frozenset({"precision", "recompute"}), 0.1))))
    assert verdict.kind == "gain"
    assert re.search(r"3 changes together: 1\.(19|20)x \(95% ", verdict.sentence)
    assert "Most of the gain is from precision: 1.6" in verdict.sentence
    assert "The plan is faster without micro batch and without recompute." in verdict.sentence
    assert re.search(
        r"more throughput gain in the plan than alone: precision by 1\.\d\dx .*, recompute by 1", verdict.sentence
    )
    assert "micro batch by" not in verdict.sentence
    sentence = said(evidence(lambda held: math.log(1.1) * len(held))).sentence
    assert re.search(r"The largest gain in the plan is from \w.*: 1\.", sentence)
    assert "Most of the gain" not in sentence
    sentence = said(evidence(speed())).sentence
    assert re.search(
        r"No change has a significantly different .* than alone; the A/A control resolves \d.*%",
        sentence,
    )
    assert headline((), (), ()) == NOTHING
    assert NOTHING.kind == "no gain"
    assert AblationDesign(()).controls == {}


@pytest.mark.parametrize(
    ("end", "factor", "kind", "code", "says"),
    [
        (0.46, 1.0, "gain", "quality.higher", r"no significant gain .*: \+1[56]\.\d\d points \(95% "),
        (0.46, 1.5, "no verdict", "speed.contradicts_quality", r"slower, .*: \+1[56]\.\d\d points"),
        (0.20, 1.0, "harm", "quality.lower", r": -1?\d\.\d\d points"),
        (0.20, 0.5, "no verdict", "speed.contradicts_quality", r"2\.00x .* of the reference\. .*: -1?\d\.\d\d points"),
        (0.30, 1.0, "no gain", "speed.not_significant", r"equal within the limit: [+-]0\.\d"),
    ],
)
def test_of_a_plan_that_changes_the_training_the_headline_tells_what_it_ends_with(end, factor, kind, code, says):
    """As many rows a second, and half the loss: "no gain" would be all that is read of it."""
    design, measured, _ = ended({PLAN: end}, noise=0.0005)
    draw = random.Random(5)
    for race in measured.races.values():
        theirs = race[REFERENCE].evaluations[-1].metrics["accuracy"]
        seconds = [t * factor * draw.uniform(0.999, 1.001) for t in (1.0, 2.0)]
        race[PLAN] = climbing(seconds, [0.1, theirs + end - 0.30])
    effects = tuple(found(measured, plan_kind="tuned").values())
    verdict = headline(changes(design), effects, tuple(measured.whole("tuned")), measured.interaction_control)
    assert (verdict.kind, verdict.code) == (kind, code)
    assert re.search(says, verdict.sentence)
