"""What a plan changes, in each host's loop: the weights of a plain loop that does the same by hand."""

from __future__ import annotations

import contextlib

import pytest
import test_accelerate
import test_lightning
import test_transformers
import torch
from accelerate import Accelerator
from call_counts import OutOfReach
from test_hosts_of_unlike_lengths import InOrder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

import trimtab
from trimtab.integrations.accelerate import start
from trimtab.integrations.lightning import TrimtabStrategy
from trimtab.integrations.transformers import TrimtabTrainer

STEPS, ROWS, MICRO, WIDTH, LENGTH, WORDS = 20, 8, 3, 16, 12, 17
# The settings, the type of weights, and how far apart of a tensor's largest: of bf16 the loops round alike.
PLANS = {
    "as it is": ({}, torch.float64, 1e-12),
    "bf16": ({"precision": "bf16"}, torch.float32, 1e-6),
    "recomputed": ({"recompute": "every_block"}, torch.float64, 1e-12),
    "both": ({"precision": "bf16", "recompute": "every_block"}, torch.float32, 1e-6),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Counter:
    """Counts where no reference leads: recomputation restores a number that it reaches."""

    def __init__(self) -> None:
        self._calls = OutOfReach(number=0)

    def add(self) -> None:
        self._calls.held.number += 1

    @property
    def calls(self) -> int:
        return self._calls.held.number

    def __deepcopy__(self, memo) -> Counter:
        return Counter()


class Block(nn.Module):
    """A block that counts its forwards: one that recomputes has two for each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()
        self.norm, self.wide, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.counter.add()
        return x + self.back(torch.tanh(self.wide(self.norm(x))))


def net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3)).to(dtype)


def points(dtype: torch.dtype) -> TensorDataset:
    inputs, targets = test_lightning.data(STEPS * ROWS).tensors
    return TensorDataset(inputs.to(dtype), targets)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def computed(name: str) -> contextlib.AbstractContextManager:
    is_half = "precision" in PLANS[name][0]
    return torch.autocast("cpu", torch.bfloat16) if is_half else contextlib.nullcontext()


def by_hand(name: str, optimizer: torch.optim.Optimizer, tensors, loss_of, schedule=None) -> None:
    """Train by the plan's split, in its precision: what is recomputed changes no number, and is not."""
    for batch in zip(*(part.split(ROWS) for part in tensors), strict=True):
        optimizer.zero_grad()
        for micro in zip(*(part.split(MICRO) for part in batch), strict=True):
            with computed(name):
                loss = loss_of(micro)
            (loss * (len(micro[0]) / ROWS)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def plan_of(name: str) -> trimtab.Plan:
    return trimtab.Plan.fixed(ROWS, MICRO, **PLANS[name][0])


def compare(name: str, ours: nn.Module, plain: nn.Module, blocks: str, near: float | None = None) -> None:
    """Raise unless weights agree, and blocks ran as often as the plan has it."""
    assert test_lightning.difference(ours, plain) <= (near or PLANS[name][2])
    own, other = (
        next(m for m in model.modules() if type(m).__name__ == blocks).counter.calls for model in (ours, plain)
    )
    assert own == (2 if "recompute" in PLANS[name][0] else 1) * other > 0


@pytest.mark.parametrize("name", PLANS)
def test_an_accelerators_windows_are_the_plain_loops(name):
    test_accelerate.reset()
    _, dtype, _ = PLANS[name]
    plain, ours = net(dtype), net(dtype)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    by_hand(name, optimizer, points(dtype).tensors, lambda micro: loss_fn(plain, micro))
    accelerator = Accelerator(cpu=True)
    own = (ours, torch.optim.AdamW(ours.parameters(), lr=1e-2), DataLoader(points(dtype), ROWS))
    model, optimizer, loader = accelerator.prepare(*own)
    with start(accelerator, model, optimizer, plan_of(name)) as run:
        for window in run.windows(loader):
            run.train_step(window, loss_fn)
    compare(name, ours, plain, "Block")


class Module(test_lightning.Module):
    """Of blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = net(dtype)


@pytest.mark.parametrize("name", PLANS)
def test_lightnings_windows_are_the_plain_loops(tmp_path, name):
    _, dtype, _ = PLANS[name]
    plain, ours = Module(dtype), Module(dtype)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    by_hand(name, optimizer, points(dtype).tensors, lambda micro: loss_fn(plain.net, micro), schedule)
    strategy, loader = TrimtabStrategy(plan=plan_of(name)), DataLoader(points(dtype), ROWS // 2)
    test_lightning.fitted(ours, strategy, tmp_path, loader, accumulate_grad_batches=2)
    compare(name, ours, plain, "Block")


# Which take rows as they come, so that a loop by hand can too.
OURS, PLAIN = (type("InOrder", (InOrder, kind), {}) for kind in (TrimtabTrainer, Trainer))


def counting(model: nn.Module) -> nn.Module:
    """Have a host's own blocks count their forwards."""
    kind = type(model.transformer.h[0])

    def forward(self, *args, **kwargs):
        self.counter.add()
        return kind.forward(self, *args, **kwargs)

    for block in model.transformer.h:
        block.counter = Counter()
        block.__class__ = type("Counting", (kind,), {"forward": forward})
    return model


def counted_rows() -> list[dict[str, Tensor]]:
    """Return rows each of which counts eight tokens: what is divided by is a power of two, so that bf16 rounds alike.

    The first, which nothing predicts, some versions of the host count.
    """
    found = test_transformers.rows(STEPS * ROWS, ragged=False)
    for row in found:
        row["labels"][: LENGTH - 8] = -100
    return found


def stepped(name: str) -> dict[str, object]:
    """Return what steps the Trainer's model.

    In bf16 a bias of keys, whose gradient is nothing but rounding, is one step of AdamW up or down: no loop is
    another's.
    """
    return {"optim": "sgd", "learning_rate": 0.1} if "precision" in PLANS[name][0] else {"learning_rate": 1e-2}


def given_to(folder, name: str, **changes):
    changes = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "warmup_steps": 0, **stepped(name), **changes}
    return test_transformers.arguments(folder, **changes)


@pytest.mark.parametrize("name", PLANS)
def test_the_trainers_windows_are_the_plain_loops(tmp_path, name):
    _, dtype, _ = PLANS[name]
    plain, ours = (counting(test_transformers.model().to(dtype)) for _ in range(2))
    data, how = counted_rows(), stepped(name)
    tokens, labels = (torch.stack([row[name] for row in data]) for name in ("input_ids", "labels"))
    kind = torch.optim.SGD if "optim" in how else torch.optim.AdamW
    optimizer = kind(plain.parameters(), lr=how["learning_rate"], weight_decay=0.0)

    def loss_of(micro):
        num = (micro[1] != -100).sum()
        return test_transformers.in_double(plain(input_ids=micro[0]), micro[1], num)

    by_hand(name, optimizer, [tokens, labels], loss_of)
    given = given_to(tmp_path, name, gradient_accumulation_steps=2, per_device_train_batch_size=ROWS // 2)
    own = {"train_dataset": data, "compute_loss_func": test_transformers.in_double, "plan": plan_of(name)}
    OURS(model=ours, args=given, **own).train()
    compare(name, ours, plain, "Counting", test_transformers.EXACT if dtype is torch.float64 else None)


def test_the_trainers_bf16_is_the_hosts_own(tmp_path):
    """Of a batch that is not split; the host's is said by an argument, which ours refuses."""
    plain, ours = (test_transformers.model().float() for _ in range(2))
    own = {"train_dataset": counted_rows(), "compute_loss_func": test_transformers.in_double}
    plan = trimtab.Plan.fixed(ROWS, precision="bf16")
    OURS(model=ours, args=given_to(tmp_path, "bf16"), plan=plan, **own).train()
    test_accelerate.reset()
    try:
        PLAIN(model=plain, args=given_to(tmp_path, "bf16", bf16=True), **own).train()
    finally:
        test_accelerate.reset()
    assert test_lightning.difference(ours, plain) <= PLANS["bf16"][2]
    exact = test_transformers.model().float()
    OURS(model=exact, args=given_to(tmp_path, "bf16"), plan=trimtab.Plan.fixed(ROWS), **own).train()
    assert test_lightning.difference(exact, plain) > 100 * PLANS["bf16"][2]
