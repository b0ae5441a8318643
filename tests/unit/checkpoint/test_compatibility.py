"""What of the world a run was saved in is another by now, where ranks are unlike in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.checkpoint.compatibility import changes, world_of
from trimtab.core.plan import Plan


def world(*threads, ranks=None):
    """Return what ranks with so many threads each say of the world."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return world_of(model, optimizer, Plan.fixed(4), ["cpu"] * (ranks or len(threads)), threads)


def test_threads_are_told_once_where_they_are_alike_and_by_rank_where_not():
    assert world("4", "4")["threads"] == world("4")["threads"] == "4"
    assert world("4", "1", "4")["threads"] == "4, 1, 4"
    assert world(ranks=2)["threads"] == str(torch.get_num_threads())


SAME = {
    "as they were": (["4", "1"], ["4", "1"]),
    "alike": (["4", "4"], ["4", "4"]),
    "one more, as the first": (["4", "1"], ["4", "1", "4"]),
    "two more, as both": (["4", "1"], ["4", "1", "4", "1"]),
    "one less": (["4", "1"], ["4"]),
    "one process, then two": (["1"], ["1", "1"]),
}
OTHERS = {
    "each other's": (["4", "1"], ["1", "4"]),
    "unlike by now": (["4", "4"], ["4", "1"]),
    "alike by now": (["4", "1"], ["4", "4"]),
    "one more, unlike the first": (["4", "1"], ["4", "1", "1"]),
    "one process, then two with fewer": (["8"], ["1", "1"]),
    "the second is left": (["4", "1"], ["1"]),
}


@pytest.mark.parametrize(("then", "now"), [*SAME.values(), *OTHERS.values()], ids=[*SAME, *OTHERS])
def test_each_rank_s_threads_are_compared_with_those_of_the_rank_that_it_goes_on_from(then, now):
    is_changed = "threads" in changes(world(*then), world(*now))
    assert is_changed is ((then, now) in OTHERS.values())
