"""Of what recomputes every two of schedule, precision, block, eager or compiled, and one process or ranks, together."""

from __future__ import annotations

import shutil

import pytest
from recomputing_cells import cells, check_cells, covering, pairs_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "ranks"])
def test_cells_are_the_loop_that_keeps_all(tmp_path, mode, is_alone):
    if mode == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    check_cells([cell for cell in covering() if mode in cell and ("alone" in cell) is is_alone], tmp_path)


def test_every_two_values_that_may_meet_do():
    meet = set().union(*map(pairs_of, covering()))
    assert meet == set().union(*map(pairs_of, cells()))
    assert {("ddp", "fp16"), ("fsdp2", "bf16"), ("fsdp2", "compiled"), ("dropout", "compiled")} <= meet
