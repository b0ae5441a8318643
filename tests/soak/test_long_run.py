"""Ten thousand windows with a record, checkpoints and a freed batch: a process ends with what it held before."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from test_growth import held_over

WINDOWS = 10_000


def test_nothing_grows(tmp_path):
    held = held_over(tmp_path, WINDOWS)
    later = held[len(held) // 4 :]
    slope, _ = statistics.linear_regression([each["window"] for each in later], [each["resident"] for each in later])
    assert slope * WINDOWS < 2**20, f"{slope:.1f} bytes a window"
    assert {each["threads"] for each in later} == {later[0]["threads"]}
    assert {each["files"] for each in later} == {later[0]["files"]}
    assert {each["on_disk"] for each in later} == {later[0]["on_disk"]}
    for name, most in (("record", 1_000), ("decisions", 150)):
        bytes_a_window = [each[name] / each["window"] for each in later]
        assert max(bytes_a_window) < 1.1 * min(bytes_a_window) < most
