"""The record of a run survives a crash while writing, and says so when it is damaged."""

from __future__ import annotations

import dataclasses
import errno
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core import record as record_module
from trimtab.core.errors import FormatError
from trimtab.core.record import (
    End,
    Evaluation,
    Event,
    Header,
    RecordWriter,
    RunRecord,
    StepRecord,
    read_record,
    read_summary,
    read_together,
    summary_of,
    write_record,
)

RECORD = RunRecord(
    Header("épreuve", 3, environment={"torch": "2.13"}),
    (StepRecord(0, 8, 8.0, 2.3, 0.1, 0.5), StepRecord(1, 8, 8.0, float("inf"), 0.1, 0.5, applied=False)),
    (Evaluation(16, 1.0, {"perplexity": 9.5}),),
    (Event("précision réduite", 1, {"why": "mémoire"}),),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "run.jsonl"
    write_record(path, RECORD)
    return path.read_bytes()


def read(folder, content: bytes) -> RunRecord:
    path = folder / "read.jsonl"
    path.write_bytes(content)
    try:
        whole = read_record(path)
    except FormatError:
        with pytest.raises(FormatError):
            read_summary(path)
        raise
    assert read_summary(path).header == whole.header
    return whole


def test_every_kind_of_line_has_a_line(written):
    kinds = [line.split(b'"')[3] for line in written.splitlines()]
    assert kinds == [b"header", b"step", b"step", b"evaluation", b"event"]


def test_a_torn_last_line_is_dropped_wherever_it_is_torn(tmp_path, written):
    last = written[:-1].rindex(b"\n") + 1
    shorter = dataclasses.replace(RECORD, events=())
    assert any(byte > 127 for byte in written[last:]), "the line should also be torn inside a character"
    for cut in range(last, len(written)):
        assert read(tmp_path, written[:cut]) == shorter
    assert read(tmp_path, written) == RECORD


def test_a_torn_header_is_no_record(tmp_path, written):
    header = written.index(b"\n")
    for content in (*(written[:cut] for cut in (0, 1, header // 2, header)), written[header + 1 :]):
        with raises(FormatError, code="record.no_header"):
            read(tmp_path, content)


@given(data=st.data())
def test_a_damaged_line_before_the_last_is_refused_by_its_number(tmp_path_factory, written, data):
    lines = written.splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    kept = data.draw(st.integers(0, len(lines[number]) - 1))
    lines[number] = lines[number][:kept]
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with raises(FormatError, code="record.damaged_line", field=f"{path}:{number + 1}"):
        read_record(path)


@pytest.mark.parametrize(
    ("line", "code", "place"),
    [
        (b"\xff\xfe", "record.damaged_line", ""),
        (b"[" * 100_000, "record.damaged_line", ""),
        (b'{"step": ' + b"1" * 5_000 + b"}", "record.damaged_line", ""),
        (b"[1]", "record.damaged_line", ""),
        (b'{"name": "x"}', "record.damaged_line", ""),
        (b'{"kind": "stop"}', "record.damaged_line", ""),
        (b'{"kind": ["step"]}', "record.damaged_line", ""),
        (b'{"kind": "event", "name": "x"}', "json.key", "Event.step"),
        (b'{"kind": "event", "name": "x", "step": 1, "y": 2}', "json.key", "Event.y"),
        (b'{"kind": "header", "name": "another"}', "record.second_header", ""),
    ],
    ids=lambda v: v[:24] if isinstance(v, bytes) else None,
)
def test_a_line_of_another_shape_is_refused(tmp_path, written, line, code, place):
    with raises(FormatError, code=code) as caught:
        read(tmp_path, written + line + b"\n")
    assert caught.value.field.endswith(place)
    assert caught.value.field in str(caught.value) or place in str(caught.value)


def test_lines_written_before_a_crash_are_kept(tmp_path):
    path = tmp_path / "run.jsonl"
    writer = RecordWriter(path, RECORD.header)
    writer.write(RECORD.steps[0])
    writer.flush()
    assert read_record(path) == RunRecord(RECORD.header, RECORD.steps[:1])
    with pytest.raises(TypeError, match="not JSON serializable"):
        writer.write(Event("a figure JSON cannot hold", 1, {"why": object()}))
    writer.close()
    writer.close()
    assert read_record(path) == RunRecord(RECORD.header, RECORD.steps[:1])


def test_an_existing_file_is_never_written_over(tmp_path):
    path = tmp_path / "run.jsonl"
    write_record(path, RECORD)
    with raises(FormatError, code="record.exists", field="record") as caught:
        write_record(path, RunRecord(Header("another")))
    assert "run.jsonl" in caught.value.got
    assert "continues=True" in caught.value.hint
    assert isinstance(caught.value, FileExistsError)  # for who tells it from other files that cannot be made
    assert caught.value.errno == errno.EEXIST
    assert read_record(path) == RECORD


def test_the_end_is_read_back_and_its_absence_too(tmp_path, written):
    ended = dataclasses.replace(RECORD, end=End("finished", {"rows": 16}))
    write_record(tmp_path / "ended.jsonl", ended)
    assert read_record(tmp_path / "ended.jsonl").end == ended.end
    assert read(tmp_path, written).end is None


def test_a_header_is_read_strictly(tmp_path, written):
    path = tmp_path / "read.jsonl"
    for content in (b"", written[:10], b"\n".join(written.split(b"\n")[1:])):
        path.write_bytes(content)
        with raises(FormatError, code="record.no_header"):
            read_record(path)
    path.write_bytes(written.replace(b'"schema": 3', b'"schema": 2', 1))
    with raises(FormatError, code="json.schema"):
        read_record(path)
    with raises(FormatError, code="file.unreadable"):
        read_record(tmp_path / "absent.jsonl")


def test_runs_that_are_read_as_one_tell_all_that_differs_between_them():
    first, second = {"torch": "2.13", "sources": "abc"}, {"torch": "2.13", "sources": "def"}
    assert read_together([first, second, first]) == {"torch": "2.13", "sources": "abc / def"}
    assert read_together([{"torch": "2.13"}, second]) == {"torch": "2.13", "sources": "unknown / def"}
    assert read_together([{"torch": "2.13"}, {}]) == {"torch": "2.13"}
    assert read_together([{}, {}]) == read_together([]) == {}


def steps_written(path, steps: int):
    with RecordWriter(path, Header("it", 3)) as writer:
        for index in range(steps):
            noise = 2.0 if index == 1 else None
            writer.write(StepRecord(index, 4, 4.0, 1.0 / (1 + index), 0.1, 0.5, index != 2, noise_scale=noise))
        writer.write(Evaluation(8, 1.0, {"accuracy": 0.25}))
        writer.write(Evaluation(20, 2.5, {"accuracy": 0.5}))
        writer.write(Event("it", 1, {"a": 1}))
        writer.write(End("closed"))
    return path


def test_a_summary_has_the_figures_of_the_whole_record(tmp_path):
    path = steps_written(tmp_path / "r.jsonl", 5)
    whole, found = read_record(path), read_summary(path)
    assert repr(found) == repr(summary_of(whole))
    assert (found.header, found.end, tuple(found.events)) == (whole.header, whole.end, whole.events)
    assert list(found.steps.loss) == [step.loss for step in whole.steps]
    assert (len(found.steps), found.steps.num_skipped) == (5, 1)
    assert [math.isnan(each) for each in found.steps.noise_scale] == [True, False, True, True, True]
    assert found.last_evaluation == whole.evaluations[-1]
    assert (found.steps.trained(), found.steps.trained(3)) == ((20, 2.5), (8, 1.0))


def test_a_summary_takes_less_memory_than_its_file(tmp_path):
    path = steps_written(tmp_path / "r.jsonl", 1000)
    tracemalloc.start()
    try:
        read_summary(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size
    finally:
        tracemalloc.stop()


def test_a_line_without_end_is_refused(tmp_path, written, monkeypatch):
    monkeypatch.setattr(record_module, "LINE_BYTES", 300)
    with raises(FormatError, code="file.too_large"):
        read(tmp_path, written + b"x" * 400)


@pytest.mark.parametrize("change", [{"samples": -1}, {"index": 2**80}, {"wall_s": -0.5}, {"num_micro_batches": -2}])
def test_impossible_counts_are_refused(tmp_path, change):
    line = {"kind": "step", "index": 0, "samples": 4, "terms": 4, "loss": 1, "learning_rate": 1, "wall_s": 1} | change
    with pytest.raises(FormatError, match=":2"):
        read(tmp_path, b'{"kind": "header", "name": "it"}\n' + str(line).replace("'", '"').encode() + b"\n")
