"""Supervised losses: what a loss averages over, and what it returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trimtab
from training_patterns.script import (
    REFUSED,
    SKIPS,
    SPLIT_CHANGES,
    STEPS,
    Script,
    adamw,
    classes,
    cross_entropy,
    images,
    mlp,
    pattern,
    sgd,
)


@pattern()
def classification():
    """Cross entropy of a classifier."""
    model = mlp()
    return Script(model, sgd(model), cross_entropy, classes())


@pattern()
def regression():
    """Mean squared error, batches as dicts."""
    model = mlp(outputs=1)

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["inputs"]).squeeze(1), batch["targets"])

    batches = [{"inputs": x, "targets": x.sum(1)} for x, _ in classes()]
    return Script(model, sgd(model, 0.01), loss_fn, batches)


@pattern()
def label_smoothing():
    """A criterion object with label smoothing."""
    model, criterion = mlp(), nn.CrossEntropyLoss(label_smoothing=0.1)
    return Script(model, adamw(model), lambda model, batch: criterion(model(batch[0]), batch[1]), classes())


@pattern(outcomes=SPLIT_CHANGES)
def class_weights():
    """A mean weighted by class: its divisor depends on the labels of the whole batch."""
    model, criterion = mlp(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 10.0]))
    return Script(model, sgd(model), lambda model, batch: criterion(model(batch[0]), batch[1]), classes())


@pattern()
def class_weights_summed():
    """The same, returned as a sum and its weight."""
    model, weight = mlp(), torch.tensor([1.0, 3.0, 10.0])

    def loss_fn(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1], weight=weight, reduction="sum")
        return trimtab.Summed(loss, weight[batch[1]].sum())

    return Script(model, sgd(model), loss_fn, classes())


@pattern()
def focal_loss():
    """Focal loss (Lin et al. 2017), a mean over samples."""
    model = mlp()

    def loss_fn(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return ((1 - (-losses).exp()).square() * losses).mean()

    return Script(model, sgd(model), loss_fn, classes())


@pattern(outcomes=SPLIT_CHANGES)
def dice_loss():
    """Dice over all pixels of a batch: a ratio of sums."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 1, 3, padding=1))

    def loss_fn(model, batch):
        images, masks = batch
        found = model(images).sigmoid()
        return 1 - (2 * (found * masks).sum() + 1) / (found.sum() + masks.sum() + 1)

    batches = [(x, (x.sum(1, keepdim=True) > 1).float()) for x, _ in images()]
    return Script(model, sgd(model), loss_fn, batches)


@pattern(outcomes=SPLIT_CHANGES)
def sum_of_losses():
    """A loss that is a sum over the batch."""
    model = mlp()

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    return Script(model, sgd(model, 0.005), loss_fn, classes())


@pattern()
def positive_weight():
    """Binary labels, several per sample, with `pos_weight`."""
    model, criterion = mlp(outputs=4), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 4.0, 8.0]))
    batches = [(x, (x[:, :4] > 0.5).float()) for x, _ in classes()]
    return Script(model, adamw(model), lambda model, batch: criterion(model(batch[0]), batch[1]), batches)


@pattern(outcomes=SPLIT_CHANGES)
def sample_weights():
    """Importance weights in the batch, normalised to their sum."""
    model = mlp()

    def loss_fn(model, batch):
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return (losses * batch["weight"]).sum() / batch["weight"].sum()

    batches = [{"x": x, "y": y, "weight": torch.rand(len(y)) ** 3} for x, y in classes()]
    return Script(model, sgd(model), loss_fn, batches)


@pattern(outcomes=SPLIT_CHANGES)
def hard_example_mining():
    """Online hard example mining: the mean of the largest losses of a batch."""
    model = mlp()

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none").topk(4).values.mean()

    return Script(model, sgd(model), loss_fn, classes())


@pattern()
def weight_penalty():
    """L2 of the weights, added to the loss."""
    model = mlp()

    def loss_fn(model, batch):
        return cross_entropy(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())

    return Script(model, sgd(model), loss_fn, classes())


@pattern(samples=8)
def ctc():
    """Connectionist temporal classification with lengths per sample."""

    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(5, 12, batch_first=True), nn.Linear(12, 6)

        def forward(self, x):
            return self.head(self.rnn(x)[0]).log_softmax(-1)

    def loss_fn(model, batch):
        log_probabilities = model(batch["audio"]).transpose(0, 1)
        return F.ctc_loss(log_probabilities, batch["targets"], batch["audio_lengths"], batch["target_lengths"])

    batches = [
        {
            "audio": torch.randn(8, 12, 5),
            "audio_lengths": torch.randint(8, 13, (8,)),
            "targets": torch.randint(1, 6, (8, 4)),
            "target_lengths": torch.randint(1, 5, (8,)),
        }
        for _ in range(STEPS)
    ]
    model = Recognizer()
    return Script(model, adamw(model), loss_fn, batches)


@pattern()
def deep_supervision():
    """Losses of intermediate layers, returned beside their sum in a dict to be logged."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
            self.heads = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])

        def forward(self, x):
            first = torch.tanh(self.first(x))
            return self.heads[0](first), self.heads[1](torch.tanh(self.second(first)))

    def loss_fn(model, batch):
        early, late = (F.cross_entropy(output, batch[1]) for output in model(batch[0]))
        return late + 0.4 * early, {"early": early.detach(), "late": late.detach()}

    model = Deep()
    return Script(model, sgd(model), loss_fn, classes())


@pattern(outcomes=REFUSED)
def loss_and_accuracy():
    """`return loss, accuracy`: a pair of numbers, refused in every plan."""
    model = mlp()

    def loss_fn(model, batch):
        output = model(batch[0])
        return F.cross_entropy(output, batch[1]), (output.argmax(1) == batch[1]).float().mean()

    return Script(model, sgd(model), loss_fn, classes())


@pattern()
def loss_and_outputs():
    """A loss beside a named tuple of outputs."""
    import collections

    outputs = collections.namedtuple("outputs", ["logits", "loss"])
    model = mlp()

    def loss_fn(model, batch):
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return loss, outputs(logits.detach(), loss.detach())._asdict()

    return Script(model, sgd(model), loss_fn, classes())


class Uncertainty(nn.Module):
    """Weights of several losses, learned (Kendall et al. 2018)."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses: Tensor) -> Tensor:
        return ((-self.log_variances).exp() * losses + self.log_variances).sum()


@pattern()
def multi_task_uncertainty():
    """Two tasks whose weights are parameters of the criterion."""
    model, criterion = mlp(outputs=4), Uncertainty(2)
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-2)

    def loss_fn(model, batch):
        output = model(batch[0])
        return criterion(torch.stack([F.cross_entropy(output[:, :3], batch[1]), output[:, 3].square().mean()]))

    return Script(model, optimizer, loss_fn, classes(), {"criterion": criterion}, modules=(criterion,))


class Margin(nn.Module):
    """Class centres on a sphere, with an additive margin (CosFace)."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(outputs, width))

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        cosine = F.normalize(features) @ F.normalize(self.centres).T
        return F.cross_entropy(8 * (cosine - 0.2 * F.one_hot(labels, len(self.centres))), labels)


@pattern()
def margin_criterion():
    """A criterion that holds the class centres, in a parameter group of its own."""
    model, criterion = mlp(outputs=8), Margin(8, 3)
    groups = [{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.3}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    return Script(model, optimizer, loss_fn, classes(), {"criterion": criterion}, modules=(criterion,))


@pattern()
def loss_in_forward():
    """A model that takes the labels and returns its loss, as those of Transformers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x, labels=None):
            logits = self.body(x)
            return {"logits": logits, "loss": None if labels is None else F.cross_entropy(logits, labels)}

    model = Net()
    return Script(
        model,
        adamw(model),
        lambda model, batch: model(batch["x"], labels=batch["labels"])["loss"],
        [{"x": x, "labels": y} for x, y in classes()],
    )


@pattern()
def dict_of_losses():
    """A model that returns a dict of losses in training, as detectors do, which the loop adds up."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(outputs=5)

        def forward(self, x, targets):
            output = self.body(x)
            box = F.smooth_l1_loss(output[:, 3:], targets["boxes"])
            return {"classes": F.cross_entropy(output[:, :3], targets["labels"]), "boxes": box}

    model = Net()
    batches = [(x, {"labels": y, "boxes": x[:, 4:]}) for x, y in classes()]
    return Script(model, sgd(model), lambda model, batch: sum(model(*batch).values()), batches)


@pattern(outcomes=SPLIT_CHANGES)
def curriculum_counter():
    """A counter in the loss's closure that anneals a term."""
    model, calls = mlp(), 0

    def loss_fn(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch) * min(1.0, calls / 10)

    return Script(model, sgd(model), loss_fn, classes())


@pattern(outcomes=SPLIT_CHANGES | SKIPS)
def loss_scaled_by_running_mean():
    """A loss divided by its own running mean, kept as an attribute of the criterion."""

    class Balanced:
        def __init__(self):
            self.mean = None

        def __call__(self, model, batch):
            loss = cross_entropy(model, batch)
            self.mean = loss.detach() if self.mean is None else 0.9 * self.mean + 0.1 * loss.detach()
            return loss / self.mean

    model = mlp()
    return Script(model, sgd(model), Balanced(), classes(steps=20))  # fp16 overflows after the twelfth step


@pattern(outcomes=SPLIT_CHANGES)
def auxiliary_backward():
    """A second backward inside the loss function."""
    model = mlp()

    def loss_fn(model, batch):
        (0.1 * model(batch[0]).square().mean()).backward()
        return cross_entropy(model, batch)

    return Script(model, sgd(model), loss_fn, classes())
