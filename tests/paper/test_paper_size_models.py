"""The models at the paper's size: parameters and FLOP, by the tasks and by hand. Outputs: the tests of transformers."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.paper.resnet50 import resnet50
from benchmarks.paper.tasks import load_task
from trimtab.core.errors import ValueGivenError
from trimtab.losses import parts_of
from trimtab.tasks.task import Task

EXPECTED = {
    # By task: parameters, and FLOP of forward and backward of an image or token.
    "cifar10_resnet50": (23_520_842, 7.783e9),
    "cifar10_resnet50_7x7": (23_528_522, 0.496e9),
    "wikitext2_gpt2": (124_439_808, 0.8544e9),
}


def on_meta(task: Task) -> nn.Module:
    with torch.device("meta"):
        return task.make_model()


def step_flops(task: Task, rows: int) -> int:
    """Return FLOP of a step as torch counts them: of matrix products and convolutions, two for each multiply-add."""
    model, batch = on_meta(task), tuple(column.to("meta") for column in task.example(rows))
    with FlopCounterMode(display=False) as counter:
        result = task.loss_fn(model, batch)
        parts_of(result).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", EXPECTED)
def test_parameters_and_flop_are_those_the_tasks_state(name):
    task, (parameters, flops) = load_task(name), EXPECTED[name]
    assert sum(p.numel() for p in on_meta(task).parameters()) == parameters
    assert step_flops(task, 2) / 2 / task.terms_per_sample == pytest.approx(flops, rel=1e-3)


def test_the_flop_convention_by_hand():
    """GPT-2: six for a weight in a product (the tied one in the head), and twelve T D a layer for attention."""
    layers, width, context, vocabulary = 12, 768, 1024, 50_257
    in_products = layers * 12 * width**2 + vocabulary * width
    by_hand = 6 * in_products + 12 * layers * context * width
    assert step_flops(load_task("wikitext2_gpt2"), 1) / context == pytest.approx(by_hand, rel=1e-12)


def test_the_stems_differ_as_the_tables_say():
    ours, theirs = (step_flops(load_task(name), 2) for name in ("cifar10_resnet50", "cifar10_resnet50_7x7"))
    assert ours / theirs == pytest.approx(15.7, abs=0.05)


@pytest.mark.parametrize("stem", ["5x5", "", None])
def test_a_stem_that_is_none_is_refused(stem):
    with raises(ValueGivenError, code="value.invalid", field="stem"):
        resnet50(stem)
