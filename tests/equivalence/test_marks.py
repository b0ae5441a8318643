"""Every setting keeps the promise of its numerical effect: bitwise up to the order of sums, rounding to its precision.

The tests are generated from `trimtab.settings.SETTINGS` and its example values: a new setting is tested without a
change here, and fails if it changes more than it promises.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from plain_loop import TOLERANCE, Trained, assert_close, assert_same_training, train_ours, train_plain
from rank_cases import CASES
from training_cases import (
    blocked_case,
    class_batches,
    class_case,
    dropout_mlp,
    headed_case,
    image_case,
    named_mlp,
    wide_mlp,
)

from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import COMPILED_BLOCKS, Effect
from trimtab.core.parallelism import STAGES
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS
from trimtab.settings.sharding import SHARDING
from trimtab.state import process_state

ROWS = 4
STEPS = 3
# Examples that this machine cannot run.
MISSING = set() if process_state.can_retain() else {"allocator"}
MISSING |= set() if shutil.which("g++") else {"compiled"}
MISSING |= {"offload"}  # These loops train on a CPU; see tests/gpu/test_offload_on_cuda.py.
# The recorder of gradients keeps the step out of the backward pass; see test_optimizer_in_backward.py.
MISSING |= {"step_in_backward"}
# bf16, without which it is refused, changes more than the generated test could see; see test_float8.py.
MISSING |= {"float8"}
# Settings by which several ranks share a model: tests/distributed compares each of them with one process.
SHARED = {setting.name for setting in SHARDING}
CHANGES = {name: setting.examples for name, setting in SETTINGS.items() if name not in SHARED | MISSING}
# What a field is nothing without.
NEEDS = {"warmup_fraction": {"schedule": "warmup_cosine"}, "fp32_modules": {"precision": "bf16"}}
MARKS = Plan.effects()
changes = [(name, value) for name, values in CHANGES.items() for value in values]
# Units of rounding of the field's own precision: bf16 keeps 8 bits, fp16 11. A gradient through 3 layers and a few
# steps of momentum gathers less than 16 of them; layout and kernel only reorder fp32's.
PRECISION = {"bf16": 16 * 2**-8, "fp16": 16 * 2**-11}


def planned(name, value):
    if name == "batch_policy":
        return Plan.fixed(ROWS, batch_rule=BatchRule(value, k=2))
    values = {"micro_batch": ROWS} | NEEDS.get(name, {}) | {name: value}
    return Plan.fixed(ROWS, **values)


def train(name, value, dtype, optimizer) -> tuple[Trained, Trained]:
    batches = class_batches((ROWS,) * STEPS, dtype, (3, 7, 7))
    case = image_case(dtype, optimizer, foreach=True).having(batches=batches)
    if name == "loss_chunk":
        case = headed_case(dtype, optimizer, foreach=True)
    if name == "optimizer" or value == COMPILED_BLOCKS:
        case = blocked_case(dtype)
    if name == "optimizer_state":
        case = class_case(dtype, optimizer, model=wide_mlp)
    if name == "fp32_modules":
        case = class_case(dtype, optimizer, model=named_mlp)
    if name == "dropout":
        case = class_case(dtype, optimizer, model=dropout_mlp)
    total = 10 * ROWS if MARKS[name] is Effect.TRAINING else None
    return train_ours(case, planned(name, value), total_samples=total), train_plain(case)


def test_every_choice_of_ranks_has_a_case_on_ranks():
    tried = {(name, value) for case in CASES.values() for name, value in case.values.items()}
    assert {name for name, value in tried if name in SHARED and value != SETTINGS[name].default} == SHARED
    assert {value for name, value in tried if name == "zero_stage"} == set(STAGES)


@pytest.mark.parametrize(("name", "value"), changes)
def test_a_change_makes_the_tier_its_mark_says(name, value):
    assert set(planned(name, value).changes) == {name, *NEEDS.get(name, {})}
    assert planned(name, value).plan_kind == ("tuned" if MARKS[name] is Effect.TRAINING else "equivalent")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("name", "value"), [c for c in changes if MARKS[c[0]] is Effect.BITWISE])
def test_exact_choices_change_the_order_of_summation_at_most(name, value, optimizer):
    assert_same_training(*train(name, value, torch.float64, optimizer), TOLERANCE[torch.float64])


@pytest.mark.skipif(not process_state.can_retain(), reason="needs glibc")
def test_the_allocator_changes_no_bit():
    assert_same_training(*train("allocator", "retain", torch.float32, "adamw"), 0)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("name", "value"), [c for c in changes if MARKS[c[0]] is Effect.ROUNDING])
def test_rounding_choices_are_close_in_their_own_precision(name, value, optimizer):
    ours, plain = train(name, value, torch.float32, optimizer)
    # 4e-6: see test_layouts.py, a convolution's bias sums terms that cancel.
    precision = NEEDS.get(name, {}).get("precision", value)
    assert_same_training(ours, plain, PRECISION.get(precision, 4e-6))


@pytest.mark.parametrize(("name", "value"), [c for c in changes if MARKS[c[0]] is Effect.TRAINING])
def test_dynamics_choices_are_rightly_marked_for_they_do_change_the_training(name, value):
    ours, plain = train(name, value, torch.float64, "sgd")
    with pytest.raises(AssertionError, match="weights"):
        assert_close(ours.weights, plain.weights, 1e-6, "weights")
