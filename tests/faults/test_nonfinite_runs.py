"""Runs, checkpoints and comparisons whose training becomes non-finite."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from saving import write
from torch import nn

import trimtab
from trimtab.checkpoint.atomic_directory import committed_folders, delete_old_folders, manifest_of
from trimtab.core.errors import NonFiniteError
from trimtab.core.record import read_record
from trimtab.measure.finite_check import first_nonfinite, nonfinite_parameter
from trimtab.plans.plan import Plan
from trimtab.training import nonfinite
from trimtab.training.nonfinite import NonFinitePolicy

ROWS, BAD, STEPS = 4, 3, 7
PLAN = Plan.fixed(ROWS)


class Gradient(torch.autograd.Function):
    """The identity, with a gradient that is multiplied."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


# What makes training non-finite from step BAD on: (loss of a model's output and the step) -> loss.
CAUSES = {
    "NaN loss": lambda out, step: out.square().mean() * (math.nan if step == BAD else 1.0),
    "infinite loss": lambda out, step: out.square().mean() * (math.inf if step == BAD else 1.0),
    "log of zero": lambda out, step: (out.square().mean() * (0.0 if step == BAD else 1.0) + 0.0).log(),
    "NaN gradient": lambda out, step: Gradient.apply(out.square().mean(), math.nan if step == BAD else 1.0),
}


class Training:
    """A small regression that becomes non-finite."""

    def __init__(self, cause="NaN loss"):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(1)
        self.batches = [torch.randn(ROWS, 3, generator=generator) for _ in range(STEPS)]
        self.cause = CAUSES[cause]

    def run(self, steps=STEPS, **options):
        with trimtab.start(self.model, self.optimizer, PLAN, **options) as run:
            for window in run.windows(self.batches[:steps]):
                run.train_step(window, lambda model, batch: self.cause(model(batch), run.num_windows))
        return run


def plain(training):
    for step, batch in enumerate(training.batches):
        training.optimizer.zero_grad()
        training.cause(training.model(batch), step).backward()
        training.optimizer.step()


@pytest.mark.parametrize("cause", CAUSES)
def test_by_default_it_trains_as_the_plain_loop_does_and_warns_once(cause):
    ours, theirs = Training(cause), Training(cause)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.run()
    plain(theirs)
    assert [each.category for each in caught] == [RuntimeWarning]
    assert torch.equal(ours.model.weight.isnan(), theirs.model.weight.isnan())
    assert not torch.isfinite(ours.model.weight).all()


@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_ends_the_run_after_the_step(cause, tmp_path):
    training = Training(cause)
    with (
        trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("it")) as writer,
        pytest.raises(NonFiniteError) as raised,
    ):
        training.run(nonfinite="error", record=writer)
    assert raised.value.code == "training.nonfinite"
    found = read_record(tmp_path / "run.jsonl")
    assert len(found.steps) == BAD + (2 if cause == "NaN gradient" else 1)  # seen by the loss of the step after
    assert found.end.reason == "error"
    assert "nonfinite" in {event.name for event in found.events}


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_the_last_step_is_looked_at_too(policy):
    training = Training()
    with pytest.warns(RuntimeWarning) if policy == "warn" else pytest.raises(NonFiniteError):
        training.run(steps=BAD + 1, nonfinite=policy)


@pytest.mark.parametrize("policy", ["skip", "continue"])
def test_what_was_asked_to_go_on_goes_on_without_a_word(policy):
    run = Training().run(nonfinite=policy)
    assert run.applied_steps == STEPS - (policy == "skip")


def test_stop_leaves_the_weights_as_before_the_step():
    training, before = Training(), Training()
    before.run(steps=BAD)
    with pytest.raises(NonFiniteError) as raised:
        training.run(nonfinite="stop")
    assert raised.value.code == "step.nonfinite"
    assert torch.equal(training.model.weight, before.model.weight)


class Arriving:
    """A scalar on its way from a device; notes when it is read."""

    def __init__(self, loss):
        self.loss = loss

    def read(self):
        READ.append(self.loss.name)
        return [self.loss.value]


READ: list[str] = []


def on_device(name, value=1.0):
    return SimpleNamespace(device=torch.device("cuda", 0), name=name, value=value)


def test_a_loss_on_a_device_is_read_one_step_later(monkeypatch):
    monkeypatch.setattr(nonfinite, "AsyncScalar", Arriving)
    READ.clear()
    watch = NonFinitePolicy("error")
    watch.applied(0, on_device("first"))
    assert READ == []
    watch.applied(1, on_device("second", math.nan))
    assert READ == ["first"]
    with pytest.raises(NonFiniteError):
        watch.applied(2, on_device("third"))
    assert READ == ["first", "second"]


def test_the_last_loss_on_a_device_is_read_at_the_close(monkeypatch):
    monkeypatch.setattr(nonfinite, "AsyncScalar", Arriving)
    watch = NonFinitePolicy("warn")
    watch.applied(0, on_device("first", math.inf))
    with pytest.warns(RuntimeWarning):
        watch.over()
    watch.over()


@pytest.mark.filterwarnings("ignore:The backward of Gradient receives gradients multiplied by the loss scale")
def test_steps_that_were_skipped_for_their_loss_scale_are_no_cause():
    """fp16: the scaler drops a step whose gradients overflow; nothing was applied."""
    training = Training("NaN gradient")
    with trimtab.start(training.model, training.optimizer, Plan.fixed(ROWS, precision="fp16")) as run:
        for window in run.windows(training.batches):
            run.train_step(window, lambda model, batch: training.cause(model(batch).float(), run.num_windows))
    assert run.applied_steps < STEPS
    assert nonfinite_parameter(training.model) is None


# Checkpoints.


def saved(folder):
    return {each.name: manifest_of(each).is_finite for each in committed_folders(folder)}


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_newest_checkpoint_with_finite_parameters_is_kept(tmp_path, keep_last):
    training = Training()
    keep = trimtab.Checkpoints(tmp_path / "run", every_steps=1, every_s=None, keep_last=keep_last)
    training.run(checkpoints=keep, nonfinite="continue")
    newest = {f"step-{STEPS - index}": False for index in range(keep_last)}
    assert saved(tmp_path / "run") == newest | {f"step-{BAD}": True}


@pytest.mark.parametrize("policy", ["error", "stop"])
def test_a_run_that_ends_at_it_saves_no_such_checkpoint_and_is_resumed_from_before(tmp_path, policy):
    keep = trimtab.Checkpoints(tmp_path / "run", every_steps=1, every_s=None)
    with pytest.raises(NonFiniteError):
        Training("NaN gradient").run(checkpoints=keep, nonfinite=policy)
    assert all(saved(tmp_path / "run").values())
    mended = Training("NaN gradient")
    mended.cause = lambda out, step: out.square().mean()
    run = mended.run(checkpoints=keep, nonfinite=policy)
    assert run.num_windows == STEPS
    assert nonfinite_parameter(mended.model) is None


def test_a_checkpoint_by_hand_says_what_is_non_finite(tmp_path):
    training = Training()
    keep = trimtab.Checkpoints(tmp_path / "run", every_s=None)
    with trimtab.start(training.model, training.optimizer, PLAN, checkpoints=keep, nonfinite="error") as run:
        next(iter(run.windows(training.batches)))
        with torch.no_grad():
            training.model.bias.fill_(math.inf)
        with raises(NonFiniteError, code="training.nonfinite", field="training"):
            run.checkpoint()
    assert committed_folders(tmp_path / "run") == []


def test_checkpoints_that_do_not_say_count_as_finite(tmp_path):
    for step, said in enumerate([{}, {"finite": False}, {}, {"finite": False}, {"finite": False}]):
        write(tmp_path, f"step-{step}", lambda folder: (folder / "a").write_bytes(b"1"), {"step": step} | said)
    delete_old_folders(tmp_path, 1)
    assert [each.name for each in committed_folders(tmp_path)] == ["step-4", "step-2"]


# The check of parameters.

VALUES = {
    "fp32": torch.zeros(5),
    "fp64 beyond fp32": torch.full((3,), 1e300, dtype=torch.float64),
    "fp16": torch.full((3,), 65504.0, dtype=torch.float16),
    "bf16": torch.zeros(3, dtype=torch.bfloat16),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "8 bits": torch.zeros(3).to(torch.float8_e5m2),
    "sparse": torch.eye(3).to_sparse(),
    "a scalar": torch.tensor(1.0),
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_each_type_of_parameter_is_checked(kind, bad):
    whole = VALUES[kind]
    assert first_nonfinite([("it", whole)]) is None
    if kind == "sparse":
        broken = whole * bad
    else:
        broken = whole.clone()
        broken.view(-1)[-1:] = bad
    assert first_nonfinite([("whole", whole), ("it", broken), ("after", broken)]) == "it"


def test_what_can_hold_no_nan_is_left_out():
    odd = [torch.arange(3), torch.zeros(0), torch.ones(2, dtype=torch.bool), torch.zeros(3, device="meta")]
    assert first_nonfinite((str(index), each) for index, each in enumerate(odd)) is None
