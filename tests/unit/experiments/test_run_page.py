"""The page of a run's record: curves that tell something, events, and strings from outside as text."""

from __future__ import annotations

from trimtab.core.record import End, Event, Header, RunRecord, StepRecord, summary_of
from trimtab.experiments.pages import figures_of, run_page


def record(steps=20, **changes):
    rows = tuple(StepRecord(number, 8, 8.0, 2.0 - 0.05 * number, 0.1, 0.1, **changes) for number in range(steps))
    events = (Event("batch_rule", 5, {"k": 2, "share": 0.5}), Event("<script>", 6, {"text": "<b>bold</b>"}))
    return RunRecord(Header("<i>task</i>", 0, None, {}, {}), rows, (), events, End("closed", {}))


def test_a_page_has_curves_and_events_and_escapes_them():
    page = run_page(record())
    assert page.count("<polyline") == 2
    assert "completed" in page
    for raw in ("<script>", "<b>bold", "<i>task", "http"):
        assert raw not in page
    assert "batch_rule" in page


def test_a_record_without_steps_or_end_has_a_page():
    empty = RunRecord(Header("task", 0, None, {}, {}), (), (), (), None)
    page = run_page(empty)
    assert "Too few steps" in page
    assert "no end" in page
    assert "No events" in page


def test_figures_are_those_that_vary():
    names = [figure.caption for figure in figures_of(summary_of(record()))]
    assert names == ["mean loss per term", "learning rate of the first parameter group"]
