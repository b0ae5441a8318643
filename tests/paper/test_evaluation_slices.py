"""The script of the whole evaluation: its slices, that it resumes where it stopped, and its record."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from call_counts import OutOfReach
from raising import raises
from test_comparison import comparison
from test_phases import result as phase_result
from test_scaling import scaling
from torch.nn import functional as F

from benchmarks.paper import evaluation, goals
from benchmarks.paper import evaluation_gpu_tasks as timed
from benchmarks.paper import evaluation_slices as listed
from benchmarks.paper.claims import IMAGES, TOKENS
from benchmarks.paper.evaluation_record import record_of, records, rows_of, text_of, updated
from benchmarks.paper.resnet50 import bottleneck_resnet
from benchmarks.paper.tasks import load_task
from trimtab.api import start
from trimtab.cli.main import app
from trimtab.core.choice import MeasuredCost
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.recompute_schedule import schedule_of
from trimtab.core.record import Header, RunRecord, StepRecord, write_record
from trimtab.core.serialization import read_json, to_json
from trimtab.experiments.benchmark_rows import benchmark_object
from trimtab.experiments.plan_changes import changes_of
from trimtab.experiments.result_table import PEAK, ResultTable, Row
from trimtab.experiments.subject import MeasuredPart
from trimtab.experiments.task_plans import require_fits, task_of_rank
from trimtab.experiments.time_to_target import QualityMetric
from trimtab.losses import Summed
from trimtab.measure.blocks import find_blocks
from trimtab.planner.multi_rank_plan import for_replicas
from trimtab.plans.plan import Plan
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.training.split_conditions import has_batch_statistics

ROOT = Path(__file__).parents[2]
HERE = {"cpu": "AMD EPYC Processor avx2", "cpu_cores": "2", "os": "Linux", "sources": "abc"}


@pytest.mark.parametrize("size", ["cpu", "gpu", "tiny"])
def test_slices_are_named_once_and_fit_their_minutes(size):
    found = listed.slices(size)
    assert len({each.name for each in found}) == len(found) > 3
    assert all(each.minutes <= listed.MINUTES[size] for each in found)
    assert listed.MINUTES["gpu"] == 9  # a turn on a lent machine is ten minutes
    assert size != "gpu" or all("gpu" in each.needs or each.name.startswith("prediction") for each in found)


@pytest.mark.parametrize("size", ["cpu", "gpu", "tiny"])
def test_every_slice_is_a_command_that_exists(size):
    known = typer.main.get_command(app).commands
    for each in listed.slices(size):
        name, *rest = each.command
        if name.endswith(".py"):
            assert (ROOT / "benchmarks" / "micro" / name).is_file()
            continue
        files = {listed.TASKS: "evaluation_tasks.py", listed.GPU_TASKS: "evaluation_gpu_tasks.py"}
        given = list(rest)
        for stands, file in files.items():
            given = [part.replace(stands, str(ROOT / "benchmarks" / "paper" / file)) for part in given]
        parsed = known[name].make_context(name, list(given)).params
        load_task(parsed["task"])
        assert parsed.get("out") in (None, Path(each.result if each.writes_file else each.folder))


def test_slices_and_goals_belong_together():
    counted = {"--pairs", "--rounds"}
    for size in ("cpu", "gpu"):
        commands: dict[str, set[tuple[str, ...]]] = {}
        for each in listed.slices(size):
            kept = [p for i, p in enumerate(each.command) if p not in counted and each.command[i - 1] not in counted]
            commands.setdefault(each.folder, set()).add(tuple(kept))
        assert all(len(found) == 1 for found in commands.values())
    for goal in goals.GOALS:
        found = listed.slices(goal.size)
        assert any(goal.run in (each.folder, each.result) for each in found), goal.says
    assert {goal.size for goal in goals.GOALS} == {"cpu", "gpu"}
    # One that is not has no row of its claims.
    known = {*IMAGES.tasks, *IMAGES.smaller, *TOKENS.tasks, *TOKENS.smaller}
    raced = {each.command[1] for each in listed.slices("cpu") if each.command[0] in ("compare", "ablate", "scale")}
    tasks = {task.replace(listed.TASKS, str(ROOT / "benchmarks" / "paper" / "evaluation_tasks.py")) for task in raced}
    # Of no claim: steps that are short enough for all that a tuned plan tries, and little data for many epochs.
    of_no_claim = {"digits_resnet", "repeated_gpt"}
    assert {load_task(task).name for task in tasks} <= known | of_no_claim
    assert len(tasks) > 5


def step_of_p0(kind: str) -> tuple[float, float]:
    """Return the seconds of P0's step on the H200, and those of planning beside it, as they were measured."""
    runs = {run["name"]: run for run in records(ROOT)["evaluation-h200-x1"]["runs"]}
    figures = runs[f"{kind}-timed"]["figures"]
    (step,) = (row for row in figures["phase_saved_s"] if row["phase"] == "step")
    (planning,) = figures["planning_s"]
    return step["reference_s"], planning["planning_s"]


def test_times_that_are_asked_for_are_in_reach_of_their_slices():
    """In long slices a reference trains, by its speed, for as many times what planning and two minutes take.

    Two minutes: of what the tuned plan tries, and of its training. In nine minutes there is a bound.
    """
    tasks = {"resnet": (timed.resnet50_timed, 90), "gpt2": (timed.gpt2_timed, 150)}
    for goal in (each for each in goals.GOALS if each.size == "gpu" and each.measure == "time_to_target"):
        task, long = tasks[goal.run.partition("-")[0]]
        for minutes in (9, long):
            (command,) = {each.command[:-4] for each in listed.slices("gpu", minutes) if each.folder == goal.run}
            caps = {name: float(command[command.index(name) + 1]) for name in ("--cap", "--baseline-cap")}
            assert 3 * caps["--cap"] + caps["--baseline-cap"] < 60 * minutes
        assert caps["--cap"] >= 60
        if not goal.of_value:
            step_s, planning_s = step_of_p0(goal.run.partition("-")[0])
            trains_s = min(caps["--baseline-cap"], task.budget_samples / task.batch_size * step_s)
            assert trains_s * goal.bar >= planning_s + 120
    for task, per_s, every_s in ((timed.gpt2_timed, 370e3 / 1024, 5), (timed.resnet50_timed, 15e3, 4)):
        assert task.eval_every_samples / per_s < every_s
        assert task.budget_samples % task.eval_every_samples == task.adapted_samples % task.eval_every_samples == 0


@pytest.fixture
def program(tmp_path):
    """Return a program that notes in `ran` that it was run, and ends as it is told."""
    path = tmp_path / "program.py"
    path.write_text(
        "import sys, time, pathlib\n"
        "end, result = sys.argv[1:3]\n"
        "with open('ran', 'a') as file: file.write(result + '\\n')\n"
        "if end == 'grow':\n"
        "    left = pathlib.Path(result).parent\n"
        "    (left / 'settings.json').write_text('')\n"
        "    (left / f'race-{min(1, len(list(left.glob(\"race-*\"))))}').write_text('')\n"
        "if end in ('slow', 'grow'): time.sleep(60)\n"
        "if end == 'print': print('{\"rows\": []}')\n"
        "if end == 'write': pathlib.Path(result).write_text('{}')\n"
        "sys.exit('no luck' if end == 'fail' else 0)\n"
    )
    return str(path)


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "results"
    evaluation.claim(folder, HERE)
    return evaluation.Place(folder, dict(HERE))


@pytest.fixture
def made(program):
    def make(name: str, end: str = "write", needs: tuple[str, ...] = (), *, result: str = ""):
        result = result or f"{name}.json"
        return listed.Slice(name, "says", (program, end, result), result, 1, needs, prints=end == "print")

    return make


def outcomes(found, place, limit_s=30.0, most=None):
    lines = list(evaluation.run_slices(found, replace(place, limit_s=limit_s), most))
    return [line.partition(": ")[2].partition(",")[0] for line in lines[1::2]]


def ran(place):
    path = place.folder / "ran"
    return path.read_text().split() if path.exists() else []


def test_a_slice_is_run_once_and_another_process_goes_on(place, made):
    found = [made("one"), made("two", "print")]
    assert outcomes(found, place) == ["run", "run"]
    assert outcomes(found, place) == []
    assert ran(place) == ["one.json", "two.json"]
    assert json.loads((place.folder / "two.json").read_text()) == {"rows": []}
    written = read_json(evaluation.Ran, place.ran(found[0]))
    assert (written.sources, written.result, written.environment) == ("abc", "one.json", HERE)
    assert not list(place.folder.rglob("*.partial"))


def test_another_process_goes_on_where_the_last_one_stopped(place, made):
    found = [made(name) for name in ("one", "two", "three")]
    assert outcomes(found, place, most=2) == ["run", "run"]
    assert [place.state(each)[0] for each in found] == ["done", "done", "to do"]
    assert outcomes(found, place, most=2) == ["run"]
    assert ran(place) == ["one.json", "two.json", "three.json"]


def test_what_was_measured_with_other_sources_is_stale_and_not_run_again(place, made):
    one = made("one")
    outcomes([one], place)
    later = replace(place, environment=HERE | {"sources": "def"})
    assert later.state(one) == ("stale", "measured with sources abc, now def")
    assert place.state(replace(one, command=(*one.command, "more"))) == ("stale", "its command has changed")
    assert outcomes([one], later) == []
    said = list(evaluation.text(evaluation.summary("tiny", [one], later)))
    assert said == ["slices: 1 stale", "stale: one, measured with sources abc, now def"]


def test_a_slice_that_is_ended_in_vain_is_not_begun_again_before_it_may_take_longer(place, made):
    found = [made("slow", "slow", result="same/a"), made("after", result="same/b"), made("other")]
    (place.folder / "same").mkdir()
    tight = replace(place, limit_s=1.5)
    assert outcomes(found[:2], place, limit_s=1.5) == ["cut off"]  # what shares its folder waits too
    assert outcomes(found, place, limit_s=1.5) == ["run"]  # as it does in a later run
    assert ran(place) == ["same/a", "other.json"]
    assert [tight.state(each)[0] for each in found] == ["cut off", "to do", "done"]
    said = list(evaluation.text(evaluation.summary("tiny", found, tight)))
    assert said[0] == "slices: 1 done, 1 to do, 1 cut off"
    assert said[1].startswith("cut off: slow, at 0.025 minutes with nothing to go on from: --slice-minutes 1 or more")
    longer = replace(place, limit_s=60.0)
    assert longer.state(found[0])[0] == "to do"
    fast = replace(found[0], command=(found[0].command[0], "write", "same/a"))
    assert outcomes([fast, found[1]], place, limit_s=60.0) == ["run", "run"]
    assert not list(place.folder.glob("cut/*"))


def test_a_slice_that_leaves_something_to_go_on_from_stays_to_do_while_it_does(place, made):
    """Started again, what finds a race more each time gets to its end; a file that says whose it is is no race."""
    each = made("slow", "grow", result="same/a")
    (place.folder / "same").mkdir()
    lines = [line for _ in range(4) for line in evaluation.run_slices([each], replace(place, limit_s=1.5))]
    assert [line.partition(": ")[2] for line in lines[1::2]][:2] == [
        "cut off, at 0.025 minutes: run again it goes on from what it left"
    ] * 2
    assert lines[-1].startswith("slow: cut off, at 0.025 minutes with nothing to go on from")
    assert ran(place) == ["same/a"] * 3  # the third left what was there before


def test_what_a_slice_takes_is_what_it_took_here(place, made):
    declared, twelfth = made("races-3", result="races/result.json"), made("races-12", result="races/result.json")
    plans = made("races-plans", result="races/result.json")
    assert place.minutes(declared) == declared.minutes == 1
    for name, seconds in (("races-plans", 600.0), ("races-2", 120.0), ("races-10", 301.0)):
        each = made(name, result="races/result.json")
        place.ran(each).parent.mkdir(exist_ok=True)
        ended = evaluation.Ran(name, "", "abc", HERE, seconds, each.result)
        place.ran(each).write_text(to_json(ended))
    assert [place.minutes(each) for each in (plans, declared, twelfth)] == [
        10.0,
        5.0,
        5.0,
    ]  # its own, or the last race's
    assert place.state(declared) == ("to do", "about 5 minutes")
    assert list(evaluation.listed([declared, twelfth], place))[-1].endswith("about 10 minutes are left to do here")


def test_what_a_slice_is_declared_to_take_is_about_what_it_took():
    """Of every slice of which a record is kept; a slice that ends much sooner does no harm."""
    every = {each.name: each for each in listed.slices("cpu")}
    machines = [found for name, found in records(ROOT).items() if name.endswith("core")]
    assert len(machines) == 3
    for found in machines:
        took = {row["slice"]: row["seconds"] for row in found["slices"]["done"] if row["slice"] in every}
        assert len(took) > 20
        assert {name: s for name, s in took.items() if s > 1.3 * 60 * every[name].minutes} == {}


def test_a_slice_that_fails_says_why_and_ends_no_other(place, made):
    lines = list(evaluation.run_slices([made("bad", "fail"), made("empty", "nothing")], place))
    assert lines[1] == "bad: failed, no luck"
    assert lines[3] == "empty: failed, it left no empty.json"
    assert not (place.folder / "done").exists()
    (place.folder / "arm.json").write_text(to_json(MeasuredPart(ResultTable(), {"strong": "out of memory"})))
    half = listed.Slice("half", "", ("compare", "x", "--memory", f"{listed.HALF}arm.json"), "half/result.json", 1)
    assert outcomes([half, made("next")], place) == ["failed", "run"]
    assert ran(place) == ["bad.json", "empty.json", "next.json"]


def test_what_it_started_ends_with_it(tmp_path):
    """It runs in a session of its own, so that a signal to the script alone would leave it at work."""
    child = f"import os, time; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"""
        import sys
        sys.path[:0] = [{str(ROOT)!r}]
        from benchmarks.paper import evaluation
        from pathlib import Path
        evaluation.end_with_children()
        evaluation._run([sys.executable, "-c", {child!r}], Path({str(tmp_path)!r}), 60.0)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) as script:
        number = wait_for(lambda: (tmp_path / "child").is_file() and (tmp_path / "child").read_text())
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


def wait_for(what, limit_s: float = 60.0):
    end = time.monotonic() + limit_s
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_what_is_not_here_is_not_tried(place, made):
    needs = ("gpu", "4 gpus", "meter", "bf16", "command ablate", "first.json")
    found = [made(f"needs-{number}", needs=(need,)) for number, need in enumerate(needs)]
    assert [place.state(each) for each in found] == [("cannot run here", f"needs {need}") for need in needs]
    assert outcomes(found, place) == []
    (place.folder / "first.json").write_text("{}")
    half = place.environment | {"cpu": "Xeon amx_bf16"}
    more = replace(place, num_gpus=4, has_meter=True, commands=("ablate",), environment=half)
    assert [more.state(each)[0] for each in found] == ["to do"] * 6
    assert replace(more, num_gpus=2).state(found[1])[0] == "cannot run here"


def test_a_machine_has_a_folder_of_its_own(tmp_path, place):
    hosts = [HERE | {"gpu": "NVIDIA H200", "cpu": name} for name in ("EPYC avx2", "Xeon amx_bf16", "EPYC avx512f")]
    folders = [tmp_path / name for name in ("h200-x1", "h200-x1-2", "h200-x1-3")]
    for host, folder in zip(hosts, folders, strict=True):
        assert evaluation.own_folder(folders[0], host) == folder
        evaluation.claim(folder, host)
    assert [evaluation.own_folder(folders[0], host) for host in hosts] == folders  # each goes on where it was
    evaluation.claim(place.folder, HERE | {"sources": "def"})  # other sources are no other machine
    with raises(FormatError, code="format.invalid"):
        evaluation.claim(place.folder, HERE | {"cpu_cores": "16", "gpu": "NVIDIA H200"})
    (place.folder / "machine.json").write_text("{")
    with raises(FormatError, code="format.invalid"):
        evaluation.claim(place.folder, HERE)
    with raises(FormatError, code="format.invalid"):
        evaluation.own_folder(place.folder, HERE)
    assert evaluation.slug(HERE) == "epyc-avx2-2core"
    assert evaluation.slug({"cpu": "Intel(R) Xeon(R) CPU", "gpu": "NVIDIA H200"}, 1) == "h200-x1"


def ran_as(monkeypatch, capsys, *arguments):
    """Return what the script says where it ends with an error, and prints where it does not."""
    monkeypatch.setattr(sys, "argv", ["evaluation.py", *map(str, arguments)])
    try:
        evaluation.main()
    except SystemExit as ended:
        return str(ended)
    return capsys.readouterr().out


@pytest.mark.parametrize("most", ["0", "-3"])
def test_no_number_of_slices_below_one_is_taken(monkeypatch, capsys, tmp_path, most):
    said = ran_as(monkeypatch, capsys, "--size", "tiny", "--most", most, "--folder", tmp_path / "new")
    assert said.startswith("evaluation: --most")
    assert "a whole number >= 1" in said
    assert not (tmp_path / "new").exists()


def test_a_list_of_slices_leaves_nothing(monkeypatch, capsys, tmp_path):
    said = ran_as(monkeypatch, capsys, "--size", "tiny", "--dry-run", "--folder", tmp_path / "new")
    assert "slices in new; about" in said
    assert not (tmp_path / "new").exists()


def test_a_command_is_made_where_it_runs(place):
    path = place.folder / "arm" / "steps.json"
    path.parent.mkdir()
    peaks = [Row(arm, -1, -1, PEAK, value, "B") for arm, value in (("baseline", 5000.0), ("strong", 1001.0))]
    path.write_text(to_json(MeasuredPart(ResultTable.of(peaks))))
    task = f"{listed.TASKS}:cifar10_short"
    each = listed.Slice("x", "", ("compare", task, "--memory", f"{listed.HALF}arm/steps.json"), "x/result.json", 1)
    python, *rest = evaluation._argv(each, place.folder)
    assert python == sys.executable
    assert rest[:3] == ["-m", "trimtab.cli", "compare"]
    assert (place.folder / rest[3].partition(":")[0]).resolve() == ROOT / "benchmarks" / "paper" / "evaluation_tasks.py"
    assert rest[-1] == "500B"
    path.write_text(to_json(MeasuredPart(ResultTable.of(peaks[:1]), {"strong": "out of memory"})))
    with raises(FormatError, code="format.invalid"):
        evaluation._argv(each, place.folder)


def test_a_slice_that_writes_a_file_has_a_folder_for_it(place, monkeypatch):
    ran = []

    def writes(argv, folder, limit_s):
        ran.append(argv)
        (folder / argv[argv.index("--out") + 1]).write_text("{}")
        return 0, "", ""

    monkeypatch.setattr(evaluation, "_run", writes)
    found = [each for each in listed.slices("cpu") if each.writes_file]
    assert [evaluation.run_slice(each, place)[0] for each in found] == ["run"] * 5
    for argv in ran:
        task, num_ranks = argv[argv.index("phases") + 1], 2 if "--ranks" in argv else 1
        of = load_task(f"{(place.folder / task.partition(':')[0]).resolve()}:{task.partition(':')[2]}")
        if "--plan" in argv:
            plan = read_json(Plan, place.folder / argv[argv.index("--plan") + 1])
            require_fits(task_of_rank(of, num_ranks), for_replicas(plan, num_ranks), num_ranks)


BY_HAND = {
    "cpu": {
        *("cifar-ablate-paper", "cifar-ablate-windows", "cifar-ablate-freed"),
        *("wikitext-ablate-paper", "wikitext-ablate-freed", "text-ablate-regularised"),
        *("cifar-ablate-half", "wikitext-ablate-half"),
    },
    "gpu": {"resnet-ablate-paper", "gpt2-ablate-paper"},
}
NOT_THE_PAPERS = {  # and what they change
    "cifar-ablate-freed": {"schedule", "learning_rate_scale"},
    "cifar-ablate-windows": {"batch_policy"},  # what batch statistics allow of the paper's accumulation
    "wikitext-ablate-freed": {"schedule", "learning_rate_scale"},
    "text-ablate-regularised": {"dropout", "weight_decay"},
    "cifar-ablate-half": {"precision", "memory_layout", "fused_optimizer"},
    "wikitext-ablate-half": {"precision", "allocator", "fused_optimizer", "loss_chunk"},
}


@pytest.mark.parametrize("size", BY_HAND)
def test_plans_that_are_written_by_hand_are_there_and_fit_their_tasks(place, size):
    found = [each for each in listed.slices(size) if "--plan" in each.command and each.command[0] == "ablate"]
    assert {each.folder for each in found} == BY_HAND[size]
    assert len(found) == 5 * len(BY_HAND[size])
    for each in found[::5]:
        argv = evaluation._argv(each, place.folder)
        path, task = place.folder / argv[argv.index("--plan") + 1], argv[argv.index("ablate") + 1]
        plan = read_json(Plan, path)
        of = load_task(f"{(place.folder / task.partition(':')[0]).resolve()}:{task.partition(':')[2]}")
        require_fits(of, plan)
        with torch.device("meta"):
            model = of.make_model()
        chain = find_blocks(model)
        assert plan.recompute_blocks in ((), chain)
        changes = set(changes_of(plan, of.reference))
        if each.folder in NOT_THE_PAPERS:
            assert changes == NOT_THE_PAPERS[each.folder]
            continue
        assert ("micro_batch" in changes) == (not has_batch_statistics(model))
        size_of = math.ceil(math.sqrt(len(chain)))
        *segments, last = (len(part.stages) for part in schedule_of(plan.recompute.value, len(chain)))
        assert set(segments) == {size_of}
        assert 0 < last <= size_of
        if size == "gpu":
            assert changes >= {"precision", "schedule"}
            assert plan.precision.value == "fp16"
            assert plan.reference == of.reference


@pytest.mark.parametrize("kind", ["resnet50", "gpt2"])
def test_each_block_of_a_plan_at_the_papers_size_is_run_twice(kind):
    """On a model of as many blocks, whose segments reach over stages; in fp32, which a processor has."""
    plan = read_json(Plan, ROOT / "benchmarks" / "paper" / "plans" / f"paper-{kind}.json")
    rows = plan.batch_size // plan.micro_batch.value * 2
    kept = {"batch_size": rows, "micro_batch": replace(plan.micro_batch, value=2), "precision": Plan.fixed(1).precision}
    images, tokens = torch.randn(rows, 3, 8, 8), torch.randint(16, (rows, 8))
    if kind == "gpt2":
        model = GPT(GPTShape(vocab_size=16, context=8, num_layers=12, num_heads=2, width=8))
        loss_fn, batch = (lambda model, batch: Summed(*model(*batch))), (tokens, tokens)
    else:
        model = bottleneck_resnet("3x3", 4, (3, 4, 6, 3), 4)
        loss_fn, batch = (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])), (images, tokens[:, 0] % 4)

    seen = OutOfReach(calls=Counter())
    for name in plan.recompute_blocks:  # what is in a segment has no hooks of its own
        first = next(model.get_submodule(name).children())
        first.register_forward_hook(lambda *_, name=name: seen.held.calls.update([name]))
    with start(model, torch.optim.AdamW(model.parameters()), replace(plan, **kept), total_samples=10 * rows) as run:
        run.train_step(run.window(batch), loss_fn)
    assert seen.held.calls == dict.fromkeys(plan.recompute_blocks, 2 * rows // 2)


def test_tables_one_to_three_are_raced_to_the_papers_targets_within_their_slices():
    """The paper's recipe and its components, each as long as the loop that they are held against."""
    for minutes in (9, 60):
        found = {each.folder: each.command for each in listed.slices("gpu", minutes)}
        for kind, target, peers, changes in (("resnet", 0.85, 3, 3), ("gpt2", 45.0, 4, 4)):
            for folder, arms in ((f"{kind}-whole", peers + 1), (f"{kind}-ablate-paper", 3 + 2 * changes)):
                command = found[folder]
                cap_s = float(command[command.index("--cap") + 1])
                assert 20 <= cap_s <= 60 * minutes / arms
                assert arms * cap_s + 2 * min(60, cap_s) < 60 * minutes - 60
                assert "--baseline-cap" not in command
                assert command[-1] != "0"  # a race that is whole, however many there are
            against = found[f"{kind}-whole"][found[f"{kind}-whole"].index("--against") + 1].split(",")
            assert {"paper", "strong"} <= set(against)
            assert len(against) == peers - 1
            task = command[1].replace(listed.GPU_TASKS, str(ROOT / "benchmarks" / "paper" / "evaluation_gpu_tasks.py"))
            assert target in load_task(task).targets


def test_slices_are_chosen_by_name_or_folder_and_a_list_says_what_is_left(place):
    found = listed.slices("cpu")
    assert [each.name for each in evaluation.chosen(found, ["monitor"])] == ["monitor"]
    assert len(evaluation.chosen(found, ["cifar-freed"])) == 5
    with raises(FormatError, code="format.invalid", field="--only"):
        evaluation.chosen(found, ["x"])
    lines = list(evaluation.listed(listed.slices("gpu"), place))
    assert lines[0].startswith("cannot run here  gpt2-timed-5")
    assert lines[-1] == f"{len(lines) - 1} slices in results; about 2 minutes are left to do here"
    with raises(ValueGivenError, code="value.invalid", field="--size"):
        evaluation.refuse_gpu("cpu", 1)
    evaluation.refuse_gpu("cpu", 0)
    evaluation.refuse_gpu("gpu", 1)


def test_a_slice_that_is_done_in_the_committed_record_is_not_repeated(place, made, tmp_path):
    kept = replace(place, record=tmp_path / "record.json")
    one, two = made("one"), made("two")
    assert kept.recorded == {}
    evaluation.summary("tiny", [one], kept)
    assert not kept.record.exists()  # Nothing was completed.
    summaries = []
    list(
        evaluation.run_slices([one], kept, completed=lambda: summaries.append(evaluation.summary("tiny", [one], kept)))
    )
    assert len(summaries) == 1
    assert [row["slice"] for row in kept.recorded["slices"]["done"]] == ["one"]
    elsewhere = replace(kept, folder=tmp_path / "other")
    evaluation.claim(elsewhere.folder, HERE)
    assert elsewhere.state(one)[0] == "done"
    assert replace(elsewhere, environment=HERE | {"sources": "def"}).state(one)[0] == "stale"
    assert elsewhere.state(two)[0] == "to do"
    assert outcomes([one, two], elsewhere) == ["run"]
    assert ran(elsewhere) == ["two.json"]
    evaluation.summary("tiny", [one, two], elsewhere)
    assert [row["slice"] for row in kept.recorded["slices"]["done"]] == ["one", "two"]


# The record.


def measured(speed, task="cifar10_resnet_short", **changes):
    """Return a comparison of the paper's recipe and of a plan with a speed."""
    facts = {"torch": "2.13", "sources": "abc", "os": "Linux"}
    return comparison({"paper": 1.5, "plan": speed}, task=task, environment=facts, **changes)


def write_run(place, name, found, file="result.json"):
    path = place.folder / name / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(to_json(found))


def recorded(place, before=None, size="cpu", facts=HERE):
    """Return the record of a folder's results, as it is read from its file."""
    return json.loads(text_of(updated(size, listed.slices(size), place.folder, before or {}, facts)))


def status_of(found, says):
    (goal,) = [goal for goal in found["goals"] if goal["says"] == says]
    return goal["status"]


def test_a_record_has_the_rows_of_every_run_and_the_status_of_every_goal(place):
    write_run(place, "cifar-recipes", measured(2.0))
    write_run(place, "cifar-scale", replace(scaling(), task="cifar10_resnet"), "scaling.json")
    write_run(place, "cifar-phases", replace(phase_result(), task="cifar10_resnet_short"), "phases.json")
    steps = tuple(StepRecord(step, 10, 10.0, 1.0, 0.1, 0.5) for step in range(4))
    write_record(place.folder / "energy.jsonl", RunRecord(Header("cifar10_resnet", 0, None, {}, {}), steps))
    found = recorded(place)
    runs = {run["name"]: run for run in found["runs"]}
    assert {name: run["kind"] for name, run in runs.items()} == {
        "cifar-recipes": "comparison",
        "cifar-scale": "scaling",
        "cifar-phases": "phases",
        "energy.jsonl": "record",
    }
    assert runs["cifar-recipes"]["environment"] == {"torch": "2.13", "sources": "abc"}
    assert {row["metric"] for row in rows_of(runs["cifar-scale"])} == {"scaling_efficiency"}
    assert {"phase_saved_s", "step_speedup"} <= set(runs["cifar-phases"]["figures"])
    assert runs["energy.jsonl"]["figures"]["samples_per_s"] == [{"arm": "run", "value": 20.0}]
    metrics = list(runs["cifar-recipes"]["figures"])
    wanted = [row for row in benchmark_object(measured(2.0))["rows"] if row.get("arm") == "equivalent_plan"]
    kept = [row for row in rows_of(runs["cifar-recipes"]) if row.get("arm") == "equivalent_plan"]
    assert len(kept) > 5
    for ours, theirs in zip(kept, sorted(wanted, key=lambda row: metrics.index(row["metric"])), strict=True):
        assert (ours["metric"], ours.get("against")) == (theirs["metric"], theirs.get("against"))
        assert ours.get("mean") == (None if theirs.get("mean") is None else pytest.approx(theirs["mean"], rel=1e-4))
    assert status_of(found, "cifar: S 1.8x P0") == "met"
    assert status_of(found, "wikitext: S 1.3x P0") == "not measured"
    assert len(found["goals"]) == len([goal for goal in goals.GOALS if goal.size == "cpu"])
    assert found["claims"] == []  # Nothing on a CPU is comparable with the paper.
    assert recorded(place, found) == found


def test_a_new_run_replaces_its_rows_and_all_others_are_kept(place):
    write_run(place, "cifar-recipes", measured(2.0))
    before = recorded(place)
    unknown = {"name": "elsewhere", "kind": "new", "task": "x", "figures": {"unknown": [{"arm": "a", "value": 1.0}]}}
    before["runs"].append(unknown)
    before["claims"] = [{"run": name, "claim": name, "source": "", "arm": "paper", "status": "pass"}
                        for name in ("elsewhere", "cifar-recipes")]  # fmt: skip
    for goal in before["goals"]:
        if goal["says"] in ("wikitext: S 1.3x P0", "cifar: S 1.8x P0"):
            goal |= {"status": "met", "figure": "9.000x"}
    before["slices"]["done"] = [{"slice": "monitor", "sources": "abc", "seconds": 1.0}]
    write_run(place, "cifar-recipes", measured(1.5))
    found = recorded(place, before)
    assert [run["name"] for run in found["runs"]] == ["cifar-recipes", "elsewhere"]
    (speed,) = (row["mean"] for row in found["runs"][0]["figures"]["throughput_ratio"]
                if row["arm"] == "equivalent_plan" and row["against"] == "reference")  # fmt: skip
    assert speed == pytest.approx(1.5, rel=1e-3)
    assert found["runs"][1] == unknown
    assert rows_of(unknown) == [{"metric": "unknown", "task": "x", "arm": "a", "value": 1.0}]
    assert [row["run"] for row in found["claims"]] == ["elsewhere"]
    assert status_of(found, "cifar: S 1.8x P0") == "missed"
    assert [goal["figure"] for goal in found["goals"] if goal["says"] == "wikitext: S 1.3x P0"] == ["9.000x"]
    assert [row["slice"] for row in found["slices"]["done"]] == ["monitor"]
    assert "monitor" not in found["slices"]["to do"]
    assert recorded(replace(place, folder=place.folder / "empty"), found) == found


def test_goals_of_time_and_of_files_are_judged_from_the_folder(place):
    plans = {"tuned plan": replace(Plan.fixed(10, 5), planning_s=0.5)}
    metric = QualityMetric("accuracy", targets=(0.3,))
    of = comparison({"tuned plan": 10.0}, evaluated={}, metric=metric, plans=plans, task="cifar10_resnet_half")
    write_run(place, "cifar-freed", of)
    row = {"metric": "monitor_overhead_ratio", "task": "digits_resnet", "mean": 1.001, "low": 0.999, "high": 1.002}
    (place.folder / "monitor.json").write_text(json.dumps({"rows": [row | {"n": 100, "control_half_width": 0.001}]}))
    for name, step_s, size in (("prediction-small", 0.12, 4_400_000_000), ("prediction", 0.1, 15_000_000_000)):
        plan = replace(Plan.fixed(32), predicted=MeasuredCost(step_s, size))
        (place.folder / f"{name}.json").write_text(to_json(plan))
    found = recorded(place)
    assert status_of(found, "cifar: F 3x P0 to the target, search charged") == "met"
    assert status_of(found, "the noise monitor takes 0.25%") == "met"
    says = "GPT-2: within 4.5 GB at 1.35x the time without a limit, as told for an H200"
    assert status_of(found, says) == "predicted met"
    (place.folder / "prediction.json").unlink()
    assert status_of(recorded(place), says) == "not measured"


def test_claims_of_a_gpu_are_recorded_by_run(place):
    gpu = HERE | {"gpu": "NVIDIA H200"}
    write_run(place, "gpt2-recipes", measured(2.0, "wikitext2_gpt2"))
    first = recorded(place, size="gpu", facts=gpu)
    assert {(row["run"], row["task"]) for row in first["claims"]} == {("gpt2-recipes", "wikitext2_gpt2")}
    statuses = {(row["claim"], row["arm"]): row["status"] for row in first["claims"]}
    assert statuses["27.8% more tokens per second", "paper"] == "pass"
    assert first["headline"]["kind"] == "2 of 24 shown"  # Throughput and memory.
    write_run(place, "gpt2-recipes", replace(measured(2.0, "wikitext2_gpt2"), failures={"paper": "out of memory"}))
    second = recorded(place, first, size="gpu", facts=gpu)
    assert {row["arm"] for row in second["claims"]} == {"equivalent_plan"}
    assert second["headline"]["kind"] == "0 of 24 shown"


def test_a_changed_figure_of_a_record_is_a_changed_line(place):
    write_run(place, "cifar-recipes", measured(2.0))
    found = recorded(place)
    before = text_of(found).splitlines()
    found["runs"][0]["figures"]["throughput_ratio"][1]["mean"] = 3.0
    after = text_of(found).splitlines()
    assert len(before) == len(after) > 30
    assert sum(ours != theirs for ours, theirs in zip(before, after, strict=True)) == 1


def test_the_records_in_the_checkout_are_read_by_name():
    found = records(ROOT)
    assert set(found) >= {"evaluation-h200-x1"}
    for name, record in found.items():
        path = record_of(ROOT, name)
        assert json.loads(path.read_text(encoding="utf-8")) == record
        assert all(rows_of(run) for run in record["runs"])


def test_the_summary_lists_goals_first_and_counts_slices(place):
    write_run(place, "cifar-recipes", measured(2.0))
    found = evaluation.summary("cpu", listed.slices("cpu"), place)
    statuses = {row["says"]: row["status"] for row in found["rows"] if row["metric"] == "goal"}
    assert statuses["cifar: S 1.8x P0"] == "met"
    assert statuses["wikitext: S 1.3x P0"] == "not measured"
    states = [row for row in found["rows"] if row["metric"] == "slice"]
    assert len(states) == len(listed.slices("cpu"))
    said = list(evaluation.text(found))
    assert len(said) == len(statuses) + 1
    assert said[0].split("  ")[0] == next(iter(statuses.values()))
