"""Whole messages of measuring, as a reader who has not seen the library meets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.energy.meter_selection import Metering, find_meter, measurable
from trimtab.measure.blocks import find_blocks


def test_energy_without_a_meter(tmp_path):
    found = find_meter(torch.device("cpu"), Metering(root=tmp_path / "powercap"))
    with pytest.raises(ValueGivenError) as caught:
        measurable(Objective(energy=0.5), Budget(), found)
    assert str(caught.value) == (
        f"The objective or the budget contains energy, which cannot be measured: {tmp_path / 'powercap'} does not "
        "exist; virtual machines and containers usually have no access to CPU energy counters. Remove energy, or pass "
        'Metering(watts=...) for an estimate. Metering(without="renormalise") drops the weight of energy from the '
        "objective, but no limit."
    )


def test_a_block_that_the_model_does_not_have():
    with pytest.raises(ValueGivenError) as caught:
        find_blocks(nn.Sequential(nn.Linear(2, 2)), ["layers.0"])
    assert str(caught.value) == (
        "blocks: got 'layers.0'; expected names of submodules of the model. Use names from model.named_modules(), such "
        "as 'layers.0'."
    )
