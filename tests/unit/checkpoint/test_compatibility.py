"""What of the world a run was saved in is another by now, and whole messages, as a user reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from trimtab.checkpoint.config import Checkpoints, changes, require_accepted, world_of
from trimtab.checkpoint.train_state import ModelState
from trimtab.core.errors import TrimtabError
from trimtab.plans.plan import Plan


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


def test_a_changed_version_of_torch():
    with pytest.raises(TrimtabError) as refused:
        require_accepted({"torch": ("2.12.0", "2.13.0")}, ())
    assert str(refused.value) == (
        "The version of torch has changed since the checkpoint was saved, from 2.12.0 to 2.13.0. "
        'Install the saved version of torch, or accept the change: Checkpoints(..., accepts=("torch",)).'
    )


def test_a_layer_of_another_size():
    with pytest.raises(TrimtabError) as refused:
        ModelState(nn.Linear(4, 3)).loading(ModelState(nn.Linear(4, 2)).state_dict())
    assert str(refused.value) == (
        "weight is float32 of shape (3, 4) in the model, but float32 of shape (2, 4) in the checkpoint. "
        "Build the model with the same architecture, sizes and dtypes as for the saved run."
    )


def test_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(TrimtabError) as refused:
        Checkpoints(tmp_path, resume="always").require_as_asked()
    assert str(refused.value).replace(str(tmp_path), str(Path("runs", "mine"))) == (
        'resume="always" requires a checkpoint, but runs/mine contains none. '
        'Check the path, or use resume="auto" to start a new run if there is no checkpoint.'
    )


def test_an_object_without_a_state():
    with pytest.raises(TrimtabError) as refused:
        Checkpoints("runs/mine", also={"rates": torch.float32})
    assert str(refused.value) == (
        "checkpoints.also['rates']: got dtype; expected an object with state_dict() and load_state_dict(). "
        "Pass the object itself, such as a scheduler, or write a class with both methods for it."
    )
