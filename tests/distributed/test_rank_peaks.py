"""What a rank is told to hold at most, against two ranks that train."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from memory_rank import CASES, loss, told_on
from raising import raises
from ranks import run_program

from trimtab.core.errors import ModelError, ValueGivenError

pytestmark = pytest.mark.slow

RANKS = 2


def told(stage: int, k: int = 1, **how) -> int:
    found = told_on("cpu", stage, k, **how)
    assert not dist.is_initialized()
    return found


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, list[int]]:
    folder = tmp_path_factory.mktemp("peaks")
    run_program(Path(__file__).parents[1] / "memory_rank.py", folder, ranks=RANKS)
    of_rank = [json.loads((folder / f"peaks{rank}.json").read_text()) for rank in range(RANKS)]
    # gloo's threads let go of what they sent when they get to it: the window in which they did so soonest
    return {name: min(itertools.chain(*(each[name] for each in of_rank))) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_rank_is_told_within_five_percent(counted, name):
    stage, k, once = CASES[name]
    assert told(stage, k, once=once) == pytest.approx(counted[name], rel=0.05)


def test_each_stage_is_told_apart(counted):
    """So that the comparison above can fail."""
    by_stage = [counted[f"{stage}-1-once"] for stage in range(4)]
    assert all(more > 1.05 * less for more, less in itertools.pairwise(by_stage))


def test_more_ranks_hold_less_each():
    assert told(3, ranks=8) < told(3, ranks=4) < told(3, ranks=2)


def test_what_is_gathered_in_bf16_holds_less():
    assert told(3, gather_dtype="bf16") < told(3)
    assert told(2, gather_dtype="bf16") < told(2)


def test_a_step_that_cannot_be_traced_leaves_no_group_behind():
    def looks(model, tokens):
        return loss(model, tokens) if float(loss(model, tokens)) > 0 else None

    with raises(ModelError, code="model.not_traceable", field="model"):
        told(2, loss_fn=looks)
    assert not dist.is_initialized()


def test_one_rank_is_no_share():
    with raises(ValueGivenError, code="value.invalid", field="ranks"):
        told(2, ranks=1)
