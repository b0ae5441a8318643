"""Layers that keep state, parametrizations, data types, and models that torch transformed."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from training_patterns.script import (
    NO_FP16,
    NOT_FUSED,
    NOT_RECOMPUTED,
    SPLIT_CHANGES,
    STEPS,
    Block,
    Script,
    adamw,
    classes,
    cross_entropy,
    images,
    mlp,
    pattern,
    sgd,
)


@pattern(outcomes=SPLIT_CHANGES)
def batch_norm():
    """Batch normalisation of images."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    return Script(model, sgd(model), cross_entropy, images())


@pattern(outcomes=SPLIT_CHANGES | NO_FP16 | {"bf16": "raises"})
def batch_norm_of_the_user():
    """Batch normalisation written by the user, with running statistics as buffers."""

    class Normalize(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(width))
            self.register_buffer("mean", torch.zeros(width))

        def forward(self, x):
            mean = x.mean(0)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
            return self.scale * (x - mean) / (x.var(0, unbiased=False) + 1e-5).sqrt()

    model = nn.Sequential(nn.Linear(6, 16), Normalize(16), nn.Tanh(), nn.Linear(16, 3))
    return Script(model, sgd(model), cross_entropy, classes())


@pattern()
def batch_norm_frozen():
    """Batch normalisation kept in evaluation mode while fine-tuning."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh())
            self.head = nn.Linear(16, 3)

        def train(self, mode=True):
            super().train(mode)
            self.body[1].eval()
            return self

        def forward(self, x):
            return self.head(self.body(x))

    model = Net().train()
    return Script(model, sgd(model), cross_entropy, classes())


@pattern(outcomes=SPLIT_CHANGES)
def instance_norm_with_statistics():
    """Instance normalisation that tracks running statistics."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 3),
    )
    return Script(model, sgd(model, 0.02), cross_entropy, images())


@pattern()
def weight_norm():
    """Weight normalisation by parametrization."""
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 16)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(16, 3))
    )
    return Script(model, sgd(model), cross_entropy, classes())


@pattern(outcomes=SPLIT_CHANGES)
def spectral_norm():
    """Spectral normalisation: a power iteration in every forward."""
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 16)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(16, 3))
    )
    return Script(model, sgd(model), cross_entropy, classes())


class LowRank(nn.Module):
    """A low-rank update of a frozen weight."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(2, inputs) / 4), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


@pattern()
def low_rank_adaptation():
    """LoRA by parametrization; all else is frozen."""
    model = mlp().requires_grad_(False)
    for layer in (model[0], model[1].linear, model[2].linear, model[3]):
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    trained = [p for p in model.parameters() if p.requires_grad]
    return Script(model, torch.optim.AdamW(trained, lr=1e-2), cross_entropy, classes())


class FakeQuantize(nn.Module):
    """An observer of ranges and a rounding that gradients go straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.low.copy_(0.9 * self.low + 0.1 * x.min())
                self.high.copy_(0.9 * self.high + 0.1 * x.max())
        step = (self.high - self.low).clamp_min(1e-3) / 255
        rounded = ((x - self.low) / step).round().clamp(0, 255) * step + self.low
        return x + (rounded - x).detach()


@pattern(rounding=0.1, outcomes=SPLIT_CHANGES)
def quantization_aware():
    """Quantization-aware training: observers move with the batches; values round to one of 256."""
    model = nn.Sequential(
        nn.Linear(6, 16), FakeQuantize(), nn.Tanh(), nn.Linear(16, 16), FakeQuantize(), nn.Tanh(), nn.Linear(16, 3)
    )
    return Script(model, sgd(model, 0.05), cross_entropy, classes())


@pattern()
def checkpointed_by_the_user():
    """Activation checkpointing that the model does itself."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks, self.head = (
                nn.Linear(6, 16),
                nn.ModuleList([Block(16) for _ in range(3)]),
                nn.Linear(16, 3),
            )

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    model = Net()
    return Script(model, adamw(model), cross_entropy, classes())


@pattern(rounding=1e-2, repeats=False, outcomes=NOT_RECOMPUTED | NO_FP16)
def scripted():
    """A scripted model; torch fuses it by a profile of its calls, and two plain loops in bf16 are 0.3 % apart."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripting is deprecated, and still used
        model = torch.jit.script(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
    return Script(model, sgd(model), cross_entropy, classes())


@pattern()
def compiled_by_the_user():
    """A model compiled in place by the user."""
    model = mlp()
    model.compile(backend="aot_eager")
    return Script(model, sgd(model), cross_entropy, classes())


@pattern(outcomes=NOT_FUSED | NO_FP16)
def complex_parameters():
    """A layer of complex weights in the Fourier domain."""

    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(4, dtype=torch.cfloat)), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, 6))

    model = Fourier()
    return Script(model, sgd(model, 0.05), cross_entropy, classes())


@pattern(rounding=1e-9)
def double_precision():
    """A model in fp64."""
    model = mlp().double()
    return Script(model, adamw(model), cross_entropy, [(x.double(), y) for x, y in classes()])


@pattern(rounding=0.5, outcomes=NOT_FUSED | NO_FP16)
def half_weights():
    """Weights in bf16: a step is a few units of their last place, which a sum in another order changes."""
    model = mlp().bfloat16()

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0].bfloat16()).float(), batch[1])

    return Script(model, sgd(model), loss_fn, classes())


@pattern(rounding=0.5, outcomes=NOT_FUSED)
def half_embedding():
    """An embedding in bf16 beside layers in fp32."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(40, 16).bfloat16(), nn.Linear(16, 3)

        def forward(self, ids):
            return self.head(self.embedding(ids).float().mean(1))

    model = Net()
    return Script(
        model, sgd(model), cross_entropy, [(ids, ids.sum(1) % 3) for ids in torch.randint(0, 40, (STEPS, 16, 4))]
    )


@pattern()
def lazy_layers():
    """Lazy layers, built by a first forward."""
    model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(3))
    model(torch.zeros(1, 6))
    return Script(model, sgd(model), cross_entropy, classes())


class Experts(nn.Module):
    """Experts behind a router whose balance term depends on the whole batch."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.experts, self.router = nn.ModuleList([mlp() for _ in range(3)]), nn.Linear(6, 3)
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(1)
        weight, chosen = probabilities.max(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        output = weight[:, None] * outputs[torch.arange(len(x)), chosen]
        share = F.one_hot(chosen, 3).float().mean(0)
        return output, self.weight * 3 * (share * probabilities.mean(0)).sum()


@pattern(outcomes=SPLIT_CHANGES)
def mixture_of_experts():
    """A mixture of experts with the customary small weight of its balance term."""

    def loss_fn(model, batch):
        output, balance = model(batch[0])
        return F.cross_entropy(output, batch[1]) + balance

    model = Experts(1e-2)
    return Script(model, sgd(model), loss_fn, classes())


class LoggingExpert(nn.Module):
    """A block that appends an auxiliary loss to a list that its model reads."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.block, self.losses = Block(16), losses

    def forward(self, x):
        x = self.block(x)
        self.losses.append(x.square().mean())
        return x


@pattern()
def auxiliary_losses_in_a_list():
    """Auxiliary losses that blocks append to a list."""
    losses: list[Tensor] = []
    model = nn.Sequential(nn.Linear(6, 16), LoggingExpert(losses), LoggingExpert(losses), nn.Linear(16, 3))

    def loss_fn(model, batch):
        losses.clear()
        return cross_entropy(model, batch) + 0.01 * sum(losses)

    return Script(model, sgd(model), loss_fn, classes())


class Recorded(nn.Module):
    """A block that keeps its last output as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(16), None

    def forward(self, x):
        self.last = self.block(x)
        return self.last


@pattern()
def activations_as_attributes():
    """A penalty on activations that blocks keep as attributes."""
    model = nn.Sequential(nn.Linear(6, 16), Recorded(), Recorded(), nn.Linear(16, 3))

    def loss_fn(model, batch):
        loss = cross_entropy(model, batch)
        return loss + 0.01 * (model[1].last.square().mean() + model[2].last.square().mean())

    return Script(model, sgd(model), loss_fn, classes())


class Warming(nn.Module):
    """A block whose output grows with the number of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), 0

    def forward(self, x):
        self.calls += self.training
        return x + min(1.0, self.calls / 20) * torch.tanh(self.linear(x))


@pattern(outcomes=SPLIT_CHANGES)
def counter_in_a_block():
    """Blocks that count their forwards, as schedules of dropout or temperature do."""
    model = nn.Sequential(nn.Linear(6, 16), Warming(), Warming(), nn.Linear(16, 3))
    return Script(model, sgd(model), cross_entropy, classes())


@pattern()
def shared_block():
    """One block that runs several times in a forward."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.head = nn.Linear(6, 16), Block(16), nn.Linear(16, 3)

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = self.block(x)
            return self.head(x)

    model = Net()
    return Script(model, sgd(model, 0.05), cross_entropy, classes())


@pattern(outcomes=SPLIT_CHANGES)
def early_exit():
    """A number of blocks that depends on the values of the batch."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks, self.head = (
                nn.Linear(6, 16),
                nn.ModuleList([Block(16) for _ in range(3)]),
                nn.Linear(16, 3),
            )

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                if x.abs().mean() > 0.6:
                    break
                x = block(x)
            return self.head(x)

    model = Net()
    return Script(model, sgd(model), cross_entropy, classes())


# A known limit: the loop reads what the loss put aside, which is the last micro-batch. No check of the loss sees that.
@pattern(rounding=1e-2, outcomes=SPLIT_CHANGES | {"proved_split": "differs"})
def per_sample_gradients():
    """Differential privacy: gradients of each sample by `vmap`, clipped, put into `grad` before the step."""
    model = mlp()
    last = {}

    def loss_fn(model, batch):
        last["batch"] = batch
        return cross_entropy(model, batch)

    def replace():
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of(weights, x, y):
            return F.cross_entropy(torch.func.functional_call(model, weights, x[None]), y[None])

        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, *last["batch"])
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (0.5 / norms).clamp_max(1)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.einsum("b,b...->...", factor, each[name]) / len(factor)

    return Script(model, sgd(model), loss_fn, classes(), before_step=replace)


@pattern()
def hypernetwork():
    """A network whose output is another one's weights, by `functional_call`."""

    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.target = mlp(2, 21), nn.Linear(6, 3).requires_grad_(False)
            self.task = nn.Parameter(torch.randn(2))

        def forward(self, x):
            made = self.body(self.task[None]).squeeze(0)
            return torch.func.functional_call(self.target, {"weight": made[:18].view(3, 6), "bias": made[18:]}, x)

    model = Hyper()
    return Script(model, sgd(model, 0.05), cross_entropy, classes())


@pattern()
def functional_call_of_blocks():
    """A forward by `functional_call` with scaled weights, in a model with blocks."""
    model = mlp()

    def loss_fn(model, batch):
        scaled = {name: p * 0.9 for name, p in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, scaled, batch[0]), batch[1])

    return Script(model, sgd(model), loss_fn, classes())


@pattern()
def straight_through():
    """Binary weights with a straight-through gradient."""

    class Binary(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(outputs, inputs) / 3)

        def forward(self, x):
            return F.linear(x, self.weight + (self.weight.sign() - self.weight).detach()) / 4

    model = nn.Sequential(Binary(6, 16), nn.Tanh(), Binary(16, 3))
    return Script(model, sgd(model, 0.01), cross_entropy, classes())
