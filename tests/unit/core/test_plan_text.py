"""The screen of `print(plan)`: at most 20 lines of the terminal's width, with the figures that a user asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.core.choice import MeasuredCost, Note, Proof, Rejected
from trimtab.plans.plan import Plan
from trimtab.plans.plan_text import MOST_LINES, headline, screen
from trimtab.settings import SETTINGS

VALUES = {
    "precision": "bf16", "memory_layout": "channels_last", "allocator": "retain", "fused_optimizer": True,
    "loss_chunk": 256, "recompute": "every_block", "compiled": True, "dropout": 0.1, "clip_norm": 1.0,
}  # fmt: skip
GIB = 2**30


def measured(*names: str, memory: int = GIB, reason: str = "1.5x the speed (95% 1.4 to 1.6, n=6) of fp32") -> Plan:
    """Return a plan with measured costs that changes some settings."""
    plan = Plan.fixed(32, **{name: VALUES[name] for name in names})
    told = {name: replace(getattr(plan, name), reason=reason) for name in names}
    return plan.having(
        **told,
        baseline=MeasuredCost(0.2, 2 * GIB),
        measured=MeasuredCost(0.1, memory),
        verified=(1.8, 2.2),
        planning_s=26.0,
        proof=Proof(True, "agrees", "proof.holds", names, ("fp32",), 87, 0.1),
    )


def test_the_headline_has_speed_memory_and_numerics():
    assert headline(measured("precision")) == "1.99x faster, 50 % less memory, same results up to rounding"
    assert headline(measured("allocator")) == "1.99x faster, 50 % less memory, bitwise the same results"
    assert "50 % more memory" in headline(measured("precision", memory=3 * GIB))
    assert "memory" not in headline(measured("precision", memory=2 * GIB))
    assert "changes the training (dropout)" in headline(measured("precision", "dropout"))


def test_an_uncertain_speed_is_marked():
    assert "(not significant)" in headline(measured("precision").having(verified=(0.9, 1.2)))
    predicted = measured("precision").having(measured=None, verified=None, predicted=MeasuredCost(0.05, GIB))
    assert "4x faster (predicted, not run)" in headline(predicted)
    assert "neither measured nor proved" in headline(Plan.fixed(32, precision="bf16"))
    assert headline(Plan.fixed(32)).startswith("No change")


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("names", [("precision",), tuple(VALUES)], ids=("one change", "all changes"))
def test_a_plan_fits_on_a_screen(columns, names):
    plan = measured(*names, reason="a reason of many words, " * 20)
    plan = plan.having(advice=(Note("data.waiting", "advice of many words, " * 20),) * 3)
    lines = screen(plan, columns).splitlines()
    assert len(lines) <= MOST_LINES
    assert all(len(line) <= columns for line in lines)


@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_the_screen_has_two_recommendations_and_the_number_of_others(number):
    advice = tuple(Note("data.waiting", f"recommendation {index}") for index in range(number))
    plan = measured(*VALUES, reason="a reason of many words, " * 20).having(advice=advice)
    lines = screen(plan, 80).splitlines()
    assert [line for line in lines if line.startswith("advice: ")] == [
        f"advice: recommendation {index}" for index in range(min(2, number))
    ]
    assert any("2 more" in line for line in lines) is (number == 4)
    assert len(lines) <= MOST_LINES


def test_the_screen_has_changes_with_reasons_and_what_stays():
    text = screen(measured("precision", "fused_optimizer"), 80)
    assert "bf16: 1.5x the speed of fp32" in text  # without the interval
    assert "fused optimizer: " in text
    assert "left alone: micro-batch, memory format" in text
    assert "87 tensors" in text
    assert "pays back after 260 steps" in text


def test_a_setting_that_failed_its_proof_is_named():
    plan = measured("precision")
    layout = replace(plan.memory_layout, rejected=(Rejected("channels_last", "differs", "proof.differs"),))
    assert "memory format (not proved)" in screen(plan.having(memory_layout=layout), 80)


def test_every_setting_has_a_title_and_words_for_a_change():
    for setting in SETTINGS.values():
        assert setting.title
        assert "_" not in setting.title_of(setting.examples[0])


def test_details_are_in_the_explanation():
    plan = measured("precision")
    assert "(95% 1.4 to 1.6, n=6)" in plan.explain()
    assert "weight decay" in plan.explain()
    assert "weight decay" not in str(plan)
