"""Whole messages of the integrations."""

from __future__ import annotations

import pytest

from trimtab.carbon.services import ElectricityMaps, source_named
from trimtab.core.errors import DataMissingError, ValueGivenError
from trimtab.integrations.trainer_rules import checked_plan
from trimtab.plans.plan import Plan


def test_a_plan_with_a_setting_of_the_trainer():
    with pytest.raises(ValueGivenError) as caught:
        checked_plan(Plan.fixed(8, schedule="warmup_cosine"), "TrainingArguments")
    assert str(caught.value) == (
        "The plan sets schedule to 'warmup_cosine', but TrainingArguments decides this setting. Make a plan without "
        "adapt, and configure the setting in TrainingArguments."
    )


def test_a_service_without_its_token(monkeypatch):
    monkeypatch.delenv("ELECTRICITYMAPS_TOKEN", raising=False)
    with pytest.raises(DataMissingError) as caught:
        ElectricityMaps("DE").forecast(0.0)
    assert str(caught.value) == (
        "The environment variable ELECTRICITYMAPS_TOKEN is not set. Use a CSV file or a constant as the source, or "
        "start without a forecast."
    )


def test_a_kind_that_a_service_does_not_have():
    with pytest.raises(ValueGivenError) as caught:
        source_named("great-britain", "marginal")
    assert str(caught.value) == (
        "Great Britain (NESO) forecasts average intensity, not marginal. Pass average, or leave the kind out."
    )
