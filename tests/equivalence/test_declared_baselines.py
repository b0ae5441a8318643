"""Precision and activation checkpointing that a trainer declares: the trainer's own weights, in an unchanged plan."""

from __future__ import annotations

import csv
import dataclasses
import time
from pathlib import Path

import pytest
import test_accelerate
import test_lightning
import test_transformers
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from raising import raises
from test_hosts_that_are_planned import OURS, PLAIN, counted_rows
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.integrations import accelerate, lightning
from trimtab.integrations.lightning import TrimtabStrategy
from trimtab.integrations.transformers import TrimtabTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("brief_trials"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STEPS, ROWS = 20, 8
_NAMES = {field.name for field in dataclasses.fields(TrainingArguments)}
RECOMPUTES = "activation_checkpointing" if "activation_checkpointing" in _NAMES else "gradient_checkpointing"
BF16 = 1e-6  # Of a tensor's largest weight: both loops round alike.
# Gains are adopted from five blocks of trials on, so that three keep everything.
KEEPS = {"num_blocks": 3}


@pytest.fixture(autouse=True)
def own_state():
    test_accelerate.reset()
    yield
    test_accelerate.reset()


def trainer_of(kind, folder, dtype=torch.float32, *, own=None, **changes):
    """Return a Trainer with SGD, since AdamW makes steps of rounding in a bias of keys."""
    given = {"max_grad_norm": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0, "optim": "sgd"}
    args = test_transformers.arguments(folder, **given | {"learning_rate": 0.1} | changes)
    data = counted_rows()
    how = {"train_dataset": data, "eval_dataset": data[:ROWS], "compute_loss_func": test_transformers.in_double}
    return kind(model=test_transformers.model().to(dtype), args=args, **how, **(own or {}))


@pytest.mark.parametrize(
    "own", [{"plan": trimtab.Plan.fixed(ROWS)}, {"planning": KEEPS}], ids=["set by hand", "planned"]
)
@pytest.mark.parametrize("changes", [{}, {RECOMPUTES: True}], ids=["", "recomputed"])
def test_the_trainers_bf16_stays(tmp_path, own, changes):
    changes = {"bf16": True, "eval_strategy": "steps", "eval_steps": 10, **changes}
    plain = trainer_of(PLAIN, tmp_path / "plain", **changes)
    plain.train()
    test_accelerate.reset()
    ours = trainer_of(OURS, tmp_path / "ours", own=own, **changes)
    ours.train()
    assert ours.plan.precision.value == ours.plan.reference.precision == "bf16"
    assert ours.plan.reference.declared
    assert not ours.plan.changes
    assert test_lightning.difference(ours.model, plain.model) <= BF16
    for name in ("loss", "eval_loss", "grad_norm"):
        found, expected = (test_transformers.history(each, name) for each in (ours, plain))
        assert found == pytest.approx(expected, rel=1e-4), name
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    logits = [each.model.train()(input_ids=counted_rows()[0]["input_ids"][None]).logits for each in (ours, plain)]
    assert torch.allclose(*logits, atol=1e-5)  # After training, the Accelerator's own autocast is back.


def test_another_precision_than_the_trainers_is_the_plans(tmp_path):
    ours = trainer_of(OURS, tmp_path / "ours", bf16=True, own={"plan": trimtab.Plan.fixed(ROWS, precision="fp32")})
    ours.train()
    test_accelerate.reset()
    plain = trainer_of(PLAIN, tmp_path / "plain")
    plain.train()
    assert test_lightning.difference(ours.model, plain.model) <= BF16


class InHalf:
    """Scales losses in fp16 on a CPU, which Accelerate does on a GPU only."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp, self.accelerator.scaler = True, torch.amp.GradScaler("cpu")


def test_the_trainers_fp16_stays_and_scales_once(tmp_path):
    trainers = []
    for kind in (PLAIN, OURS):
        test_accelerate.reset()
        own = {"plan": trimtab.Plan.fixed(ROWS)} if kind is OURS else {}
        changes = {"fp16": True, "eval_strategy": "steps", "eval_steps": 10, "max_grad_norm": 0.5}
        trainers.append(trainer_of(type("Half", (InHalf, kind), {}), tmp_path / kind.__name__, own=own, **changes))
        trainers[-1].train()
    plain, ours = trainers
    assert (ours.plan.precision.value, ours.plan.changes) == ("fp16", ())
    assert test_lightning.difference(ours.model, plain.model) <= BF16
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        found, expected = (test_transformers.history(each, name) for each in (ours, plain))
        assert found == pytest.approx(expected, rel=1e-4), name
    assert ours.accelerator.native_amp
    assert ours.accelerator.scaler is not None


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("own", [{"plan": trimtab.Plan.fixed(ROWS, 3)}, {"planning": KEEPS}], ids=["split", "planned"])
def test_the_trainers_own_recomputation_stays(tmp_path, optim, own):
    changes = {RECOMPUTES: True, "optim": optim, "learning_rate": 1e-2}
    plain = trainer_of(PLAIN, tmp_path / "plain", torch.float64, **changes)
    plain.train()
    ours = trainer_of(OURS, tmp_path / "ours", torch.float64, own=own, **changes)
    ours.train()
    assert ours.model.is_gradient_checkpointing
    assert test_lightning.difference(ours.model, plain.model) <= test_transformers.EXACT
    assert ours.plan.recompute.value is None


def test_planning_is_not_in_the_trainers_speeds(tmp_path, caplog, monkeypatch):
    from trimtab.integrations import transformers

    make = transformers.make_plan

    def slowly(*given, **how):
        assert how["total_steps"] == STEPS
        time.sleep(2)
        return make(*given, **how)

    monkeypatch.setattr(transformers, "make_plan", slowly)
    ours = trainer_of(TrimtabTrainer, tmp_path, own={"planning": KEEPS})
    start = time.perf_counter()
    metrics = ours.train().metrics
    took_s = time.perf_counter() - start
    assert metrics["planning_seconds"] > 2
    assert metrics["train_runtime"] < took_s - metrics["planning_seconds"]
    assert metrics["train_steps_per_second"] == pytest.approx(STEPS / metrics["train_runtime"], rel=0.01)
    assert metrics["train_samples_per_second"] == pytest.approx(STEPS * ROWS / metrics["train_runtime"], rel=0.01)
    (logged,) = [each for each in ours.state.log_history if "train_runtime" in each]
    assert logged["planning_seconds"] == metrics["planning_seconds"]
    assert caplog.text.count("trimtab: no change is significantly better; planned in") == 1


def test_a_given_plan_is_not_planned(tmp_path, caplog):
    ours = trainer_of(TrimtabTrainer, tmp_path, own={"plan": trimtab.Plan.fixed(ROWS)})
    assert "planning_seconds" not in ours.train().metrics
    assert "planned in" not in caplog.text


class Single(test_lightning.Module):
    """In single precision, by SGD; records the dtype of its logits in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net.float()
        self.dtypes = []

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].float(), batch[1]], batch_idx)

    def validation_step(self, batch, batch_idx):
        self.dtypes.append(self.net(batch[0].float()).dtype)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "own", [{"plan": trimtab.Plan.fixed(ROWS)}, {"planning": KEEPS}], ids=["set by hand", "planned"]
)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_lightnings_bf16_stays(tmp_path, own, clip):
    plain, ours, strategy = Single(), Single(), TrimtabStrategy(**own)
    changes = {"precision": "bf16-mixed", "gradient_clip_val": clip}
    for module, kind in ((plain, "auto"), (ours, strategy)):
        loaders = [DataLoader(test_lightning.data(), ROWS) for _ in range(2)]
        test_lightning.fitted(module, kind, tmp_path, loaders, **changes)
    assert strategy.plan.precision.value == strategy.plan.reference.precision == "bf16"
    assert not strategy.plan.changes
    assert test_lightning.difference(ours, plain) <= BF16
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.dtypes == plain.dtypes
    assert set(ours.dtypes) == {torch.bfloat16}
    exact = Single()
    test_lightning.fitted(exact, "auto", tmp_path, DataLoader(test_lightning.data(), ROWS), gradient_clip_val=clip)
    assert test_lightning.difference(exact, plain) > 100 * BF16


def test_lightnings_fp16_stays_and_scales_once(tmp_path):
    plain, ours, strategy = Single(), Single(), TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, 4))
    for module, kind in ((plain, "auto"), (ours, strategy)):
        changes = {"plugins": [MixedPrecision("16-mixed", "cpu")], "gradient_clip_val": 0.3}
        test_lightning.fitted(module, kind, tmp_path, DataLoader(test_lightning.data(), ROWS), **changes)
    assert strategy.plan.precision.value == "fp16"
    assert test_lightning.difference(ours, plain) <= 1e-2  # Halves of a batch round otherwise.
    assert ours.losses == pytest.approx(plain.losses, rel=1e-3)


def test_planning_is_not_in_lightnings_timers(tmp_path, caplog, monkeypatch):
    make = lightning.make_plan

    def slowly(*given, **how):
        assert how["total_steps"] == STEPS
        time.sleep(2)
        return make(*given, **how)

    class Sees(Callback):
        def on_train_batch_end(self, trainer, *given):
            seen.append(timer.time_elapsed())

    monkeypatch.setattr(lightning, "make_plan", slowly)
    seen, timer, strategy = [], Timer(duration={"seconds": 3600}), TrimtabStrategy(planning=KEEPS)
    start = time.perf_counter()
    logger = CSVLogger(tmp_path)
    test_lightning.trained(test_lightning.Module(), strategy, tmp_path, callbacks=[timer, Sees()], logger=logger)
    took_s = time.perf_counter() - start
    assert len(seen) == STEPS
    assert 0 < seen[0] < seen[-1] < took_s - 2
    rows = list(csv.DictReader(Path(logger.experiment.metrics_file_path).read_text().splitlines()))
    (planning_s,) = [float(row["planning_seconds"]) for row in rows if row["planning_seconds"]]
    assert 2 < planning_s < took_s
    assert caplog.text.count("trimtab: no change is significantly better; planned in") == 1


def single(rows: int = STEPS * ROWS):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    inputs, targets = test_lightning.data(rows).tensors
    loader = DataLoader(TensorDataset(inputs.float(), targets), ROWS)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def loss_fn(model, batch):
    logits = model(batch[0])
    assert logits.dtype == torch.float32
    return nn.functional.cross_entropy(logits, batch[1])


@pytest.mark.parametrize("way", ["set by hand", "planned"])
@pytest.mark.parametrize("prepared", [True, False])
def test_accelerates_bf16_stays(way, prepared):
    host = Accelerator(cpu=True, mixed_precision="bf16")
    plain, optimizer, loader = host.prepare(*single())
    for batch in loader:
        host.backward(loss_fn(plain, batch))
        optimizer.step()
        optimizer.zero_grad()
    expected = plain.eval()(loader.dataset.tensors[0])
    test_accelerate.reset()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer, loader = single()
    loader = accelerator.prepare(loader)
    if prepared:
        model, optimizer = accelerator.prepare(model, optimizer)
    forward = vars(model).get("forward")
    plan = trimtab.Plan.fixed(ROWS)
    if way == "planned":
        plan = accelerate.plan(accelerator, model, optimizer, loss_fn, loader, total_steps=STEPS, **KEEPS)
        assert vars(model).get("forward") == forward
    with accelerate.start(accelerator, model, optimizer, plan) as run:
        for window in run.windows(loader):
            run.train_step(window, loss_fn)
        assert run.plan.precision.value == run.plan.reference.precision == "bf16"
        assert not run.plan.changes
        assert torch.allclose(model.eval()(loader.dataset.tensors[0]), expected, atol=1e-5)
    assert vars(model).get("forward") == forward
    assert test_lightning.difference(accelerator.unwrap_model(model), host.unwrap_model(plain)) <= BF16


@pytest.mark.parametrize("way", ["set by hand", "planned"])
def test_fabrics_bf16_stays(way):
    host = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model, optimizer, loader = single()
    plain, optimizer = host.setup(model, optimizer)
    for batch in loader:
        optimizer.zero_grad()
        host.backward(loss_fn(plain, batch))
        optimizer.step()
    expected = plain.eval()(loader.dataset.tensors[0])
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    ours, optimizer, loader = single()
    plan = trimtab.Plan.fixed(ROWS)
    if way == "planned":
        plan = lightning.plan(fabric, ours, optimizer, loss_fn, loader, total_steps=STEPS, **KEEPS)
    with lightning.start(fabric, ours, optimizer, plan) as run:
        for window in run.windows(loader):
            run.train_step(window, loss_fn)
        assert run.plan.precision.value == run.plan.reference.precision == "bf16"
        assert torch.allclose(ours.eval()(loader.dataset.tensors[0]), expected, atol=1e-2)
    assert "forward" not in vars(ours)
    assert test_lightning.difference(ours, model) <= BF16


def test_a_precision_without_a_plan_is_refused():
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    with raises(ValueGivenError, code="trainer.precision_unsupported", field="Fabric(precision=...)"):
        lightning.start(fabric, *single()[:2], trimtab.Plan.fixed(ROWS))


def test_plain_training_is_what_a_plan_without_changes_does(tmp_path):
    plain = trainer_of(Trainer, tmp_path / "plain", torch.float64)
    ours = trainer_of(TrimtabTrainer, tmp_path / "ours", torch.float64, own={"planning": KEEPS})
    for each in (plain, ours):
        each.train()
    assert ours.plan.reference == trimtab.Reference("fp32", clip_norm=1.0, keeps_gradients=True)
    assert not ours.plan.changes
    assert test_lightning.difference(ours.model, plain.model) <= test_transformers.EXACT
