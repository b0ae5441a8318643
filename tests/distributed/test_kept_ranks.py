"""Two ranks that are kept: killed, they go on as ranks that were not; where one cannot, all end with one reason."""

from __future__ import annotations

import json
import shutil

import pytest
from ranks import started

RANK = """
    import json, os, signal, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from torch.nn.parallel import DistributedDataParallel
    import trimtab
    from trimtab.checkpoint import ranks as kept_ranks
    from trimtab.core.errors import TrimtabError

    torch.set_num_threads(1)
    rank, folder, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    meet = f"{folder}/meet-{options['name']}"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=options.get("ranks", 2))
    torch.manual_seed(rank)  # of dropout; weights are rank 0's

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.drop, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))

    x = torch.sin(torch.arange(64 * 6.0).reshape(64, 6))
    order = torch.Generator().manual_seed(5)
    loader = trimtab.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True, generator=order))
    model, seen = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if options.get("own"):
        model = DistributedDataParallel(model)
        plan = trimtab.Plan.fixed(4)
    else:
        plan = trimtab.Plan.fixed(4, num_ranks=options.get("ranks", 2), zero_stage=options.get("stage", 0))
    if options.get("cannot_write") == rank:
        def full(*_, **__):
            raise OSError(28, "No space left on device")
        kept_ranks.write_state = full
    if options.get("cannot_read") == rank:
        def damaged(*_, **__):
            raise ValueError("another disk")
        kept_ranks.read_state = damaged
    said, consumed = {}, []
    checkpoints = trimtab.Checkpoints(f"{folder}/run", every_s=options.get("every_s"), **options.get("keep", {}))
    try:
        with trimtab.start(model, optimizer, plan, total_samples=400, checkpoints=checkpoints) as run:
            while run.passes < 4:
                for window in run.windows(loader):
                    consumed.append([run.num_windows, [round(v, 4) for v in window._batches[0][0][:, 0].tolist()]])
                    if options.get("signal") == [rank, run.num_windows]:
                        signal.raise_signal(signal.SIGTERM)
                    run.train_step(window, lambda model, b: (model(b[0]) - b[1]).square().mean())
                    said[run.num_windows] = float(run.loss).hex()
                    if run.num_windows == options.get("dies_after"):
                        with open(f"{folder}/{options['name']}-{rank}.json", "w") as file:
                            json.dump({"said": said, "consumed": consumed}, file)
                        os._exit(9)
        said["end"] = [float(v.double().sum()).hex() for v in model.state_dict().values()]
    except SystemExit as left:
        said["left"] = left.code
    except (TrimtabError, ValueError) as error:
        said["error"] = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{options['name']}-{rank}.json", "w") as file:
        json.dump({"said": said, "consumed": consumed}, file)
"""


def trained(folder, name, **options):
    """Return what each rank said, by name, and the rows that each consumed."""
    ranks = options.get("ranks", 2)
    arguments = [(rank, folder, json.dumps({"name": name} | options)) for rank in range(ranks)]
    with started(RANK, folder, arguments) as running:
        for each in running:
            status = each.wait(120)
            assert status == (9 if "dies_after" in options else 0), each.said()[-3000:]
    found = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]
    return [each["said"] for each in found], [each["consumed"] for each in found]


STEPS = {"every_steps": 5}


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """Return a folder with a job that died after 13 windows, saved after 10; and what one says that did not."""
    folder = tmp_path_factory.mktemp("kept")
    trained(folder, "dead", keep=STEPS, dies_after=13)
    assert sorted(each.name for each in (folder / "run").glob("step-*")) == ["step-10", "step-5"]
    other = tmp_path_factory.mktemp("whole")
    return folder, trained(other, "whole", keep={})


def copied(dead, tmp_path):
    shutil.copytree(dead[0] / "run", tmp_path / "run")
    return tmp_path


def test_ranks_go_on_as_ranks_that_were_not_killed(dead, tmp_path):
    """Losses of each rank, and at the end parameters, and buffers of their own."""
    said, consumed = trained(copied(dead, tmp_path), "again", keep=STEPS)
    for rank in range(2):
        whole_said, whole_consumed = dead[1][0][rank], dead[1][1][rank]
        assert min(int(window) for window in said[rank] if window != "end") == 11
        assert said[rank] == {window: loss for window, loss in whole_said.items() if window in said[rank]}
        assert consumed[rank] == whole_consumed[10:]
        assert "end" in said[rank]
    assert said[0]["11"] != said[1]["11"]


def test_more_ranks_go_on_where_that_is_accepted_and_no_row_is_lost_or_seen_twice(dead, tmp_path):
    folder = copied(dead, tmp_path)
    refused, _ = trained(folder, "refused", ranks=3)
    assert all("resume: ranks: given 3; expected 2" in each["error"] for each in refused)
    _, consumed = trained(folder, "three", ranks=3, keep={"accepts": ["ranks", "plan"]})

    def rows(of_ranks, window):
        return sorted(row for rank in of_ranks for number, rows in rank if number == window for row in rows)

    for window in range(10, 32):
        assert rows(consumed, window) == rows(dead[1][1], window)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_ends_all_with_one_reason(dead, tmp_path, rank):
    folder = copied(dead, tmp_path)
    said, _ = trained(folder, "full", keep=STEPS, cannot_write=rank)
    assert all("No space left" in each["error"] for each in said)
    assert sorted(each.name for each in (folder / "run").iterdir() if "step" in each.name) == ["step-10", "step-5"]


def test_a_rank_that_cannot_read_ends_all_before_anything_is_changed(dead, tmp_path):
    said, _ = trained(copied(dead, tmp_path), "unread", cannot_read=1)
    assert "another disk" in said[0]["error"]
    assert said[1]["error"] == "ValueError: another disk"


def test_a_signal_to_one_rank_saves_and_ends_all_and_they_go_on(dead, tmp_path):
    said, _ = trained(tmp_path, "signalled", keep={"every_steps": None}, signal=[1, 6])
    assert [each["left"] for each in said] == [128 + 15] * 2
    (saved,) = (tmp_path / "run").glob("step-*")
    assert saved.name == "step-8"  # seen after the seventh window, and told in the eighth
    said, _ = trained(tmp_path, "again")
    for ours, theirs in zip(said, dead[1][0], strict=True):
        assert ours == {window: loss for window, loss in theirs.items() if window in ours}
        assert {"9", "end"} <= ours.keys()


def test_models_in_shards_are_refused(tmp_path):
    said, _ = trained(tmp_path, "shards", stage=2)
    assert all("a model in shards; expected one process, or ranks that each hold" in each["error"] for each in said)


def test_seconds_are_agreed_upon(tmp_path):
    trained(tmp_path, "timed", every_s=1e-3)
    saved = sorted(int(each.name.partition("-")[2]) for each in (tmp_path / "run").glob("step-*"))
    assert saved == [25, 30]


def test_a_model_that_the_loop_wrapped_itself_is_kept_too(tmp_path):
    trained(tmp_path, "one", own=True, keep=STEPS, dies_after=8)
    said, _ = trained(tmp_path, "two", own=True, keep=STEPS)
    (tmp_path / "other").mkdir()
    whole, _ = trained(tmp_path / "other", "whole", own=True)
    for ours, theirs in zip(said, whole, strict=True):
        assert ours == {window: loss for window, loss in theirs.items() if window in ours}
        assert "6" in ours
