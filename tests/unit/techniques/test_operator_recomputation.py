"""Blocks that keep the results of some operators: the same step, whatever is kept, and less memory."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn
from torch.nn import functional as F

from trimtab.core.errors import ModelError
from trimtab.core.recompute_schedule import schedule_of
from trimtab.measure.block_memory import trace_stages
from trimtab.measure.blocks import BlockGraph
from trimtab.techniques.activation_checkpointing import survey_operators, use_schedule

LEVELS = ["~0", "~0[]", "~0[0]", "~0[1]", "~0[0-9]"]


class Bottleneck(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.relu, self.drop = nn.ReLU(inplace=inplace), nn.Dropout(0.3)

    def forward(self, x):
        y = self.relu(self.norms[0](self.one(x)))
        return self.relu(self.drop(self.norms[1](self.two(y))) + x)


class Attending(nn.Module):
    """Attention with dropout, views, a residual connection, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.into(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + F.dropout(F.gelu(self.out(self.norm(x))), 0.1)


class Overwriting(nn.Module):
    """In-place operators on its own tensors, on views of them, and on empty tensors."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = torch.sin(self.one(x) * 3).mul_(2).add_(1)
        z = self.two(y) * 2
        filled = torch.empty_like(z)
        filled[:, :4] = z[:, :4] * 3
        filled[:, 4:] = y[:, 4:].exp()
        noise = torch.empty_like(z).normal_()
        return filled * z.relu_() * noise.abs_().add_(1) * torch.arange(8) * y


class Function(torch.autograd.Function):
    """Saves a result that is computed in NumPy, which torch does not see."""

    @staticmethod
    def forward(ctx, x):
        slope = torch.empty_like(x)
        slope.numpy()[...] = x.detach().numpy() ** 2
        ctx.save_for_backward(slope)
        return x * slope

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return 3 * slope * grad


class Unseen(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)

    def forward(self, x):
        return Function.apply(torch.tanh(self.one(x)))


IMAGES, TOKENS, ROWS = (3, 4, 5, 5), (3, 5, 8), (6, 8)
BLOCKS = {
    "bottleneck": (Bottleneck, IMAGES), "inplace": (lambda: Bottleneck(inplace=True), IMAGES),
    "attending": (Attending, TOKENS), "overwriting": (Overwriting, ROWS), "unseen": (Unseen, ROWS),
}  # fmt: skip


def steps_of(make, shape, text, autocast=False):
    """Return losses, gradients, buffers and the random numbers left after two steps, the first with two backwards."""
    torch.manual_seed(0)
    model = nn.Sequential(make()).train()
    undo = use_schedule(model, ["0"], schedule_of(text, 1))
    found = []
    for turn in range(2):
        x = torch.randn(shape).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).square().mean()
        for last in (False, True) if turn == 0 else (True,):
            loss.backward(retain_graph=not last)
        found += [loss.detach(), x.grad]
    undo()
    return [*found, *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(3)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("text", LEVELS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_step_is_the_same_whatever_is_kept(name, text, autocast):
    if name == "unseen" and autocast:
        pytest.skip("NumPy has no bfloat16")
    for ours, theirs in zip(
        steps_of(*BLOCKS[name], text, autocast), steps_of(*BLOCKS[name], "0", autocast), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("text", ["~0", "~0[]"])
def test_gradients_of_gradients_are_the_same(text):
    def second(text):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()))
        undo = use_schedule(model, ["0"], schedule_of(text, 1))
        x = torch.randn(4, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        undo()
        return [x.grad, *(p.grad for p in model.parameters())]

    for ours, theirs in zip(second(text), second("0"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("text", "rows"), [("0", 4), ("~0", 3), ("~0[1]", 2), ("~0[]", 1)])
def test_only_kept_results_are_held_between_forward_and_backward(text, rows):
    """Of both norms' inputs and both activations; the last activation is the block's result."""
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    model, x = nn.Sequential(nn.Sequential(*layers)).train(), torch.randn(1024, 64)
    schedule = schedule_of(text, 1)
    traced = trace_stages(
        model, lambda m, x: m(x).sum(), x, BlockGraph(("0",), ()), prepare=lambda m: use_schedule(m, ["0"], schedule)
    )
    stage = traced.first.stages[0]
    assert stage.saved_bytes == pytest.approx(rows * x.nbytes, rel=0.01)


def test_a_kept_tensor_that_is_changed_is_an_error_and_no_wrong_gradient():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    undo = use_schedule(model, ["0"], schedule_of("~0[]", 1))
    for change in (lambda: x.add_(1), lambda: model[0][0].weight.add_(1)):
        loss = model(x).sum()
        with torch.no_grad():
            change()
        with raises(ModelError, code="recompute.side_effects", field="plan.recompute"):
            loss.backward()
    undo()


class MovingMean(nn.Module):
    """Changes a buffer after an operator whose result backward recomputes from it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        scaled = (x - self.mean).exp()
        self.mean.lerp_(x.detach().mean(0), 3e-4)
        return self.linear(scaled)


class Exponential(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear((x * 2).exp())


def test_a_small_change_of_a_tensor_first_seen_in_the_block_is_an_error():
    """The comparison of both passes would not see a relative change of 3e-4."""
    model = nn.Sequential(MovingMean())
    use_schedule(model, ["0"], schedule_of("~0[]", 1))
    with raises(ModelError, code="recompute.side_effects", field="plan.recompute"):
        model(torch.randn(ROWS)).square().mean().backward()


def test_a_change_of_the_blocks_input_after_the_forward_is_an_error_in_every_call():
    """The passes are compared in calls 1, 2, 4, 8 and so on only."""
    model = nn.Sequential(Exponential())
    use_schedule(model, ["0"], schedule_of("~0[]", 1))
    for call in range(3):
        x = torch.randn(ROWS)
        loss = model(x).square().mean()
        if call < 2:
            loss.backward()
            continue
        x.add_(1)
        with raises(ModelError, code="recompute.side_effects", field="plan.recompute"):
            loss.backward()


def test_a_tensor_that_differs_when_recomputed_is_an_error():
    class Hidden(nn.Module):
        """Overwrites a result in NumPy, which torch does not see."""

        def __init__(self):
            super().__init__()
            self.one = nn.Linear(8, 8)

        def forward(self, x):
            y = torch.tanh(self.one(x))
            y.detach().numpy()[...] *= 2
            return y.exp().sin()

    model = nn.Sequential(Hidden())
    undo = use_schedule(model, ["0"], schedule_of("~0", 1))
    with raises(ModelError, code="recompute.differs", field="plan.recompute"):
        model(torch.randn(4, 8)).sum().backward()
    undo()


def test_only_what_backward_needs_is_recomputed():
    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def backward_of(text):
        model = nn.Sequential(Bottleneck()).train()
        model[0].drop.p = 0.0
        undo = use_schedule(model, ["0"], schedule_of(text, 1))
        loss = model(torch.randn(IMAGES)).sum()
        counted = Counted()
        counted.names = []
        with counted:
            loss.backward()
        undo()
        return [counted.names.count(each) for each in ("convolution", "native_batch_norm", "relu")]

    # The second norm's result is needed by none, and the last activation is the block's result.
    assert backward_of("~0") == [0, 1, 1]
    assert backward_of("~0[0]") == [1, 1, 1]
    assert backward_of("~0[1]") == [1, 1, 1]
    assert backward_of("~0[]") == [2, 1, 1]


def test_operators_are_found_with_what_backward_needs():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 8))).train()
    (found,) = survey_operators(model, ["0"], lambda: model(torch.randn(4, 8)).sum().backward())
    assert [each.num_bytes for each in found.expensive] == [4 * 32 * 4, 4 * 32 * 4, 4 * 8 * 4]
    assert [each.is_random for each in found.expensive] == [False, True, False]
    assert [each.is_needed for each in found.expensive] == [True, True, False]
    assert 0 < sum(each.seconds for each in found.expensive) < found.forward_s
    assert found.more_s > 0
    assert type(model[0]) is nn.Sequential
