"""The command: what it prints where, and how it fails; in this process but where a process of its own matters."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import brief
import pytest
from raising import raises
from saving import forge
from typer.main import get_command

import trimtab as package
from trimtab import api, cli, progress_display
from trimtab.api import profile
from trimtab.cli.options import settings_to_adapt
from trimtab.core.errors import ValueGivenError
from trimtab.core.record import read_record
from trimtab.core.serialization import from_json, read_json, to_json
from trimtab.distributed.deepspeed_backend import config_of
from trimtab.distributed.plan_on_ranks import traces_of_ranks
from trimtab.energy import meter_selection
from trimtab.energy.energy_meter import NoMeter
from trimtab.experiments import paired_run, phases, progress_bar, rank_plan_output
from trimtab.experiments.comparison import Comparison
from trimtab.experiments.phase_result import PhaseResult
from trimtab.measure import machine
from trimtab.planner.multi_rank_plan import WAYS, RankPeakMemory, Way
from trimtab.plans.plan import Plan
from trimtab.plans.profile import PROFILE_SCHEMA, Profile
from trimtab.tasks import BUILT_IN, load_task

SOURCE = Path(__file__).parents[2] / "src"
TINY_TASK = Path(__file__).parent / "experiments" / "tiny_task.py"
PLAN = Plan.fixed(32, micro_batch=8)
MAIN = "from trimtab import cli\ncli.main()"


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        """The standard output, which must be one JSON object on one line."""
        assert self.out.count("\n") == 1
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    def succeeded(self) -> Done:
        """Check that the command succeeded and wrote nothing to standard error."""
        assert (self.code, self.err) == (0, "")
        return self


@pytest.fixture(scope="module")
def traced_once():
    """Return what traces a job's ranks, the same ones once: that is most of what their plans take."""
    found: dict[tuple, tuple[RankPeakMemory, ...]] = {}

    def traces(profile: Profile, loop: tuple, ranks: int, progress, ways: Sequence[Way]) -> tuple[RankPeakMemory, ...]:
        model, optimizer, loss_fn, batch = loop
        of = (repr(model), repr(optimizer), loss_fn.__code__, *(part.shape for part in batch))
        on = (profile.device.kind, profile.device.name, *(traced.candidate for traced in profile.traces))
        key = (of, on, ranks, tuple(ways))
        if key not in found:
            found[key] = traces_of_ranks(profile, loop, ranks, progress, ways)
        return found[key]

    return traces


@pytest.fixture(scope="module")
def profiled_once():
    """Return what measures a task's loop, each loop once: its seconds decide nothing that these tests look at."""
    found: dict[tuple, Profile] = {}

    def profiles(model, optimizer, loss_fn, batch, *, data=None, progress=None, **how) -> Profile:
        tasks = tuple((path.name, path.read_text()) for path in sorted(Path().glob("*.py")))
        of = (tasks, repr(model), repr(optimizer), *(part.shape for part in batch))
        key = (of, machine.cpu_name(), data is None, repr(how))
        if key not in found:
            given = how | ({} if progress is None else {"progress": progress})
            found[key] = profile(model, optimizer, loss_fn, batch, data=data, **given)
        return found[key]

    return profiles


@pytest.fixture
def trimtab(monkeypatch, capsys, tmp_path, traced_once, profiled_once):
    """Return a function that runs a command line in a folder that holds `tiny.py` and `plan.json`."""
    shutil.copy(TINY_TASK, tmp_path / "tiny.py")
    (tmp_path / "plan.json").write_text(to_json(PLAN))
    monkeypatch.chdir(tmp_path)
    brief.shorten(monkeypatch.setattr)
    monkeypatch.setattr(rank_plan_output, "traces_of_ranks", traced_once)
    monkeypatch.setattr(api, "profile", profiled_once)
    monkeypatch.setattr(paired_run, "_BLOCK_S", 0.02)
    monkeypatch.setattr(phases, "_LAP_S", 0.005)
    monkeypatch.setattr(meter_selection, "rapl", lambda root: NoMeter("none that tests read"))

    def run(line: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["trimtab", *shlex.split(line)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code or 0
        return Done(code, *capsys.readouterr())

    yield run
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def as_process(folder: Path, *arguments: str, path: Sequence[Path] = (SOURCE,)) -> Done:
    """Run Python in a folder, with these folders as its import path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, env=environment
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def made() -> list[str]:
    """The tiny task's profile, once it was made."""
    return []


@pytest.fixture
def profile_json(trimtab, made) -> None:
    """`profile.json` of the tiny task is there."""
    if not made:
        assert trimtab("profile tiny.py:task -o profile.json").code == 0
        made.append(Path("profile.json").read_text())
    Path("profile.json").write_text(made[0])


def explained(done: Done, code: str, *words: str) -> None:
    """Check that the command failed with one line on standard error, without a traceback.

    Args:
        code: the error's code, printed at the end of the line.
        words: names and values in the line.
    """
    assert (done.code, done.out) == (1, ""), done
    assert done.err.startswith("trimtab: ")
    assert done.err.endswith(f" [{code}]\n"), done.err
    assert done.err.count("\n") == 1
    assert all(word in done.err for word in words), done.err


def changed(folder: Path, name: str, before: str, after: str) -> str:
    """Write the tiny task with a change; return its name."""
    text = (folder / "tiny.py").read_text()
    assert before in text
    (folder / f"{name}.py").write_text(text.replace(before, after))
    return f"{name}:task"


def test_doctor_says_what_is_there_and_how_to_get_what_is_missing(trimtab):
    lines = trimtab("doctor").succeeded().out.splitlines()
    assert all(line.startswith(("ok  ", "--  ")) for line in lines)
    names = [line[4:26].strip() for line in lines]
    assert {"python", "torch", "device", "precision bf16", "memory figures", "energy", "typer"} <= set(names)
    assert lines[names.index("typer")].startswith("ok")
    assert lines[names.index("energy")].startswith("--")
    found = trimtab("doctor --json").json
    assert (found["schema"], found["name"]) == (1, "doctor")
    assert all(set(row) == {"name", "ok", "detail"} for row in found["rows"])
    assert [row["ok"] for row in found["rows"] if row["name"] == "torch"] == [True]


def test_a_profile_is_printed_and_written_and_a_plan_decided_from_it(trimtab, tmp_path):
    done = trimtab("profile tiny.py:task -o profile.json").succeeded()
    for shown in (
        "32 samples and 32 rows per step",
        "trials:\n",
        " fp32, micro-batch 32 ",
        "(A/A control)",
        "splitting the batch keeps the gradient: ",
    ):
        assert shown in done.out
    assert read_json(Profile, tmp_path / "profile.json").loop.batch_size == 32
    plan = trimtab("plan profile.json").succeeded()
    assert "your loop: " in plan.out
    assert "micro-batch" in plan.out
    written = trimtab("plan profile.json --json -o plan.json")
    assert from_json(Plan, written.out) == read_json(Plan, tmp_path / "plan.json")
    assert str(from_json(Plan, written.out)) == plan.out.rstrip("\n")
    explained(trimtab("plan profile.json --memory 1KB"), "plan.infeasible", "1000 B")


def test_a_plan_for_a_task(trimtab):
    done = trimtab("plan tiny:task --memory 1GiB").succeeded()
    assert "(fp32 eager, 32 samples)" in done.out
    found = trimtab("plan tiny:task --adapt learning-rate --json").succeeded()
    assert from_json(Plan, found.out).plan_kind == "tuned"
    assert found.json["schedule"]["value"] == "warmup_cosine"
    done = trimtab("profile tiny:task --json").succeeded()
    assert from_json(Profile, done.out).loop.optimizer == "AdamW"
    assert done.json["schema"] == PROFILE_SCHEMA


@pytest.mark.usefixtures("profile_json")
def test_a_plan_explained_has_all_that_was_considered_and_tried(trimtab, tmp_path):
    trimtab("plan profile.json -o plan.json").succeeded()
    explained_ = trimtab("plan profile.json --explain").out
    assert explained_.startswith(read_json(Plan, tmp_path / "plan.json").explain())
    head = re.search(r"(\d+) combinations considered, .* \(weights: time 1, memory 0\):", explained_)
    considered = explained_[head.end() :].partition("\n\n")[0].splitlines()[1:]
    scores = [float(line.split()[0]) for line in considered]
    assert 1.0 in scores  # the unchanged loop
    ranks = [(";" in line, score) for line, score in zip(considered, scores, strict=True)]  # Refused ones come last.
    assert ranks == sorted(ranks)
    assert "trials:\n" in explained_
    assert len(considered) == int(head[1])
    explained(trimtab("plan profile.json --explain --json"), "option.conflict", "--explain", "--json")
    there = trimtab("plan profile.json --device 'H100 SXM' --explain").out
    assert "traced" in there
    assert there.rstrip("\n").endswith("No measurements: the plan is for another device.")


@pytest.mark.usefixtures("profile_json")
def test_a_plan_under_other_limits_and_for_another_device_is_predicted(trimtab):
    elsewhere = trimtab("plan profile.json --device 'H100 SXM'").succeeded()
    assert "predicted" in elsewhere.out.splitlines()[0]
    assert "predicted on H100 SXM" in elsewhere.out
    recorded, direct = (
        from_json(Plan, trimtab(f"plan {of} --device 'H100 SXM' --json").out) for of in ("profile.json", "tiny.py:task")
    )
    assert (recorded.predicted, recorded.changes) == (direct.predicted, direct.changes)
    assert from_json(Plan, trimtab("plan profile.json --memory-weight 1 --json").out).planning_s > 0
    explained(trimtab("plan profile.json --time 1e-9"), "plan.infeasible")
    direct = trimtab("plan tiny.py:task --device 'A100 80GB' --json")
    assert from_json(Plan, direct.out).measured is None
    explained(trimtab("plan tiny.py:task --device Abacus"), "value.invalid", "Abacus", "RTX 4090")


# Four ranks of a device that is not here.
RANKS = "plan tiny.py:task --ranks 4 --device 'H100 SXM'"


@pytest.mark.slow
def test_a_plan_of_ranks_that_are_not_here(trimtab):
    there = trimtab(f"{RANKS} --link nvlink -o plan.json").succeeded()
    assert "a rank at each ZeRO stage, predicted:" in there.out
    made = read_json(Plan, Path("plan.json"))
    assert made.target_device == "4 ranks of H100 SXM, over nvlink:H100"
    assert (made.num_ranks, made.zero_stage.value, made.measured) == (4, 0, None)
    over = from_json(Plan, trimtab(f"{RANKS} --link '2 x nvlink + ib' --json").out)
    assert over.target_device == "4 ranks of H100 SXM, over 2 x nvlink:H100 + ib:NDR"
    assert made.predicted is not None
    tight = f"{made.predicted.peak_bytes - 1}B"
    less = from_json(Plan, trimtab(f"{RANKS} --link ib --memory {tight} --json").out)
    assert less.predicted is not None
    assert less.predicted.peak_bytes < made.predicted.peak_bytes
    assert (less.zero_stage.value, less.micro_batch.value) != (0, made.micro_batch.value)
    assert [(each.zero_stage, each.reduces_once) for each in less.stages] == list(WAYS)
    way = less.zero_stage.value, less.reduces_once.value
    (taken,) = (each for each in less.stages if (each.zero_stage, each.reduces_once) == way)
    assert (taken.refusal, taken.peak_bytes, taken.window_s) == ("", less.predicted.peak_bytes, less.predicted.step_s)
    assert 0 <= taken.waiting_s <= taken.window_s
    assert (taken.micro_batch, taken.num_micro_batches) == (less.micro_batch.value, less.num_micro_batches)
    assert taken.reduce_dtype == less.reduce_dtype.value
    assert all((each.peak_bytes is None) == bool(each.refusal) for each in less.stages)
    assert next(e.code for e in made.stages if not e.reduces_once) == "ranks.one_micro_batch"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "name"), [("nvlink", "nvlink:H100"), ("2 x nvlink + ib:NDR", "2 x nvlink:H100 + ib:NDR")]
)
def test_ranks_of_this_machines_device_are_joined_by_its_own_link(trimtab, monkeypatch, link, name):
    monkeypatch.setattr(machine, "cpu_name", lambda: "NVIDIA H100 80GB HBM3")
    here = trimtab(f"plan tiny.py:task --ranks 4 --link '{link}' --json")
    assert here.code == 0, here.err
    assert from_json(Plan, here.out).target_device == f"4 ranks of NVIDIA H100 80GB HBM3, over {name}"


def test_a_device_without_a_link_of_its_own_is_refused_by_its_name(trimtab, monkeypatch):
    monkeypatch.setattr(machine, "cpu_name", lambda: "an abacus")
    explained(trimtab("plan tiny.py:task --ranks 4 --link nvlink"), "value.invalid", "nvlink", "an abacus")


@pytest.mark.slow
def test_a_plan_for_deepspeed_has_its_own_configuration_beside_it(trimtab):
    of = f"{RANKS} --link nvlink --engine deepspeed"
    done = trimtab(f"{of} -o made.json").succeeded()
    assert done.out.endswith("DeepSpeed configuration: made.deepspeed.json\n")
    assert "DeepSpeed was not traced" in done.out
    made, config = read_json(Plan, Path("made.json")), json.loads(Path("made.deepspeed.json").read_text())
    assert (made.engine.value, made.num_ranks) == ("deepspeed", 4)
    assert config["zero_optimization"]["stage"] == made.zero_stage.value in (1, 2, 3)
    elements = sum(p.numel() for p in load_task("tiny.py:task").make_model().parameters())
    assert config == config_of(made, elements)

    Path("made.deepspeed.json").unlink()
    to_nowhere = trimtab(f"{of} -o {os.devnull}").succeeded()  # no file that a configuration could be beside
    for bare in (trimtab(of), to_nowhere):
        assert json.loads(bare.out.partition("DeepSpeed configuration: ")[2]) == config
    assert not Path(os.devnull).with_suffix(".deepspeed.json").exists()
    as_json = trimtab(f"{of} --json").succeeded()
    assert from_json(Plan, as_json.out).engine.value == "deepspeed"
    assert not list(Path().glob("*.deepspeed.json"))
    both = trimtab(f"{of} --json -o plan.json")
    assert from_json(Plan, both.out).engine.value == "deepspeed"
    assert both.err == "DeepSpeed configuration: plan.deepspeed.json\n"
    assert json.loads(Path("plan.deepspeed.json").read_text()) == config


@pytest.mark.usefixtures("profile_json")
def test_what_was_found_is_shown_before_a_full_disk_says_no(trimtab, monkeypatch):
    def full(*args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trimtab.core.serialization.write_result", full)
    monkeypatch.setattr(rank_plan_output, "write_result", full)
    cases = (
        ("profile tiny.py:task", "trials:"),
        ("plan profile.json", "your loop: "),
        (f"{RANKS} --link nvlink", "ranks"),
    )
    for line, shown in cases:
        done = trimtab(f"{line} -o found.json")
        assert shown in done.out
        assert (done.code, done.err) == (1, "trimtab: [Errno 28] No space left on device\n")


def test_a_loop_in_fp16_is_none_for_deepspeed(trimtab, tmp_path):
    name = changed(tmp_path, "half", 'Reference("fp32")', 'Reference("fp16")')
    done = trimtab(f"plan {name} --ranks 2 --link ib --engine deepspeed")
    explained(done, "engine.precision_unsupported", "fp16", "--engine deepspeed")


def test_a_training_is_kept_gone_on_with_and_looked_at(trimtab, tmp_path):
    kept = "train tiny:task --checkpoints kept --every 4 --record run.jsonl --json"
    first = trimtab(f"{kept} --plan plan.json --steps 6").json
    assert "resumed_at_rows" not in first
    again = trimtab(f"{kept} --steps 9").json  # by the plan that it was saved with
    assert again["resumed_at_rows"] == 6 * 32
    whole = trimtab("train tiny:task --plan plan.json --steps 9 --json").json
    assert (again["loss"], again["accuracy"]) == (whole["loss"], whole["accuracy"])
    assert [step.index for step in read_record(tmp_path / "run.jsonl").steps] == list(range(9))
    finished = trimtab(f"{kept} --steps 9")
    assert "kept" in finished.err
    assert "run.jsonl" in finished.err
    over = finished.json
    assert (over["resumed_at_rows"], over["accuracy"]) == (9 * 32, whole["accuracy"])
    found = trimtab("checkpoint verify kept --json").json["rows"]
    assert [(row["folder"], row["is_whole"], row["step"]) for row in found] == [
        ("step-9", True, 9),
        ("step-6", True, 6),
    ]
    (tmp_path / "kept" / "step-9" / "state.json").write_text("{}")
    done = trimtab("checkpoint verify kept")
    assert done.code == 1
    for shown in ("--  step-9", "state.json", "2 bytes", "ok  step-6         6 steps, 192 samples"):
        assert shown in done.out
    assert trimtab("checkpoint verify kept/step-6").code == 0
    explained(trimtab("checkpoint verify absent"), "checkpoint.missing", "absent")
    (tmp_path / "kept" / "step-9" / "manifest.json").unlink()
    lost = trimtab("checkpoint verify kept/step-9")
    assert (lost.code, "--  step-9" in lost.out) == (1, True)
    explained(trimtab(f"{kept} --resume never"), "checkpoint.exists", "step-9", "kept")


def test_a_checkpoint_that_is_put_aside_is_not_called_whole(trimtab, tmp_path):
    trimtab("train tiny:task --plan plan.json --checkpoints kept --steps 2")
    (tmp_path / "kept" / "export").mkdir()
    (tmp_path / "kept" / "export" / "manifest.json").write_text("{}")  # a user's own folder is not reported
    assert trimtab("checkpoint verify kept").code == 0
    forge(tmp_path / "kept" / "step-2", lambda said: said["about"].pop("plan"))
    done = trimtab("checkpoint verify kept")
    assert done.code == 1
    assert "--  step-2" in done.out
    (row,) = trimtab("checkpoint verify kept --json").json["rows"]
    assert (row["folder"], row["is_whole"], row["code"]) == ("step-2", False, "checkpoint.metadata_invalid")
    assert "manifest.json" in row["says"]


@pytest.mark.parametrize("name", ["notes.txt", "other.jsonl"])
def test_a_kept_run_that_begins_writes_over_no_file_of_anothers(trimtab, name):
    Path("notes.txt").write_text("what I learned\n")
    assert trimtab("train tiny:task --plan plan.json --steps 2 --seed 3 --record other.jsonl").code == 0
    before = Path(name).read_bytes()
    for plan in ("", "--plan plan.json"):  # before a plan would be made
        done = trimtab(f"train tiny:task --steps 2 --checkpoints new --record {name} {plan}")
        explained(done, "record.other_run", "--record", name)
    assert Path(name).read_bytes() == before
    assert not Path("new").exists()


SECRET = "hunter2-and-nobody-else-s"


def test_nothing_that_a_run_leaves_holds_what_the_environment_keeps_secret(trimtab, tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "TRIMTAB_SECRET"):
        monkeypatch.setenv(name, f"{SECRET}-{name}")
    kept = "train tiny:task --checkpoints kept --every 1 --record run.jsonl"
    lines = (
        f"{kept} --plan plan.json --steps 2",
        f"{kept} --steps 4 --json",
        "report run.jsonl --out pages",
        "checkpoint verify kept",
    )
    said = [trimtab(line) for line in lines]
    assert [done.code for done in said] == [0] * 4
    assert not any(SECRET in done.out + done.err for done in said)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.jsonl", "manifest.json", "tensors.safetensors", "decisions.jsonl"} <= {path.name for path in left}
    assert any(path.suffix == ".html" for path in left)
    assert not [path for path in left if SECRET.encode() in path.read_bytes()]


def test_a_run_is_kept_by_its_tasks_name_and_gone_on_with_as_it_was_begun(trimtab, tmp_path):
    begun = "train tiny:task --resume auto --json"
    trimtab(f"{begun} --plan plan.json --steps 2")
    assert (tmp_path / "runs" / "train-tiny" / "step-2").is_dir()
    assert trimtab(f"{begun} --steps 3").json["resumed_at_rows"] == 2 * 32
    assert "loss" not in trimtab(f"{begun} --steps 3").json  # no step was left
    for option in ("--adapt batch", "--memory 1GiB"):
        explained(trimtab(f"{begun} --steps 4 {option}"), "resume.plan_fixed", option.split()[0])
    explained(trimtab(f"{begun} --steps 4 --seed 1"), "resume.seed_differs", "seed: got 1; expected 0")


def test_training_through_a_plan_file_with_a_record(trimtab, tmp_path):
    line = "train tiny:task --plan plan.json --steps 12 --record run.jsonl"
    done = trimtab(line).succeeded()
    assert "steps: 12\nrows: 384\n" in done.out
    assert "accuracy: 0." in done.out
    record = read_record(tmp_path / "run.jsonl")
    assert (record.header.name, record.header.seed, record.end.reason) == ("tiny", 0, "closed")
    assert [step.index for step in record.steps] == list(range(12))
    assert record.header.plan["micro_batch"]["value"] == 8
    assert f"accuracy: {record.evaluations[-1].metrics['accuracy']}" in done.out
    explained(trimtab(line), "record.exists", "run.jsonl")


def test_a_task_is_begun_in_a_new_file_and_runs_as_it_is(trimtab, tmp_path):
    assert "trimtab compare my_task.py:task --quick" in trimtab("init --kind task").succeeded().out
    explained(trimtab("init --kind task"), "file.exists", "my_task.py")
    explained(trimtab("init my-task.py --kind task"), "file.name_invalid", "my-task.py", "my_task.py")
    explained(trimtab("init none/mine.py"), "folder.missing", "none")
    assert trimtab("init mine.py --kind task").code == 0
    assert "trimtab plan mine.py:task" in (tmp_path / "mine.py").read_text()
    (tmp_path / "plan.json").write_text(to_json(Plan.fixed(256)))
    found = trimtab("train mine.py:task --plan plan.json --steps 40 --json").json
    assert (found["task"], found["data"]) == ("mine", "four classes, made up (TensorDataset and TensorDataset)")
    assert found["accuracy"] > 0.5  # of four classes


def test_what_is_to_be_typed_next_names_a_file_in_any_folder(trimtab):
    Path("my dir").mkdir()
    done = trimtab("init 'my dir/task.py' --kind task")
    assert "  trimtab compare 'my dir/task.py:task' --quick\n" in done.out
    text = Path("my dir/task.py").read_text()
    assert "\ntrimtab plan 'my dir/task.py:task' " in text
    assert 'name="task"' in text


def test_training_makes_its_own_plan(trimtab):
    done = trimtab("train tiny:task --steps 4 --adapt learning-rate,batch --json").succeeded()
    assert done.json["steps"] == 4
    done = trimtab("train tiny:task --batch-size 8 --judged 1 --steps 2 --json")
    assert done.json["rows"] == 16
    assert done.json["data_on"].startswith("host: trained on the processor")
    runs = [trimtab(f"train tiny:task --plan plan.json --steps 8 --seed {seed} --json").json for seed in (1, 1, 2)]
    assert [(run["task"], run["steps"], run["rows"]) for run in runs] == [("tiny", 8, 256)] * 3
    assert runs[0]["loss"] == runs[1]["loss"] != runs[2]["loss"]
    assert runs[0]["accuracy"] == runs[1]["accuracy"]
    assert runs[0]["samples_per_s"] > 0


def test_training_says_what_it_took_or_why_that_is_not_known(trimtab, tmp_path):
    found = trimtab("train tiny.py:task --steps 3 --record run.jsonl --json").json
    assert (found["energy"], found["energy_j"]) == ("not measured: none that tests read", None)
    record = read_record(tmp_path / "run.jsonl")
    assert record.header.detail["meter"]["provenance"] == "absent"
    found = trimtab("train tiny.py:task --steps 3 --energy-watts 90 --json").json
    assert found["energy"].endswith("estimated (90 W, as given)")
    assert found["energy_j"] > 0


def test_training_says_its_carbon_of_one_kind_or_why_it_is_not_known(trimtab, tmp_path):
    train = "train tiny.py:task --steps 3 --carbon 360 --json"
    explained(trimtab(train), "carbon.kind_missing", "average", "marginal")
    found = trimtab(f"{train} --carbon-kind average").json
    assert (found["carbon"], found["carbon_g"]) == ("unknown: none that tests read", None)
    found = trimtab(f"{train} --carbon-kind marginal --energy-watts 90").json
    assert found["carbon_g"] == pytest.approx(found["energy_j"] * 360 / 3.6e6, rel=1e-12)
    assert found["carbon"].endswith("g CO2e (marginal carbon intensity, estimated energy)")
    (tmp_path / "old.csv").write_text("time,g_per_kwh\n2020-01-01T00:00Z,100\n2020-01-01T01:00Z,300\n")
    old = trimtab("train tiny.py:task --steps 3 --carbon old.csv --carbon-kind average")
    explained(old, "intensity.not_current", "2020-01-01T00:00")


@pytest.mark.usefixtures("profile_json")
def test_energy_that_is_weighed_without_a_meter_is_refused_estimated_or_left_out(trimtab):
    plan = "plan tiny.py:task --energy-weight 1"
    explained(trimtab(plan), "energy.no_meter", "none that tests read", "renormalise")
    left = trimtab(f"{plan} --without-meter renormalise")
    shown = " ".join(left.out.split())
    assert "energy: not measured: none that tests read. Its weight of 0.5 in the objective was set to 0" in shown
    assert "energy: estimated (90 W, as given)" in trimtab(f"{plan} --energy-watts 90 --explain").out
    explained(trimtab("plan profile.json --energy-weight 1"), "energy.not_measured", "energy")
    explained(trimtab("plan profile.json --energy-watts 5"), "option.conflict", "--energy-watts")
    explained(trimtab(f"{plan} --device 'H100 SXM'"), "energy.no_meter", "H100 SXM")


def test_a_diverged_run_is_still_one_json_object(trimtab, tmp_path):
    name = changed(tmp_path, "diverging", "lr=3e-3", "lr=1e30")
    done = trimtab(f"train {name} --plan plan.json --steps 5 --nonfinite continue --json")
    assert done.code == 0
    assert done.json["loss"] in ("nan", "inf")
    refused = trimtab(f"train {name} --plan plan.json --steps 5 --json")
    assert (refused.code, refused.out) == (1, "")


RESULT = {"report.html", "result.json"}


@pytest.mark.slow
def test_a_comparison_and_its_report(trimtab, tmp_path):
    line = "compare tiny.py:task --steps 6 --pairs 2 --out out"
    found = trimtab(f"{line} --json").succeeded().json
    assert (found["schema"], found["name"]) == (1, "compare")
    metrics = {row["metric"] for row in found["rows"]}
    assert metrics >= {"throughput_ratio", "peak_memory_ratio", "final_metric", "planning_s"}
    saved = Comparison.load(tmp_path / "out" / "result.json")
    assert saved.num_pairs == 2
    assert saved.command == f"trimtab {line} --json"
    assert {path.name for path in (tmp_path / "out").iterdir()} >= RESULT

    screen = trimtab(line).succeeded().out.splitlines()
    assert screen[-1] == "report: out/report.html"
    assert len(screen) <= 25
    assert max(map(len, screen)) <= 80
    details = Comparison.load(tmp_path / "out" / "result.json").details()
    assert trimtab("report out --verbose").succeeded().out == f"{details}\nreport: out/report.html\n"
    for option, setting in (("--steps 8", "--steps"), ("--cap 9", "--cap"), ("--memory 1GiB", "--memory")):
        explained(trimtab(f"{line} {option}"), "folder.settings_differ", setting, "--out")

    again = trimtab("report out --out elsewhere").succeeded()
    assert again.out.rstrip().endswith("report: elsewhere/report.html")
    assert (tmp_path / "elsewhere" / "report.html").read_text() == (tmp_path / "out" / "report.html").read_text()
    as_json = trimtab("report out/result.json --json")
    assert as_json.json["rows"] == trimtab("report out --json").json["rows"]
    assert {row["metric"] for row in as_json.json["rows"]} == metrics

    trimtab("train tiny:task --steps 2 --record run.jsonl")
    several = trimtab("report out run.jsonl").succeeded()
    assert "report: out/report.html" in several.out
    assert several.out.rstrip().endswith("report: run.html")
    lines = trimtab("report out run.jsonl --json").out.splitlines()
    assert [json.loads(line).get("name", "") for line in lines] == ["compare", ""]
    explained(trimtab("report out run.jsonl --out page"), "option.conflict", "2 runs")
    explained(trimtab("report out tiny.py"), "json.invalid", "tiny.py")
    explained(trimtab("report out ."), "format.invalid")


def test_reports_and_kept_runs_are_refused_before_anything_begins(trimtab):
    Path("page.html").write_text("mine")
    explained(trimtab("report absent --out page.html"), "folder.is_file", "page.html")
    assert Path("page.html").read_text() == "mine"
    done = trimtab("train tiny:task --steps 2 --checkpoints new --record absent/run.jsonl")
    explained(done, "folder.missing", "--record absent/run.jsonl")
    assert not Path("new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "--energy-watts 50"])
def test_a_comparison_to_the_end_has_targets_and_its_joules(trimtab, tmp_path, given):
    line = f"compare tiny.py:task --to-end --pairs 1 --against strong,strict --plan plan.json --out out {given}"
    found = trimtab(f"{line} --json").succeeded().json
    targets = [row for row in found["rows"] if row["metric"] == "time_to_target_ratio"]
    assert {row["target"] for row in targets} == {0.3, 0.6}
    assert {row["arm"] for row in targets} == {"equivalent_plan", "strong", "strict", "strong_plan"}
    joules = [row for row in found["rows"] if row["metric"] == "joules_per_sample"]
    assert bool(joules) == bool(given)
    said = "energy: estimated (50 W, as given)"
    assert (said in trimtab(f"{line} --verbose").out) == bool(given)
    assert any(row["metric"] == "do_no_harm_ratio" for row in found["rows"])


def test_a_tuned_plan_is_compared_beside_the_plan(trimtab):
    found = trimtab("compare tiny.py:task --quick --pairs 1 --adapt learning-rate --out out --json").succeeded().json
    plans = {row["arm"]: row for row in found["rows"] if row["metric"] == "planning_s"}
    assert set(plans) == {"equivalent_plan", "tuned_plan"}
    assert "schedule" in plans["tuned_plan"]["changes"]
    assert "schedule" not in plans["equivalent_plan"]["changes"]
    assert plans["equivalent_plan"]["search_s"] == 0 < plans["tuned_plan"]["search_s"]


def test_a_plan_that_was_made_before_is_compared(trimtab, tmp_path):
    trimtab("compare tiny.py:task --quick --pairs 1 --plan plan.json --out given").succeeded()
    saved = Comparison.load(tmp_path / "given" / "result.json")
    assert saved.plans == {"plan": PLAN}


def test_phases_of_a_plan_are_timed_and_read_back(trimtab, tmp_path):
    done = trimtab("phases tiny.py:task --plan plan.json --rounds 2 --out found.json").succeeded()
    assert "forward" in done.out
    assert "backward Linear" in done.out
    found = read_json(PhaseResult, tmp_path / "found.json")
    assert len(found.plain("plan")) == 2
    assert trimtab("report found.json").succeeded().out == done.out
    rows = trimtab("report found.json --json").json
    assert (rows["schema"], rows["name"]) == (1, "phases")


def test_an_ablation_and_its_report(trimtab, tmp_path):
    (tmp_path / "mine.json").write_text(to_json(Plan.fixed(32, micro_batch=8, fused_optimizer=True)))
    asked = "ablate tiny.py:task --steps 4 --pairs 1 --plan mine.json --out out"
    found = trimtab(f"{asked} --json").succeeded().json
    assert (found["schema"], found["name"]) == (1, "ablate")
    of_speed = {(row["change"], row["setting"]) for row in found["rows"] if "change" in row}
    assert of_speed == {
        ("micro_batch", "alone"),
        ("micro_batch", "in the plan"),
        ("fused_optimizer", "alone"),
        ("fused_optimizer", "in the plan"),
        ("micro_batch and fused_optimizer", "together"),
    }
    resumed = trimtab(asked).succeeded()
    assert {"micro-batch", "fused optimizer"} <= {line[:15].strip() for line in resumed.out.splitlines()}
    assert resumed.out.rstrip().endswith("report: out/report.html")
    explained(trimtab(f"{asked} --pairwise"), "folder.settings_differ", "pairwise", "--out")
    assert trimtab("report out --json").json["name"] == "ablate"


def test_none_is_adapted_beside_nothing_else():
    assert settings_to_adapt(None) == settings_to_adapt("none") == settings_to_adapt("none,none") == ()
    assert settings_to_adapt("batch,learning-rate,batch") == ("batch", "learning_rate")
    with raises(ValueGivenError, code="option.conflict", field="--adapt"):
        settings_to_adapt("none,batch")


@pytest.mark.parametrize("command", ["train", "compare", "phases"])
def test_other_ranks_than_a_launcher_started_are_refused(trimtab, monkeypatch, command):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    explained(trimtab(f"{command} tiny:task --ranks 3"), "ranks.launcher_differs", "3", "2 processes")


def test_user_code_is_kept_from_the_result_and_its_errors_are_one_line(trimtab, tmp_path):
    loud = "\nprint('imported')\ndef load_data():\n    print('loading')\n"
    name = changed(tmp_path, "loud", "\ndef load_data() -> TaskData:\n", loud)
    done = trimtab(f"profile {name} --json")
    assert done.json["schema"] == PROFILE_SCHEMA
    assert done.err == "imported\nloading\n"
    failing = "    raise ArithmeticError('no loss today\\nnor ever')\n"
    name = changed(tmp_path, "odd", "    points, labels = batch\n", failing)
    explained(trimtab(f"plan {name}"), "loss.failed", "ArithmeticError: no loss today", "TRIMTAB_TRACEBACK=1")


# A command line, the error's code, and names and values in its line.
ERRORS = [
    ("plan nonsense", "value.invalid", "'nonsense'", "source_gpt", "my_module:attribute"),
    ("plan absent:task", "value.invalid", "absent"),
    ("plan absent.py:task", "value.invalid", "absent.py"),
    ("plan tiny:nothing", "value.invalid", "'nothing'", "tiny"),
    ("plan broken:task", "format.invalid", "broken", "ZeroDivisionError"),
    ("profile absent:task", "value.invalid", "absent"),
    ("train absent:task", "value.invalid", "absent"),
    ("compare absent:task --out out", "value.invalid", "absent"),
    ("plan absent.json", "file.unreadable", "absent.json", "Profile"),
    ("plan damaged.json", "json.invalid"),
    ("train tiny:task --plan absent.json", "file.unreadable", "absent.json", "Plan"),
    ("train tiny:task --plan other.json", "plan.batch_differs", "got 64", "expected 32"),
    ("train tiny:task --plan plan.json --batch-size 8", "plan.batch_differs", "got 32", "expected 8"),
    ("compare tiny:task --against fast", "recipe.missing", "tiny", "fast", "strict, strong"),
    ("compare tiny:task --against muon", "recipe.missing", "tiny", "muon"),
    ("compare tiny:task --against strict --ranks 2", "option.conflict", "2 ranks", "--against"),
    ("ablate absent:task --out out", "value.invalid", "absent"),
    ("ablate tiny:task --plan absent.json", "file.unreadable", "absent.json", "Plan"),
    ("ablate tiny:task --plan damaged.json --out out", "json.invalid"),
    ("ablate tiny:task --plan other.json --out out", "plan.batch_differs", "64", "32", "tiny"),
    ("ablate tiny:task --plan plan.json --memory 1GiB", "option.conflict", "--memory 1GiB"),
    ("ablate tiny:task --plan plan.json --adapt learning-rate", "option.conflict", "--adapt learning-rate", "--plan"),
    ("ablate tiny:task --adapt batch", "value.invalid", "--adapt", "'batch'"),
    ("ablate tiny:task --out plan.json", "folder.is_file", "plan.json"),
    ("report absent", "file.unreadable", "absent", "compare"),
    ("report .", "format.invalid"),
    ("report damaged.json", "json.invalid"),
    ("plan tiny:task --memory lots", "value.invalid", "'lots'", "8GiB"),
    ("profile tiny:task --memory -1GiB", "value.invalid", "'-1GiB'"),
    ("compare tiny:task --memory 0", "value.invalid", "'0'"),
    (
        "plan tiny:task --adapt all",
        "value.invalid",
        "'all'",
        "learning-rate, schedule, optimizer, dropout, optimizer-state, batch, none",
    ),
    ("train tiny:task --adapt x", "value.invalid", "--adapt", "'x'"),
    ("train tiny:task --adapt x --plan plan.json", "value.invalid", "--adapt", "'x'"),
    ("train tiny:task --adapt learning-rate --plan plan.json", "option.conflict", "--adapt learning-rate", "--plan"),
    ("plan profile.json --adapt learning-rate", "option.conflict", "--adapt learning-rate", "profile.json"),
    ("compare tiny:task --adapt x", "value.invalid", "--adapt", "'x'"),
    ("compare tiny:task --adapt batch --memory 1GiB", "option.conflict", "--adapt batch", "--memory"),
    ("compare tiny:task --cap -1", "cap.not_positive", "-1"),
    ("profile tiny:task -o absent/profile.json", "folder.missing", "--out absent/profile.json"),
    ("plan tiny:task -o absent/plan.json", "folder.missing", "--out absent/plan.json"),
    ("compare tiny:task --out plan.json", "folder.is_file", "plan.json"),
    ("train tiny:task --memory 1GiB --plan plan.json", "option.conflict", "--memory 1GiB"),
    ("train tiny:task --memory lots", "value.invalid", "'lots'"),
    ("train tiny:task --memory 1B", "plan.infeasible", "1 B"),
    ("train tiny:task --plan plan.json --record absent/run.jsonl", "folder.missing", "--record absent/run.jsonl"),
    ("train tiny:task --record plan.json", "record.exists", "plan.json"),
    ("compare tiny:task --ranks 2 --adapt learning-rate", "option.conflict", "2 ranks", "--adapt"),
    ("compare tiny:task --ranks 33", "ranks.too_many", "33", "32"),
    ("compare tiny:task --ranks 2 --memory 0", "value.invalid", "'0'"),
    ("scale tiny:task --memory lots", "value.invalid", "'lots'"),
    ("scale tiny:task --memory 1GiB --plan plan.json", "option.conflict", "--memory 1GiB"),
    ("scale tiny:task --plan freed.json", "plan.not_equivalent", "learning rate"),
    ("plan tiny:task --ranks 2", "option.required", "--ranks 2", "--link"),
    ("plan tiny:task --link ib", "option.required", "--link ib", "--ranks"),
    ("plan tiny:task --ranks 2 --link string", "value.invalid", "link", "'string'"),
    ("plan tiny:task --ranks 2 --link '8 x ib + string'", "value.invalid", "link", "'string'"),
    ("plan tiny:task --ranks 2 --link ib --adapt batch", "option.conflict", "--adapt batch", "--ranks"),
    ("plan tiny:task --ranks 2 --link ib --explain", "option.conflict", "ranks", "--explain"),
    ("plan tiny:task --ranks 4096 --link ib", "ranks.too_many", "4096", "32"),
    ("plan tiny:task --engine deepspeed", "option.required", "--engine deepspeed", "--ranks"),
    ("plan tiny:task --link ib --engine deepspeed", "option.required", "--engine deepspeed", "--ranks"),
    ("plan tiny:task --ranks 2 --engine deepspeed", "option.required", "--ranks 2", "--link"),
    ("plan tiny:task --ranks 2 --link ib --engine horovod", "value.invalid", "--engine", "horovod"),
    (
        "plan tiny:task --ranks 2 --link ib --engine deepspeed --adapt batch",
        "option.conflict",
        "--adapt batch",
        "--ranks",
    ),
    ("plan tiny:task --ranks 4 --device 'H100 SXM' --link nvlink --energy-weight 1", "energy.several_ranks", "4 ranks"),
    ("train tiny:task --steps 2 --every 4", "option.required", "--every 4", "--checkpoints", "--resume auto"),
    ("train tiny:task --steps 2 --accept torch", "option.required", "--accept torch", "--checkpoints", "--resume auto"),
    ("compare tiny:task --quick --steps 9 --out no", "option.conflict", "--quick", "--steps"),
    ("compare tiny:task --quick --to-end --out no", "option.conflict", "--quick", "--to-end"),
    ("compare tiny:task --cap 9 --baseline-cap 5", "cap.too_small", "5 s", "9 s"),
    ("train tiny.py:task --carbon-kind average", "option.required", "--carbon-kind average"),
    ("compare tiny.py:task --plan other.json --out no", "plan.batch_differs", "64", "32"),
    (
        "compare tiny:task --plan plan.json --adapt learning-rate --out no",
        "option.conflict",
        "--adapt learning-rate",
        "--plan",
    ),
    ("phases tiny:task --plan plan.json --memory 1GiB", "option.conflict", "--memory 1GiB"),
    ("phases tiny:task --out no/where.json", "folder.missing", "--out no/where.json"),
]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case[0])
def test_an_error_is_one_line_without_a_traceback(trimtab, tmp_path, case):
    line, code, *words = case
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "other.json").write_text(to_json(Plan.fixed(64)))
    (tmp_path / "freed.json").write_text(to_json(Plan.fixed(32, learning_rate_scale=2.0)))
    explained(trimtab(line), code, *words)


def test_a_traceback_is_shown_on_request(trimtab, monkeypatch):
    monkeypatch.setenv("TRIMTAB_TRACEBACK", "1")
    with raises(ValueError, code="value.invalid", field="task"):
        trimtab("plan nonsense")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "fly",
        "plan",
        "plan tiny:task --fast",
        "compare tiny:task --pairs 0",
        "compare tiny:task --pairs five",
        "train tiny:task --steps 0",
        "report",
    ],
)
def test_a_command_line_that_does_not_parse_exits_2(trimtab, line):
    done = trimtab(line)
    assert done.code == 2
    assert "Usage: " in done.err + done.out
    assert "Traceback" not in done.err


def test_help_names_every_command(trimtab):
    done = trimtab("--help")
    assert done.code == 0
    command = get_command(cli.app)
    assert all(f"\n  {name} " in done.out for name in command.commands)
    start, more = (done.out.index(f"\n{title}:\n") for title in ("Start here", "More"))
    assert start < done.out.index("\n  doctor ") < done.out.index("\n  compare ") < more < done.out.index("\n  scale ")
    assert "--adapt" in trimtab("compare --help").out
    assert trimtab("-h").out == done.out
    assert trimtab("compare -h").out == trimtab("compare --help").out
    assert trimtab("checkpoint verify -h").code == 0
    bare = trimtab("")
    assert "Start here:" in bare.out + bare.err


def test_the_version_is_printed(trimtab):
    assert trimtab("--version").succeeded().out == f"trimtab {package.__version__}\n"


@pytest.mark.parametrize("line", ["--help", "-h", "--version", "", "estimate --help", "compar"])
def test_help_and_version_do_not_load_torch(tmp_path, line):
    code = (
        "import sys\nfrom trimtab import cli\n"
        f"sys.argv = ['trimtab', *{line.split()!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    assert as_process(tmp_path, "-c", code).err.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete -")])
def test_a_shell_completes_the_commands(tmp_path, shell, word):
    def shown(**asked: str) -> str:
        code = f"import os, sys\nos.environ.update({asked})\nsys.argv = ['trimtab']\n{MAIN}"
        return as_process(tmp_path, "-c", code).out

    assert word in shown(_TRIMTAB_COMPLETE=f"source_{shell}")
    words = {"COMP_WORDS": "trimtab com", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "trimtab com"}
    assert "compare" in shown(_TRIMTAB_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_FISH_ACTION="get-args", **words)


def test_tasks_are_listed_with_the_ways_to_name_ones_own(trimtab):
    lines = trimtab("tasks").succeeded().out.splitlines()
    assert [line.split()[0] for line in lines[: len(BUILT_IN)]] == list(BUILT_IN)
    assert all(len(line.split()) > 3 for line in lines[: len(BUILT_IN)])
    assert any("train.py:setup" in line for line in lines)
    rows = trimtab("tasks --json").succeeded().json["rows"]
    assert [row["task"] for row in rows] == list(BUILT_IN)


LOOPS = """raise SystemExit("was run")
from trimtab.tasks import Task
def make_model(): ...
def helper(width): ...
def setup(seed): ...
mine = Task(name="mine")
"""


@pytest.mark.parametrize("command", ["plan", "compare", "train"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("loops.py", "loops.py:setup or loops.py:mine?"),
        ("loops", "loops:setup or loops:mine?"),
        ("loops.py:", "loops.py:setup or loops.py:mine?"),
        ("digits_resnt", "digits_resnet?"),
        ("tiny.py:tsk", "tiny.py:task?"),
    ],
)
def test_a_misspelt_task_is_answered_by_a_name_that_is_there(trimtab, tmp_path, command, name, meant):
    (tmp_path / "loops.py").write_text(LOOPS)
    explained(trimtab(f"{command} {name}"), "value.invalid", name, f"Did you mean {meant}")


def test_a_misspelt_command_or_device_is_answered_by_the_one_that_is_there(trimtab):
    done = trimtab("compar tiny:task")
    assert (done.code, done.err.splitlines()[-1]) == (2, "Error: No such command 'compar'. Did you mean 'compare'?")
    for line in ("plan tiny:task", "estimate tiny.py:task"):
        explained(trimtab(f"{line} --device H10"), "value.invalid", "Did you mean H100?")
    explained(trimtab("estimate tiny.py"), "value.invalid", "Did you mean tiny.py:task?")


@pytest.mark.slow
def test_an_estimate_of_a_task(trimtab):
    shown = trimtab("estimate tiny.py:task --device 'RTX 4090'").succeeded().out.splitlines()
    assert len(shown) <= 20
    assert all(len(line) <= 80 for line in shown)
    found = trimtab("estimate tiny.py:task --device 'RTX 4090,L4' --json").succeeded().json
    assert [row["device"] for row in found["rows"]] == ["RTX 4090", "L4"]
    assert all(row["plain_fits"] and row["plain"]["peak_bytes"] > 0 for row in found["rows"])
    explained(trimtab("estimate tiny.py:task --length 8"), "option.conflict", "--length")


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch) -> Terminal:
    """Replace standard error by a terminal: in a test itself, as pytest sets its own after fixtures."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_progress_is_one_line_of_the_terminals_width(monkeypatch):
    """A wrapped line would leave a row behind each time it is drawn again."""
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    with progress_bar.ProgressBar() as show:
        show("reference [1024] rows 3 s  " * 7, 0.25)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    drawn = {line for line in re.split(r"[\r\n]", text) if line.strip()}
    assert len(drawn) == 1
    (line,) = drawn
    assert line.startswith("reference [1024]")  # a bracket is no markup
    assert " 25% " in line
    assert len(line) <= 60


def test_progress_is_drawn_on_a_terminal_only_and_goes_with_the_work(trimtab, monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress_display, "_REDRAW_S", 0.0)
    done = trimtab("train tiny:task --plan plan.json --steps 3 --json")
    assert done.json["steps"] == 3
    text = terminal.getvalue()
    assert "batch 3 of 3" in text
    assert "100%" in text
    assert text.endswith("\x1b[2K")  # the line is cleared


def test_what_is_told_too_often_is_not_drawn(monkeypatch):
    """A step of milliseconds must not pay for a drawing of one."""
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress_display, "_REDRAW_S", 1e9)
    with progress_bar.ProgressBar() as show:
        for step in range(5):
            show(f"step {step}")
    assert "step 0" in terminal.getvalue()
    assert "step 4" not in terminal.getvalue()


COMMAND = "from trimtab.cli import main; main()"


@pytest.mark.slow
def test_a_process_prints_its_result_and_nothing_else(tmp_path):
    """torch's profiler too is kept off standard error."""
    (tmp_path / "tiny.py").write_text(TINY_TASK.read_text() + brief.CODE)
    done = as_process(tmp_path, "-c", COMMAND, "profile", "tiny:task", "--json", "-o", "profile.json").succeeded()
    assert done.json["loop"]["optimizer"] == "AdamW"
    failed = as_process(tmp_path, "-c", COMMAND, "plan", "profile.json", "--memory", "10B")
    explained(failed, "plan.infeasible", "10 B")
    code = (
        "import sys; sys.argv = ['trimtab', 'plan', 'profile.json', '--json']\n"
        "from trimtab.cli import app\n"
        "app(standalone_mode=False)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    decided = as_process(tmp_path, "-c", code)
    assert from_json(Plan, decided.out).batch_size == 32
    assert decided.err == "False False\n"  # a profile is decided without torch


@pytest.mark.parametrize("way", [("-c", COMMAND), ("-m", "trimtab.cli")], ids=("script", "-m"))
def test_without_its_packages_the_command_says_which_extra_has_them(tmp_path, way):
    """The wheel without its extras explains the missing package, without a traceback."""
    (tmp_path / "typer.py").write_text("raise ImportError('blocked')")
    done = as_process(tmp_path, *way, "doctor", path=(tmp_path, SOURCE))
    explained(done, "dependency.missing", "typer", "pip install 'trimtab[cli]'")


def test_without_its_packages_its_parts_are_no_less_an_error(tmp_path):
    code = "import sys; sys.modules['typer'] = None\nfrom trimtab.core.errors import DependencyError\n"
    code += "try:\n    from trimtab.cli import app\nexcept DependencyError as error:\n    print(error)"
    done = as_process(tmp_path, "-c", code)
    assert "trimtab[cli]" in done.out, done.err


@pytest.mark.slow
def test_an_interrupt_ends_it_quietly(tmp_path):
    shutil.copy(TINY_TASK, tmp_path / "tiny.py")
    load = "def load_data() -> TaskData:\n"
    slow = "    import time\n    open('begun', 'w').close()\n    time.sleep(60)\n"
    name = changed(tmp_path, "slow", load, load + slow)
    # A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}; {COMMAND}", "plan", name]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    for _ in range(600):
        if (tmp_path / "begun").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
