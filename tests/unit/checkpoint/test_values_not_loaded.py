"""Values that a model saves but does not load, such as the scales of quantised weights."""

from __future__ import annotations

import copy

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


NAN = torch.tensor([1.0, float("nan")])


@pytest.mark.parametrize(
    ("saved", "other"),
    [(torch.ones(2), torch.zeros(2)), (4, 8), (NAN, torch.ones(2)), ((torch.ones(2), NAN), (torch.ones(2), NAN + 1))],
    ids=["tensor", "number", "NaN", "tuple"],
)
def test_values_that_a_model_does_not_load_must_equal_its_own(saved, other):
    state = ModelState(Quantised(saved)).state_dict()
    same = Quantised(copy.deepcopy(saved))
    ModelState(same).loading(state)()
    assert torch.equal(same.layer.weight, state["own"]["layer.weight"])
    with raises(ModelError, code="model.state_not_restored"):
        ModelState(Quantised(other)).loading(state)()


class WithoutStrict(nn.Linear):
    def load_state_dict(self, state):
        return super().load_state_dict(state)


class WithoutResult(nn.Linear):
    def load_state_dict(self, state, strict=True, assign=False):
        super().load_state_dict(state, strict, assign)


@pytest.mark.parametrize("kind", [WithoutStrict, WithoutResult])
def test_a_model_may_override_load_state_dict(kind):
    saved, model = kind(2, 2), kind(2, 2)
    ModelState(model).loading(ModelState(saved).state_dict())()
    assert torch.equal(model.weight, saved.weight)


def remove_bias(module, state, prefix, metadata):
    del state["bias"]


def test_a_parameter_that_a_hook_removes_from_the_state_is_named():
    model = nn.Linear(2, 2)
    model.register_state_dict_post_hook(remove_bias)
    with raises(ModelError, code="model.state_not_saved", field="model: bias"):
        ModelState(model).loading(ModelState(model).state_dict())()
