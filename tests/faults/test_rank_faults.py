"""One rank's trouble is everyone's: all stop, or go on together, and each says the same reason."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from ranks import started

RANK = """
    import json, os, signal, sys, time, warnings
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from torch import nn
    import trimtab
    from trimtab.core.errors import TrimtabError
    from trimtab.adaptive_batch.noise_probes import OverheadBudget
    from trimtab.distributed import host_gather

    torch.set_num_threads(1)
    rank, ranks, folder, fault, stage = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[6])
    host_gather._ANSWER_S = 1.0
    limit_s = 3.0 if fault == "stop" else 60.0
    found = {"steps": 0, "micro": [], "rows": 0}

    def loss(model, batch):
        at = found["steps"]
        if fault == "kinds":
            each = model(batch).square()
            return each.mean() if rank else trimtab.Summed(each.sum(), each.numel())
        if rank == 1 and at == 5 and fault == "words":
            raise RuntimeError("object store: connection timed out")
        if rank == 1 and at == 3 and fault == "bad-end":
            return model(batch).square().mean() * float("nan")
        if rank == 1 and at == 5:
            if fault == "raises":
                raise ValueError("a bad batch")
            if fault.endswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault.endswith("memory") and len(batch) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if rank == 1 and fault == "slow":
            time.sleep(0.02)
        return model(batch).square().mean()

    def loader():
        generator = torch.Generator().manual_seed(3)
        fewer = 8 if fault == "bad-end" else 4 if fault.endswith("ends") else 0
        for index in range(40 if fault == "slow" else 12 - fewer * rank):
            yield torch.randn(4, 6, generator=generator, dtype=torch.float64)

    try:
        with trimtab.process_group(limit_s):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            micro = 2 if fault == "plans" and rank == 1 else 4
            sharing = {"zero_stage": stage, "num_ranks": ranks}
            if fault.startswith("measured"):
                sharing["batch_rule"] = trimtab.BatchRule("fixed", k=1, learning_rate="none", min_windows=10**6)
                OverheadBudget.is_due = lambda self, sparse=0: True
            plan = trimtab.Plan.fixed(4, micro, **sharing)
            options = {"nonfinite": "skip"} if fault == "bad-end" else {}
            options |= {"clip_norm": 1.0} if fault == "options" and rank == 1 else {}
            started = trimtab.start(model, optimizer, plan, **options)
            with warnings.catch_warnings(record=True) as caught, started as run:
                warnings.simplefilter("always")
                for window in run.windows(loader()):
                    found["micro"].append(window.micro_batch)
                    if fault == "open-kill":
                        for micro in window:
                            run.backward(loss(run.model, micro))
                        run.step()
                        found["steps"] += 1
                        continue
                    if fault == "discards" and rank == 1 and found["steps"] == 5:
                        for micro in window:
                            run.backward(loss(run.model, micro))
                        run.discard()
                        found["steps"] += 1
                        continue
                    run.train_step(window, loss)
                    found["steps"], found["rows"] = found["steps"] + 1, run.consumed_samples
                    found["applied"] = run.applied_steps
            found["warned"] = [str(each.message) for each in caught if each.category is RuntimeWarning]
            found["weights"] = [float(getattr(p, "full_tensor", lambda: p)().sum()) for p in model.parameters()]
    except BaseException as error:
        found["error"], found["kind"] = str(error), type(error).__name__
        found |= {name: getattr(error, name, None) for name in ("is_echo", "code", "ranks")}
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump(found, file)
    os._exit(0)
"""


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(folder: Path, fault: str, stage: int = 0, ranks: int = 2, leaves: tuple[int, ...] = (0, 1)):
    """Return what the ranks found that end by themselves, and the seconds until the last of these did."""
    port, start = free_port(), time.monotonic()
    with started(RANK, folder, [(rank, ranks, folder, fault, stage, port) for rank in range(ranks)]) as running:
        for rank in leaves:
            running[rank].wait(120)
        seconds = time.monotonic() - start
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in leaves], seconds


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_that_raises_ends_all_by_its_reason(tmp_path, stage):
    (one, other), _ = run(tmp_path, "raises", stage)
    assert (other["kind"], other["error"]) == ("ValueError", "a bad batch")
    assert one["kind"] == "RankError"
    assert one["is_echo"]  # rank 1 says it
    assert (one["code"], one["ranks"]) == ("ranks.ended", [1])
    assert "ValueError: a bad batch" in one["error"]
    assert one["steps"] == other["steps"] == 5


def test_a_reason_that_sounds_like_a_lost_connection_is_told_all_the_same(tmp_path):
    (one, other), _ = run(tmp_path, "words")
    assert (other["kind"], other["error"]) == ("RuntimeError", "object store: connection timed out")
    assert (one["code"], one["ranks"]) == ("ranks.ended", [1])
    assert "RuntimeError: object store" in one["error"]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_with_different_kinds_of_loss_are_told_in_their_first_window(tmp_path, stage):
    one, other = run(tmp_path, "kinds", stage)[0]
    assert {one["steps"], other["steps"]} == {0}
    assert "a mean on rank 1 and trimtab.Summed on rank 0" in one["error"] + other["error"]


def test_a_reduced_window_that_one_rank_gives_up_ends_all_before_their_weights_are_used(tmp_path):
    for each in run(tmp_path, "discards")[0]:
        assert each["kind"] == "RankError"
        assert "Rank 1 made 5 optimizer steps" in each["error"]
        assert "rank 0 made 6" in each["error"]


def test_a_rank_whose_data_end_in_a_void_window_voids_no_other(tmp_path):
    one, other = run(tmp_path, "bad-end")[0]
    assert "error" not in one
    assert "error" not in other
    assert one["weights"] == other["weights"]
    assert one["applied"] == other["applied"] == 11


def test_options_that_differ_are_refused_by_all(tmp_path):
    for each in run(tmp_path, "options")[0]:
        assert each["kind"] == "ValueGivenError"
        assert each["code"] == "ranks.differ"
        assert "clip_norm" in each["error"]


@pytest.mark.parametrize(("fault", "stage"), [("kill", 0), ("kill", 3), ("open-kill", 0), ("open-kill", 1)])
def test_a_rank_that_is_killed_is_named(tmp_path, fault, stage):
    """In `train_step`, and in the open form of the loop."""
    ((one,), _) = run(tmp_path, fault, stage, leaves=(0,))
    assert one["kind"] == "RankError"
    assert (one["code"], one["ranks"]) == ("ranks.silent", [1])
    assert "2 ranks" in one["error"]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_hangs_is_named_once_the_time_limit_is_over(tmp_path, stage):
    ((one,), _) = run(tmp_path, "stop", stage, leaves=(0,))
    assert one["kind"] == "RankError"
    assert not one["is_echo"]
    assert (one["code"], one["ranks"]) == ("ranks.silent", [1])
    assert "2 ranks" in one["error"]


def test_a_rank_whose_memory_runs_out_begins_its_window_anew_and_all_cut_alike(tmp_path):
    (one, other), _ = run(tmp_path, "memory")
    assert "error" not in one
    assert "error" not in other
    assert one["weights"] == other["weights"]
    assert one["steps"] == other["steps"] == 12
    assert other["micro"][5:8] == [4, 2, 2]  # as it was made, and after what all agreed on
    assert one["micro"][5:8] == [4, 2, 2]


def test_where_it_cannot_begin_anew_all_stop_with_one_reason(tmp_path):
    (one, other), _ = run(tmp_path, "memory", stage=3)
    assert other["kind"] == "OutOfMemoryError"
    assert (one["code"], one["ranks"]) == ("ranks.ended", [1])
    assert "OutOfMemoryError: CUDA out of memory" in one["error"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loader_that_ends_early_loses_no_data_of_the_others(tmp_path, stage):
    (one, other), _ = run(tmp_path, "ends", stage)
    assert "error" not in one
    assert "error" not in other
    assert one["steps"] == other["steps"] == 12
    assert one["rows"] == other["rows"] == 4 * (12 + 8)
    assert one["weights"] == other["weights"]


@pytest.mark.parametrize("stage", [0, 3])
def test_it_does_so_too_where_windows_are_measured(tmp_path, stage):
    one, other = run(tmp_path, "measured-ends", stage)[0]
    assert "error" not in one
    assert "error" not in other
    assert one["steps"] == other["steps"] == 12
    assert one["weights"] == other["weights"]


def test_where_ranks_decide_of_the_batch_none_begins_a_window_anew(tmp_path):
    one, other = run(tmp_path, "measured-memory")[0]
    assert other["kind"] == "OutOfMemoryError"
    assert (one["code"], one["ranks"]) == ("ranks.ended", [1])
    assert "OutOfMemoryError: CUDA out of memory" in one["error"]


@pytest.mark.parametrize("stage", [0, 3])
def test_plans_that_differ_are_refused_by_all(tmp_path, stage):
    for each in run(tmp_path, "plans", stage)[0]:
        assert each["kind"] == "ValueGivenError"
        assert each["code"] == "ranks.differ"
        assert "micro_batch" in each["error"]


def test_a_rank_that_the_others_wait_for_is_named_once(tmp_path):
    for each in run(tmp_path, "slow")[0]:
        assert "error" not in each
        (said,) = [text for text in each["warned"] if "takes" in text]
        assert said.startswith("Rank 1 takes")
