"""A split is proved with dropout only if each sample has masks of its own, and never in evaluation mode."""

from __future__ import annotations

import pytest
import torch
from small_loops import sgd
from state_digest import fingerprint
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trimtab.plans.profile import Candidate
from trimtab.profiling.gradient_equivalence import check_splitting
from trimtab.profiling.plan_proof import prove
from trimtab.profiling.training_loop import TrainingLoop

ROWS, WIDTH = 16, 8


class Between(nn.Module):
    """Runs a function in the middle of a model while training."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x):
        return self.function(self, x) if self.training else x


def subject_of(*between):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), *between, nn.Tanh(), nn.Linear(WIDTH, 3))
    batch = torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))
    return TrainingLoop(model, sgd(model), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batch)


# Deterministic layers whose class name says "drop".


def layer(name, function, **attributes):
    """A class of modules that run a function while training and return their input otherwise."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            for attribute, value in attributes.items():
                setattr(self, attribute, value)

        def forward(self, x):
            return function(self, x) if self.training else x

    Layer.__name__ = Layer.__qualname__ = name
    return Layer


def scaled_by_kept(module, x):
    x = x - x.mean(0)
    kept = (x.abs() > x.abs().mean()).float()
    return x * kept * kept.numel() / kept.sum()


def scaled_by_kept_at_random(module, x):
    """Scales by the fraction of the whole batch that is kept, as torchvision does."""
    mask = torch.empty_like(x).bernoulli_(0.7)
    return x * mask * (mask.numel() / mask.sum())


def centred(module, x):
    return x - x.mean(0)


DropBlockNorm, DropMean = layer("DropBlockNorm", scaled_by_kept), layer("DropMean", centred)
GatedByProbability = layer("GatedByProbability", lambda m, x: centred(m, x) if m.dropout > 0 else x, dropout=0.5)


COUPLED = (
    *(DropBlockNorm, DropMean, GatedByProbability),
    layer("DropAndCentre", lambda module, x: centred(module, x) * torch.rand(len(x), 1).round()),
    layer("DropBlock2d", scaled_by_kept_at_random),
)


@pytest.mark.parametrize("layer", COUPLED)
def test_a_layer_is_proved_as_it_trains_whatever_its_name(layer):
    check = check_splitting(subject_of(layer()))
    assert (check.splittable, check.code) == (False, "split.gradient_differs"), check.reason


@pytest.mark.parametrize("layer", [DropBlockNorm, DropMean, GatedByProbability])
def test_a_plan_is_proved_with_such_a_layer_in_training_mode(layer):
    reference = Candidate(ROWS)
    proof = prove(subject_of(layer()), Candidate(2), reference)
    assert (proof.holds, proof.code) == (False, "proof.differs")


# Masks that samples share.


def weight_drop(module, x):
    return F.linear(x, F.dropout(module.weight, 0.5, module.training))


def drop_connect(module, x):
    return F.linear(x, module.weight * torch.empty_like(module.weight).bernoulli_(0.5))


def embedding_dropout(module, x):
    words = (x[:, 0].abs() * 4).long() % WIDTH
    mask = module.weight.new_empty(WIDTH, 1).bernoulli_(0.5).expand_as(module.weight) / 0.5
    return x + F.embedding(words, mask * module.weight)


def dropout_over_samples(module, x):
    return x + F.dropout(torch.ones(1, WIDTH), 0.5) * x


def attention_over_samples(module, x):
    one = x.unsqueeze(0)
    return F.scaled_dot_product_attention(one, one, one, dropout_p=0.3).squeeze(0)


def zero_initialized(module, x):
    """Its branch is multiplied by a weight that starts at zero: the loss is the same with any mask."""
    return x + module.gain * x * (torch.rand(()) > 0.5)


def by_index(module, x):
    """Keeps one of two halves, by an operator whose smallest value is not known."""
    return x * (torch.arange(WIDTH) % 2 == torch.multinomial(torch.ones(2), 1))


class DropAll(nn.Module):
    """One number for the whole batch."""

    def forward(self, x):
        return x * (torch.rand(()) > 0.5) if self.training else x


class NeedsSamples(DropAll):
    """Runs on the parts of the proof alone."""

    def forward(self, x):
        if len(x) not in (2, 4, 10, ROWS) or (self.training and len(x) == 8):
            raise ValueError(f"{len(x)} samples")
        return super().forward(x)


class StochasticDepth(nn.Module):
    """As torchvision has it."""

    def __init__(self, p, mode):
        super().__init__()
        self.p, self.mode = p, mode

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        survival = 1.0 - self.p
        size = [x.shape[0]] + [1] * (x.ndim - 1) if self.mode == "row" else [1] * x.ndim
        noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(survival)
        if survival > 0.0:
            noise.div_(survival)
        return x * noise


SHARED = {
    "weight drop": lambda: Between(weight_drop),
    "drop connect": lambda: Between(drop_connect),
    "embedding dropout": lambda: Between(embedding_dropout),
    "dropout of one sample": lambda: Between(dropout_over_samples),
    "attention over samples": lambda: Between(attention_over_samples),
    "one number": DropAll,
    "one integer": layer("DropByInteger", lambda module, x: x * torch.randint(0, 2, ())),
    "one index": layer("DropByIndex", by_index),
    "one number that rarely drops": layer("DropRarely", lambda module, x: x * (torch.rand(()) < 0.99999)),
    "sizes of the proof alone": NeedsSamples,
    "one number and a probability": layer(
        *("AllOrNothing", lambda module, x: x * (torch.rand(()) > module.dropout)), dropout=0.1
    ),
    "zero initialized": layer("ZeroInitialized", zero_initialized, gain=nn.Parameter(torch.zeros(()))),
    "stochastic depth": lambda: StochasticDepth(0.05, "batch"),
}


@pytest.mark.parametrize("layer", SHARED.values(), ids=SHARED)
def test_a_mask_that_samples_share_is_refused(layer):
    tried = subject_of(layer())
    before = fingerprint(tried.model, tried.optimizer)
    check = check_splitting(tried)
    assert (check.splittable, check.code) == (False, "split.random"), check.reason
    assert type(tried.model[1]).__name__ in check.reason
    assert fingerprint(tried.model, tried.optimizer) == before


# Masks of single samples.


class DropPath(nn.Module):
    """As timm has it."""

    def __init__(self, drop_prob=0.3, scale_by_keep=True):
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        if keep > 0.0 and self.scale_by_keep:
            mask.div_(keep)
        return x * mask


def locked_dropout(module, x):
    """One mask for all time steps of a sample, which is dimension 1."""
    steps = x.unsqueeze(0).expand(3, -1, -1)
    return (steps * x.new_empty(1, x.size(0), x.size(1)).bernoulli_(0.6) / 0.6).mean(0)


OwnProbability = layer(
    *("OwnProbability", lambda module, x: x * (torch.rand_like(x) > module.attention_dropout)), attention_dropout=0.2
)


class LayerDrop(nn.Module):
    """Draws a number in each forward, and compares it with a probability of 0, as BART does."""

    def __init__(self):
        super().__init__()
        self.dropout, self.layerdrop = 0.1, 0.0

    def forward(self, x):
        if self.training and torch.rand([]) < self.layerdrop:
            return x
        return F.dropout(x, self.dropout, self.training)


class AttendingByProbability(nn.Module):
    """Holds a probability, and calls an operator that draws nothing while dropout is held off."""

    def __init__(self):
        super().__init__()
        self.attention_dropout = 0.2

    def forward(self, x):
        x = torch.stack([x, x.tanh()], 1).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.attention_dropout).mean((1, 2))


class Recomputed(nn.Module):
    """Draws its masks again in the backward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), DropPath(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        x = torch.stack([x, x.tanh()], 1)
        return self.attention(x, x, x)[0].mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.4)

    def forward(self, x):
        return self.lstm(torch.stack([x, x.tanh()]))[0].mean(0)


def function(run):
    return lambda: Between(lambda module, x: run(x))


def sdpa(x):
    x = torch.stack([x, x.tanh()], 1)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3).mean(1)


PER_SAMPLE = {
    "Dropout": lambda: nn.Dropout(0.5),
    "Dropout1d": lambda: nn.Sequential(nn.Unflatten(1, (4, 2)), nn.Dropout1d(0.5), nn.Flatten()),
    "Dropout2d": lambda: nn.Sequential(nn.Unflatten(1, (4, 2, 1)), nn.Dropout2d(0.5), nn.Flatten()),
    "Dropout3d": lambda: nn.Sequential(nn.Unflatten(1, (4, 2, 1, 1)), nn.Dropout3d(0.5), nn.Flatten()),
    "AlphaDropout": lambda: nn.AlphaDropout(0.5),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.5),
    "F.dropout": function(lambda x: F.dropout(x, 0.5)),
    "F.dropout in place": function(lambda x: F.dropout(x * 1, 0.5, inplace=True)),
    "F.dropout1d": function(lambda x: F.dropout1d(x.view(-1, 4, 2), 0.5).flatten(1)),
    "F.alpha_dropout": function(lambda x: F.alpha_dropout(x, 0.5, True)),
    "F.feature_alpha_dropout": function(lambda x: F.feature_alpha_dropout(x, 0.5, True)),
    "torch.dropout": function(lambda x: torch.dropout(x, 0.5, True)),
    "F.rrelu": function(lambda x: F.rrelu(x, 0.1, 0.4, True)),
    "attention": function(sdpa),
    "MultiheadAttention": Attending,
    "LSTM": Recurrent,
    "attention and a probability": AttendingByProbability,
    "recomputed": Recomputed,
    "called twice": lambda: nn.Sequential(*[DropPath()] * 2),
    "TransformerEncoderLayer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.2, batch_first=True), nn.Flatten()
    ),
    "StochasticDepth": lambda: StochasticDepth(0.4, "row"),
    "DropPath": DropPath,
    "LockedDropout": layer("LockedDropout", locked_dropout),
    "a probability of its own": OwnProbability,
    "a number that is not used": LayerDrop,
}


@pytest.mark.parametrize("layer", PER_SAMPLE.values(), ids=PER_SAMPLE)
def test_masks_of_single_samples_are_no_obstacle(layer):
    tried = subject_of(layer())
    before = fingerprint(tried.model, tried.optimizer)
    check = check_splitting(tried)
    assert (check.splittable, check.code) == (True, "split.proved"), check.reason
    assert fingerprint(tried.model, tried.optimizer) == before


@pytest.mark.parametrize("layer", [DropPath, OwnProbability, nn.Dropout])
@pytest.mark.parametrize("changed", [{"micro_batch": 2}, {"fused_optimizer": True}, {"recompute": "every_block"}])
def test_a_plan_is_proved_with_masks_of_single_samples(layer, changed):
    reference = Candidate(ROWS)
    proof = prove(subject_of(layer()), Candidate(**{**vars(reference), **changed}), reference)
    assert (proof.holds, proof.code) == (True, "proof.holds"), proof.reason
