"""`trimtab train --ranks`: torchrun's launcher starts the ranks, which train as one process does, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import brief
import pytest
from ranks import Ended, run_command, run_torchrun
from wide_task import WIDE, least_of

from trimtab.core.record import read_record
from trimtab.core.serialization import to_json
from trimtab.plans.plan import Plan

pytestmark = pytest.mark.slow

TINY_TASK = Path(__file__).parents[1] / "unit" / "experiments" / "tiny_task.py"
FAULTY = """
import os, signal
from dataclasses import replace
import tiny

calls = 0

def loss_fn(model, batch):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == "1":
        FAULT
    return tiny.loss_fn(model, batch)

task = replace(tiny.task, loss_fn=loss_fn)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY_TASK.read_text() + brief.CODE)
    return tmp_path


def train(folder: Path, *arguments: object, forked_ranks: int = 2) -> Ended:
    return run_command(folder, "train", *arguments, forked_ranks=forked_ranks)


def rows() -> int:
    sys.path.insert(0, str(TINY_TASK.parent))
    try:
        import tiny_task
    finally:
        sys.path.pop(0)
    return tiny_task.task.batch_size


def written(folder: Path, **values) -> Path:
    path = folder / "plan.json"
    path.write_text(to_json(Plan.fixed(values.pop("batch_size", None) or rows(), **values)))
    return path


def test_two_ranks_train_as_one_process_does_and_one_of_them_says_so(folder):
    whole = train(folder, "tiny:task", "--steps", 6, "--plan", written(folder), "--json", forked_ranks=0)
    assert whole.returncode == 0, whole.stderr
    path = written(folder, batch_size=-(-rows() // 2), num_ranks=2, zero_stage=3)
    record = folder / "run.jsonl"
    given = ("--steps", 6, "--plan", path, "--ranks", 2, "--json", "--record", record)
    two = train(folder, "tiny:task", *given, forked_ranks=0)  # ranks that are new Pythons, as a user's are
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("\n") == 1
    alone, ours = json.loads(whole.stdout), json.loads(two.stdout)
    assert (alone["ranks"], ours["ranks"]) == (1, 2)
    assert ours["rows"] == alone["rows"]
    metric = next(name for name in ours if name not in {"loss", "data", "task"} and isinstance(ours[name], float))
    assert metric in alone
    found = read_record(record)
    assert [step.samples for step in found.steps] == [rows()] * 6


SMALL_GPT = """
from dataclasses import replace
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.source_gpt import CONTEXT, TASK

def make_model():
    return GPT(GPTShape(vocab_size=256, context=CONTEXT, num_layers=2, num_heads=2, width=32, dropout=0.0))

task = replace(TASK, name="small_gpt", make_model=make_model)
"""


def test_deepspeed_and_torch_share_a_gpt_to_the_same_losses(folder):
    """ZeRO-2 of both, with accumulation: one task, two engines."""
    (folder / "small_gpt.py").write_text(SMALL_GPT)
    rows, losses = 4, {}
    for engine in ("torch", "deepspeed"):
        path = written(folder, batch_size=rows, micro_batch=rows // 2, num_ranks=2, zero_stage=2, engine=engine)
        record = folder / f"{engine}.jsonl"
        brief = ("--batch-size", 2 * rows, "--steps", 8, "--judged", 1, "--plan", path)
        done = train(folder, "small_gpt:task", *brief, "--ranks", 2, "--record", record)
        assert done.returncode == 0, done.stderr
        losses[engine] = [step.loss for step in read_record(record).steps]
    assert len(losses["torch"]) == 8
    assert losses["deepspeed"] == pytest.approx(losses["torch"], rel=1e-5)
    assert losses["torch"][-1] < losses["torch"][0]


def test_a_plan_of_one_process_is_shared_by_replicas(folder):
    path = written(folder, batch_size=-(-rows() // 2))
    done = train(folder, "tiny:task", "--steps", 4, "--plan", path, "--ranks", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2


LOOP = """
    import json, sys, torch, trimtab

    with trimtab.process_group() as here:
        torch.manual_seed(here.rank)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(48, 8, generator=generator)
        data = torch.utils.data.TensorDataset(rows, (rows.sum(1) > 0).long())
        order = torch.Generator().manual_seed(2)
        loader = trimtab.shard(torch.utils.data.DataLoader(data, batch_size=10, shuffle=True, generator=order))

        def loss_fn(model, batch):
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

        plan = trimtab.plan(model, optimizer, loss_fn, next(iter(loader)), data=loader)
        losses = []
        with trimtab.start(model, optimizer, plan) as run:
            for _ in range(8):
                for window in run.windows(loader):
                    run.train_step(window, loss_fn)
                    losses.append(float(run.loss))
        weights = [float(p.detach().double().sum()) for p in model.parameters()]
        said = {"plan": plan.explain(), "rows": run.consumed_samples, "weights": weights, "losses": losses}
    with open(f"rank-{here.rank}.json", "w") as file:
        json.dump(said, file)
"""


def test_a_loop_of_ones_own_plans_together_and_trains_on_its_rows(folder):
    """Under torchrun itself: rank 0 plans, and both have its plan, weights and rows, of a shuffled DataLoader."""
    (folder / "loop.py").write_text(brief.CODE + textwrap.dedent(LOOP))
    done = run_torchrun(folder, "loop.py")
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one["plan"] == other["plan"]
    assert "on each of 2 ranks" in one["plan"]
    assert "of gradients over gloo of 2 ranks" in one["plan"]
    assert one["rows"] == other["rows"] == 8 * 48
    assert one["weights"] == other["weights"]
    assert one["losses"][-1] < one["losses"][0]


def test_ranks_that_plan_under_a_limit_share_the_model(folder):
    """Replicas do not meet it, and the plan that they train by is in the record."""
    (folder / "wide.py").write_text(WIDE)
    whole, shared = least_of(0), min(least_of(stage) for stage in (1, 2, 3))
    limit, record = (whole + shared) // 2, folder / "run.jsonl"
    given = ("wide:task", "--steps", 6, "--ranks", 2, "--record", record)
    done = train(folder, *given, "--memory", f"{limit}B", "--json")
    assert done.returncode == 0, done.stderr
    plan = read_record(record).header.plan
    assert plan["zero_stage"]["value"] >= 1
    assert plan["predicted"]["peak_bytes"] <= limit
    assert "is over the budget" in plan["zero_stage"]["rejected"][0]["reason"]
    assert json.loads(done.stdout)["rows"] == 6 * rows()


def test_a_limit_that_no_stage_meets_ends_the_job_with_one_reason(folder):
    done = train(folder, "tiny:task", "--steps", 2, "--ranks", 2, "--memory", "1KiB")
    assert done.returncode == 1
    assert done.stderr.count("No ZeRO stage on 2 ranks meets") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "Rank 1 was ended by SIGKILL"),
        ('raise ValueError("a bad batch")', "a bad batch"),
    ],
)
def test_a_rank_that_ends_ends_the_job_with_one_reason(folder, fault, said):
    (folder / "faulty.py").write_text(FAULTY.replace("FAULT", fault))
    path = written(folder, batch_size=-(-rows() // 2), num_ranks=2, zero_stage=0)
    done = train(folder, "faulty:task", "--steps", 6, "--plan", path, "--ranks", 2)
    assert done.returncode == 1
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("sys.exit(0)", "[task.exits]"),
        ("os._exit(0)", "Rank 1 "),
    ],
)
def test_a_rank_that_leaves_early_is_named_whatever_its_status(folder, fault, said):
    (folder / "faulty.py").write_text(FAULTY.replace("import os", "import os, sys").replace("FAULT", fault))
    path = written(folder, batch_size=-(-rows() // 2), num_ranks=2, zero_stage=0)
    done = train(folder, "faulty:task", "--steps", 6, "--plan", path, "--ranks", 2)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Rank 0 " not in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


SLOW = """
import os, sys, time
from pathlib import Path

if "RANK" in os.environ:
    Path(f"rank-{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    WAIT
from tiny import task
"""


@pytest.mark.parametrize(
    "wait",
    [
        "time.sleep(60)",
        "os.environ['RANK'] == '1' and time.sleep(60)",  # rank 0 waits for it where ranks meet
    ],
)
def test_ranks_end_with_a_launcher_that_is_killed_during_start_up(folder, wait):
    (folder / "slow.py").write_text(SLOW.replace("WAIT", wait))
    command = [sys.executable, "-m", "trimtab.cli", "train", "slow:task", "--steps", "2", "--ranks", "2"]
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    how = {"cwd": folder, "env": os.environ | {"PYTHONPATH": paths}, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "--plan", str(written(folder))], **how) as launcher:
        found = [folder / f"rank-{rank}.pid" for rank in range(2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in found), 120)
        launcher.kill()
    ranks = [int(path.read_text()) for path in found]
    try:
        wait_until(lambda: not any(map(runs, ranks)), 5)
    finally:
        for process in filter(runs, ranks):
            os.kill(process, signal.SIGKILL)


def runs(process: int) -> bool:
    """Return whether a process runs; one that has ended and is not yet waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def wait_until(is_so, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, f"not so after {limit_s:g} s"
        time.sleep(0.05)


def test_more_ranks_than_rows_are_refused(folder):
    done = train(folder, "tiny:task", "--ranks", rows() + 1)
    assert done.returncode == 1
    assert "[ranks.too_many]" in done.stderr
