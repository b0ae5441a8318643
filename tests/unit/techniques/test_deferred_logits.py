"""A model with a plain linear head trains the same with deferred logits, whatever it does with the logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.techniques.deferred_logits import DeferredLogits, defer_logits

WORDS, WIDTH, CHUNK = 32, 8, 5


class Plain(nn.Module):
    """Embedding, one layer and a linear head."""

    def __init__(self, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))


TOKENS = torch.randint(0, WORDS, (4, 7), generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(0, WORDS, (4, 7), generator=torch.Generator().manual_seed(2))


def nanogpt(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    ours = logits[..., :-1, :].contiguous().float()
    return F.cross_entropy(ours.view(-1, ours.shape[-1]), targets[..., 1:].reshape(-1))


def ignoring(logits: Tensor, targets: Tensor) -> Tensor:
    targets = targets.masked_fill(targets < WORDS // 2, 3)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=3)


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    total = F.cross_entropy(logits.reshape(-1, WORDS), targets.reshape(-1), reduction="sum")
    return total / targets.numel()


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, WORDS), targets.view(-1))


def transposed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


def permuted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.permute(0, 2, 1), targets)


DEFERRED = (nanogpt, shifted, ignoring, summed, smoothed, transposed, permuted)


def z_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nanogpt(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), weight=torch.linspace(0.5, 1, WORDS))


def each_token(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.view(-1, WORDS), targets.view(-1), reduction="none")
    return (losses * (targets.view(-1) > 3)).sum() / TARGETS.numel()


def capped(logits: Tensor, targets: Tensor) -> Tensor:
    return nanogpt(5 * torch.tanh(logits / 5), targets)


def changed_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.view(-1, WORDS)
    flat[:, 0] = -10
    return nanogpt(logits, targets)


def divided_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    logits /= 2
    return nanogpt(logits, targets)


def with_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    soft = F.one_hot(targets.view(-1), WORDS).float()
    return F.cross_entropy(logits.view(-1, WORDS), soft)


def by_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    return F.nll_loss(logits.log_softmax(-1).view(-1, WORDS), targets.view(-1))


class Squares(torch.autograd.Function):
    """An operation that the Python level of torch does not dispatch."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits.square().mean()

    @staticmethod
    def backward(ctx, slope):
        (logits,) = ctx.saved_tensors
        return slope * 2 * logits / logits.numel()


def own_function(logits: Tensor, targets: Tensor) -> Tensor:
    return nanogpt(logits, targets) + Squares.apply(logits)


def last_classes(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., : WORDS // 2].reshape(-1, WORDS // 2), targets.view(-1) % (WORDS // 2))


COMPUTED = (
    z_loss,
    weighted,
    each_token,
    capped,
    changed_in_place,
    divided_in_place,
    with_probabilities,
    by_log_softmax,
    own_function,
    last_classes,
)


def gradients(model: nn.Module, loss_fn, precision: str = "fp32") -> tuple[Tensor, list[Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_fn(model(TOKENS), TARGETS)
    loss.backward()
    return loss.detach(), [each.grad for each in model.parameters()]


def compare(model: nn.Module, loss_fn, precision: str = "fp32"):
    """Compare loss and gradients with and without deferral, and return the use of the head."""
    own, deferred = model, copy.deepcopy(model)
    use, undo = defer_logits(deferred.head, CHUNK)
    loss, slopes = gradients(own, loss_fn, precision)
    ours, found = gradients(deferred, loss_fn, precision)
    undo()
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if precision == "fp32" else {"rtol": 3e-2, "atol": 3e-3}
    torch.testing.assert_close(ours.float(), loss.float(), **tolerance)
    for a, b in zip(found, slopes, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    return use


@pytest.mark.parametrize("loss_fn", DEFERRED)
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"tied": True}], ids=["plain", "bias", "tied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_by_cross_entropy_never_compute_the_logits(loss_fn, options, precision):
    torch.manual_seed(0)
    use = compare(Plain(**options), loss_fn, precision)
    assert not use.computed_by
    assert use.tokens == (TARGETS[:, 1:] if loss_fn is shifted else TARGETS).numel()


@pytest.mark.parametrize("loss_fn", COMPUTED)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_losses_compute_the_logits_and_are_recorded(loss_fn, precision):
    torch.manual_seed(0)
    assert compare(Plain(bias=True), loss_fn, precision).computed_by


def test_logits_tell_their_shape_without_values_and_are_computed_when_read():
    model = Plain()
    use, undo = defer_logits(model.head, CHUNK)
    logits = model(TOKENS)
    assert isinstance(logits, DeferredLogits)
    assert (logits.shape, logits.dtype, logits.device.type) == ((4, 7, WORDS), torch.float32, "cpu")
    assert logits.requires_grad
    assert not use.computed_by
    best = logits.argmax(-1)
    undo()
    assert use.computed_by == {"argmax": None}
    assert torch.equal(best, model(TOKENS).argmax(-1))


def test_without_gradients_and_after_undo_the_head_is_unchanged():
    model = Plain()
    _, undo = defer_logits(model.head, CHUNK)
    with torch.no_grad():
        assert type(model(TOKENS)) is Tensor
    undo()
    assert type(model(TOKENS)) is Tensor
    assert not model.head._forward_pre_hooks


def test_a_loss_without_counted_tokens_is_nan_as_in_torch():
    model = Plain()
    _, undo = defer_logits(model.head, CHUNK)
    loss = F.cross_entropy(model(TOKENS).view(-1, WORDS), torch.full((28,), -100))
    undo()
    assert loss.isnan()
