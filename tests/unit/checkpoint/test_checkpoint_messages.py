"""Whole messages, as a user reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from trimtab.checkpoint.compatibility import require_accepted
from trimtab.checkpoint.config import Checkpoints
from trimtab.checkpoint.train_state import ModelState
from trimtab.core.errors import TrimtabError


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
