"""One rank of a job of a host's, trained by the host and through us; run by test_host_ranks.py.

    python host_rank.py RANK RANKS FOLDER HOST

Writes, of each way to train, the weights that it ends with and what was reported, to FOLDER/HOST-RANK.pt. Rank 0 also
those of one process with what all ranks have, by the plain loop or the host itself, to FOLDER/HOST-alone.pt.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import brief
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.core.serialization import to_json
from trimtab.losses import Summed

brief.shorten()
STEPS, ROWS, LENGTH, WORDS = 20, 8, 12, 17  # ROWS: of a step, on all ranks
NOTHING = -100
# Rows that end in a window of one batch on each rank, and in one of a batch on the first rank alone.
UNEVEN = (19 * ROWS, 18 * ROWS + ROWS // 2)


def launched(rank: int, ranks: int, folder: str) -> None:
    """Be what torchrun starts, in a group that meets in a folder."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    own |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "a-test"}
    os.environ.update({name: str(value) for name, value in own.items()})
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)


# A loop of one's own, on an Accelerator or Fabric.


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def points(rows: int = STEPS * ROWS) -> TensorDataset:
    """Return rows of which few count where the first of two ranks has them, and most where the second does."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * ROWS, 6, generator=generator).double()
    targets = torch.randint(0, 3, (STEPS * ROWS,), generator=generator)
    is_first = torch.arange(STEPS * ROWS) % ROWS < ROWS // 2
    targets[is_first & (torch.rand(STEPS * ROWS, generator=generator) < 0.7)] = NOTHING
    return TensorDataset(inputs[:rows], targets[:rows])


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Summed:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=NOTHING, reduction="sum")
    return Summed(loss, (batch[1] != NOTHING).sum())


def weights(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def plain(rows: int = STEPS * ROWS, window: int = ROWS) -> list[Tensor]:
    model, optimizer = parts()
    for batch in DataLoader(points(rows), window):
        optimizer.zero_grad()
        found = loss_fn(model, batch)
        (found.loss_sum / found.count).backward()
        optimizer.step()
    return weights(model)


def accelerated(stage: int | None, *, planned: bool = False, rows: int = STEPS * ROWS, batches: int = 1) -> dict:
    """Return what windows of so many batches train, the last of which may be fewer; no rank is given rows twice."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from trimtab.integrations import accelerate as ours

    once = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=batches, dataloader_config=once)
    ranks = accelerator.num_processes
    model, optimizer = parts()
    loader = accelerator.prepare(DataLoader(points(rows), ROWS // ranks))
    inner = model
    if stage is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    if planned:
        plan = ours.plan(accelerator, model, optimizer, loss_fn, next(iter(loader)), num_blocks=3, dry_runs=False)
    else:
        own = {} if stage is None else {"num_ranks": ranks, "zero_stage": stage}
        plan = trimtab.Plan.fixed(ROWS // ranks, 3, **own)
    with ours.start(accelerator, model, optimizer, plan) as run:
        for window in run.windows(loader):
            run.train_step(window, loss_fn)
    return {"weights": weights(inner), "plan": to_json(plan), "steps": run.applied_steps, "rows": run.consumed_samples}


def refused(call) -> str:
    """Return the code of the error that a call raises, or ""."""
    try:
        call()
    except ValueGivenError as error:
        return error.code
    return ""


def refusals() -> dict[str, str]:
    from accelerate import Accelerator

    from trimtab.integrations import accelerate as ours

    accelerator = Accelerator(cpu=True)
    model, optimizer = parts()
    wrapped = accelerator.prepare_model(parts()[0])
    batch, alone = next(iter(DataLoader(points(), 4))), trimtab.Plan.fixed(4)
    shared = trimtab.Plan.fixed(4, num_ranks=2, zero_stage=0)
    return {
        "unshared": refused(lambda: ours.start(accelerator, model, optimizer, alone)),
        "wrapped": refused(lambda: ours.start(accelerator, wrapped, optimizer, shared)),
        "planned": refused(lambda: ours.plan(accelerator, wrapped, optimizer, loss_fn, batch)),
    }


def by_fabric() -> dict:
    from lightning.fabric import Fabric

    from trimtab.integrations.lightning import start

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = parts()
    own = trimtab.shard(DataLoader(points(), ROWS))  # Fabric's sampler deals rows out in turn: other batches
    plan = trimtab.Plan.fixed(ROWS // 2, 3, num_ranks=2, zero_stage=0)
    with start(fabric, model, optimizer, plan) as run:
        for window in run.windows(own):
            run.train_step(window, loss_fn)
    unshared = refused(lambda: start(fabric, *parts(), trimtab.Plan.fixed(4)))
    return {"weights": weights(model), "unshared": unshared}


# Hugging Face's Trainer.


class Rows(Dataset):
    """Rows that count few tokens or many, or in part none at all."""

    def __init__(self, *, has_none: bool = False) -> None:
        self._has_none = has_none

    def __len__(self) -> int:
        return 8 * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[2 + (5 * index) % (LENGTH - 2) :] = NOTHING
        if self._has_none and index % 2:
            labels[:] = NOTHING
        return {"input_ids": tokens, "labels": labels}


def in_double(outputs, labels, num_items_in_batch=None):
    """Return the loss that the host's models have, which they compute in fp32 whatever the weights are."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, ignore_index=NOTHING, reduction="sum") / num_items_in_batch


def runs_out_on(model: nn.Module, *, is_here: bool) -> nn.Module:
    """Have memory run out in micro-batches of more than one row, where it is here."""

    class RunsOut(type(model)):
        def forward(self, input_ids=None, **kwargs):
            if is_here and self.training and len(input_ids) > 1:
                raise torch.OutOfMemoryError("out of memory, as a test has it")
            return super().forward(input_ids=input_ids, **kwargs)

    model.__class__ = RunsOut
    return model


class Waits(TorchDispatchMode):
    """Counts what ranks send each other by torch in each of a Trainer's windows, and reads, but for the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._is_in_model = False
        model.register_forward_pre_hook(lambda *_: self._enters(True))
        model.register_forward_hook(lambda *_: self._enters(False))
        self.counted: Counter[str] = Counter()
        self.windows: list[Counter[str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith("c10d.") or ("_local_scalar_dense" in name and not self._is_in_model):
            self.counted[name.split(".")[1]] += 1
        return func(*args, **(kwargs or {}))

    def seen(self):
        """Return a callback that ends a window."""
        from transformers import TrainerCallback

        return type("Seen", (TrainerCallback,), {"on_step_end": lambda *_, **__: self._ends()})()

    def _enters(self, is_in_model: bool) -> None:
        self._is_in_model = is_in_model

    def _ends(self) -> None:
        self.windows.append(self.counted)
        self.counted = Counter()

    def least(self) -> dict[str, int]:
        """Return what every window has: those that begin a training, or follow what is logged, have more."""
        return {name: min(window[name] for window in self.windows) for name in set().union(*self.windows)}


def trained(
    folder: Path, *, ours: bool, k: int = 1, rows=None, runs_out=False, evaluates=False, counts=False, half=False, **own
) -> dict:
    """Return what a Trainer, or ours, ends with."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from trimtab.integrations.transformers import TrimtabTrainer

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": WORDS, "n_positions": LENGTH}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **still))
    model = model if half else model.double()
    if runs_out:
        model = runs_out_on(model, is_here=dist.get_rank() == 1)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    given = {"max_steps": STEPS, "report_to": "none", "use_cpu": True, "save_strategy": "no", "seed": 3}
    given |= {"logging_steps": 5, "lr_scheduler_type": "cosine", "learning_rate": 1e-2, "disable_tqdm": True}
    given |= {"per_device_train_batch_size": ROWS // ranks // k, "gradient_accumulation_steps": k}
    given |= {"eval_strategy": "steps", "eval_steps": 10, "prediction_loss_only": True} if evaluates else {}
    given |= {"bf16": True, "optim": "sgd", "learning_rate": 0.1} if half else {}
    arguments = TrainingArguments(str(folder / "trainer"), remove_unused_columns=False, **given)
    data = {
        "train_dataset": rows or Rows(),
        "eval_dataset": Rows() if evaluates else None,
        "compute_loss_func": in_double,
    }
    waits = Waits(model)
    kind = TrimtabTrainer if ours else Trainer
    trainer = kind(model=model, args=arguments, callbacks=[waits.seen()], **data, **own)
    with waits if counts else contextlib.nullcontext():
        trainer.train()
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    said = {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}
    found = {"weights": weights(model), "said": said, "waits": waits.least() if counts else None}
    return found | ({"plan": to_json(trainer.plan)} if ours else {})


def by_trainers(folder: Path, ranks: int) -> dict:
    shared = {"num_ranks": ranks, "zero_stage": 0}
    found = {"host": trained(folder, ours=False, evaluates=True)}
    found["ours"] = trained(folder, ours=True, evaluates=True, plan=trimtab.Plan.fixed(4, 3, **shared))
    found["accumulated"] = trained(folder, ours=True, k=2, plan=trimtab.Plan.fixed(4, 3, **shared))
    found["planned"] = trained(folder, ours=True, planning={"num_blocks": 3, "dry_runs": False})
    found["ran out"] = trained(folder, ours=True, runs_out=True, plan=trimtab.Plan.fixed(4, **shared))
    none = Rows(has_none=True)
    found["host, none"] = trained(folder, ours=False, rows=none)
    found["none"] = trained(folder, ours=True, rows=none, plan=trimtab.Plan.fixed(4, **shared))
    found["host, counted"] = trained(folder, ours=False, counts=True)
    for micro in (1, 4):
        found[f"counted {micro}"] = trained(folder, ours=True, counts=True, plan=trimtab.Plan.fixed(4, micro, **shared))
    found["host, half"] = trained(folder, ours=False, half=True, evaluates=True)
    found["half"] = trained(folder, ours=True, half=True, evaluates=True, plan=trimtab.Plan.fixed(4, **shared))
    found["unshared"] = refused(lambda: trained(folder, ours=True, plan=trimtab.Plan.fixed(4)))
    return found


def alone(folder: str, host: str) -> dict:
    if host == "transformers":
        return {"whole": trained(Path(folder), ours=False)}
    return {"plain": plain()} | {f"accumulated {rows}": plain(rows, 2 * ROWS) for rows in UNEVEN}


def main(rank: int, ranks: int, folder: str, host: str) -> None:
    """Train all ways of a host."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if rank == 0:  # before it is launched, which the host would see for the rest of the process
        torch.save(alone(folder, host), f"{folder}/{host}-alone.pt")
    launched(rank, ranks, folder)
    if host == "transformers":
        found = by_trainers(Path(folder), ranks)
    else:
        found = {f"stage {stage}": accelerated(stage) for stage in (None, 0, 1, 3)}
        found |= {"planned": accelerated(0, planned=True), "refused": refusals(), "fabric": by_fabric()}
        for rows, stage in itertools.product(UNEVEN, (None, 0)):
            found[f"accumulated {rows}, stage {stage}"] = accelerated(stage, rows=rows, batches=2)
    torch.save(found, f"{folder}/{host}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
