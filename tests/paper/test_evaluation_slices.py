"""The script of the whole evaluation: its slices, that it goes on where it stopped, and what it says of goals."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
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
from benchmarks.paper.evaluation_archive import archive_of, folder_of, pack, unpack_all, unpacked
from benchmarks.paper.findings import of_comparison
from call_counts import OutOfReach
from measured_runs import CPU, GAIN, ablation, arm, around, comparison, scaled
from raising import raises
from torch.nn import functional as F
from trimtab.experiments.ablation.ablation_design import changes_of
from trimtab.experiments.comparison.comparison_result import RatioRow

from benchmarks import advice_figures, evaluation_figures
from benchmarks.paper import evaluation, goals, results
from benchmarks.paper import evaluation_gpu_tasks as timed
from benchmarks.paper import evaluation_slices as listed
from benchmarks.paper.claims import IMAGES, TOKENS
from benchmarks.paper.evaluation_slices import Ran
from benchmarks.paper.judge import judge_goals
from benchmarks.paper.resnet50 import bottleneck_resnet
from benchmarks.paper.tasks import load_task
from trimtab.api import start
from trimtab.cli.main import app
from trimtab.core.choice import MeasuredCost
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.recompute_schedule import schedule_of
from trimtab.core.serialization import read_json, to_json
from trimtab.experiments.task_plans import require_fits
from trimtab.experiments.task_ranks import task_of_rank
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
        load_task(parsed.get("task") or parsed["sources"][0])
        assert parsed.get("out") in (None, Path(each.result if each.writes_file else each.folder))


def test_slices_and_goals_belong_together():
    counted = {"--pairs", "--whole", "--seeds", "--rounds"}
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
    found = json.loads((unpacked(ROOT, "evaluation-h200-x1") / f"{kind}-timed/report.json").read_text())
    (reference,) = (arm for arm in found["arms"] if arm["name"] == "reference")
    return statistics.median(reference["step_s"]), found["planning_s"]


def test_times_that_are_asked_for_are_in_reach_of_their_slices():
    """In long slices a reference trains, by its speed, for as many times what planning and two minutes take.

    Two minutes: of what the tuned plan tries, and of its training. In nine minutes there is a bound.
    """
    tasks = {"resnet": (timed.resnet50_timed, 90), "gpt2": (timed.gpt2_timed, 150)}
    for goal in (each for each in goals.GOALS if each.size == "gpu" and each.measure == "time_to_target"):
        task, long = tasks[goal.run.partition("-")[0]]
        for minutes in (9, long):
            (command,) = {each.command[:-4] for each in listed.slices("gpu", minutes) if each.folder == goal.run}
            caps = {name: float(command[command.index(name) + 1]) for name in ("--cap", "--reference-cap")}
            assert 3 * caps["--cap"] + caps["--reference-cap"] < 60 * minutes
        assert caps["--cap"] >= 60
        if not goal.of_value:
            step_s, planning_s = step_of_p0(goal.run.partition("-")[0])
            trains_s = min(caps["--reference-cap"], task.budget_samples / task.batch_size * step_s)
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
    declared, twelfth = made("races-3", result="races/report.json"), made("races-12", result="races/report.json")
    plans = made("races-plans", result="races/report.json")
    assert place.minutes(declared) == declared.minutes == 1
    for name, seconds in (("races-plans", 600.0), ("races-2", 120.0), ("races-10", 301.0)):
        each = made(name, result="races/report.json")
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
    """Of every slice of which a record is kept; one that ends much sooner does no harm."""
    every = {each.name: each for each in listed.slices("cpu")}
    folders = [folder for folder in unpack_all(ROOT) if folder.name.endswith("core")]
    assert len(folders) == 3
    for folder in folders:
        took = {path.stem: json.loads(path.read_text())["seconds"] for path in (folder / "done").glob("*.json")}
        assert {name: s for name, s in took.items() if s > 1.3 * 60 * every[name].minutes} == {}


def test_a_slice_that_fails_says_why_and_ends_no_other(place, made):
    lines = list(evaluation.run_slices([made("bad", "fail"), made("empty", "nothing")], place))
    assert lines[1] == "bad: failed, no luck"
    assert lines[3] == "empty: failed, it left no empty.json"
    assert not (place.folder / "done").exists()
    (place.folder / "arm.json").write_text('{"peak_bytes": null}')
    half = listed.Slice("half", "", ("compare", "x", "--memory", f"{listed.HALF}arm.json"), "half/report.json", 1)
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
    (place.folder / "arm.json").write_text('{"peak_bytes": 1001}')
    task = f"{listed.TASKS}:cifar10_short"
    each = listed.Slice("x", "", ("compare", task, "--memory", f"{listed.HALF}arm.json"), "x/report.json", 1)
    python, *rest = evaluation._argv(each, place.folder)
    assert python == sys.executable
    assert rest[:3] == ["-m", "trimtab.cli", "compare"]
    assert (place.folder / rest[3].partition(":")[0]).resolve() == ROOT / "benchmarks" / "paper" / "evaluation_tasks.py"
    assert rest[-1] == "500B"
    (place.folder / "arm.json").write_text('{"peak_bytes": null}')
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
                assert "--reference-cap" not in command
                assert command[-1] != "0"  # a race that is whole, however many there are
            against = found[f"{kind}-whole"][found[f"{kind}-whole"].index("--against") + 1].split(",")
            assert {"paper", "strong"} <= set(against)
            assert len(against) == peers - 1
            task = command[1].replace(listed.GPU_TASKS, str(ROOT / "benchmarks" / "paper" / "evaluation_gpu_tasks.py"))
            assert target in load_task(task).targets


def test_slices_are_chosen_by_name_or_folder_and_a_list_says_what_is_left(place):
    found = listed.slices("cpu")
    assert [each.name for each in evaluation.chosen(found, ["monitor"])] == ["monitor"]
    assert len(evaluation.chosen(found, ["cifar-freed"])) == 6
    with raises(FormatError, code="format.invalid", field="--only"):
        evaluation.chosen(found, ["x"])
    lines = list(evaluation.listed(listed.slices("gpu"), place))
    assert lines[0].startswith("cannot run here  gpt2-timed-plans")
    assert lines[-1] == f"{len(lines) - 1} slices in results; about 2 minutes are left to do here"
    with raises(ValueGivenError, code="value.invalid", field="--size"):
        evaluation.refuse_gpu("cpu", 1)
    evaluation.refuse_gpu("cpu", 0)
    evaluation.refuse_gpu("gpu", 1)


def stands(says, folder, runs=None):
    (goal,) = [each for each in goals.GOALS if each.says == says and each.size in ("cpu", "gpu")][:1]
    (found,) = judge_goals([goal], folder, runs or {})
    return found.goal_status, found.why


def test_a_goal_is_met_missed_or_not_shown_by_its_interval(tmp_path):
    def at(speed, n=5):
        return {"cifar-recipes": of_comparison("cifar-recipes", comparison(plan=speed, n=n))}

    says = "cifar: S 1.8x P0"
    status, figure = stands(says, tmp_path, at(2.0))
    assert status == "met"
    assert figure.startswith("2.000x (95% 1.98")
    assert stands(says, tmp_path, at(1.5))[0] == "missed"
    assert stands(says, tmp_path, at(1.8))[0] == "not shown"
    status, figure = stands(says, tmp_path, at(2.0, n=3))
    assert status == "not shown"
    assert figure.startswith("pairs 1.980, 2.000")
    assert "95%" not in figure
    assert stands(says, tmp_path) == ("not measured", "")
    of = comparison("cifar10_resnet50")
    row = replace(of.target_rows[-1], arm="tuned_plan", plan_kind="tuned", target=0.85, ratio=None, bound=">= 2x")
    open_row = replace(row, verdict=replace(row.verdict, kind="no verdict"))
    says = "ResNet-50 3x3: F 85% in 60 s, planning counted"

    def at(*seconds):
        found = replace(of, target_rows=(replace(open_row, arm_s=seconds),))
        return stands(says, tmp_path, {"resnet-minute": of_comparison("resnet-minute", found)})

    assert at(50.0, 51.0, 52.0, 50.0, 51.0)[0] == "met"
    assert at(70.0, 71.0, 72.0, 70.0, 71.0)[0] == "missed"
    assert at(50.0, 51.0, 90.0, 50.0, 51.0)[0] == "not shown"
    assert at(50.0, 51.0, 52.0, 50.0)[0] == "not shown"
    assert at(50.0, 51.0, 52.0, 50.0, math.inf) == ("not shown", "50, 51, 52, 50, never s")


def test_a_time_is_told_as_speed_and_a_bound_counts(tmp_path):
    of = comparison()
    row = replace(of.target_rows[-1], arm="tuned_plan", plan_kind="tuned", ratio=around(5.0), verdict=GAIN)
    says = "cifar: F 3x P0 to the target, search charged"

    def at(**changes):
        found = replace(of, target_rows=(replace(row, **changes),))
        return stands(says, tmp_path, {"cifar-freed": of_comparison("cifar-freed", found)})

    status, figure = at()
    assert status == "met"
    assert figure.startswith("5.000x (95% 4.95")
    assert figure.endswith("to 0.85")
    assert at(ratio=around(2.0))[0] == "missed"
    assert at(ratio=None, bound=">= 4.10x") == ("met", ">= 4.10x to 0.85, n = 5")
    assert at(ratio=None, bound=">= 4.10x", arm_s=(1.0,) * 4)[0] == "not shown"
    assert at(ratio=None, bound=">= 2.10x")[0] == "not shown"
    assert at(ratio=None, bound="<= 2.10x")[0] == "missed"
    assert at(ratio=None, bound="<= 4.10x")[0] == "not shown"
    assert at(ratio=None, bound="<= 2.10x", arm_s=(1.0,) * 4)[0] == "not shown"
    assert at(ratio=None, bound="never reached") == ("not shown", "never reached to 0.85, n = 5")
    assert at(charged=False) == ("not measured", "")


def test_a_bound_counts_where_a_harder_rung_was_never_reached(tmp_path):
    # An hour of the reference does not come to where a minute of the plan does, and nobody to the last rung.
    of = comparison("wikitext2_gpt2_timed")
    row = replace(of.target_rows[-1], arm="tuned_plan", plan_kind="tuned", verdict=GAIN)
    rows = (
        replace(row, target=100.0, ratio=around(20.0)),
        replace(row, target=60.0, ratio=None, bound=">= 31.00x"),
        replace(row, target=45.0, ratio=None, bound="never reached by either"),
    )
    run = of_comparison("gpt2-freed", replace(of, target_rows=rows))
    says = "GPT-2: F 30x P0 to the target, search charged"
    assert stands(says, tmp_path, {"gpt2-freed": run}) == ("met", ">= 31.00x to 60, n = 5")

    def at(target):
        run = of_comparison("cifar-recipes", comparison(target=target))
        return stands("cifar: S within 0.5% of P0's quality", tmp_path, {"cifar-recipes": run})

    status, figure = at(0.85)
    assert status == "met"
    assert figure.endswith("; after 1,000 rows; the reference ends at accuracy 0.95 and reaches 0.85")
    assert at(0.99)[1].endswith("reaches no rung: it is far from trained")
    says = "the noise monitor takes 0.25%"
    row = {"metric": "monitor_overhead_ratio", "task": "t", "mean": 1.001, "low": 0.999, "high": 1.003, "n": 100}
    for half, status in ((0.001, "met"), (0.0001, "not shown")):
        (tmp_path / "monitor.json").write_text(json.dumps({"rows": [row | {"control_half_width": half}]}))
        assert stands(says, tmp_path)[0] == status


def test_what_a_plan_for_the_tuned_loop_holds_is_over_that_loop(tmp_path):
    of = comparison("wikitext2_gpt2")
    arms = (*of.arms, arm("strong", 1.0, 5), arm("strong_plan", 2.5, 5, "equivalent"))
    row = replace(
        of.ratios[0], metric="do_no_harm", arm="strong_plan", against="strong", plan_kind="equivalent", verdict=GAIN
    )
    run = of_comparison("gpt2-half", replace(of, arms=arms, ratios=(*of.ratios, row)))
    assert stands("GPT-2: half of P2's memory", tmp_path, {"gpt2-half": run}) == ("met", "0.400x")
    small = {"gpt2-small": run}
    assert stands("GPT-2: within 4.5 GB", tmp_path, small) == ("met", "400,000,000 bytes")
    assert stands("GPT-2: S 370,000 tokens/s", tmp_path, {"gpt2-timed": run})[0] == "missed"


def test_figures_of_an_arm_that_failed_meet_no_goal(tmp_path):
    of, says = comparison("wikitext2_gpt2"), "GPT-2: S 370,000 tokens/s"
    arms = tuple(replace(each, terms_per_s=(400e3,) * 5) for each in of.arms)
    found = replace(of, arms=arms)
    assert stands(says, tmp_path, {"gpt2-timed": of_comparison("x", found)})[0] == "met"
    verdict = replace(of.ratios[2].verdict, kind="no verdict", sentence="equivalent_plan failed in 1 of 6 races: 2.00x")
    rows = tuple(replace(row, verdict=verdict) if row.arm == "equivalent_plan" else row for row in of.ratios)
    status, figure = stands(says, tmp_path, {"gpt2-timed": of_comparison("x", replace(found, ratios=rows))})
    assert (status, figure) == ("not shown", "equivalent_plan failed in 1 of 6 races: 2.00x")
    of, said = comparison("wikitext2_gpt2"), "strong_plan failed in 1 of 6 races: the figure is of what ran"
    arms = (*of.arms, arm("strong", 1.0, 5), arm("strong_plan", 2.5, 5, "equivalent"))
    verdict = replace(of.ratios[0].verdict, kind="no verdict", sentence=said)
    row = replace(
        of.ratios[0], metric="do_no_harm", arm="strong_plan", against="strong", plan_kind="equivalent", verdict=verdict
    )
    run = of_comparison("gpt2-small", replace(of, arms=arms, ratios=(row,)))
    assert stands("GPT-2: within 4.5 GB", tmp_path, {"gpt2-small": run}) == ("not shown", said)


def test_steps_in_turns_are_of_their_task_and_of_no_change_that_all_of_the_process_has(tmp_path):
    says = "cifar: no harm to P2, 0.97, step by step"
    row = {"metric": "do_no_harm_ratio", "task": "cifar10_resnet", "mean": 0.99, "high": 1.0, "n": 240}
    assert stands(says, tmp_path) == ("not measured", "")

    def at(low, high, changes="nothing", task="cifar10_resnet"):
        rows = [row | {"low": low, "high": high, "changes": changes, "task": task}]
        (tmp_path / "no-harm.json").write_text(json.dumps({"rows": rows}))
        return stands(says, tmp_path)

    for low, high, status in ((0.98, 1.0, "met"), (0.96, 1.0, "not shown"), (0.9, 0.96, "missed")):
        found, figure = at(low, high)
        assert (found, figure.endswith("n = 240) of a plan that changes nothing")) == (status, True)
    assert at(0.98, 1.0, task="wikitext2_gpt") == ("not measured", "")
    row = {"metric": "do_no_harm_ratio", "task": "cifar10_resnet", "mean": 1.0, "low": 0.99, "high": 1.01, "n": 240}
    (tmp_path / "no-harm.json").write_text(json.dumps({"rows": [row | {"changes": "allocator retain"}]}))
    status, figure = stands("cifar: no harm to P2, 0.97, step by step", tmp_path)
    assert (status, figure) == ("not measured", "allocator retain is of the process, and so of both")


def test_a_gain_on_an_easier_target_is_not_shown_where_the_reference_came_further(tmp_path):
    of = comparison()
    easy = replace(
        of.target_rows[-1], arm="tuned_plan", plan_kind="tuned", charged=True, ratio=around(5.0), verdict=GAIN
    )
    never = {"arm_s": (math.inf,) * 5, "against_s": (80.0,) * 5, "reached_arm": 0}
    hard = replace(easy, target=0.9, ratio=None, bound="never reached", **never)

    def at(*rows):
        run = of_comparison("cifar-freed", replace(of, target_rows=rows))
        return stands("cifar: F 3x P0 to the target, search charged", tmp_path, {"cifar-freed": run})

    assert at(easy)[0] == "met"
    status, figure = at(easy, hard)
    assert (status, figure.endswith("to 0.85; the other arm came further, to 0.9 in more pairs")) == ("not shown", True)
    assert at(replace(easy, ratio=around(2.0)), hard)[0] == "missed"
    assert at(hard) == ("not shown", "never reached to 0.9, n = 5")
    capped = replace(hard, bound="<= 2.50x")
    assert at(easy, capped)[0] == "not shown"
    assert at(replace(easy, ratio=around(2.0)), replace(hard, bound="<= 3.20x"))[0] == "missed"
    assert at(capped) == ("missed", "<= 2.50x to 0.9, n = 5")


def test_what_is_told_within_a_limit_is_held_against_what_is_told_without(tmp_path):
    """A plan that was made within 4.5 GB is within it: what may be missed is the time that it takes for that."""
    says = "GPT-2: within 4.5 GB at 1.35x the time without a limit, as told for an H200"

    def told(name, step_s, peak_bytes):
        plan = replace(Plan.fixed(32), predicted=MeasuredCost(step_s, peak_bytes))
        (tmp_path / f"{name}.json").write_text(to_json(plan))

    assert stands(says, tmp_path) == ("not measured", "")
    told("prediction-small", 0.12, 4_400_000_000)
    assert stands(says, tmp_path) == ("not measured", "")
    told("prediction", 0.1, 15_000_000_000)
    status, figure = stands(says, tmp_path)
    assert status == "predicted met"
    assert figure == "1.200x the time (0.12 s a step for 0.1), 4,400,000,000 bytes; not measured"
    for step_s, size in ((0.14, 4_400_000_000), (0.12, 4_600_000_000)):
        told("prediction-small", step_s, size)
        assert stands(says, tmp_path)[0] == "predicted missed"


def test_the_summary_reads_the_runs_and_writes_their_page(place):
    (place.folder / "cifar-recipes").mkdir()
    (place.folder / "cifar-recipes" / "report.json").write_text(to_json(comparison("cifar10_resnet_short")))
    known = [{"runs": ["cifar-recipes"], "says": "One."}, {"runs": ["x"], "says": "Two."}]
    known += [{"sources": [comparison().environment["sources"]], "says": "Three."}, {"sources": ["y"], "says": "Four."}]
    (place.folder / "known.json").write_text(json.dumps({"found": known}))
    found = evaluation.summary("cpu", listed.slices("cpu"), place)
    statuses = {row["says"]: row["status"] for row in found["rows"] if row["metric"] == "goal"}
    assert statuses["cifar: S 1.8x P0"] == "met"
    assert statuses["wikitext: S 1.3x P0"] == "not measured"
    page = (place.folder / "evaluation.md").read_text()
    assert "a smaller task" in page
    assert [line for line in page.splitlines() if line.startswith("- Run 1 (")] == [
        "- Run 1 (cifar-recipes): One.",
        "- Run 1 (cifar-recipes): Three.",
    ]
    assert next(evaluation.text(found)) == "not measured     wikitext: S 1.3x P0"
    (place.folder / "known.json").write_text(json.dumps(known))
    with raises(FormatError, code="format.invalid"):
        evaluation.summary("cpu", listed.slices("cpu"), place)


def test_a_measure_that_was_found_wrong_counts_for_nothing(place):
    (place.folder / "cifar-recipes").mkdir()
    (place.folder / "cifar-recipes" / "report.json").write_text(to_json(comparison("cifar10_resnet_short")))
    (place.folder / "known.json").write_text(
        json.dumps({"found": [{"runs": ["cifar-recipes"], "says": "Too fast.", "unfounded": ["throughput"]}]})
    )
    found = evaluation.summary("cpu", listed.slices("cpu"), place)
    statuses = {row["says"]: row["status"] for row in found["rows"] if row["metric"] == "goal"}
    assert statuses["cifar: S 1.8x P0"] == "not shown"
    run = results.read_evaluation(listed.slices("cpu"), place.folder)["cifar-recipes"]
    assert {each.figure for each in run.findings if each.measure == "throughput"} == {None}
    assert any(each.figure for each in run.findings if each.measure != "throughput")
    assert "not to be believed" in (place.folder / "evaluation.md").read_text()


def test_the_summary_reads_the_runs_once(place, monkeypatch):
    (place.folder / "cifar-recipes").mkdir()
    (place.folder / "cifar-recipes" / "report.json").write_text(to_json(comparison("cifar10_resnet_short")))
    read, read_runs = [], results.read_runs
    monkeypatch.setattr(results, "read_runs", lambda paths: read.append(paths) or read_runs(paths))
    evaluation.summary("cpu", listed.slices("cpu"), place)
    assert len(read) == 1


def test_what_is_written_beside_the_records_is_of_the_records_alone(made, place):
    """Of sources that have changed since the command says so, and no file does: a file is the same on every machine."""
    one = made("monitor")
    outcomes([one], place)
    (place.folder / "monitor.json").write_text('{"rows": []}')
    here = evaluation.summary("cpu", [one], place)
    files = {path.name: path.read_text() for path in place.folder.glob("*.json")}
    (row,) = [row for row in json.loads(files["summary.json"])["rows"] if row["metric"] == "slice"]
    assert row | {"seconds": 0} == {
        "metric": "slice",
        "slice": "monitor",
        "state": "done",
        "sources": "abc",
        "seconds": 0,
    }
    later = evaluation.summary("cpu", [one], replace(place, environment=HERE | {"sources": "def"}))
    assert [found["rows"][-1]["state"] for found in (here, later)] == ["done", "stale"]
    assert {path.name: path.read_text() for path in place.folder.glob("*.json")} == files
    assert evaluation.summary("cpu", listed.slices("cpu"), place)["rows"][-1]["state"] == "cannot run here"


@pytest.fixture
def measured(tmp_path):
    """Return an archived evaluation's folder with a comparison against every peer, an ablation and a scaling table."""
    folder = folder_of(tmp_path, "evaluation-here")
    ran = Ran("cifar-recipes-1", "compare", "abc", HERE, 1.0, "cifar-recipes/report.json")
    found = comparison("cifar10_resnet_short", CPU)
    peers = [RatioRow("throughput", name, "reference", "", around(1.2), GAIN) for name in ("strict", "strong", "muon")]
    cut = ablation()
    refused = replace(cut.changes[0], name="schedule", refusals={"alone": "it needs a rate of its own"})
    files = {
        "machine.json": json.dumps({"cpu": "Some CPU", "cpu_cores": "2", "os": "Linux"}),
        "done/cifar-recipes-1.json": to_json(ran),
        "cifar-recipes/report.json": to_json(replace(found, ratios=(*found.ratios, *peers))),
        "cifar-ablate/report.json": to_json(replace(cut, environment=CPU, changes=(*cut.changes, refused))),
        "cifar-scale/scaling.json": to_json(scaled(environment=CPU)),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    archive = archive_of(tmp_path, folder.name)
    archive.parent.mkdir(parents=True)
    assert pack(folder, archive)
    return folder


def test_the_pages_of_an_evaluation_are_made_of_its_runs(measured):
    assert evaluation_figures.folders(measured.parents[2]) == [measured]
    runs = results.read_evaluation(listed.slices("cpu"), measured)
    lines = list(evaluation_figures.report(measured, runs))
    shown = "\n".join(lines)
    assert "| cifar: S 1.8x P0 | met | 2.000x (95%" in shown
    assert "| wikitext: S 1.3x P0 | not measured |" in shown
    for name in ("P0 strict fp32", "P2 strong", "P3 strong, with Muon", "P1 paper, literal", "trimtab S"):
        assert f"| throughput | {name} | P0 reference |" in shown
    assert "| precision | alone | throughput | 1." in shown
    assert "| schedule | alone | | not run: it needs a rate of its own | | |" in shown
    assert "## cifar-scale: cifar10_resnet50" in lines
    assert "`trimtab scale cifar10_resnet50`; torch 2.13, sources abc, threads 1 a rank." in lines
    assert any(line.startswith("| weak | plan | 2 |") for line in lines)
    files = evaluation_figures.written("cpu", listed.slices("cpu"), measured)
    assert set(files) == {"summary.json", "evaluation.md", "evaluation.html", "evaluation.json", "report.md"}
    assert files == evaluation_figures.written("cpu", listed.slices("cpu"), measured)
    page = files["evaluation.md"]
    for said in ("Table I: CIFAR-10", "Table III", "Table IV", "cifar10_resnet_short"):
        assert said in page
    (measured / "done" / "cifar-recipes-1.json").unlink()
    assert evaluation_figures.folders(measured.parents[2]) == []


@pytest.mark.parametrize(
    ("bound", "at_least", "at_most", "told"),
    [
        (">= 3.10x", 3.1, None, "at least 3.10x the speed"),
        ("<= 0.80x", None, 0.8, "at most 0.80x the speed"),
        ("never reached", None, None, "never reached"),
        ("", None, None, "not known"),
    ],
)
def test_a_bound_on_a_time_is_told_as_one_of_speeds(bound, at_least, at_most, told):
    assert evaluation_figures._value({"bound": bound, "at_least": at_least, "at_most": at_most}) == told


def test_a_goal_that_was_measured_somewhere_is_not_called_unmeasured_elsewhere(measured):
    """A machine that a few slices were run on has lines of these alone; what nowhere was measured has one of each."""
    root, other = measured.parents[2], measured.parent / "evaluation-other"
    (other / "done").mkdir(parents=True)
    (other / "machine.json").write_text(json.dumps({"cpu": "A CPU avx512_bf16", "cpu_cores": "2", "os": "Linux"}))
    (other / "done" / "monitor.json").write_text(
        to_json(Ran("monitor", "monitor.py", "abc", HERE, 1.0, "monitor.json"))
    )
    row = {"task": "digits_resnet", "metric": "monitor_overhead_ratio", "mean": 1.0, "low": 0.99, "high": 1.01, "n": 8}
    (other / "monitor.json").write_text(json.dumps({"rows": [row | {"control_half_width": 0.02}]}))
    pack(other, archive_of(root, other.name))
    lines = [line.split(" | ")[:2] for line in advice_figures._goals(root)]
    found = [(says.removeprefix("| "), status) for says, status in lines]
    assert [status for says, status in found if says.endswith("the noise monitor takes 0.25%")] == ["met"]
    assert ("with bf16, the noise monitor takes 0.25%", "met") in found
    assert [says for says, _ in found if says.endswith("cifar: S 1.8x P0")] == ["without bf16, cifar: S 1.8x P0"]
    unknown = [says for says, _ in found if says.endswith("wikitext: S 1.3x P0")]
    assert sorted(unknown) == ["with bf16, wikitext: S 1.3x P0", "without bf16, wikitext: S 1.3x P0"]
