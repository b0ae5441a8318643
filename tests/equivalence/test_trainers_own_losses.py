"""Losses that Hugging Face's Trainer has by itself: its model's own, of smoothed labels, and with noise in embeddings.

And one of a model that has our loss head. Weights after twenty steps of SGD are the host's where the host is right,
and a plain loop's.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from raising import raises
from test_hosts_of_unlike_lengths import InOrder
from test_transformers import EXACT, ROWS, STEPS, WORDS, arguments, difference, in_double, model
from test_transformers import rows as of_unlike_counts
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, Trainer
from transformers.trainer_pt_utils import LabelSmoother

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.integrations.transformers import TrimtabTrainer
from trimtab.nn import LossHead

pytestmark = pytest.mark.slow

SMOOTHED = 0.1
# Whether the host divides a smoothed loss by the window's count: before that it was by the batch's, whatever k is.
DIVIDES_BY_WINDOW = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
PLAIN, OURS = type("Plain", (InOrder, Trainer), {}), type("Ours", (InOrder, TrimtabTrainer), {})
# AdamW makes a whole step of what is nothing but rounding.
BY_SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "warmup_steps": 0}
SPLIT = trimtab.Plan.fixed(ROWS, 3)


def data() -> list[dict[str, Tensor]]:
    """Return rows that count few tokens or many; the first, which nothing predicts, some versions of the host count."""
    found = of_unlike_counts(STEPS * ROWS)
    for row in found:
        row["labels"][0] = -100
    return found


def trained(kind, folder, held: nn.Module, *, k: int = 1, changes=None, **own) -> nn.Module:
    """Return a model that a trainer has trained."""
    given = {"gradient_accumulation_steps": k, "per_device_train_batch_size": ROWS // k, "max_grad_norm": 0.0}
    given = arguments(folder, **given | BY_SGD | (changes or {}))
    kind(model=held, args=given, train_dataset=data(), **own).train()
    return held


@pytest.mark.parametrize("k", [1, 2])
def test_a_models_own_loss_trains_as_in_the_host(tmp_path, k):
    """In fp32, in which the host's models compute it whatever their weights are."""
    plain = trained(PLAIN, tmp_path / "plain", model().float(), k=k)
    ours = trained(OURS, tmp_path / "ours", model().float(), k=k, plan=SPLIT)
    assert difference(ours, plain) <= 1e-5
    assert difference(model().float(), plain) > 1e-2


def smoothed_by_hand() -> nn.Module:
    """Return what a plain loop trains: torch's own smoothing, over all that counts in a window."""
    held, found = model(), data()
    tokens, labels = (torch.stack([row[name] for row in found]).split(ROWS) for name in ("input_ids", "labels"))
    optimizer = torch.optim.SGD(held.parameters(), lr=BY_SGD["learning_rate"])
    for batch, targets in zip(tokens, labels, strict=True):
        logits = held(input_ids=batch)["logits"][:, :-1].flatten(0, 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, targets[:, 1:].flatten(), label_smoothing=SMOOTHED).backward()
        optimizer.step()
    return held


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2])
def test_smoothed_labels_train_as_in_a_plain_loop_whatever_the_host_divides_by(tmp_path, k, micro):
    """To the rounding of fp32, in which the host sums what it spreads over all words."""
    changes = {"label_smoothing_factor": SMOOTHED}
    ours = trained(OURS, tmp_path, model(), k=k, changes=changes, plan=trimtab.Plan.fixed(ROWS, micro))
    assert difference(ours, smoothed_by_hand()) <= 1e-6
    assert difference(ours, trained(PLAIN, tmp_path / "sharp", model(), k=k)) > 1e-3


@pytest.mark.parametrize("k", [1, 2])
def test_the_host_smooths_labels_as_a_plain_loop_does_where_it_divides_by_the_window(tmp_path, k):
    plain = trained(PLAIN, tmp_path, model(), k=k, changes={"label_smoothing_factor": SMOOTHED})
    apart = difference(plain, smoothed_by_hand())
    assert apart <= 1e-6 if k == 1 or DIVIDES_BY_WINDOW else apart > 1e-3


@pytest.mark.parametrize("is_told", [True, False])
def test_smoothed_labels_whose_first_counts_are_not_split_where_a_mean_is_of_what_is_predicted(
    tmp_path, monkeypatch, is_told
):
    """As in older versions of the host, whose smoother is not told what was counted."""

    def untold(self, model_output, labels, shift_labels=False, **_):
        return self.told(model_output, labels, shift_labels)

    given = arguments(tmp_path, **BY_SGD, label_smoothing_factor=SMOOTHED)
    ours = OURS(model=model(), args=given, train_dataset=of_unlike_counts(STEPS * ROWS), plan=SPLIT)
    if not is_told:
        monkeypatch.setattr(LabelSmoother, "told", LabelSmoother.__call__, raising=False)
        monkeypatch.setattr(LabelSmoother, "__call__", untold)
    if is_told and DIVIDES_BY_WINDOW:
        ours.train()
        return
    if not is_told:
        held = model()
        held.__class__ = type("OfNoNextWords", (GPT2LMHeadModel,), {})  # of which the host shifts no labels
        OURS(model=held, args=given, train_dataset=of_unlike_counts(STEPS * ROWS), plan=SPLIT).train()
    with raises(ValueGivenError, code="labels.not_counted", field="args.label_smoothing_factor"):
        ours.train()


@pytest.mark.parametrize("micro", [3, 8])
def test_noise_in_embeddings_is_drawn_as_in_the_host(tmp_path, micro):
    """Row by row, where nothing else is drawn in between, so that a split batch has the same."""
    how = {"changes": {"neftune_noise_alpha": 5.0}, "compute_loss_func": in_double}
    plain = trained(PLAIN, tmp_path / "plain", model(), **how)
    ours = trained(OURS, tmp_path / "ours", model(), plan=trimtab.Plan.fixed(ROWS, micro), **how)
    assert difference(ours, plain) <= EXACT
    quiet = trained(PLAIN, tmp_path / "quiet", model(), compute_loss_func=in_double)
    assert difference(ours, quiet) > 1e-3


class Headed(GPT2LMHeadModel):
    """Of a host's model one whose head is a loss head, and computes the loss in its forward."""

    chunks = frozenset()

    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        self.chunks |= {self.lm_head.chunk_rows}
        features = self.transformer(input_ids=input_ids)[0]
        loss_sum, count = self.lm_head.loss(features[:, :-1], labels[:, 1:])
        return {"loss": loss_sum / (count if num_items_in_batch is None else num_items_in_batch)}


def headed() -> Headed:
    """Return the model with its head's weight, which is its embedding's, in a loss head."""
    held = model()
    head = LossHead(held.lm_head.in_features, WORDS)
    head.weight = held.lm_head.weight
    held.lm_head, held.__class__ = head, Headed
    return held


@pytest.mark.parametrize("k", [1, 2])
def test_a_model_with_a_loss_head_is_planned_and_trains_as_the_hosts_own(tmp_path, k):
    plain = trained(PLAIN, tmp_path / "plain", model(), k=k, compute_loss_func=in_double)
    ours = trained(OURS, tmp_path / "ours", headed(), k=k, plan=trimtab.Plan.fixed(ROWS, 3, loss_chunk=5))
    assert difference(ours, plain) <= EXACT
    assert (ours.chunks, ours.lm_head.chunk_rows) == ({5}, None)
