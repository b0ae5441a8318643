"""Hosts whose batches are each padded to its own longest row: windows of several train as a plain loop does on all."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_lightning import Module, difference, fitted
from test_transformers import EXACT, ROWS, STEPS, WORDS, arguments, in_double, model
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer

import trimtab
from trimtab.integrations.lightning import TrimtabStrategy
from trimtab.integrations.transformers import TrimtabTrainer

K = 2
pytestmark = [
    pytest.mark.usefixtures("brief_trials"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def rows() -> list[dict[str, Tensor]]:
    """Return rows of which each batch's longest is another's than the next one's, but for every fifth window."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(STEPS * ROWS):
        batch = index // (ROWS // K)
        longest = 6 if batch // K % 5 == 4 else 5 + batch % 7
        tokens = torch.randint(0, WORDS, (longest - index % 3,), generator=generator)
        labels = tokens.clone()
        labels[0] = -100  # which nothing predicts, and some versions of the host count
        found.append({"input_ids": tokens, "labels": labels})
    return found


def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as a batch of its longest; what is behind a row's end is seen by nothing, and does not count."""
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in batch], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


def test_the_windows_are_of_unlike_batches():
    data = rows()
    lengths = [padded(data[i : i + ROWS // K])["labels"].shape[1] for i in range(0, len(data), ROWS // K)]
    apart = [one != other for one, other in zip(lengths[::K], lengths[1::K], strict=True)]
    assert set(apart) == {True, False}
    assert sum(apart) > len(apart) // 2


class InOrder:
    """A trainer that takes rows as they come, so that a loop by hand can too."""

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def by_hand(data: list[dict[str, Tensor]]) -> nn.Module:
    """Return what a plain loop trains, a step on all rows of a window as one batch."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0.0)
    for start in range(0, len(data), ROWS):
        batch = padded(data[start : start + ROWS])
        outputs = trained(input_ids=batch["input_ids"])
        optimizer.zero_grad()
        in_double(outputs, batch["labels"], (batch["labels"][:, 1:] != -100).sum()).backward()
        optimizer.step()
    return trained


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_the_trainers_windows_are_a_plain_loops(tmp_path, micro):
    held, base = model(), type("Ours", (InOrder, TrimtabTrainer), {})
    changes = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0}
    given = arguments(tmp_path, per_device_train_batch_size=ROWS // K, gradient_accumulation_steps=K, **changes)
    how = {"train_dataset": rows(), "data_collator": padded, "compute_loss_func": in_double}
    base(model=held, args=given, plan=trimtab.Plan.fixed(ROWS, micro), **how).train()
    assert difference(held, by_hand(rows())) <= EXACT


@pytest.mark.parametrize("nothing", ["of some batches", "of a window"])
def test_a_batch_none_of_whose_labels_count_adds_nothing(tmp_path, nothing):
    """Of one row, as is each of a window whose rows stay apart: what is divided by there is nothing."""
    data = rows()[: 3 * ROWS]
    for row in data[1::3] if nothing == "of some batches" else data[ROWS : 2 * ROWS]:
        row["labels"] = torch.full_like(row["labels"], -100)
    held, base = model(), type("Ours", (InOrder, TrimtabTrainer), {})
    changes = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0, "max_steps": 3}
    given = arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=ROWS, **changes)
    how = {"train_dataset": data, "data_collator": padded, "compute_loss_func": in_double}
    base(model=held, args=given, plan=trimtab.Plan.fixed(ROWS), **how).train()
    assert all(bool(torch.isfinite(p).all()) for p in held.parameters())
    if nothing == "of some batches":
        assert difference(held, by_hand(data)) <= EXACT


def test_the_trainers_own_windows_are_a_plain_loops_too(tmp_path):
    held, base = model(), type("Plain", (InOrder, Trainer), {})
    changes = {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0}
    given = arguments(tmp_path, per_device_train_batch_size=ROWS // K, gradient_accumulation_steps=K, **changes)
    how = {"train_dataset": rows(), "data_collator": padded, "compute_loss_func": in_double}
    base(model=held, args=given, **how).train()
    assert difference(held, by_hand(rows())) <= EXACT


class Tokens(Module):
    """Tells each token's successor; its loss is a mean over those that count, which it says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WORDS)).double()

    def said(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, targets = self.net(batch["input_ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        count = (targets != -100).sum()
        return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count, count

    def training_step(self, batch, batch_idx):
        self.seen.append(tuple(batch["labels"].shape))
        loss, count = self.said(batch)
        return {"loss": loss, "num": count}


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_lightnings_windows_are_a_plain_loops(tmp_path, micro):
    plain, ours, data = Tokens(), Tokens(), rows()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for start in range(0, len(data), ROWS):
        optimizer.zero_grad()
        plain.said(padded(data[start : start + ROWS]))[0].backward()
        optimizer.step()
        schedule.step()
    strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, micro), count="num")
    loader = DataLoader(data, batch_size=ROWS // K, collate_fn=padded)
    fitted(ours, strategy, tmp_path, loader, accumulate_grad_batches=K)
    assert difference(ours, plain) <= 1e-12
    assert max(rows for rows, _ in ours.seen) == micro  # of a window of one shape, which is cut as one batch
    assert min(micro, ROWS // K) in {rows for rows, _ in ours.seen}


@pytest.mark.parametrize("first", [0, 4 * ROWS])
def test_a_plan_is_made_of_the_longest_batch_that_it_is_given(tmp_path, first):
    """Of as many rows as the loader's, be the first window's batches of unlike lengths or of one."""
    data = rows()
    longest = padded([max(data, key=lambda row: len(row["labels"]))] * (ROWS // K))
    strategy = TrimtabStrategy(planning={"num_blocks": 3, "longest_batch": longest}, count="num")
    seen, planned = [], []

    class Noting(Tokens):
        def said(self, batch):
            (seen if strategy.run else planned).append(tuple(batch["labels"].shape))
            return super().said(batch)

    loader = DataLoader(data[first:] + data[:first], ROWS // K, collate_fn=padded)
    fitted(Noting(), strategy, tmp_path, loader, accumulate_grad_batches=K)
    assert strategy.plan.batch_size == ROWS // K
    lengths = [length for _, length in planned]
    runs = [length for length, _ in itertools.groupby(lengths)]
    own = longest["labels"].shape[1]
    assert runs == [own, *({*lengths} - {own}), own][: len(runs)]  # but for one proof, of an example, all is of it
    assert max(rows for rows, _ in seen) == ROWS // K
