"""Every backend over gloo against one process: the same weights after ten steps, whatever each rank has of a batch.

One job trains all cases, since starting ranks takes longer than they do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_cases import CASES, STAGES, STEPS
from ranks import DEEPSPEED, run_program

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "backend_rank.py"
# Four ranks on fewer cores show that the figures of more than two add up.
ON_FOUR = [name for name in CASES if name.endswith(("/tokens-k3-clip", "/rank-without-rows", "/mean-k3"))]
# Of a weight in double precision; of the largest weight where gradients are sent in bf16 (8 bits, each a mean of ranks
# rounded once) and where each micro-batch is computed in fp16 (11 bits).
# DeepSpeed's weights are fp32, and each of ten steps rounds them.
EXACT, SINGLE, HALF = 1e-12, STEPS * 2**-24, {"bf16-reduction": 2**-8, "fp16-clip": 2**-11}


def job(folder: Path, ranks: int, pattern: str, *mutant: str) -> dict:
    run_program(PROGRAM, folder, pattern, *mutant, ranks=ranks, imports=DEEPSPEED)
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return job(folder, 2, "."), json.loads((folder / "rank-1.json").read_text())


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    return job(tmp_path_factory.mktemp("four"), 4, "|".join(f"^{name}$" for name in ON_FOUR))


def check(found: dict, name: str) -> None:
    way = name.partition("/")[2]
    assert "error" not in found, found["error"]
    if name.startswith("deepspeed"):
        assert found["of_all"] <= SINGLE
    elif way in HALF:
        assert found["of_all"] <= HALF[way]
    else:
        assert found["difference"] <= EXACT
    ours, theirs = found["ours"], found["theirs"]
    rough = 1e-3 if way in HALF else 1e-5 if name.startswith("deepspeed") else 1e-12
    assert (ours["rows"], ours["steps"]) == (theirs["rows"], theirs["steps"])
    assert ours["steps"] >= STEPS - 1  # fp16's first window overflows, on all ranks alike
    assert ours["scale"] == theirs["scale"]
    if theirs["norm"] is not None:
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=rough)


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("powersgd")])
def test_two_ranks_train_as_one_process_does(on_two, name):
    check(on_two[0][name], name)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_do_too(on_four, name):
    check(on_four[name], name)


def test_powersgd_is_other_dynamics_and_still_learns(on_two):
    found = on_two[0]["ddp/powersgd"]
    assert found["of_all"] > 1e-3
    assert found["ours"]["losses"][-1] < found["ours"]["losses"][0]


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_as_many_steps_at_the_same_rates(on_two, name):
    one, other = on_two[0][name]["ours"], on_two[1][name]
    assert (one["rows"], one["steps"], one["rates"], one["scale"]) == (
        other["rows"],
        other["steps"],
        other["rates"],
        other["scale"],
    )


@pytest.mark.parametrize("stage", [*STAGES, "deepspeed-1", "deepspeed-2", "deepspeed-3"])
def test_the_optimizer_object_holds_the_same_groups_with_their_state_afterwards(on_two, stage):
    found = on_two[0][f"{stage}/mean"]
    assert found["ours"]["names"] == found["theirs"]["names"]
    assert found["ours"]["state"] == found["theirs"]["state"] > 0


@pytest.mark.parametrize(
    ("mutant", "cases"),
    [
        ("mean-of-means", ("ddp/tokens", "zero-3/tokens")),
        ("local-clip", ("zero-3/tokens-k3-clip",)),
        ("lost-rows", ("ddp/uneven-ends",)),
    ],
)
def test_the_comparison_notices_what_would_be_wrong(tmp_path, mutant, cases):
    found = job(tmp_path, 2, "|".join(f"^{case}$" for case in cases), mutant)
    for case in cases:
        with pytest.raises(AssertionError):
            check(found[case], case)
