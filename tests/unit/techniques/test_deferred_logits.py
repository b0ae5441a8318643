"""A model with a plain linear head trains the same with deferred logits, whatever it does with the logits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from raising import raises
from torch import Tensor, nn
from torch.nn import functional as F

from trimtab.core.errors import LossError
from trimtab.nn import chunked_cross_entropy
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


def accuracy_first(logits: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        logits.argmax(-1)
    return nanogpt(logits, targets) + 1e-3 * logits.square().mean()


def own_function_first(logits: Tensor, targets: Tensor) -> Tensor:
    return Squares.apply(logits) + nanogpt(logits, targets)


def copy_changed(logits: Tensor, targets: Tensor) -> Tensor:
    copied = logits[:, :-1].contiguous().float()
    copied[..., 7] = -1e4
    copied.div_(2)
    return F.cross_entropy(copied.flatten(0, 1), targets[:, 1:].reshape(-1))


def hooked(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    flat.register_hook(lambda slope: slope / 10)
    return F.cross_entropy(flat, targets.flatten())


def view_without_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        part = logits[:, :-1]
    return nanogpt(part.contiguous(), targets[:, 1:].contiguous()) + nanogpt(logits, targets)


def few_bits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(torch.uint8))


COMPUTED = (
    accuracy_first,
    own_function_first,
    copy_changed,
    hooked,
    view_without_gradient,
    few_bits,
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


def test_a_loss_without_counted_tokens_is_nan_with_gradients_of_zero_as_in_torch():
    model = Plain()
    _, undo = defer_logits(model.head, CHUNK)
    loss = F.cross_entropy(model(TOKENS).view(-1, WORDS), torch.full((28,), -100))
    undo()
    assert loss.isnan()
    loss.backward()
    assert not any(each.grad.any() for each in model.parameters())


@pytest.mark.parametrize("change", ["weight", "hidden"])
def test_logits_that_are_read_after_a_change_of_their_operands_are_refused(change):
    model = Plain()
    _, undo = defer_logits(model.head, CHUNK)
    hidden = torch.randn(3, WIDTH)
    logits = model.head(hidden)
    with torch.no_grad():
        (model.head.weight if change == "weight" else hidden).mul_(2)
    with raises(LossError, code="loss_chunk.read_late"):
        logits.argmax(-1)
    with raises(LossError, code="loss_chunk.read_late"):
        F.cross_entropy(logits, torch.zeros(3, dtype=torch.int64))
    undo()


def test_detached_logits_keep_their_values_after_a_step():
    model = Plain()
    expected = model(TOKENS)
    _, undo = defer_logits(model.head, CHUNK)
    kept = model(TOKENS).detach()
    undo()
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert torch.equal(kept, expected)
    assert not kept.requires_grad


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_not_deferred(duplicate):
    model = Plain()
    _, undo = defer_logits(model.head, CHUNK)
    copied = duplicate(model)
    undo()
    assert type(copied(TOKENS)) is Tensor


def test_a_head_with_a_full_backward_hook_is_not_deferred():
    model, seen = Plain(), []
    model.head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(inputs[0]))
    _, undo = defer_logits(model.head, CHUNK)
    nanogpt(model(TOKENS), TARGETS).backward()
    undo()
    assert seen[0] is not None


def test_a_model_in_double_precision_stays_so_under_autocast():
    model = Plain().double()
    _, undo = defer_logits(model.head, CHUNK)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = torch.randn(28, WIDTH, dtype=torch.float64)
        loss = F.cross_entropy(model.head(hidden), TARGETS.flatten())
        undo()
        expected = F.cross_entropy(model.head(hidden), TARGETS.flatten())
    assert abs(loss.item() - expected.item()) < 1e-6


@pytest.mark.parametrize("chunk_rows", [64, 1024])
def test_many_tokens_in_bf16_lose_no_digits_of_the_sum(chunk_rows):
    torch.manual_seed(0)
    features, weight = torch.randn(16384, 32), torch.randn(WORDS, 32)
    targets = torch.randint(WORDS, (16384,))
    exact = F.cross_entropy(features @ weight.t(), targets, reduction="sum")
    half = features.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    total = chunked_cross_entropy(*half, None, targets, chunk_rows)
    total.backward()
    assert abs(total.item() / exact.item() - 1) < 2e-3
    plain = weight.clone().requires_grad_()
    F.cross_entropy(features @ plain.t(), targets, reduction="sum").backward()
    assert (half[1].grad - plain.grad).norm() < 1e-2 * plain.grad.norm()
