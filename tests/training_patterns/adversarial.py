"""Two networks against each other, and losses that differentiate inside."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import trimtab
from training_patterns.script import NOT_FUSED, SPLIT_CHANGES, STEPS, Script, classes, cross_entropy, mlp, pattern, sgd


def networks():
    """Return a generator and a discriminator."""
    return mlp(4, 6), mlp(6, 1)


def pairs():
    """Return batches of (data, noise)."""
    return [(x + 1, torch.randn(len(x), 4)) for x, _ in classes()]


def optimizers(generator, discriminator):
    """Return the optimizers of both."""
    return tuple(
        torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.5, 0.999)) for network in (generator, discriminator)
    )


@pattern(rounding=1e-2)
def gan():
    """Alternating steps of discriminator and generator."""
    generator, discriminator = networks()
    generators, discriminators = optimizers(generator, discriminator)

    def judged(discriminator, batch):
        data, noise = batch
        with torch.no_grad():
            made = generator(noise)
        return F.softplus(-discriminator(data)).mean() + F.softplus(discriminator(made)).mean()

    def fooled(generator, batch):
        return F.softplus(-discriminator(generator(batch[1]))).mean()

    def plain(script, loop):
        scalers = loop.scaler(), loop.scaler()
        for batch in script.batches:
            sides = (discriminators, judged, discriminator), (generators, fooled, generator)
            for scaler, (optimizer, loss_fn, network) in zip(scalers, sides, strict=True):
                optimizer.zero_grad()
                with loop.autocast():
                    loss = loss_fn(network, batch)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    def through(script, plan):
        with (
            trimtab.start(discriminator, discriminators, plan) as judging,
            trimtab.start(generator, generators, plan) as making,
        ):
            for batch in script.batches:
                judging.train_step(judging.window(batch), judged)
                making.train_step(making.window(batch), fooled)

    others = {"discriminator": discriminator}
    return Script(generator, generators, fooled, pairs(), others, plain=plain, through=through)


@pattern(rounding=1e-2)
def discriminator_alone():
    """The discriminator's loss, with a generator in the loss's closure."""
    generator, discriminator = networks()
    _, discriminators = optimizers(generator, discriminator)

    def loss_fn(discriminator, batch):
        data, noise = batch
        made = generator(noise).detach()
        return F.relu(1 - discriminator(data)).mean() + F.relu(1 + discriminator(made)).mean()

    return Script(discriminator, discriminators, loss_fn, pairs(), {"generator": generator})


@pattern(draws=True, rounding=1e-2)
def gradient_penalty():
    """WGAN-GP: the gradient's norm between data and samples, at random mixtures."""
    generator, critic = networks()
    _, critics = optimizers(generator, critic)

    def loss_fn(critic, batch):
        data, noise = batch
        made = generator(noise).detach()
        mix = torch.rand(len(data), 1)
        between = (mix * data + (1 - mix) * made).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(made).mean() - critic(data).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()

    return Script(critic, critics, loss_fn, pairs(), {"generator": generator})


@pattern(rounding=1e-2)
def r1_penalty():
    """R1: the gradient's norm at the data, which are made to require a gradient in place."""
    generator, discriminator = networks()
    _, discriminators = optimizers(generator, discriminator)

    def loss_fn(discriminator, batch):
        data, noise = batch
        data.requires_grad_()
        scores = discriminator(data)
        (gradient,) = torch.autograd.grad(scores.sum(), data, create_graph=True)
        loss = F.softplus(-scores).mean() + F.softplus(discriminator(generator(noise).detach())).mean()
        return loss + gradient.square().sum(1).mean()

    return Script(discriminator, discriminators, loss_fn, pairs(), {"generator": generator})


@pattern(rounding=1e-2, outcomes=NOT_FUSED)
def weight_clipping():
    """WGAN: weights are clamped after every step."""
    generator, critic = networks()

    def loss_fn(critic, batch):
        data, noise = batch
        return critic(generator(noise).detach()).mean() - critic(data).mean()

    @torch.no_grad()
    def clamp():
        for parameter in critic.parameters():
            parameter.clamp_(-0.1, 0.1)

    optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-3)
    return Script(critic, optimizer, loss_fn, pairs(), {"generator": generator}, after_step=clamp)


@pattern()
def adversarial_examples():
    """FGSM: inputs moved along the sign of the loss's gradient."""
    model = mlp()

    def loss_fn(model, batch):
        inputs, labels = batch
        inputs = inputs.clone().requires_grad_()
        loss = F.cross_entropy(model(inputs), labels)
        (gradient,) = torch.autograd.grad(loss, inputs)
        return F.cross_entropy(model((inputs + 0.1 * gradient.sign()).detach()), labels)

    return Script(model, sgd(model), loss_fn, classes())


@pattern(outcomes=SPLIT_CHANGES)
def adversarial_examples_by_backward():
    """PGD as older code writes it: `backward` on the inputs, then the model's gradients cleared."""
    model = mlp()

    def loss_fn(model, batch):
        inputs, labels = batch
        moved = inputs.clone().requires_grad_()
        F.cross_entropy(model(moved), labels).backward()
        model.zero_grad()
        return F.cross_entropy(model((moved + 0.1 * moved.grad.sign()).detach()), labels)

    return Script(model, sgd(model), loss_fn, classes())


class Reversal(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return -gradient


@pattern()
def gradient_reversal():
    """Domain-adversarial training: two heads, one behind a reversed gradient."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label, self.domain = mlp(outputs=8), nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x):
            features = self.body(x)
            return self.label(features), self.domain(Reversal.apply(features))

    def loss_fn(model, batch):
        label, domain = model(batch["x"])
        return F.cross_entropy(label, batch["y"]) + F.cross_entropy(domain, batch["domain"])

    model = Net()
    batches = [{"x": x, "y": y, "domain": torch.randint(0, 2, y.shape)} for x, y in classes()]
    return Script(model, sgd(model, 0.05), loss_fn, batches)


@pattern(rounding=1e-2)
def physics_informed():
    """A differential equation's residual, by gradients of the output with respect to the input."""
    model = mlp(1, 1)

    def loss_fn(model, batch):
        x = batch.detach().requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        boundary = model(torch.zeros(1, 1)).square().mean()
        return (curvature + u).square().mean() + boundary

    return Script(
        model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, [torch.rand(16, 1) for _ in range(STEPS)]
    )


@pattern(samples=4, rounding=1e-2)
def meta_learning():
    """MAML: an inner step by `functional_call`, differentiated through."""
    model = mlp(outputs=1)

    def loss_fn(model, batch):
        losses = []
        for task in range(len(batch["x"])):
            weights = dict(model.named_parameters())
            inner = F.mse_loss(torch.func.functional_call(model, weights, batch["x"][task]), batch["y"][task])
            gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            moved = {name: w - 0.05 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            losses.append(
                F.mse_loss(torch.func.functional_call(model, moved, batch["x_test"][task]), batch["y_test"][task])
            )
        return torch.stack(losses).mean()

    def task():
        x = torch.randn(4, 5, 6)
        return x, x.sum(2, keepdim=True)

    batches = []
    for _ in range(STEPS):
        (x, y), (x_test, y_test) = task(), task()
        batches.append({"x": x, "y": y, "x_test": x_test, "y_test": y_test})
    return Script(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn, batches)


@pattern(rounding=0.1, outcomes={"planned": "refused"})
def mixed_precision_in_loss():
    """The user's own autocast inside the loss function: parts of a batch are rounded to bf16 one by one."""
    model = mlp()

    def loss_fn(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model, batch)

    return Script(model, sgd(model), loss_fn, classes())
