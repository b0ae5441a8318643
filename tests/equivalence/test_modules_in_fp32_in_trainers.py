"""Modules in fp32 of a plan stay in fp32 in every trainer, whatever precision the trainer is configured with."""

from __future__ import annotations

import accelerate
import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

import trimtab
from trimtab.integrations.accelerate import start
from trimtab.integrations.lightning import TrimtabStrategy
from trimtab.integrations.transformers import TrimtabTrainer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of Lightning
ROWS = 8
DATA = torch.randn(4 * ROWS, 6, generator=torch.Generator().manual_seed(1)), torch.arange(4 * ROWS) % 3


class Watching(nn.Linear):
    """Records the precision of its forwards."""

    def forward(self, x):
        self.__dict__.setdefault("seen", set()).add((x.dtype, torch.is_autocast_enabled("cpu")))
        return super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.whole, self.head = Watching(6, 16), Watching(16, 16), nn.Linear(16, 3)

    def forward(self, inputs, labels=None):
        logits = self.head(torch.tanh(self.whole(self.first(inputs))))
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return logits if loss is None else {"loss": loss, "logits": logits}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def plan(names):
    return trimtab.Plan.fixed(ROWS, ROWS // 2, precision="bf16", fp32_modules=names)


def by_accelerate(folder, half):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    accelerator, model = Accelerator(cpu=True, mixed_precision="bf16" if half else "no"), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(*DATA), ROWS))
    with start(accelerator, model, optimizer, plan("whole")) as run:
        for window in run.windows(loader):
            run.train_step(window, lambda model, batch: model(*batch)["loss"])
    return accelerator.unwrap_model(model)


def by_transformers(folder, half):
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=ROWS,
        max_steps=2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        bf16=half,
    )
    rows = [{"inputs": x, "labels": y} for x, y in zip(*DATA, strict=True)]
    trainer = TrimtabTrainer(model=Net(), args=arguments, train_dataset=rows, plan=plan("whole"))
    trainer.train()
    return trainer.model


def by_lightning(folder, half):
    module = Module()
    trainer = pl.Trainer(
        strategy=TrimtabStrategy(plan=plan("net.whole")),
        precision="bf16-mixed" if half else "32-true",
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(TensorDataset(*DATA), ROWS))
    return module.net


@pytest.mark.parametrize("half", [False, True], ids=["trainer in fp32", "trainer in bf16"])
@pytest.mark.parametrize("train", [by_accelerate, by_transformers, by_lightning])
def test_named_modules_run_in_fp32_and_the_others_in_the_plans_precision(train, half, tmp_path):
    model = train(tmp_path, half)
    assert model.whole.seen == {(torch.float32, False)}
    assert model.first.seen == {(torch.float32, True)}
    assert type(model.whole) is Watching
