"""`trimtab phases`: what was recorded is shown as it is, and what only measuring can do is refused with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from measured_runs import gain
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.serialization import to_json
from trimtab.experiments.phase_result import PhaseResult
from trimtab.experiments.phases_command import PhasesRequest, phases_of
from trimtab.plans.plan import Plan

PAGE = PhaseResult((gain(),), ((),))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Work in a folder with laps that were recorded, and a plan."""
    (tmp_path / "found.json").write_text(to_json(PAGE))
    (tmp_path / "plan.json").write_text(to_json(Plan.fixed(32)))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("memory", "1GiB"), ("plan", Path("plan.json")), ("rounds", 3), ("ranks", 2)]
)
def test_what_is_asked_of_measuring_is_refused_where_nothing_is_measured(name, value):
    with raises(ValueGivenError, code="option.conflict", field=f"--{name}"):
        phases_of(PhasesRequest(("found.json",), **{name: value}))


def test_what_was_recorded_is_shown_as_it_is():
    assert phases_of(PhasesRequest(("found.json",))) == PAGE
