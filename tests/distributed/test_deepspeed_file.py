"""`trimtab plan --engine deepspeed -o plan.json`: the file beside it is what `deepspeed.initialize` is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ranks import DEEPSPEED, run_command, run_ranks

pytestmark = pytest.mark.slow

TINY_TASK = Path(__file__).parents[1] / "unit" / "experiments" / "tiny_task.py"
RANK = """
    import json, sys
    import torch
    import torch.distributed as dist
    import deepspeed
    import trimtab
    from trimtab.core.serialization import read_json
    from trimtab.plans.plan import Plan
    from trimtab.tasks import load_task

    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    plan = read_json(Plan, f"{folder}/plan.json")
    given, initialize = [], deepspeed.initialize

    def noting(**arguments):
        given.append(arguments.pop("config"))
        return initialize(config=f"{folder}/plan.deepspeed.json", **arguments)  # which reads it as its own

    deepspeed.initialize = noting
    torch.manual_seed(0)
    task = load_task(f"{folder}/tiny.py:task")
    model = task.make_model()
    optimizer = task.make_optimizer(model)
    losses = []
    with trimtab.start(model, optimizer, plan) as run:
        for window in run.windows(trimtab.shard([next(task.load_data().batches(0, task.batch_size))] * 8)):
            run.train_step(window, task.loss_fn)
            losses.append(float(run.loss))
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump({"given": given, "losses": losses}, file)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_the_written_file_is_what_deepspeed_gets(tmp_path):
    """And DeepSpeed reads it: the ranks train by the file itself."""
    shutil.copy(TINY_TASK, tmp_path / "tiny.py")
    options = ("--ranks", "2", "--link", "ib", "--device", "H100 SXM", "--engine", "deepspeed", "-o", "plan.json")
    made = run_command(tmp_path, "plan", "tiny.py:task", *options)
    assert made.returncode == 0, made.stderr
    run_ranks(RANK, tmp_path, imports=DEEPSPEED)
    written = json.loads((tmp_path / "plan.deepspeed.json").read_text())
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["given"] == [written]
        assert found["losses"][-1] < found["losses"][0]
