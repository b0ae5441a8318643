"""Values that a model saves but does not load, such as the scales of quantised weights."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

from trimtab.checkpoint.train_state import ModelState
from trimtab.core.errors import ModelError


class Quantised(nn.Module):
    """Saves the scale of its weight under a name that `load_state_dict` rejects."""

    def __init__(self, scale):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.scale = scale

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}layer.weight.scale"] = self.scale


@pytest.mark.parametrize(("saved", "other"), [(torch.ones(2), torch.zeros(2)), (4, 8)], ids=["tensor", "number"])
def test_values_that_a_model_does_not_load_must_equal_its_own(saved, other):
    state = ModelState(Quantised(saved)).state_dict()
    same = Quantised(saved)
    ModelState(same).loading(state)()
    assert torch.equal(same.layer.weight, state["own"]["layer.weight"])
    with raises(ModelError, code="model.state_not_restored"):
        ModelState(Quantised(other)).loading(state)()
