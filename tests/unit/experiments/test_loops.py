"""Loops of every kind, compared with their plan: the same batches for all arms, and equal losses."""

from __future__ import annotations

import itertools
import random

import lightning.pytorch as pl
import numpy
import pytest
import torch
from raising import raises
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import trimtab
from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import DataStream, Loop, plain_steps, planned_steps
from trimtab.experiments.step_check import check_step
from trimtab.plans.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]
STEPS = 12


def class_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Augmented(Dataset):
    """Samples with random noise from all three generators."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        noise = random.random() + numpy.random.random() + float(torch.rand(()))
        return torch.full((4,), index / 48 + 0.1 * noise), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(64):
            yield torch.randn(4) + index % 3, index % 3


def ragged(samples):
    """Pad sequences to the longest of the batch."""
    lengths = [length for _, length in samples]
    tokens = torch.zeros(len(samples), max(lengths), dtype=torch.long)
    for row, (start, length) in enumerate(samples):
        tokens[row, :length] = (torch.arange(length) + start) % 16 + 1
    return tokens


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(17, 16), nn.Linear(16, 17)

    def forward(self, tokens):
        return self.head(self.words(tokens).tanh())


def words_loss(model, tokens):
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    counted = targets != 0
    loss_sum = nn.functional.cross_entropy(logits[counted], targets[counted], reduction="sum")
    return trimtab.Summed(loss_sum, counted.sum())


def make_model():
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def with_workers(seed):
    model = make_model()
    return Loop(model, adamw(model), class_loss, DataLoader(Augmented(), 8, shuffle=True, num_workers=2))


def with_lengths(seed):
    model = Words()
    samples = [(index, 3 + index % 7) for index in range(64)]
    loader = DataLoader(samples, 8, shuffle=True, collate_fn=ragged)
    return Loop(model, adamw(model), words_loss, loader, longest_batch=ragged([(0, 9)] * 8))


def with_stream(seed):
    model = make_model()
    return Loop(
        model, adamw(model), class_loss, DataLoader(Stream(), 8), evaluate=lambda model: {"bias": model[0].bias[0]}
    )


def with_own_step(seed):
    """Accumulation over two batches, a gradient scaler, clipping and a scheduler, as a user writes them."""
    model = make_model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    scaler, calls = torch.amp.GradScaler("cpu", enabled=False), itertools.count(1)

    def step(model, optimizer, batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = class_loss(model, batch)
        scaler.scale(loss / 2).backward()
        if next(calls) % 2 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        return loss

    return Loop(
        model,
        optimizer,
        class_loss,
        DataLoader(Augmented(), 8, shuffle=True),
        step=step,
        after_step=scheduler.step,
        accumulate=2,
        reference=trimtab.Reference("bf16", clip_norm=1.0),
    )


def with_transformers(seed, **changes):
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=17, n_positions=12, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0
    )
    tokens = torch.randint(0, 17, (64, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    given = {"per_device_train_batch_size": 8, "report_to": "none", "use_cpu": True, "learning_rate": 1e-2, **changes}
    args = TrainingArguments("runs/unused", max_steps=STEPS, disable_tqdm=True, **given)
    return Trainer(GPT2LMHeadModel(config), args, train_dataset=rows)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = make_model()

    def training_step(self, batch, batch_idx):
        return class_loss(self.net, batch)

    def configure_optimizers(self):
        found = adamw(self)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(found, 0.9)
        return {"optimizer": found, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def with_lightning(seed, **changes):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", **quiet, **changes)
    return trainer, Module(), DataLoader(Augmented(), 8, shuffle=True)


def with_accumulation(seed):
    """A Trainer that counts labels over two batches, also a first label without prediction, and checkpoints."""
    given = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "gradient_checkpointing": True}
    trainer = with_transformers(seed, **given)
    for module in trainer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for index, row in enumerate(trainer.train_dataset):
        row["labels"] = row["labels"].masked_fill(torch.arange(12) > 3 + index % 8, -100)
    return trainer


class ModuleOfKnownLength(Module):
    def configure_optimizers(self):
        found = adamw(self)
        steps = int(self.trainer.estimated_stepping_batches)
        return [found], [torch.optim.lr_scheduler.OneCycleLR(found, 1e-2, total_steps=steps)]


def with_known_length(seed):
    trainer, _, loader = with_lightning(seed, max_epochs=50)
    return trainer, ModuleOfKnownLength(), loader


KINDS = (
    with_workers,
    with_lengths,
    with_stream,
    with_own_step,
    with_transformers,
    with_accumulation,
    with_lightning,
    with_known_length,
)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # the older name is tested
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # Lightning's, of torch
@pytest.mark.parametrize("setup", KINDS)
def test_a_loop_of_each_kind_is_planned_and_compared_with_equal_losses(setup):
    found = trimtab.compare(setup, steps=STEPS, pairs=1, num_blocks=3)
    assert not found.failures
    assert found.arms == ("baseline", "plan")
    assert found.speed().mean > 0
    assert found.memory() > 0
    # Dropout draws other masks where the plan splits or accumulates, so that losses differ by more than rounding.
    limit = 5.0 if setup in (with_workers, with_stream, with_own_step, with_lightning, with_known_length) else 0.5
    assert abs(found.loss_difference().mean) < limit
    assert found.table.select("loss", "baseline")
    assert found.verdict() == "no verdict"


def test_a_trainer_that_accumulates_steps_as_its_own_train_does():
    def accumulating(seed):
        trainer = with_transformers(seed, gradient_accumulation_steps=3, per_device_train_batch_size=4)
        trainer.args.max_steps = 2
        for module in trainer.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for index, row in enumerate(trainer.train_dataset):  # Different numbers of tokens; none at the start.
            row["labels"] = row["labels"].masked_fill(torch.arange(12) <= index % 10, -100)
        return trainer

    trainer = accumulating(0)
    loop_setup.seed_everything(0)
    loop = loop_setup.build(accumulating, 0)
    assert loop.accumulate == 3
    trainer.model.load_state_dict(loop.model.state_dict())
    batches = list(itertools.islice(trainer.get_train_dataloader(), 6))
    trainer.get_train_dataloader = lambda: batches
    steps = plain_steps(loop, iter(batches))
    losses = [float(next(steps).loss), float(next(steps).loss)]
    found = trainer.train()
    assert found.training_loss == pytest.approx(sum(losses) / 2, rel=1e-5)
    for one, other in zip(loop.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    check_step(accumulating, loop.reference)


def test_a_trainer_with_work_outside_its_step_is_refused():
    with raises(ValueGivenError, code="setup.trainer_arguments"):
        loop_setup.build(lambda seed: with_transformers(seed, neftune_noise_alpha=5.0), 0)
    with raises(ValueGivenError, code="setup.trainer_arguments"):
        loop_setup.build(lambda seed: with_lightning(seed, gradient_clip_val=1.0, gradient_clip_algorithm="value"), 0)


def test_optimizers_that_cannot_be_configured_outside_of_fit_are_refused():
    class Failing(Module):
        def configure_optimizers(self):
            raise KeyError("rate")

    def setup(seed):
        trainer, _, loader = with_lightning(seed)
        return trainer, Failing(), loader

    with raises(ValueGivenError, code="setup.configure_optimizers"):
        loop_setup.build(setup, 0)


def test_a_trainers_step_has_the_trainers_precision():
    loop = loop_setup.build(lambda seed: with_transformers(seed, bf16=True), 0)
    seen = []
    loop.model.transformer.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    next(plain_steps(loop, DataStream(loop.loader, 0)))
    assert loop.reference.precision == "bf16"
    assert seen == [True]


def test_frozen_normalisation_stays_frozen():
    def setup(seed):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        model[1].eval()
        return Loop(model, adamw(model), class_loss, [])

    assert not loop_setup.build(setup, 0).model[1].training


def test_the_precision_of_an_own_step_is_observed():
    def setup(seed):
        model = make_model()

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = class_loss(model, batch)
            loss.backward()
            optimizer.step()

        return Loop(model, adamw(model), class_loss, DataLoader(Augmented(), 8), step=step)

    assert loop_setup.observed_reference(setup, 0) == trimtab.Reference("bf16", declared=False)
    assert not loop_setup.observed_reference(with_stream, 0).declared


@pytest.mark.parametrize("workers", [0, 2])
def test_two_streams_of_a_seed_yield_the_same_batches_whatever_is_drawn_between(workers):
    loader = DataLoader(Augmented(), 8, shuffle=True, num_workers=workers)
    ours, theirs = DataStream(loader, 5), DataStream(loader, 5)
    for index in range(9):  # One and a half epochs.
        first = next(ours)
        torch.rand(index + 1)
        random.random()
        assert all(map(torch.equal, first, next(theirs)))
    assert ours.num_epochs == 1
    assert not torch.equal(next(DataStream(loader, 6))[0], next(DataStream(loader, 5))[0])


def test_a_stream_leaves_the_generators_of_the_process_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    next(DataStream(DataLoader(Augmented(), 8, shuffle=True), 5))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_plain_step_and_a_planned_one_move_the_weights_alike(accumulate):
    """Of samples with unequal numbers of terms too: the plan weighs batches by their terms."""
    ends = []
    for steps in (plain_steps, lambda loop, batches: planned_steps(loop, batches, Plan.fixed(8, 4))):
        torch.manual_seed(0)
        loop = with_lengths(0)
        loop = Loop(loop.model.double(), loop.optimizer, loop.loss_fn, loop.loader, accumulate=accumulate)
        running = steps(loop, DataStream(loop.loader, 0))
        samples = [next(running).samples for _ in range(4)]
        running.close()
        assert samples == [8 * accumulate] * 4
        ends.append(torch.cat([each.detach().flatten() for each in loop.model.parameters()]))
    assert torch.allclose(*ends, rtol=1e-9, atol=1e-12)


REFUSED = {
    "model": (lambda: Loop(1, None, class_loss, []), "value.invalid"),
    "iterator": (lambda: Loop(m := make_model(), adamw(m), class_loss, iter([])), "loop.loader"),
    "loss": (lambda: Loop(m := make_model(), adamw(m), None, []), "value.invalid"),
    "setup": (lambda: loop_setup.build(3, 0), "setup.not_callable"),
    "other": (lambda: loop_setup.build(lambda seed: "loop", 0), "setup.not_loop"),
}


@pytest.mark.parametrize(("make", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_loop_is_refused(make, code):
    with raises(ValueGivenError, code=code):
        make()


def test_an_error_of_setup_and_an_empty_loader_are_named():
    def failing(seed):
        raise KeyError("x")

    with raises(LoopError, code="setup.failed"):
        loop_setup.build(failing, 0)
    with raises(LoopError, code="loader.empty"):
        next(DataStream([], 0))
