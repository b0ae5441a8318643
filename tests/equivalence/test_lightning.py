"""Lightning's Trainer, plain and with our strategy: the same weights after twenty steps, where the host is right."""

from __future__ import annotations

import logging
import weakref

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from raising import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.integrations.lightning import TrimtabStrategy, start

STEPS, ROWS = 20, 8
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    """A small network, whose own forward its training step does not call."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        self.num_optimizers, self.seen, self.losses = optimizers, [], []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        self.seen.append(len(inputs))
        loss = nn.functional.cross_entropy(self.net(inputs), targets)
        self.log("train_loss", loss, batch_size=len(inputs))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        found = [torch.optim.AdamW(self.parameters(), lr=1e-2) for _ in range(self.num_optimizers)]
        if self.num_optimizers > 1:
            return found
        schedule = torch.optim.lr_scheduler.ExponentialLR(found[0], 0.9)
        return {"optimizer": found[0], "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counted(Module):
    """As `Module`, with targets that do not count."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        count = (targets >= 0).sum()
        loss = nn.functional.cross_entropy(self.net(inputs), targets, ignore_index=-1, reduction="sum")
        return {"loss": loss / count.clamp(min=1), "num": count}


def data(rows: int = STEPS * ROWS, *, dropped: bool = False) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 6, generator=generator).double()
    targets = torch.randint(0, 3, (rows,), generator=generator)
    if dropped:
        targets[torch.rand(rows, generator=generator) < 0.6] = -1
        targets[:4] = -1  # a micro-batch of which nothing counts
    return TensorDataset(inputs, targets)


def fitted(module, strategy, folder, loaders, *, ckpt_path=None, **changes):
    """Return the trainer that has fitted a module to a loader, or to one and another that judges."""
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder}
    trainer = pl.Trainer(strategy=strategy, **{**given, **changes})
    trainer.fit(module, *(loaders if isinstance(loaders, list) else [loaders]), ckpt_path=ckpt_path)
    return trainer


def trained(module, strategy, folder, *, rows: int = STEPS * ROWS, dropped: bool = False, batch: int = ROWS, **changes):
    return fitted(module, strategy, folder, DataLoader(data(rows, dropped=dropped), batch_size=batch), **changes)


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


@pytest.fixture(autouse=True)
def of_the_host(recwarn):
    """What the host warns of is its own: few workers, loggers that are off."""


pytestmark = [
    pytest.mark.usefixtures("brief_trials"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_its_windows_train_as_the_host_does(tmp_path, micro, k, clip):
    changes = {"accumulate_grad_batches": k, "batch": ROWS // k, "gradient_clip_val": clip}
    plain, ours = Module(), Module()
    trained(plain, "auto", tmp_path, **changes)
    trainer = trained(ours, TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, micro)), tmp_path, **changes)
    assert difference(ours, plain) <= 1e-12
    assert trainer.global_step == STEPS
    if k == 1:
        assert ours.losses == pytest.approx(plain.losses, rel=1e-6)
    assert max(ours.seen) == micro


def by_hand(rows: int, window: int, *, dropped: bool = False) -> nn.Module:
    """Return what a plain loop trains, a step for each so many rows."""
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs, targets = data(rows, dropped=dropped).tensors
    for x, y in zip(inputs.split(window), targets.split(window), strict=True):
        nn.functional.cross_entropy(module.net(x), y, ignore_index=-1).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return module


def test_a_short_last_window_is_the_plain_loops_where_the_host_takes_a_part_of_it(tmp_path):
    changes = {"rows": 20, "batch": 4, "accumulate_grad_batches": 2}  # its last window is one batch
    plain, ours = Module(), Module()
    trained(plain, "auto", tmp_path, **changes)
    trained(ours, TrimtabStrategy(plan=trimtab.Plan.fixed(8, 4)), tmp_path, **changes)
    assert difference(ours, by_hand(20, 8)) <= 1e-12
    assert difference(plain, by_hand(20, 8)) > 1e-9


def test_terms_are_weighed_where_the_module_counts_them(tmp_path):
    ours = Counted()
    strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, 2), count="num")
    trained(ours, strategy, tmp_path, dropped=True)
    assert difference(ours, by_hand(STEPS * ROWS, ROWS, dropped=True)) <= 1e-12


def test_callbacks_are_given_what_the_module_returned_of_the_last_micro_batch(tmp_path):
    seen = []

    class Sees(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((sorted(outputs), int(outputs["num"]) if "num" in outputs else None, float(outputs["loss"])))

    strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, 3), count="num")
    changes = {"rows": 2 * ROWS, "batch": 4, "accumulate_grad_batches": 2, "callbacks": [Sees()]}
    trained(Counted(), strategy, tmp_path, **changes)
    assert [names for names, _, _ in seen] == [["loss"], ["loss", "num"]] * 2
    assert [num for _, num, _ in seen[1::2]] == [2, 2]  # eight rows in micro-batches of three
    assert [loss for _, _, loss in seen[::2]] == [0.0, 0.0]
    assert all(loss > 0 for _, _, loss in seen[1::2])


def test_what_a_module_returned_is_not_held_where_memory_runs_out(tmp_path):
    """Else the graph of the window that did not fit is there beside its parts."""
    saved, alive = [], []

    class Runs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(held := x.clone())
            saved.append(weakref.ref(held))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if len(gradient) > 4:
                raise torch.OutOfMemoryError("out of memory, as a test has it")
            return gradient

    class Returns(Module):
        def training_step(self, batch, batch_idx):
            alive.append(sum(each() is not None for each in saved))
            logits = Runs.apply(self.net(batch[0]))
            return {"loss": nn.functional.cross_entropy(logits, batch[1]), "logits": logits}

    seen = []

    class Sees(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append((len(outputs["logits"]), outputs["logits"].requires_grad))

    with pytest.warns(RuntimeWarning, match="out of memory"):
        trained(Returns(), TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS)), tmp_path, rows=ROWS, callbacks=[Sees()])
    assert alive == [0, 0, 0]
    assert seen == [(4, False)]


def test_it_plans_by_its_first_window_and_logs_nothing_of_that(tmp_path):
    plain, ours = Module(), Module()
    trained(plain, "auto", tmp_path)
    strategy = TrimtabStrategy(planning={"num_blocks": 3})
    trainer = trained(ours, strategy, tmp_path)
    assert strategy.plan.batch_size == ROWS
    assert difference(ours, plain) <= 1e-6  # a plan may change rounding
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(plain.losses[-1], rel=1e-5)
    assert "log" not in vars(ours)


def test_what_an_epoch_that_ends_early_has_left_of_a_window_is_dropped(tmp_path):
    """As the host does, which zeroes it at the next window's first batch."""

    class Skips(Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 5 else None

    plain, ours = Skips(), Skips()
    changes = {"rows": 64, "batch": 4, "accumulate_grad_batches": 4, "max_epochs": 2}
    trained(plain, "auto", tmp_path, **changes)
    trained(ours, TrimtabStrategy(plan=trimtab.Plan.fixed(16, 4)), tmp_path, **changes)
    assert difference(ours, plain) <= 1e-12


def test_a_backward_of_the_modules_own_is_refused(tmp_path):
    class Own(Module):
        def backward(self, loss):
            loss.backward()

    with raises(ValueGivenError, code="trainer.backward_overridden", field="LightningModule.backward"):
        trained(Own(), TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS)), tmp_path)


def test_callbacks_see_the_gradient(tmp_path):
    class Sees(pl.Callback):
        norms = ()

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.norms += (float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])),)

    plain, ours = Sees(), Sees()
    trained(Module(), "auto", tmp_path, callbacks=[plain])
    trained(Module(), TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, 3)), tmp_path, callbacks=[ours])
    assert ours.norms == pytest.approx(plain.norms, rel=1e-9)
    assert len(ours.norms) == STEPS


class Judged(Module):
    """Is validated, and keeps what that found."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        assert not torch.is_grad_enabled()
        self.found.append(float(nn.functional.cross_entropy(self.net(inputs), targets)))
        self.log("val_loss", self.found[-1], batch_size=len(inputs))


def test_the_hosts_checkpoints_go_on_and_it_validates_inside_a_window(tmp_path):
    """After every third batch, of windows of two: weights, schedule and what validation found are the host's.

    Both go on with a pass anew, as the host does with a loader that cannot tell its place.
    """

    def fit(folder, *, ours, **how):
        module = Judged()
        kept = ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1, filename="{step}", every_n_train_steps=7)
        strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, 3)) if ours else "auto"
        changes = {"accumulate_grad_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
        changes |= {"enable_checkpointing": True, "callbacks": [kept], "limit_val_batches": 2}
        loaders = [DataLoader(data(), batch_size=ROWS // 2) for _ in range(2)]
        fitted(module, strategy, folder, loaders, **changes, **how)
        return module

    plain, cut = (fit(tmp_path / name, ours=name == "ours") for name in ("plain", "ours"))
    assert cut.found == pytest.approx(plain.found, rel=1e-9)
    assert len(plain.found) == 2 * 13
    assert difference(cut, plain) <= 1e-12
    goes_on = {name: {"ckpt_path": str(tmp_path / name / "step=14.ckpt")} for name in ("plain", "ours")}
    plain, again = (fit(tmp_path / name, ours=name == "ours", **goes_on[name]) for name in ("plain", "ours"))
    assert again.found == pytest.approx(plain.found, rel=1e-9)
    assert difference(again, plain) <= 1e-12


def test_an_error_closes_the_run(tmp_path):
    class Stops(pl.Callback):
        def on_train_batch_end(self, *given):
            raise RuntimeError("stopped by a callback")

    strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS))
    with pytest.raises(RuntimeError, match="stopped by a callback"):
        trained(Module(), strategy, tmp_path, callbacks=[Stops()])
    assert strategy.run is None


@pytest.mark.parametrize(
    ("make", "changes", "code", "field"),
    [
        (Module, {"precision": "bf16-true"}, "trainer.precision_unsupported", "Trainer.precision"),
        (lambda: Module(optimizers=2), {}, "trainer.manual_optimization", "automatic_optimization"),
    ],
)
def test_what_decides_as_a_plan_does_is_refused(tmp_path, make, changes, code, field):
    module = make()
    module.automatic_optimization = module.num_optimizers == 1
    with raises(ValueGivenError, code=code, field=field):
        trained(module, TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS)), tmp_path, **changes)


@pytest.mark.parametrize("changes", [{"devices": 2}, {"num_nodes": 2}])
def test_several_devices_are_refused(tmp_path, changes):
    with raises(ValueGivenError, code="trainer.several_devices", field="Trainer.devices"):
        trained(Module(), TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS)), tmp_path, **changes)


def by_fabric() -> nn.Module:
    """Return what a loop of one's own trains on what Fabric set up."""
    fabric = Fabric(accelerator="cpu", devices=1)
    module = Module()
    net, optimizer = fabric.setup(module.net, torch.optim.AdamW(module.net.parameters(), lr=1e-2))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    for inputs, targets in fabric.setup_dataloaders(DataLoader(data(), batch_size=ROWS)):
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(net(inputs), targets))
        optimizer.step()
        schedule.step()
    return module


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_fabric_gives_the_device_and_the_loaders(micro):
    fabric = Fabric(accelerator="cpu", devices=1)
    module = Module()
    optimizer = torch.optim.AdamW(module.net.parameters(), lr=1e-2)
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=ROWS))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with start(fabric, module.net, optimizer, trimtab.Plan.fixed(ROWS, micro)) as run:
        for window in run.windows(loader):
            run.train_step(window, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
            schedule.step()
    assert run.applied_steps == STEPS
    assert difference(module, by_fabric()) <= 1e-12
    assert difference(module, by_hand(STEPS * ROWS, ROWS)) <= 1e-12
