"""Representation learning: contrastive losses, queues, teachers and codebooks."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from training_patterns.script import SKIPS, SPLIT_CHANGES, STEPS, Script, adamw, classes, mlp, pattern, sgd


def views():
    """Return batches of two views of each sample."""
    inputs = [x for x, _ in classes(steps=20)]  # with fewer draws before these, MoCo's first step overflows in fp16
    return [(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)) for x in inputs[:STEPS]]


@pattern(outcomes=SPLIT_CHANGES)
def simclr():
    """Other samples of the batch are the negatives."""
    model = mlp(outputs=8)

    def loss_fn(model, batch):
        first, second = (F.normalize(model(view)) for view in batch)
        return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(first)))

    return Script(model, sgd(model), loss_fn, views())


@pattern(outcomes=SPLIT_CHANGES)
def clip():
    """Two encoders and a learned temperature, symmetric over the batch."""

    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = mlp(outputs=8), mlp(outputs=8)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, images, texts):
            return self.scale.exp() * F.normalize(self.image(images)) @ F.normalize(self.text(texts)).T

    def loss_fn(model, batch):
        logits = model(*batch)
        targets = torch.arange(len(logits))
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2

    model = Clip()
    return Script(model, adamw(model), loss_fn, views())


class Moco(nn.Module):
    """A key encoder that follows the query encoder, and a queue of keys."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        self.query = mlp(outputs=8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        queue = F.normalize(torch.randn(32, 8))
        if as_buffer:
            self.register_buffer("queue", queue)
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        else:
            self.queue, self.place = queue, 0

    @torch.no_grad()
    def _keys(self, view):
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
        return F.normalize(self.key(view))

    def forward(self, first, second):
        queries, keys = F.normalize(self.query(first)), self._keys(second)
        positive = (queries * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, queries @ self.queue.clone().T], 1) / 0.2
        place = int(self.place)
        self.queue[place : place + len(keys)] = keys
        place = (place + len(keys)) % len(self.queue)
        if isinstance(self.place, torch.Tensor):
            self.place[0] = place
        else:
            self.place = place
        return F.cross_entropy(logits, torch.zeros(len(keys), dtype=torch.long))


@pattern(outcomes=SPLIT_CHANGES)
def moco_queue_buffer():
    """MoCo with its queue in a buffer."""
    model = Moco(as_buffer=True)
    return Script(model, sgd(model.query), lambda model, batch: model(*batch), views())


@pattern(outcomes=SPLIT_CHANGES)
def moco_queue_attribute():
    """MoCo with its queue as a plain attribute."""
    model = Moco(as_buffer=False)
    return Script(model, sgd(model.query), lambda model, batch: model(*batch), views())


@pattern(outcomes=SPLIT_CHANGES)
def byol():
    """A teacher that the forward moves."""

    class Byol(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.predictor = mlp(outputs=8), nn.Linear(8, 8)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, first, second):
            with torch.no_grad():
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
                target = self.teacher(second)
            return 2 - 2 * F.cosine_similarity(self.predictor(self.student(first)), target).mean()

    model = Byol()
    return Script(model, sgd(model), lambda model, batch: model(*batch), views())


@pattern()
def mean_teacher():
    """A teacher that the loop moves after each step."""
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model, batch):
        first, second = batch
        return F.mse_loss(model(first).softmax(1), teacher(second).softmax(1))

    @torch.no_grad()
    def follow():
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    return Script(model, sgd(model), loss_fn, views(), {"teacher": teacher}, after_step=follow)


@pattern(outcomes=SPLIT_CHANGES | SKIPS)
def dino():
    """A teacher's outputs, centred by a running mean in the loss module."""
    model = mlp(outputs=8)
    teacher = copy.deepcopy(model).requires_grad_(False)

    class DinoLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(1, 8))

        def forward(self, student, target):
            loss = -((target - self.centre) / 0.1).softmax(1).mul((student / 0.2).log_softmax(1)).sum(1).mean()
            self.centre = 0.9 * self.centre + 0.1 * target.mean(0, keepdim=True)
            return loss

    criterion = DinoLoss()

    def loss_fn(model, batch):
        with torch.no_grad():
            target = teacher(batch[1])
        return criterion(model(batch[0]), target)

    @torch.no_grad()
    def follow():
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    others = {"teacher": teacher, "criterion": criterion}
    return Script(model, sgd(model), loss_fn, views(), others, after_step=follow)


@pattern(outcomes=SPLIT_CHANGES)
def barlow_twins():
    """The correlation of two views' features over the batch."""
    model = mlp(outputs=6)

    def loss_fn(model, batch):
        first, second = (model(view) for view in batch)
        first, second = ((each - each.mean(0)) / each.std(0) for each in (first, second))
        correlation = first.T @ second / len(first)
        return (correlation - torch.eye(6)).square().sum() / 10

    return Script(model, sgd(model, 0.02), loss_fn, views())


@pattern(outcomes=SPLIT_CHANGES)
def triplet_mining():
    """The hardest positive and negative of each sample, within the batch."""
    model = mlp(outputs=8)

    def loss_fn(model, batch):
        features = F.normalize(model(batch[0]))
        distances = (2 - 2 * features @ features.T).clamp_min(1e-6).sqrt()
        same = batch[1][:, None] == batch[1]
        farthest = distances.masked_fill(~same, 0).amax(1)
        nearest = distances.masked_fill(same, 9).amin(1)
        return F.relu(farthest - nearest + 0.5).mean()

    return Script(model, sgd(model), loss_fn, classes())


@pattern()
def distillation():
    """A frozen teacher in evaluation mode beside the student."""
    model, teacher = mlp(), mlp(width=24).eval().requires_grad_(False)

    def loss_fn(model, batch):
        logits = model(batch[0])
        with torch.no_grad():
            target = (teacher(batch[0]) / 2).softmax(1)
        soft = F.kl_div((logits / 2).log_softmax(1), target, reduction="batchmean")
        return F.cross_entropy(logits, batch[1]) + 4 * soft

    return Script(model, sgd(model, 0.05), loss_fn, classes(), {"teacher": teacher})


@pattern()
def feature_distillation_by_hooks():
    """Features gathered by forward hooks into a dict."""
    model, teacher = mlp(), mlp().eval().requires_grad_(False)
    features = {}
    model[1].register_forward_hook(lambda module, inputs, output: features.__setitem__("student", output))
    teacher[1].register_forward_hook(lambda module, inputs, output: features.__setitem__("teacher", output))

    def loss_fn(model, batch):
        logits = model(batch[0])
        with torch.no_grad():
            teacher(batch[0])
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(features["student"], features["teacher"])

    return Script(model, sgd(model, 0.05), loss_fn, classes())


@pattern(outcomes=SPLIT_CHANGES)
def vector_quantization():
    """VQ-VAE: a codebook that follows the batch's assignments by a running mean."""

    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(outputs=4), mlp(4, 6)
            self.register_buffer("codes", torch.randn(8, 4))
            self.register_buffer("counts", torch.ones(8))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x):
            found = self.encoder(x)
            chosen = F.one_hot(torch.cdist(found, self.codes).argmin(1), 8).float()
            quantized = chosen @ self.codes
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                    self.sums.mul_(0.9).add_(chosen.T @ found, alpha=0.1)
                    self.codes.copy_(self.sums / self.counts[:, None].clamp_min(1e-3))
            commitment = F.mse_loss(found, quantized)
            return self.decoder(found + (quantized - found).detach()), commitment

    def loss_fn(model, batch):
        output, commitment = model(batch[0])
        return F.mse_loss(output, batch[0]) + 0.25 * commitment

    model = Quantizer()
    return Script(model, adamw(model), loss_fn, classes())


@pattern(outcomes=SKIPS)
def memory_bank():
    """Features of every sample kept in a dict by index, one step old (instance discrimination)."""
    model, bank = mlp(outputs=8), {}

    def loss_fn(model, batch):
        features = F.normalize(model(batch["x"]))
        loss = features.square().mean()
        for index, feature in zip(batch["index"].tolist(), features, strict=True):
            if index in bank:
                loss = loss + (feature - bank[index]).square().mean() / len(features)
            bank[index] = feature.detach()
        return loss

    batches = [{"x": x, "index": torch.randint(0, 24, y.shape)} for x, y in classes()]
    return Script(model, sgd(model), loss_fn, batches)
