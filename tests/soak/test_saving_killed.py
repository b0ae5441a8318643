"""A process that saves, killed a hundred times at moments that nobody chose."""

from __future__ import annotations

import random

import pytest
from saving import kill_while_saving

KILLS = 50


@pytest.mark.parametrize("size", [2_000, 500_000])
def test_every_kill_leaves_the_last_checkpoint_whole(tmp_path, size):
    chance = random.Random(size)
    steps, cut = kill_while_saving(tmp_path, lambda: chance.uniform(0, 0.05), KILLS, size)
    assert steps >= KILLS
    assert cut >= KILLS // 5, "most moments are inside a save"
