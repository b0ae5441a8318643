"""The file of a kept run's record: a run that begins writes over its own alone, and a refused one over none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import FormatError, ModelError, SaveError
from trimtab.core.record import Header, RecordWriter, StepRecord, read_record
from trimtab.core.serialization import to_jsonable

BATCHES = list(torch.arange(48.0).reshape(12, 4).split(4))
PLAN = trimtab.Plan.fixed(4)
OWN = Header("it", 0, to_jsonable(PLAN))
OTHERS = {
    "another name": replace(OWN, name="another"),
    "another seed": replace(OWN, seed=1),
}
PLANS = {
    "another plan": to_jsonable(trimtab.Plan.fixed(4, micro_batch=2)),
    "another batch": to_jsonable(trimtab.Plan.fixed(8)),
    "no plan": None,
}
TEXTS = {"notes": b"what I learned\nis here\n", "a line of notes": b"what I learned", "JSON": b'{"kind": "mine"}\n'}


def written(path, header: Header) -> bytes:
    with RecordWriter(path, header) as record:
        record.write(StepRecord(0, 4, 4.0, 1.5, 0.1, 0.1))
    return path.read_bytes()


def start(writer, folder=None, width: int = 4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keep = None if folder is None else trimtab.Checkpoints(folder, every_steps=1, every_s=None)
    return trimtab.start(model, optimizer, PLAN, record=writer, checkpoints=keep, nonfinite="continue")


def train(writer, folder, windows: int) -> None:
    with start(writer, folder) as run:
        while run.num_windows < windows:
            for window in run.windows(BATCHES):
                run.train_step(window, lambda model, batch: model(batch).square().mean())
                if run.num_windows >= windows:
                    break


@pytest.fixture(params=[*OTHERS, *TEXTS])
def foreign(request, tmp_path):
    """Return a file that is not this run's, and what is in it."""
    path = tmp_path / "r.jsonl"
    if request.param in OTHERS:
        return path, written(path, OTHERS[request.param])
    path.write_bytes(TEXTS[request.param])
    return path, TEXTS[request.param]


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
def test_a_run_that_begins_is_refused_a_file_that_is_not_its_own(foreign, tmp_path, is_kept):
    path, before = foreign
    with RecordWriter(path, OWN, continues=True) as writer, raises(FormatError, code="record.other_run"):
        start(writer, tmp_path / "run" if is_kept else None)
    assert path.read_bytes() == before


def test_who_writes_by_hand_is_refused_too(foreign):
    path, before = foreign
    writer = RecordWriter(path, OWN, continues=True)
    for write in (lambda: writer.write(StepRecord(0, 4, 4.0, 1.5, 0.1, 0.1)), writer.end):
        with raises(FormatError, code="record.other_run"):
            write()
    writer.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("left", ["nothing", "an empty file", "a whole record", "half a header"])
def test_a_run_that_was_cut_off_before_its_first_checkpoint_begins_its_record_anew(tmp_path, left):
    path = tmp_path / "r.jsonl"
    if left != "nothing":
        # Of one and the same plan, what planning measured differs each time.
        measured = replace(OWN, plan=to_jsonable(replace(PLAN, planning_s=12.5)))
        whole = written(path, measured if left == "a whole record" else OWN)
        path.write_bytes({"an empty file": b"", "a whole record": whole, "half a header": whole[:60]}[left])
    with RecordWriter(path, OWN, continues=True) as writer:
        train(writer, tmp_path / "run", 3)
    found = read_record(path)
    assert (found.header.name, found.header.seed) == ("it", 0)
    assert [step.index for step in found.steps] == [0, 1, 2]
    assert {step.loss for step in found.steps} != {1.5}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_record_of_its_own_by_another_plan_stays_beside_the_one_that_is_begun(tmp_path, plan):
    """A run that is started again without anybody there is planned anew: it begins, and nothing is lost."""
    path = tmp_path / "r.jsonl"
    (tmp_path / "r.jsonl.1").write_text("somebody's")
    before = written(path, replace(OWN, plan=plan))
    with RecordWriter(path, OWN, continues=True) as writer:
        with pytest.warns(UserWarning, match=r"r\.jsonl.*another plan.*r\.jsonl\.2"):
            train(writer, tmp_path / "run", 3)
        train(writer, tmp_path / "run", 6)
    assert (tmp_path / "r.jsonl.1").read_text() == "somebody's"
    assert (tmp_path / "r.jsonl.2").read_bytes() == before
    assert [step.index for step in read_record(path).steps] == [*range(6)]


def test_a_resume_that_is_refused_leaves_the_record_as_it_is(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordWriter(path, OWN, continues=True) as writer:
        train(writer, tmp_path / "run", 3)
    before = path.read_bytes()
    with RecordWriter(path, OWN, continues=True) as writer, pytest.raises(ModelError):
        start(writer, tmp_path / "run", width=5)
    assert path.read_bytes() == before


def test_a_run_saved_without_a_record_is_refused_anothers_where_it_goes_on(foreign, tmp_path):
    path, before = foreign
    train(None, tmp_path / "run", 2)
    with RecordWriter(path, OWN, continues=True) as writer, raises(FormatError, code="record.other_run"):
        start(writer, tmp_path / "run")
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", OTHERS)
def test_a_resume_cuts_no_other_runs_record(tmp_path, name):
    """Not even one in which a line happens to end where this run's own stood at the checkpoint."""
    path = tmp_path / "r.jsonl"
    with RecordWriter(path, OWN, continues=True) as writer:
        train(writer, tmp_path / "run", 3)
    size = path.stat().st_size
    head = written(tmp_path / "other.jsonl", OTHERS[name])
    before = head + b" " * (size - len(head) - 1) + b"\n" + head * 2
    assert before[size - 1 : size] == b"\n"
    path.write_bytes(before)
    with RecordWriter(path, OWN, continues=True) as writer, raises(FormatError, code="record.other_run"):
        start(writer, tmp_path / "run")
    assert path.read_bytes() == before


@pytest.mark.parametrize("call", ["rename", "replace"])
def test_a_record_that_cannot_be_set_aside_stays(tmp_path, monkeypatch, call):
    path = tmp_path / "r.jsonl"
    before = written(path, replace(OWN, plan=None))

    def full(*_):
        raise OSError(28, "No space left on device")

    with RecordWriter(path, OWN, continues=True) as writer:
        monkeypatch.setattr(f"trimtab.core.files.os.{call}", full)
        with pytest.raises(SaveError):
            writer.end()
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["r.jsonl"]
        with pytest.warns(UserWarning, match="another plan"):
            writer.end()
    assert read_record(path).header == OWN
    assert (tmp_path / "r.jsonl.1").read_bytes() == before
