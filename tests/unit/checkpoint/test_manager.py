"""A run that is kept: gone on with, refused where its world is another, saved or told of where it could not be."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from saving import ended, forge, forked
from torch import nn
from torch.utils.data import DataLoader

import trimtab
from trimtab.checkpoint import atomic_directory, manager
from trimtab.checkpoint.atomic_directory import committed_folders, manifest_of, run_metadata
from trimtab.checkpoint.batch_size_log import BatchSizeLog
from trimtab.checkpoint.config import MUST_MATCH, class_of, device_of
from trimtab.checkpoint.manager import RankCommunication
from trimtab.checkpoint.run_lock import locked
from trimtab.checkpoint.state_files import StateFiles
from trimtab.core.errors import (
    DamagedError,
    FormatError,
    LoopError,
    ModelError,
    OptimizerError,
    SaveError,
    UsageError,
    ValueGivenError,
)
from trimtab.core.record import Header, read_record

pytestmark = pytest.mark.slow

ROWS = torch.arange(48.0).reshape(12, 4)
BATCHES = list(ROWS.split(4))


def loss_fn(model, batch):
    return model(batch).square().mean()


class Loop:
    """A user's loop of three windows a pass."""

    def __init__(self, folder, *, plan=None, width=4, **keep) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.plan = plan or trimtab.Plan.fixed(4)
        self.checkpoints = trimtab.Checkpoints(folder, **({"every_steps": 1, "every_s": None} | keep))

    def start(self, **options):
        return trimtab.start(self.model, self.optimizer, self.plan, checkpoints=self.checkpoints, **options)

    def train(self, windows: int, batches=BATCHES, loss=loss_fn, **options) -> list[float]:
        losses = []
        with self.start(**options) as run:
            while run.num_windows < windows:
                for window in run.windows(batches):
                    run.train_step(window, loss)
                    losses.append(float(run.loss))
                    if run.num_windows >= windows:
                        run.checkpoint()
                        break
        return losses

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.fixture
def saved(tmp_path):
    """Return a folder with a run after four windows."""
    Loop(tmp_path / "run").train(4)
    return tmp_path / "run"


def test_it_goes_on(saved, tmp_path):
    rest = Loop(saved).train(8)
    assert rest == Loop(tmp_path / "other").train(8)[4:]


@pytest.mark.parametrize("name", ["rows", "plan", "world", "in_shards", "accepted"])
@pytest.mark.parametrize("instead", ["left out", "as text"])
def test_what_says_what_no_run_does_is_put_aside_and_the_one_before_gone_on_from(saved, name, instead):
    def change(said):
        if instead == "left out":
            del said["about"][name]
        else:
            said["about"][name] = "12"

    forge(saved / "step-4", change)
    loop = Loop(saved)
    assert loop.checkpoints.saved_samples() == 12
    with pytest.raises(DamagedError) as damaged:
        run_metadata(saved / "step-4", manifest_of(saved / "step-4"))
    assert damaged.value.code in ("checkpoint.metadata_invalid", "checkpoint.manifest_invalid")
    assert damaged.value.field.endswith("step-4/manifest.json")
    with pytest.warns(UserWarning, match=r"step-4/manifest\.json.*step-3"), loop.start() as run:
        assert run.num_windows == 3


def test_the_last_two_are_kept(saved):
    assert [each.name for each in committed_folders(saved)] == ["step-4", "step-3"]
    assert (saved / "latest").read_text() == "step-4\n"


@pytest.mark.parametrize(
    ("changed", "code", "field", "got", "expected"),
    [
        (
            {"plan": trimtab.Plan.fixed(4, micro_batch=2)},
            *("resume.plan_differs", "resume: plan", "micro_batch=2", "micro_batch=4"),
        ),
        (
            {"plan": trimtab.Plan.fixed(4, precision="bf16")},
            *("resume.plan_differs", "resume: plan", "precision=bf16", "precision=fp32"),
        ),
        (
            {"width": 5},
            *("model.shapes_differ", "model: 0.weight", "float32 of shape (5, 4)", "float32 of shape (4, 4)"),
        ),
    ],
)
def test_another_run_is_refused_and_nothing_is_changed(saved, changed, code, field, got, expected):
    loop = Loop(saved, **changed)
    before = loop.weights()
    with raises(UsageError, code=code, field=field) as refused:
        loop.start()
    assert (refused.value.got, refused.value.expected) == (got, expected)
    assert all(map(torch.equal, before, loop.weights()))
    assert not loop.optimizer.state
    Loop(saved).train(6)  # nobody holds the folder


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_type_is_refused_and_nothing_is_changed(saved, dtype):
    loop = Loop(saved)
    loop.model.to(dtype)
    before = loop.weights()
    with raises(ModelError, code="model.shapes_differ", field="model: 0.weight"):
        loop.start()
    assert all(map(torch.equal, before, loop.weights()))


def test_another_optimizer_is_refused(saved):
    loop = Loop(saved)
    loop.optimizer = torch.optim.AdamW([{"params": [p]} for p in loop.model.parameters()], lr=0.01)
    before = loop.weights()
    with raises(OptimizerError, code="optimizer.groups_differ", field="optimizer"):
        loop.start()
    assert all(map(torch.equal, before, loop.weights()))


@pytest.mark.parametrize("other", [torch.optim.RAdam, torch.optim.SGD])
def test_an_optimizer_of_another_class_is_refused_and_nothing_is_changed(saved, other):
    """Its groups are as large, and it would train on by another's moments, or fail in its first step."""
    loop = Loop(saved)
    loop.optimizer = other(loop.model.parameters(), lr=0.01)
    before, options = loop.weights(), dict(loop.optimizer.param_groups[0])
    with raises(ValueGivenError, code="resume.optimizer_differs", field="resume: optimizer") as refused:
        loop.start()
    assert (refused.value.got, refused.value.expected) == (other.__name__, "AdamW")
    assert all(map(torch.equal, before, loop.weights()))
    assert not loop.optimizer.state
    assert loop.optimizer.param_groups[0] == options


def test_the_class_of_an_optimizer_is_that_of_what_a_wrapper_holds_too():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    adam, sgd = (kind(nn.Linear(1, 1).parameters(), lr=0.1) for kind in (torch.optim.Adam, torch.optim.SGD))
    assert class_of(adam) == "Adam"
    assert class_of(Wrapper(adam)).endswith("Wrapper of Adam")
    assert class_of(Wrapper(adam)) != class_of(Wrapper(sgd))


def test_another_number_of_threads_is_refused_or_accepted_and_recorded(saved, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with raises(ValueGivenError, code="resume.threads_differs", field="resume: threads"):
            Loop(saved).start()
        with trimtab.RecordWriter(tmp_path / "r.jsonl", Header("it"), continues=True) as record:
            Loop(saved, accepts=("threads",)).train(6, record=record)
    finally:
        torch.set_num_threads(threads)
    (event,) = (each for each in read_record(tmp_path / "r.jsonl").events if each.name == "resumed")
    assert event.detail["changed"] == {"threads": f"{threads} -> {threads + 1}"}
    assert event.detail["from"] == "step-4"


def test_other_data_are_refused_or_accepted_and_written_down(saved, tmp_path):
    with raises(FormatError, code="resume.data_differs", field="resume: data"):
        Loop(saved).train(6, batches=[*BATCHES, BATCHES[0]])
    with trimtab.RecordWriter(tmp_path / "r.jsonl", Header("it"), continues=True) as record:
        Loop(saved, accepts=("data",)).train(6, batches=[*BATCHES, BATCHES[0]], record=record)
    (event,) = (each for each in read_record(tmp_path / "r.jsonl").events if each.name == "resumed_data")
    assert event.detail["changed"] == {"data": "3 batches -> 4 batches"}
    assert manifest_of(committed_folders(saved)[0]).about["accepted"] == {"data": "3 batches -> 4 batches"}
    Loop(saved).train(7, batches=[*BATCHES, BATCHES[0]])
    assert manifest_of(committed_folders(saved)[0]).about["accepted"] == {"data": "3 batches -> 4 batches"}


def test_another_number_of_rows_is_refused_though_there_are_as_many_batches(tmp_path):
    def loader(rows):
        return DataLoader(torch.arange(4.0 * rows).reshape(rows, 4), batch_size=4, shuffle=True)

    Loop(tmp_path / "run").train(4, batches=loader(11))
    with raises(FormatError, code="resume.data_differs", field="resume: data"):
        Loop(tmp_path / "run").train(6, batches=loader(12))


@pytest.mark.parametrize("name", [name for name in MUST_MATCH if name != "ranks"])  # whose files it then is without
def test_each_change_of_the_world_is_refused_by_name_or_accepted_and_written_down(saved, name):
    folder = committed_folders(saved)[0]
    about = manifest_of(folder).about
    (folder / "manifest.json").unlink()
    atomic_directory.write_manifest(folder, about | {"world": about["world"] | {name: "another"}})
    with raises(ValueGivenError, code=f"resume.{name}_differs", field=f"resume: {name}"):
        Loop(saved).start()
    Loop(saved, accepts=(name,)).train(6)
    assert manifest_of(committed_folders(saved)[0]).about["accepted"][name].startswith("another -> ")


def test_the_plan_it_was_saved_with_is_at_hand(saved, tmp_path):
    assert trimtab.Checkpoints(saved).saved_plan() == trimtab.Plan.fixed(4)
    assert trimtab.Checkpoints(tmp_path / "none").saved_plan() is None


def test_one_that_must_be_there_and_one_that_must_not(saved, tmp_path):
    with raises(FormatError, code="checkpoint.missing"):
        Loop(tmp_path / "new", resume="always").start()
    with raises(FormatError, code="checkpoint.exists", field="checkpoints.resume"):
        Loop(saved, resume="never").start()


def test_a_damaged_one_is_put_aside_and_the_one_before_is_gone_on_from(saved, tmp_path):
    victim = saved / "step-4" / "tensors.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    size = victim.stat().st_size
    told = rf"step-4/tensors\.safetensors .*{size} bytes.*{size + 1} bytes.*step-3"
    with pytest.warns(UserWarning, match=told), trimtab.RecordWriter(tmp_path / "r.jsonl", Header("it")) as record:
        rest = Loop(saved).train(6, record=record)
    assert rest == Loop(tmp_path / "other").train(6)[3:]
    (event,) = (each for each in read_record(tmp_path / "r.jsonl").events if each.name == "resumed")
    assert (event.detail["from"], event.detail["damaged_codes"]) == ("step-3", ["checkpoint.size_differs"])
    assert [each.name.partition("-4")[0] for each in saved.glob("step-4.damaged-*")] == ["step"]


def test_what_cannot_be_read_for_now_is_refused_and_stays_as_it_is(saved, tmp_path, monkeypatch):
    """It may be whole, and the newest."""
    opens, before = os.open, sorted(os.listdir(saved))

    out_of_reach = [""]

    def stale(path, *given, **named):
        if str(path).endswith(out_of_reach[0]):
            raise OSError(errno.ESTALE, "Stale file handle")
        return opens(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", stale)
        for name in ("step-4/tensors.safetensors", "step-4/manifest.json"):
            out_of_reach[0] = name
            with raises(FormatError, code="checkpoint.out_of_reach"):
                Loop(saved).start()
        with raises(FormatError, code="checkpoint.out_of_reach"):
            Loop(saved).checkpoints.saved_plan()
    assert sorted(os.listdir(saved)) == before
    assert Loop(saved).train(6) == Loop(tmp_path / "other").train(6)[4:]


def test_what_is_gone_on_from_is_what_was_verified(saved, tmp_path, monkeypatch):
    """Neither file of the state is opened again."""

    def again(*_):
        raise AssertionError("a file that was verified is read once more")

    expected = Loop(tmp_path / "other").train(6)[4:]
    monkeypatch.setattr(StateFiles, "read", again)
    assert Loop(saved).train(6) == expected


def test_a_start_that_is_refused_holds_no_state(saved, monkeypatch):
    loop, reads, held = Loop(saved), manager._contents, []

    def contents(folder):
        found = reads(folder)
        held.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(manager, "_contents", contents)
    loop.optimizer = torch.optim.RMSprop(loop.model.parameters())
    with raises(ValueGivenError, code="resume.optimizer_differs", field="resume: optimizer"):
        loop.start()
    assert [each() for each in held] == [None]


def test_nothing_whole_is_no_reason_to_begin_anew(saved):
    for each in committed_folders(saved):
        (each / "state.json").write_text("{}")
    with raises(FormatError, code="checkpoint.all_damaged"):
        Loop(saved).start()


def test_two_runs_do_not_share_a_folder(saved):
    with Loop(saved).start(), raises(FormatError, code="output.in_use"):
        Loop(saved).start()
    Loop(saved).train(5)


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_stops_the_run_or_is_told_each_time(saved, monkeypatch, background):
    monkeypatch.setattr(atomic_directory, "write_manifest", full)
    with raises(OSError, code="checkpoint.not_saved"):
        Loop(saved, background=background).train(8)
    with pytest.warns(RuntimeWarning, match=r"\b[5-8]\b.*No space left") as told:
        Loop(saved, on_failure="warn", background=background).train(8)
    assert len([each for each in told if "No space left" in str(each.message)]) >= 3
    assert [each.name for each in sorted(saved.iterdir()) if "step" in each.name] == ["step-3", "step-4"]
    monkeypatch.undo()
    assert len(Loop(saved).train(8)) == 4


def test_what_the_user_keeps_too_is_looked_at_first(saved, tmp_path):
    class Refuses:
        def state_dict(self):
            return {"it": 1}

        def load_state_dict(self, state):
            raise RuntimeError("another it")

    Loop(tmp_path / "also", also={"mine": Refuses()}).train(2)
    loop = Loop(tmp_path / "also", also={"mine": Refuses()})
    before = loop.weights()
    with pytest.raises(RuntimeError, match="another it"):
        loop.start()
    assert all(map(torch.equal, before, loop.weights()))
    with raises(ValueGivenError, code="checkpoints.no_state_dict", field="checkpoints.also['mine']"):
        Loop(tmp_path / "x", also={"mine": 3})


class Mine:
    """What counts how often it was loaded."""

    loads = 0

    def state_dict(self):
        return {"it": 1}

    def load_state_dict(self, state):
        self.loads += 1


class Said(Mine):
    """What says what it is given to say."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"it": self.value}


@pytest.mark.parametrize("background", [False, True])
def test_schedules_one_after_another_go_on_over_where_they_meet(tmp_path, background):
    """MultiStepLR counts its milestones, and asks there for what a dict does not know."""

    def rates(folder, windows):
        loop = Loop(folder)
        schedules = torch.optim.lr_scheduler
        first = schedules.LinearLR(loop.optimizer, 0.5, total_iters=3)
        second = schedules.MultiStepLR(loop.optimizer, [1, 3, 3])
        both = schedules.SequentialLR(loop.optimizer, [first, second], [4])
        keep = {"every_steps": None, "every_s": None, "background": background}
        loop.checkpoints, found = trimtab.Checkpoints(folder, also={"schedules": both}, **keep), []
        with loop.start() as run:
            while run.num_windows < windows:
                for window in run.windows(BATCHES):
                    run.train_step(window, loss_fn)
                    both.step()
                    found.append(loop.optimizer.param_groups[0]["lr"])
                    if run.num_windows >= windows:
                        run.checkpoint()
                        break
        return found

    cut = rates(tmp_path / "run", 2) + rates(tmp_path / "run", 8)
    assert cut == rates(tmp_path / "whole", 8)
    assert len(set(cut)) >= 5


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({1}, "state.unsupported_type"),
        (torch.Size([2]), "state.unsupported_type"),
        (torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), "state.unsupported_type"),
        (torch.zeros(2, device="meta"), "state.unsupported_tensor"),
    ],
)
def test_what_cannot_be_written_is_refused_as_the_run_starts(tmp_path, value, code):
    loop = Loop(tmp_path / "run", also={"mine": Said(value)})
    with raises(FormatError, code=code, field="state['also']['mine']['it']"):
        loop.start()
    assert committed_folders(tmp_path / "run") == []
    loop = Loop(tmp_path / "run")
    loop.optimizer.param_groups[0]["names"] = {"a set"}
    with raises(FormatError, code="state.unsupported_type", field="state['optimizer']['param_groups'][0]['names']"):
        loop.start()


def test_what_has_nothing_to_say_before_the_first_step_is_asked_at_the_save(tmp_path):
    """As an average of weights that is made as the first of them are there."""

    class Late(Said):
        def state_dict(self):
            return {"it": self.value + 1}

    late = Late(None)
    with Loop(tmp_path / "run", also={"mine": late}).start() as run:
        late.value = 1
        run.checkpoint()
    assert [each.name for each in committed_folders(tmp_path / "run")] == ["step-0"]


def test_a_loader_is_not_asked_for_its_place_before_it_is_drawn_from(tmp_path):
    """It might begin its pass by that."""

    class Loads(Said):
        asked = 0

        def __iter__(self):
            return iter(BATCHES)

        def state_dict(self):
            self.asked += 1
            return {}

    loader = Loads(0)
    with Loop(tmp_path / "run", also={"loader": loader}).start():
        assert loader.asked == 0


def test_what_the_user_keeps_too_is_left_alone_until_every_rank_has_read(tmp_path, monkeypatch):
    Loop(tmp_path / "run", also={"mine": Mine()}).train(2)
    mine = Mine()
    loop, before = Loop(tmp_path / "run", also={"mine": mine}), None

    def another_fails(self, make, about):
        made = make()
        if about == "read":
            raise FormatError("rank 1", got="another disk", expected="every rank to go on with the run")
        return made

    before = loop.weights()
    with monkeypatch.context() as patched:
        patched.setattr(RankCommunication, "together", another_fails)
        with raises(FormatError, code="format.invalid", field="rank 1"):
            loop.start()
    assert mine.loads == 0
    assert all(map(torch.equal, before, loop.weights()))
    with Loop(tmp_path / "run", also={"mine": mine}).start():
        assert mine.loads == 1


def test_what_may_fail_on_one_rank_is_agreed_upon_before_weights_are_put_back(saved, tmp_path, monkeypatch):
    """Each part that rank 0 does alone too: the others wait for its word, and would in vain."""
    steps, weights = [], []
    (saved / "step-4" / "tensors.safetensors").write_bytes(b"damaged")

    def noted(owner, name):
        does = getattr(owner, name)

        def noting(*given, **named):
            steps.append(name)
            return does(*given, **named)

        monkeypatch.setattr(owner, name, noting)

    def together(self, make, about):
        steps.append(f"({about}")
        made = make()
        weights.append((about, loop.weights()))
        steps.append(")")
        return made

    noted(manager, "put_aside")
    noted(manager.warnings, "warn")
    noted(BatchSizeLog, "begin")
    monkeypatch.setattr(RankCommunication, "together", together)
    loop = Loop(saved)
    before = loop.weights()
    with pytest.warns(UserWarning, match="step-3"), loop.start():
        pass
    text = " ".join(steps)
    assert "(aside put_aside warn )" in text
    assert "(begun begin ) (loaded )" in text
    unmoved = [about for about, those in weights if all(map(torch.equal, before, those))]
    assert unmoved == ["world", "prepared", "read", "also", "aside", "record", "begun"]
    steps.clear()
    with Loop(tmp_path / "new").start():
        assert "(begun begin )" in " ".join(steps)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_run_where_its_window_is_over_and_ends_it(tmp_path, number):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("mine"))
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is told to ignore it

    def interrupted(model, batch):
        if model.training and len(seen) == 3:
            signal.raise_signal(number)
        seen.append(1)
        return loss_fn(model, batch)

    seen: list[int] = []
    loop = Loop(tmp_path / "run", every_steps=None)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
            loop.train(9, loss=interrupted)
        assert signal.getsignal(signal.SIGTERM) is not None
        assert signal.getsignal(signal.SIGTERM)(0, None) is None  # the user's own, back in its place
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ignored)
    assert came[:-1] == (["mine"] if number == signal.SIGTERM else [])
    assert ended.type is (SystemExit if number == signal.SIGTERM else KeyboardInterrupt)
    assert getattr(ended.value, "code", None) in (None, 128 + signal.SIGTERM)
    assert [each.name for each in committed_folders(tmp_path / "run")] == ["step-4"]
    assert Loop(tmp_path / "run").train(7) == Loop(tmp_path / "other").train(7)[4:]


def test_a_record_goes_on_where_the_checkpoint_was(saved, tmp_path):
    folder, path = tmp_path / "recorded", tmp_path / "r.jsonl"
    for windows in (5, 9):
        with trimtab.RecordWriter(path, Header("it"), continues=True) as record:
            loop = Loop(folder, every_steps=2)
            with loop.start(record=record) as run:
                while run.num_windows < windows:
                    for window in run.windows(BATCHES):
                        run.train_step(window, loss_fn)
                        if run.num_windows >= windows:
                            break
    found = read_record(path)
    assert [step.index for step in found.steps] == list(range(9))
    assert [event.name for event in found.events if event.name != "account"] == ["resumed"]


def test_a_checkpoint_by_hand_needs_somewhere_to_be(saved):
    loop = Loop(saved)
    with (
        trimtab.start(loop.model, loop.optimizer, loop.plan) as run,
        raises(UsageError, code="checkpoints.not_configured", field="run.checkpoint"),
    ):
        run.checkpoint()


def test_what_is_wrong_with_a_model_s_names_is_said(saved):
    loop = Loop(saved)
    loop.model.add_module("more", nn.Linear(1, 1))
    with raises(ModelError, code="model.names_differ", field="model"):
        loop.start()
    assert issubclass(DamagedError, FormatError)


def test_a_save_that_failed_is_not_taken_for_one(saved, monkeypatch):
    """Asked for by hand after the one that was due, it is tried once more."""
    loop = Loop(saved, on_failure="warn")
    with loop.start() as run:
        for window in run.windows(BATCHES):
            run.train_step(window, loss_fn)
            if run.num_windows == 5:
                break
        monkeypatch.setattr(atomic_directory, "write_manifest", full)
        with pytest.warns(RuntimeWarning, match=r"\b5\b.*No space left"):
            run.checkpoint()
        monkeypatch.undo()
        run.checkpoint()
    assert [each.name for each in committed_folders(saved)] == ["step-5", "step-4"]


def test_a_record_has_its_end_where_the_last_save_failed(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_directory, "write_manifest", full)
    with (
        trimtab.RecordWriter(tmp_path / "r.jsonl", Header("it")) as record,
        raises(OSError, code="checkpoint.not_saved"),
    ):
        Loop(saved, background=True, every_steps=5).train(9, record=record)
    assert read_record(tmp_path / "r.jsonl").end is not None


def test_a_forked_child_is_interrupted_and_ended_by_a_signal_as_any_process(tmp_path):
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Loop(tmp_path / "run").start():
            for number, status in ((signal.SIGINT, 7), (signal.SIGTERM, -signal.SIGTERM)):
                child = os.fork()
                if child == 0:
                    try:
                        os.kill(os.getpid(), number)
                        os._exit(0)
                    except KeyboardInterrupt:
                        os._exit(7)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
    finally:
        signal.signal(signal.SIGINT, ignored)


def test_handlers_are_there_while_a_run_is_and_not_where_none_began(saved):
    def now():
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]

    before = now()
    with pytest.raises(ModelError):
        Loop(saved, width=5).start()
    assert now() == before
    with Loop(saved).start():
        assert now()[0] != before[0]
        assert now()[2] == before[2]
    assert now() == before


def test_a_signal_after_the_last_window_ends_the_run_where_it_closes(tmp_path):
    run = Loop(tmp_path / "run", every_steps=None).start()
    for window in run.windows(BATCHES):
        run.train_step(window, loss_fn)
    run.checkpoint()
    signal.raise_signal(signal.SIGTERM)  # in the last evaluation
    with pytest.raises(SystemExit) as left:
        run.close()
    assert left.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run = Loop(tmp_path / "run").start()
    signal.raise_signal(signal.SIGTERM)
    run.close(RuntimeError("it ends by an error of its own"))


def test_a_signal_ends_a_run_that_warns_whatever_becomes_of_the_last_save(saved, monkeypatch):
    monkeypatch.setattr(atomic_directory, "write_manifest", full)

    def interrupted(model, batch):
        signal.raise_signal(signal.SIGTERM)
        return loss_fn(model, batch)

    with (
        pytest.warns(RuntimeWarning, match=r"\b5\b.*No space left"),
        pytest.raises(SystemExit) as left,
    ):
        Loop(saved, background=True, on_failure="warn", every_steps=None).train(9, loss=interrupted)
    assert left.value.code == 128 + signal.SIGTERM


def test_a_window_of_batches_that_nobody_asked_it_for_is_refused(saved):
    with Loop(saved).start() as run, raises(LoopError, code="loop.position_unknown", field="run.window"):
        run.window(BATCHES[0])


def test_a_loader_whose_workers_outlive_a_pass_is_refused(tmp_path):
    lasting = DataLoader(ROWS, batch_size=4, num_workers=1, persistent_workers=True)
    for loader in (lasting, trimtab.shard(lasting)):
        with (
            Loop(tmp_path / "run").start() as run,
            raises(ValueGivenError, code="loader.persistent_workers", field="loader"),
        ):
            next(run.windows(loader))
    with Loop(tmp_path / "run").start() as run:
        next(run.windows(DataLoader(ROWS, batch_size=4)))


def stopped(folder, windows, **options):
    """Return losses of a run of two passes, and how many it counts, that is stopped once it has so many windows."""
    losses, loop = [], Loop(folder, every_steps=None)
    with loop.start(**options) as run:
        while run.passes < 2:
            for window in run.windows(BATCHES):
                run.train_step(window, loss_fn)
                losses.append(float(run.loss))
                if run.num_windows == windows:
                    run.evaluated(1.0)
        run.checkpoint()
        return losses, run.passes


@pytest.mark.parametrize("windows", [1, 3, 4])
def test_what_a_stopped_run_did_not_see_it_sees_where_it_goes_on_without(tmp_path, windows):
    """In the middle of a pass, at the end of one and in the next."""
    first, passes = stopped(tmp_path / "run", windows, stop=trimtab.Stop(target=0.5))
    assert passes == 2
    rest, _ = stopped(tmp_path / "run", None)
    assert first + rest == stopped(tmp_path / "whole", None)[0]
    assert len(first) == windows


def test_a_copy_of_a_checkpoint_and_a_link_are_the_user_s(saved):
    shutil.copytree(saved / "step-4", saved / "best")
    (saved / "step-2").symlink_to(saved / "best")
    Loop(saved).train(9)
    assert sorted(each.name for each in committed_folders(saved)) == ["best", "step-2", "step-8", "step-9"]
    assert not list(saved.glob("*.tmp-*"))


FOREIGN = b'{"name": "an export for the web"}'


@pytest.mark.parametrize("text", [FOREIGN, b'{"about": {"accep'], ids=["another program's", "half a copy's"])
def test_a_folder_of_another_name_is_the_user_s_whatever_its_manifest_says(saved, tmp_path, text, recwarn):
    for place in (saved, tmp_path / "new", tmp_path / "never"):
        (place / "export").mkdir(parents=True)
        (place / "export" / "manifest.json").write_bytes(text)
    with Loop(saved).start() as run:
        assert run.num_windows == 4
    for place, resume in (("new", "auto"), ("never", "never")):
        with Loop(tmp_path / place, resume=resume).start() as run:
            assert run.num_windows == 0
        assert [each.name for each in (tmp_path / place).iterdir() if each.is_dir()] == ["export"]
    with raises(FormatError, code="checkpoint.missing"):
        Loop(tmp_path / "new", resume="always").start()
    assert (saved / "export" / "manifest.json").read_bytes() == text
    assert not [each for each in recwarn if "step-" in str(each.message)]


def test_a_copy_or_a_link_that_is_damaged_is_told_and_stays(saved, tmp_path):
    os.rename(saved / "step-4", saved / "best")
    (saved / "best" / "state.json").write_text("{}")
    (saved / "step-5").symlink_to(saved / "best")
    before = sorted(each.name for each in saved.iterdir())
    yours = r"{}/state\.json .*\b2 bytes.*step-3"
    with (
        pytest.warns(UserWarning, match=yours.format("best")),
        pytest.warns(UserWarning, match=yours.format("step-5")),
        Loop(saved).start() as run,
    ):
        assert run.num_windows == 3
    assert sorted(each.name for each in saved.iterdir()) == before


def denied(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_saved_though_an_older_one_cannot_be_deleted(saved, monkeypatch, tmp_path, background):
    """Which is told as such; asked for once more it is there, and nothing is written."""
    monkeypatch.setattr(atomic_directory, "remove", denied)
    loop = Loop(saved, on_failure="warn", background=background)
    with (
        pytest.warns(RuntimeWarning, match=r"\b5\b.*step-3.*Permission denied") as told,
        trimtab.RecordWriter(tmp_path / "r.jsonl", Header("it")) as record,
    ):
        loop.train(5, record=record)
    assert len([each for each in told if "step-3" in str(each.message)]) == 1
    assert [each.name for each in committed_folders(saved)] == ["step-5", "step-4", "step-3"]
    (event,) = (each for each in read_record(tmp_path / "r.jsonl").events if each.name == "checkpoint")
    assert (event.detail["windows"], event.detail["is_saved"]) == (5, True)
    assert event.detail["code"] == "checkpoint.not_deleted"
    with raises(SaveError, code="checkpoint.not_deleted"):
        Loop(saved, background=background).train(6)
    assert committed_folders(saved)[0].name == "step-6"


def test_a_checkpoint_is_saved_though_its_name_cannot_be_brought_to_disk(saved, monkeypatch):
    """No older one is deleted for it."""
    fsync, failing = os.fsync, []

    def of_the_folder(descriptor):
        if failing and os.readlink(f"/proc/self/fd/{descriptor}") == str(saved):
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_the_folder)
    with Loop(saved, on_failure="warn", every_steps=None).start() as run:
        for window in run.windows(BATCHES):
            run.train_step(window, loss_fn)
            failing.append("it")
            with pytest.warns(RuntimeWarning, match=r"\b5\b.*step-5.*Input/output error"):
                run.checkpoint()
            run.checkpoint()
            break
    assert [each.name for each in committed_folders(saved)] == ["step-5", "step-4", "step-3"]


def test_a_run_closes_on_a_disk_that_takes_no_more_writes(saved, monkeypatch):
    with monkeypatch.context() as patch, Loop(saved, every_steps=None).start() as run:
        patch.setattr(os, "ftruncate", full)
    assert run.num_windows == 4
    Loop(saved).train(5)


def test_the_name_of_a_new_folder_is_on_disk_before_anything_in_it(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Loop(tmp_path / "run").train(1)
    assert synced[0] == tmp_path
    assert tmp_path / "run" in synced


def test_of_two_runs_that_make_one_folder_at_once_the_second_is_told_who_holds_it(tmp_path, monkeypatch):
    mkdir, others = Path.mkdir, []

    def made_meanwhile(path, *given, **named):
        mkdir(path, *given, **named)
        if path == tmp_path / "run" and not others:
            others.append(locked(path))
            mkdir(path, *given, **named)

    monkeypatch.setattr(Path, "mkdir", made_meanwhile)
    with raises(FormatError, code="output.in_use"):
        Loop(tmp_path / "run").start()
    others[0].release()


def test_what_was_written_just_now_is_not_read_again(saved, monkeypatch):
    with Loop(saved).start() as run:
        monkeypatch.setattr(atomic_directory, "verify", None)
        for window in run.windows(BATCHES):
            run.train_step(window, loss_fn)
    assert len(committed_folders(saved)) == 2


def test_nothing_is_changed_where_the_decisions_cannot_be_written(saved, monkeypatch):
    loop, before = Loop(saved), sorted(os.listdir(saved))
    weights = loop.weights()
    monkeypatch.setattr(os, "write", full)
    with raises(SaveError, code="checkpoint.not_saved"):
        loop.start()
    monkeypatch.undo()
    assert all(map(torch.equal, weights, loop.weights()))
    assert not loop.optimizer.state
    assert sorted(os.listdir(saved)) == before


def test_a_record_is_on_disk_before_a_checkpoint_speaks_of_it_and_a_short_one_is_refused(saved, tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def noted(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    path, folder = tmp_path / "r.jsonl", tmp_path / "recorded"
    folder.mkdir()  # else its own name is on disk before them
    monkeypatch.setattr(os, "fsync", noted)
    with trimtab.RecordWriter(path, Header("it"), continues=True) as record:
        Loop(folder, every_steps=None).train(3, record=record)
    monkeypatch.undo()
    # Their names are on disk too, and all before the first file of the checkpoint.
    order = [synced.index(each) for each in (path.name, tmp_path.name, "state.json")]
    assert order == sorted(order)
    assert synced.index("decisions.jsonl") < synced.index("state.json")
    os.truncate(path, 100)
    with (
        trimtab.RecordWriter(path, Header("it"), continues=True) as record,
        raises(FormatError, code="record.truncated", field=str(path)),
    ):
        Loop(folder).start(record=record)


def test_a_run_that_follows_a_killed_one_says_so(tmp_path):
    def killed():
        Loop(tmp_path / "run").train(2)
        locked(tmp_path / "run")
        os._exit(9)

    assert ended(forked(killed)) == 9
    for was_killed in (True, False):
        with trimtab.RecordWriter(tmp_path / "r.jsonl", Header("it"), continues=True) as record:
            Loop(tmp_path / "run").train(2, record=record)
        (event,) = (each for each in read_record(tmp_path / "r.jsonl").events if each.name == "resumed")
        assert event.detail["was_killed"] == was_killed


def test_another_gpu_is_refused_or_accepted_and_written_down(tmp_path, monkeypatch):
    named = {0: "Card A", 1: "Card B"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: named[device.index])

    def on(index):
        model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda", index))]))
        return device_of(model)

    assert (on(0), on(1), device_of(nn.Linear(1, 1))) == ("cuda (Card A)", "cuda (Card B)", "cpu")
    monkeypatch.setattr(manager, "device_of", lambda model: on(0))
    Loop(tmp_path / "run").train(4)
    monkeypatch.setattr(manager, "device_of", lambda model: on(1))
    with raises(ValueGivenError, code="resume.device_differs", field="resume: device") as refused:
        Loop(tmp_path / "run").start()
    assert (refused.value.got, refused.value.expected) == ("cuda (Card B)", "cuda (Card A)")
    assert 'accepts=("device",)' in refused.value.hint
    Loop(tmp_path / "run", accepts=("device",)).train(5)
    about = manifest_of(committed_folders(tmp_path / "run")[0]).about
    assert about["accepted"] == {"device": "cuda (Card A) -> cuda (Card B)"}
    assert about["world"]["device"] == "cuda (Card B)"


def test_what_has_changed_and_needs_no_leave_is_in_the_record_and_in_every_later_manifest(saved, tmp_path, monkeypatch):
    then = manifest_of(saved / "step-4").about
    assert then["noted"] == {}
    assert {"python", "os", "torch", "numpy"} <= then["world"].keys()
    monkeypatch.setattr("platform.python_version", lambda: "3.99.1")
    with trimtab.RecordWriter(tmp_path / "r.jsonl", Header("it"), continues=True) as record:
        Loop(saved).train(5, record=record)
    (event,) = (each for each in read_record(tmp_path / "r.jsonl").events if each.name == "resumed")
    assert event.detail["changed"] == {"python": f"{then['world']['python']} -> 3.99.1"}
    monkeypatch.setattr("numpy.__version__", "9.9.9")
    Loop(saved).train(6)
    for step, names in ((5, {"python"}), (6, {"python", "numpy"})):
        about = manifest_of(saved / f"step-{step}").about
        assert about["noted"].keys() == names
        assert about["noted"]["python"] == f"{then['world']['python']} -> 3.99.1"
        assert about["accepted"] == {}


def test_what_was_saved_before_changes_and_the_optimizer_s_class_were_noted_is_gone_on_with(saved):
    def change(said):
        del said["about"]["noted"], said["about"]["world"]["optimizer"]

    forge(saved / "step-4", change)
    with Loop(saved).start() as run:
        assert run.num_windows == 4


def test_a_folder_is_made_with_those_that_it_lies_in(tmp_path):
    with Loop(tmp_path / "runs" / "mine").start() as run:
        run.checkpoint()
    assert (tmp_path / "runs" / "mine" / "step-0").is_dir()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with raises(FormatError, code="folder.not_writable", field="checkpoints.folder") as refused:
        Loop(tmp_path / "file").start()
    assert refused.value.got == str(tmp_path / "file")
    assert "Not a directory" in refused.value.problem
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
