"""The page of one run: its tracks, what happened on the way, and nothing that runs."""

from __future__ import annotations

import math
import re

import pytest
import race_records

from trimtab.core.record import End, Event, Header, RunRecord, StepRecord, summary_of
from trimtab.core.stopping_rule import StopReason
from trimtab.experiments.report.run_page import run_page, tracks


def steps(n, k=lambda i: 1, noise=lambda i: None, applied=lambda i: True):
    return tuple(
        StepRecord(i, 8 * k(i), 8.0 * k(i), 2.0 / (i + 1), 0.1, 0.05, applied(i), None, None, k(i), noise(i))
        for i in range(n)
    )


def columns(steps):
    return summary_of(RunRecord(Header("it"), steps)).steps


def test_the_tracks_that_say_something_are_drawn():
    assert [track.name for track in tracks(columns(steps(10)))] == ["loss", "rate"]
    adaptive = steps(10, k=lambda i: 1 + i // 5, noise=lambda i: None if i < 3 else 40.0 + i)
    found = {track.name: track for track in tracks(columns(adaptive))}
    assert list(found) == ["loss", "k", "noise", "rate"]
    assert list(found["k"].values) == [1] * 5 + [2] * 5
    assert math.isnan(found["noise"].values[0])
    assert found["noise"].values[-1] == 49.0


def test_the_page_shows_course_and_events():
    events = (Event("k", 5, {"from": 1, "to": 2, "reason": "k* = 2.3", "trace": 640.123456}),)
    record = RunRecord(Header("a run"), steps(12, k=lambda i: 1 + (i > 5)), (), events, End("target"))
    page = run_page(record)
    assert page.count("<svg") == 3
    for text in ("a run: stopped at its target", "12 steps with 144 samples", "0 skipped", "k* = 2.3", "trace 640.1"):
        assert text in page, text
    page = run_page(race_records.record(blocks=[(10, 1.0), (20, 2.5)], name="equivalent_plan"))
    assert "2 blocks with 30 samples in 3.5 s, 0 skipped" in page
    page = run_page(RunRecord(Header("a run"), steps(1), (), (Event("k", 1, {"to": 2}),), End("closed")))
    assert re.findall(r'<td[^>]*data-label="([^"]*)"', page) == ["after step", "event", "details"]
    record = RunRecord(Header("a run"), steps(9, applied=lambda i: i % 3 > 0))
    page = run_page(record)
    assert "3 skipped" in page
    assert "the record has no end" in page
    assert "No events were recorded." in page


@pytest.mark.parametrize("n", [0, 1])
def test_a_run_of_hardly_any_window_has_a_page(n):
    assert "Too few steps for a figure." in run_page(RunRecord(Header("short"), steps(n), (), (), End("closed")))


def test_the_page_is_small_and_names_are_escaped():
    record = RunRecord(Header("long"), steps(50_000, noise=lambda i: math.inf if i % 2 else 3.0))
    page = run_page(record)
    assert len(page.encode()) < 500_000
    evil = "<script>alert(1)</script>"
    record = RunRecord(Header(evil), steps(5), (), (Event(evil, 2, {evil: evil}),), End("x"))
    page = run_page(record)
    assert "<script" not in page
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.parametrize("reason", ["closed", "error", *StopReason])
def test_each_way_that_a_run_ends_has_its_words(reason):
    page = run_page(RunRecord(Header("a run"), steps(4), end=End(reason)))
    assert f"a run: {reason}<" not in page
