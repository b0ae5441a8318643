"""A record read line by line: the figures of the whole, in a fraction of its memory."""

from __future__ import annotations

import math
import tracemalloc

import pytest

from trimtab.core import record as record_module
from trimtab.core.errors import FormatError
from trimtab.core.record import (
    End,
    Evaluation,
    Event,
    Header,
    RecordWriter,
    StepRecord,
    read_lines,
    read_record,
    read_summary,
    summary_of,
)
from trimtab.experiments.comparison.comparison_statistics import trained


def written(path, steps: int = 5):
    with RecordWriter(path, Header("it", 3)) as writer:
        for index in range(steps):
            noise = 2.0 if index == 1 else None
            writer.write(StepRecord(index, 4, 4.0, 1.0 / (1 + index), 0.1, 0.5, index != 2, noise_scale=noise))
        writer.write(Evaluation(8, 1.0, {"accuracy": 0.25}))
        writer.write(Evaluation(20, 2.5, {"accuracy": 0.5}))
        writer.write(Event("it", 1, {"a": 1}))
        writer.write(End("closed"))
    return path


def test_it_is_what_the_whole_record_has(tmp_path):
    path = written(tmp_path / "r.jsonl")
    whole, found = read_record(path), read_summary(path)
    assert found == summary_of(whole) or math.isnan(found.steps.noise_scale[0])  # NaN is not equal to itself
    assert (found.header, found.end, tuple(found.events)) == (whole.header, whole.end, whole.events)
    assert list(found.steps.loss) == [step.loss for step in whole.steps]
    assert (len(found.steps), found.steps.num_skipped) == (5, 1)
    assert [math.isnan(each) for each in found.steps.noise_scale] == [True, False, True, True, True]
    assert found.last_evaluation == whole.evaluations[-1]
    assert trained(found) == (20, 2.5)
    assert found.steps.trained(3) == (8, 1.0)


@pytest.mark.parametrize("read", [read_record, read_summary])
@pytest.mark.parametrize(
    ("content", "is_refused"),
    [
        (b"", True),
        (b'{"kind": "header", "name": "it"', True),
        (b'{"kind": "header", "name": "it"}\n', False),
        (b'{"kind": "header", "name": "it"}\n{"kind": "st', False),
        (b'{"kind": "header", "name": "it"}\n{"kind": "st\n', True),
        (b'{"kind": "header", "name": "it"}\n{"kind": "header", "name": "it"}\n', True),
        (b'{"kind": "event", "name": "it", "step": 0}\n', True),
    ],
)
def test_a_torn_last_line_is_left_out_and_other_damage_is_refused(tmp_path, read, content, is_refused):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    if is_refused:
        with pytest.raises(FormatError):
            read(path)
    else:
        assert read(path).header.name == "it"


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(record_module, "LINE_BYTES", 100)
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"kind": "header", "name": "it"}\n' + b"x" * 200)
    with pytest.raises(FormatError) as raised:
        list(read_lines(path))
    assert raised.value.code == "file.too_large"


@pytest.mark.parametrize("change", [{"rows": -1}, {"index": 2**80}, {"wall_s": -0.5}, {"num_micro_batches": -2}])
def test_counts_that_no_run_has_are_refused(tmp_path, change):
    line = {"kind": "step", "index": 0, "rows": 4, "terms": 4, "loss": 1, "learning_rate": 1, "wall_s": 1} | change
    path = tmp_path / "r.jsonl"
    path.write_text('{"kind": "header", "name": "it"}\n' + str(line).replace("'", '"') + "\n")
    with pytest.raises(FormatError, match=":2"):
        read_record(path)


def test_it_takes_less_memory_than_its_file(tmp_path):
    path = written(tmp_path / "r.jsonl", 3000)
    tracemalloc.start()
    try:
        read_summary(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size
