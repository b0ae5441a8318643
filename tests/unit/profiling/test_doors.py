"""What cannot be measured is refused by name at every door, before anything runs: a device, a model in use."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from raising import raises
from small_loops import sgd
from state_digest import fingerprint
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import trimtab
from trimtab.core.errors import BatchError, LoopError, LossError, ModelError, ValueGivenError
from trimtab.distributed import backend_selection
from trimtab.plans.plan import Plan
from trimtab.profiling.gradient_equivalence import require_own_forward
from trimtab.profiling.training_loop import TrainingLoop

BATCH = (torch.randn(4, 3),)


def loop(*devices):
    model = nn.Sequential(*(nn.Linear(3, 3, device=device) for device in devices))
    return model, sgd(model, momentum=0.9)


def never(model, batch):
    raise AssertionError("the loss was computed")


DOORS = {
    "TrainingLoop": TrainingLoop,
    "profile": trimtab.profile,
    "plan": trimtab.plan,
    "adapt": lambda *given: trimtab.plan(*given, adapt="learning_rate", data=[BATCH]),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("devices", "code", "given", "expected"),
    [
        (("meta", "meta"), "model.device_unsupported", "meta", "cpu or cuda"),
        (("cpu", "meta"), "model.several_devices", "cpu, meta", "one device"),
    ],
)
def test_a_device_that_cannot_be_measured_is_refused(door, devices, code, given, expected):
    with raises(ModelError, code=code, field="model") as caught:
        door(*loop(*devices), never, BATCH)
    assert given in caught.value.got
    assert expected in caught.value.expected


def test_a_model_without_values_is_not_trained():
    with raises(ModelError, code="model.on_meta"):
        trimtab.start(*loop("meta"), Plan.fixed(4, 2))


def mean_square(model, batch):
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("window", ["closed", "open"])
def test_a_model_with_an_active_run_is_refused_as_by_start(window, door):
    model, optimizer = loop("cpu", "cpu")
    model.insert(1, nn.Dropout(0.2))
    with trimtab.start(model, optimizer, Plan.fixed(4, 2, memory_layout="channels_last")) as run:
        run.train_step(run.window(BATCH), mean_square)
        micros = iter(run.window(BATCH))
        if window == "open":
            run.backward(mean_square(model, next(micros)))
        before, state = fingerprint(model, optimizer), run.state_dict()
        with pytest.raises(LoopError) as second:
            trimtab.start(model, optimizer, Plan.fixed(4, 2, memory_layout="channels_last"))
        with pytest.raises(LoopError) as caught:
            door(model, optimizer, never, BATCH)
        assert str(caught.value) == str(second.value)
        assert (fingerprint(model, optimizer), run.state_dict()) == (before, state)
        for micro in micros:
            run.backward(mean_square(model, micro))
        assert run.step()
    TrainingLoop(model, optimizer, mean_square, BATCH)  # free again


# What a loss does with the model.


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)

    def encode(self, x):
        return self.layer(x)


def its_method(model, batch):
    return model.encode(batch[0]).square().mean()


def its_submodule(model, batch):
    return model.layer(batch[0]).square().mean()


def cast_by_the_loop(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch[0]).float().square().mean()


@pytest.mark.parametrize("loss_fn", [its_method, its_submodule])
def test_a_loss_that_does_not_call_the_model_is_refused_before_anything_is_measured(loss_fn):
    model = Tower()
    with raises(LossError, code="loss.model_not_called", field="loss_fn"):
        trimtab.plan(model, sgd(model), loss_fn, BATCH, progress=fails_to_measure)


def fails_to_measure(line):
    assert "splitting" in line, line


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("around", [False, True])
def test_an_autocast_of_the_loops_own_is_refused_whatever_is_declared(precision, around):
    """Every precision that is tried would run in it, fp16 without its loss scale among them."""
    model, optimizer = loop("cpu")
    subject = TrainingLoop(model, optimizer, mean_square if around else cast_by_the_loop, BATCH)
    cast = torch.autocast("cpu", torch.bfloat16) if around else contextlib.nullcontext()
    with cast, raises(LossError, code="loss.own_autocast", field="loss_fn"):
        require_own_forward(subject, precision)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_loss_that_leaves_the_precision_to_the_plan_passes(precision):
    def half_alone(model, batch):
        assert torch.is_autocast_enabled("cpu")
        return mean_square(model, batch)

    class Casts(Tower):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.layer(x).float()

    require_own_forward(TrainingLoop(*loop("cpu"), mean_square, BATCH), precision)
    require_own_forward(TrainingLoop(*loop("cpu"), half_alone, BATCH), "bf16")
    model = Casts()  # modules may cast as they like
    require_own_forward(TrainingLoop(model, sgd(model), mean_square, BATCH), precision)
    assert not model._forward_pre_hooks


def test_a_rate_of_zero_is_no_rate_to_rise_from():
    model, optimizer = loop("cpu")
    optimizer.param_groups[0]["lr"] = 0.0
    with raises(ValueGivenError, code="optimizer.rate_is_zero", field="optimizer"):
        trimtab.plan(model, optimizer, never, BATCH, adapt="learning_rate", data=[BATCH])


# On ranks.


@pytest.fixture
def one_of_several(monkeypatch):
    """A process that has others beside it, as far as can be seen."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(backend_selection, "has_peers", lambda: True)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("door", ["profile", "plan", "adapt"])
def test_a_model_that_communicates_in_its_forward_is_not_measured_on_ranks(one_of_several, door):
    model, _ = loop("cpu")
    split, _ = loop("cpu")
    parallelize_module(split[0], dist.device_mesh.init_device_mesh("cpu", (1,)), ColwiseParallel())
    normalized = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    cases = [
        (nn.parallel.DistributedDataParallel(model), "model.parallel"),
        (split, "model.parallel"),
        (normalized, "model.sync_batch_norm"),
    ]
    for parallel, code in cases:
        with raises(ValueGivenError, code=code, field="model"):
            DOORS[door](parallel, sgd(parallel), never, BATCH)


def test_a_plan_that_shares_nothing_says_so_on_ranks(one_of_several):
    with (
        pytest.warns(UserWarning, match="DistributedDataParallel"),
        trimtab.start(*loop("cpu"), Plan.fixed(4)) as run,
    ):
        run.train_step(run.window(BATCH), mean_square)


# Example batches that can be read once.

MAKE = {
    "generator": lambda: (torch.randn(4, 8) for _ in range(2)),
    "zip": lambda: zip(torch.randn(2, 4, 8), torch.randn(2, 4, 8), strict=True),
    "in a dict": lambda: {"x": torch.randn(4, 8), "parts": iter([1, 2])},
    "in a tuple": lambda: (torch.randn(4, 8), map(int, [1, 2])),
}


@pytest.mark.parametrize("name", MAKE)
def test_an_iterator_is_refused_and_not_read(name):
    model, batch = nn.Linear(8, 3), MAKE[name]()
    with raises(BatchError, code="batch.iterator"):
        trimtab.plan(model, sgd(model), lambda model, batch: model(batch).mean(), batch)
    read = batch["parts"] if name == "in a dict" else batch[1] if name == "in a tuple" else batch
    assert len(list(read)) == 2
