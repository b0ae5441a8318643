"""Hosts on two ranks that count unlike many terms: the weights of one process over what both have, or the host's own.

One job of each host trains all ways, since starting ranks takes longer than they do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_program

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "host_rank.py"
# Of a tensor's largest weight, in double precision; of what a plan made here changes, which may be rounding.
EXACT, ROUNDED = 1e-10, 1e-6
# Of bf16, which rounds otherwise if a loss is scaled otherwise: sixteen units of rounding of a weight, one of a figure.
HALF, HALF_UNIT = 16 * 2**-8, 2**-8


def job(folder: Path, host: str) -> tuple[dict, list[dict]]:
    """Return what one process found, and each of two ranks."""
    run_program(PROGRAM, folder, host)
    alone, *ranks = (torch.load(folder / f"{host}-{which}.pt") for which in ("alone", 0, 1))
    return alone, ranks


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """Loops of one's own on an Accelerator: those of one process, and of each rank."""
    return job(tmp_path_factory.mktemp("loops"), "accelerate")


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Transformers' Trainer: in one process, and on each rank."""
    alone, ranks = job(tmp_path_factory.mktemp("trainers"), "transformers")
    return alone["whole"], ranks


def difference(one, other) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("way", ["stage None", "stage 0", "stage 1", "stage 3", "planned"])
def test_an_accelerators_ranks_train_as_one_process_does(loops, way):
    whole, ranks = loops
    for each in ranks:
        assert difference(each[way]["weights"], whole["plain"]) <= (ROUNDED if way == "planned" else EXACT)
        assert (each[way]["steps"], each[way]["rows"]) == (20, 160)


@pytest.mark.parametrize("stage", [None, 0])
@pytest.mark.parametrize("rows", [152, 148])
def test_an_accelerators_windows_of_two_batches_are_one_processs_to_the_last(loops, rows, stage):
    """Which is of one batch on each rank, or on the first alone."""
    whole, ranks = loops
    for each in ranks:
        found = each[f"accumulated {rows}, stage {stage}"]
        assert difference(found["weights"], whole[f"accumulated {rows}"]) <= EXACT
        assert (found["steps"], found["rows"]) == (10, rows)


@pytest.mark.parametrize("host", ["loops", "trainers"])
def test_ranks_have_one_plan_which_shares_the_model(request, host):
    _, (one, other) = request.getfixturevalue(host)
    plan = one["planned"]["plan"]
    assert plan == other["planned"]["plan"]
    assert '"num_ranks":2' in plan.replace(" ", "")


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("unshared", "plan.zero_stage_unsupported"),
        ("wrapped", "plan.zero_stage_unsupported"),
        ("planned", "model.prepared"),
    ],
)
def test_a_model_that_nobody_would_share_is_refused(loops, what, code):
    for each in loops[1]:
        assert each["refused"][what] == code


def test_fabrics_ranks_train_as_one_process_does(loops):
    whole, ranks = loops
    for each in ranks:
        assert difference(each["fabric"]["weights"], whole["plain"]) <= EXACT
        assert each["fabric"]["unshared"] == "plan.zero_stage_unsupported"


@pytest.mark.parametrize("way", ["ours", "accumulated", "planned", "ran out"])
def test_a_trainers_ranks_train_as_the_hosts_own_do(trainers, way):
    whole, ranks = trainers
    near = ROUNDED if way == "planned" else EXACT
    for each in ranks:
        assert difference(each[way]["weights"], each["host"]["weights"]) <= near
        assert difference(each[way]["weights"], whole["weights"]) <= near  # the host is right on ranks


@pytest.mark.parametrize("way", ["ours", "accumulated", "planned", "ran out"])
def test_a_trainers_ranks_report_what_the_hosts_own_do(trainers, way):
    for each in trainers[1]:
        for name in ("loss", "grad_norm", "learning_rate") + (("eval_loss",) if way == "ours" else ()):
            assert len(each["host"]["said"][name]) >= 2, name
            assert each[way]["said"][name] == pytest.approx(each["host"]["said"][name], rel=1e-5), name


def test_a_trainers_ranks_say_once_a_window_what_they_count_and_wait_for_no_micro_batch(trainers):
    for each in trainers[1]:
        host, split, whole = (each[way]["waits"] for way in ("host, counted", "counted 1", "counted 4"))
        assert (split, split["allreduce_"]) == (whole, 1)  # that of gradients; of four micro-batches, and of one
        assert not split.get("allgather_")
        assert host["allgather_"] >= 1  # which is how the host counts


def test_a_rank_of_whose_batch_nothing_counts_is_no_nan(trainers):
    for each in trainers[1]:
        assert difference(each["none"]["weights"], each["host, none"]["weights"]) <= EXACT
        assert each["none"]["said"]["loss"] == pytest.approx(each["host, none"]["said"]["loss"], rel=1e-5)


def test_a_plan_that_does_not_share_the_model_is_refused_by_the_trainer(trainers):
    for each in trainers[1]:
        assert each["unshared"] == "plan.zero_stage_unsupported"


def test_a_trainers_ranks_keep_its_bf16(trainers):
    for each in trainers[1]:
        assert '"precision":{"value":"bf16"' in each["half"]["plan"].replace(" ", "").replace("\n", "")
        assert difference(each["half"]["weights"], each["host, half"]["weights"]) <= HALF
        for name in ("loss", "grad_norm", "eval_loss"):
            assert each["half"]["said"][name] == pytest.approx(each["host, half"]["said"][name], rel=HALF_UNIT), name
