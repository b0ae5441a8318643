"""Losses and layers that draw random numbers, from torch's, Python's, NumPy's or a generator of the user's."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from training_patterns.script import Block, Script, adamw, classes, cross_entropy, images, mlp, pattern, sgd


@pattern(draws=True)
def dropout():
    """Dropout modules between layers."""
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    )
    return Script(model, sgd(model), cross_entropy, classes())


class FunctionalDropout(nn.Module):
    """A block that drops by `F.dropout`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + F.dropout(torch.tanh(self.linear(x)), 0.2, self.training)


@pattern(draws=True)
def functional_dropout():
    """Dropout as a function, in repeated blocks."""
    model = nn.Sequential(nn.Linear(6, 16), FunctionalDropout(), FunctionalDropout(), nn.Linear(16, 3))
    return Script(model, sgd(model), cross_entropy, classes())


class StochasticDepth(nn.Module):
    """A residual branch that Python's generator skips for the whole batch."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.block, self.probability = Block(16), probability

    def forward(self, x):
        if self.training and random.random() < self.probability:
            return x
        return x + self.block(x)


@pattern(draws=True)
def stochastic_depth():
    """Stochastic depth by Python's generator."""
    model = nn.Sequential(nn.Linear(6, 16), StochasticDepth(0.2), StochasticDepth(0.4), nn.Linear(16, 3))
    return Script(model, sgd(model), cross_entropy, classes())


class NumpyNoise(nn.Module):
    """A block that scales its input by NumPy's noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.tanh(self.linear(x * float(1 + 0.1 * numpy.random.randn())))


@pattern(draws=True)
def noise_by_numpy():
    """Noise by NumPy's global generator, in repeated blocks."""
    model = nn.Sequential(nn.Linear(6, 16), NumpyNoise(), NumpyNoise(), nn.Linear(16, 3))
    return Script(model, sgd(model), cross_entropy, classes())


class OwnNoise(nn.Module):
    """A block that adds noise from a generator of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(16, 16), generator

    def forward(self, x):
        return torch.tanh(self.linear(x + 0.1 * torch.randn(x.shape, generator=self.generator)))


@pattern(draws=True)
def noise_by_own_generator():
    """Noise by a `torch.Generator` of the user's, shared by blocks."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), OwnNoise(generator), OwnNoise(generator), nn.Linear(16, 3))
    return Script(model, sgd(model), cross_entropy, classes())


@pattern(draws=True)
def noise_by_numpy_generator():
    """Augmentation in the loss by `numpy.random.default_rng`."""
    model, generator = mlp(), numpy.random.default_rng(0)

    def loss_fn(model, batch):
        noise = torch.from_numpy(generator.standard_normal(batch[0].shape)).float()
        return F.cross_entropy(model(batch[0] + 0.1 * noise), batch[1])

    return Script(model, sgd(model), loss_fn, classes())


@pattern(draws=True)
def mixup():
    """MixUp inside the loss: a factor by Python's generator, pairs by torch's permutation of the batch."""
    model = mlp()

    def loss_fn(model, batch):
        inputs, labels = batch
        factor, order = random.betavariate(0.4, 0.4), torch.randperm(len(inputs))
        logits = model(factor * inputs + (1 - factor) * inputs[order])
        return factor * F.cross_entropy(logits, labels) + (1 - factor) * F.cross_entropy(logits, labels[order])

    return Script(model, sgd(model), loss_fn, classes())


@pattern(draws=True)
def cutmix():
    """CutMix by Python's generator on images, pasted into the batch."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 3))

    def loss_fn(model, batch):
        inputs, labels = batch
        top, left = random.randrange(5), random.randrange(5)
        order = torch.tensor(random.sample(range(len(labels)), len(labels)))
        mixed = inputs.clone()
        mixed[:, :, top : top + 4, left : left + 4] = inputs[order, :, top : top + 4, left : left + 4]
        logits = model(mixed)
        return 0.75 * F.cross_entropy(logits, labels) + 0.25 * F.cross_entropy(logits, labels[order])

    return Script(model, sgd(model), loss_fn, images())


@pattern(draws=True)
def diffusion():
    """Random time steps and noise, and the loss of the noise's prediction."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.time, self.body = nn.Embedding(10, 6), mlp(outputs=6)

        def forward(self, x, t):
            return self.body(x + self.time(t))

    kept = torch.linspace(0.99, 0.1, 10)

    def loss_fn(model, batch):
        x = batch[0]
        t, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        signal = kept[t][:, None]
        return F.mse_loss(model(signal.sqrt() * x + (1 - signal).sqrt() * noise, t), noise)

    model = Denoiser()
    return Script(model, adamw(model), loss_fn, classes())


@pattern(draws=True)
def variational_autoencoder():
    """The reparametrised sample, and a KL term summed over the batch and divided by its size."""

    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(outputs=8), mlp(4, 6)

        def forward(self, x):
            mean, log_variance = self.encoder(x).chunk(2, 1)
            sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            return self.decoder(sample), mean, log_variance

    def loss_fn(model, batch):
        x = batch[0]
        output, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (F.mse_loss(output, x, reduction="sum") + divergence) / len(x)

    model = Vae()
    return Script(model, adamw(model), loss_fn, classes())


@pattern(draws=True)
def gumbel_softmax():
    """Discrete choices by the Gumbel softmax, straight through."""

    class Chooser(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.codes = mlp(outputs=5), nn.Embedding(5, 3)

        def forward(self, x):
            return F.gumbel_softmax(self.body(x), hard=True) @ self.codes.weight

    model = Chooser()
    return Script(model, adamw(model), cross_entropy, classes())


@pattern(draws=True)
def masked_autoencoder():
    """Random features are hidden and predicted: a mean over what was hidden."""
    model = mlp(outputs=6)

    def loss_fn(model, batch):
        x = batch[0]
        hidden = torch.rand_like(x).argsort(1) < 3
        return (model(x.masked_fill(hidden, 0)) - x).square()[hidden].mean()

    return Script(model, sgd(model), loss_fn, classes())


@pattern(draws=True)
def negative_sampling():
    """Word vectors with negatives drawn from a distribution."""

    class Vectors(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.contexts = nn.Embedding(20, 8), nn.Embedding(20, 8)

        def forward(self, words, contexts):
            return torch.einsum("bd,bnd->bn", self.words(words), self.contexts(contexts))

    weights = torch.linspace(1, 2, 20)

    def loss_fn(model, batch):
        negatives = torch.multinomial(weights, len(batch["word"]) * 4, replacement=True).view(-1, 4)
        scores = model(batch["word"], torch.cat([batch["context"][:, None], negatives], 1))
        return -F.logsigmoid(scores[:, 0]).mean() - F.logsigmoid(-scores[:, 1:]).sum(1).mean()

    batches = [{"word": torch.randint(0, 20, (16,)), "context": torch.randint(0, 20, (16,))} for _ in range(20)]
    model = Vectors()
    return Script(model, sgd(model), loss_fn, batches)


@pattern(draws=True)
def random_resizing():
    """Multi-scale training: the size of a batch's images by Python's generator."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

    def loss_fn(model, batch):
        resized = F.interpolate(batch[0], size=random.choice((6, 8, 10)))
        return F.cross_entropy(model(resized), batch[1])

    return Script(model, sgd(model), loss_fn, images())


@pattern()
def dropout_of_probability_zero():
    """Dropout modules that drop nothing."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3))
    return Script(model, sgd(model), cross_entropy, classes())
