"""A traced step holds what a counted one holds, and nothing of the user's is touched."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from raising import raises
from small_loops import class_loss as over_pixels
from small_loops import sgd
from torch import nn

from trimtab.core.errors import ModelError
from trimtab.losses import Summed
from trimtab.measure import storage_tracker
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.measure.memory_trace import trace_peaks, trace_step, trace_work
from trimtab.state.peak_memory import peak_bytes
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

pytestmark = pytest.mark.slow

SHAPE = GPTShape(vocab_size=64, context=32, num_layers=2, num_heads=2, width=32, dropout=0.1)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def sum_and_count(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Summed(loss, (batch[1] >= 0).sum())


def loop(optimizer="adamw"):
    torch.manual_seed(0)
    model = GPT(SHAPE).train()
    batch = tuple(torch.randint(0, 64, (8, 32)) for _ in range(2))
    return model, OPTIMIZERS[optimizer](model.parameters()), batch


def is_fake(tensor):
    return type(tensor).__name__ == "FakeTensor"


def half():
    return torch.autocast("cpu", torch.bfloat16)


def counted(model, optimizer, batch, autocast, num_micro_batches=1):
    def step():
        for _ in range(num_micro_batches):
            with autocast():
                loss = loss_fn(model, batch)
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def live():
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*model.parameters(), *model.buffers(), *batch, *(v for v in states if isinstance(v, torch.Tensor))]

    step()
    return peak_bytes(step, torch.device("cpu"), live)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("autocast", [contextlib.nullcontext, half])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_peak_is_the_counted_one(optimizer, autocast, num_micro_batches):
    model, made, batch = loop(optimizer)
    traced = trace_step(model, made, loss_fn, batch, autocast=autocast, num_micro_batches=num_micro_batches)
    assert traced == pytest.approx(counted(model, made, batch, autocast, num_micro_batches), rel=0.002)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_stepped_before_is_traced_as_one_that_did_not(optimizer):
    model, made, batch = loop(optimizer)
    before = trace_step(model, made, loss_fn, batch)
    counted(model, made, batch, contextlib.nullcontext)
    assert trace_step(model, made, loss_fn, batch) == before


def test_model_optimizer_and_generators_are_as_they_were():
    model, optimizer, batch = loop()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace_step(model, optimizer, loss_fn, batch)
    assert not optimizer.state
    assert all(p.grad is None and not is_fake(p) for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_without_memory_has_the_same_trace():
    model, optimizer, batch = loop()
    with FakeTensors():
        fake = GPT(SHAPE).train()
        fake_optimizer = OPTIMIZERS["adamw"](fake.parameters())
        tokens = tuple(torch.randint(0, 64, (8, 32)) for _ in range(2))
    assert all(map(is_fake, fake.parameters()))
    assert trace_step(fake, fake_optimizer, loss_fn, tokens) == trace_step(model, optimizer, loss_fn, batch)


def test_losses_of_sums_are_traced():
    model, optimizer, batch = loop()
    found = trace_step(model, optimizer, sum_and_count, batch)
    assert found == pytest.approx(trace_step(model, optimizer, loss_fn, batch), rel=0.01)


def test_a_step_that_looks_at_a_value_cannot_be_traced():
    model, optimizer, batch = loop()

    def looking(model, batch):
        loss = loss_fn(model, batch)
        return loss if loss.item() > 0 else 2 * loss

    with raises(ModelError, code="model.not_traceable", field="model"):
        trace_step(model, optimizer, looking, batch)
    assert all(not is_fake(p) for p in model.parameters())


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(True), nn.Conv2d(16, 32, 1, 2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(2))
    return (
        model,
        sgd(model),
        (torch.randn(4, 3, 24, 24), torch.randint(0, 32, (4, 144))),
    )


@pytest.mark.parametrize(("mode", "kind"), [("tf32", "tf32"), ("ieee", "fp32")])
def test_convolutions_say_what_torch_would_run_them_in(monkeypatch, mode, kind):
    """Torch's default rounds them to TF32 on CUDA, in a step whose products are in fp32."""
    monkeypatch.setattr(storage_tracker, "convolves_in_tf32", lambda: mode == "tf32")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    work = trace_work(model, sgd(model), loss, batch)
    of_conv = 2 * 2 * 8 * 36 * 3 * 9  # two FLOP a product, and two rows
    assert [flops for found, flops, _ in work["forward"] if found == kind and flops == of_conv] == [of_conv]
    assert {found for found, flops, _ in work["forward"] if flops} == {kind, "fp32"}
    assert {found for found, flops, _ in work["backward"] if flops} == {kind, "fp32"}


def recurrent():
    torch.manual_seed(0)
    model = nn.LSTM(16, 32, batch_first=True)
    return model, sgd(model), (torch.randn(8, 20, 16),)


def squares(model, batch):
    return model(batch[0])[0].square().mean()


@pytest.mark.parametrize(("make", "loss", "error"), [(convolutions, over_pixels, 0.01), (recurrent, squares, 0.05)])
def test_what_operators_take_for_themselves_is_counted_where_asked_for(make, loss, error):
    model, optimizer, batch = make()
    without, with_it = (trace_step(model, optimizer, loss, batch, counts_scratch=counts) for counts in (False, True))

    def step():
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    found = peak_bytes(step, torch.device("cpu"), lambda: [*model.parameters(), *model.buffers(), *batch])
    assert without < found
    assert abs(with_it / found - 1) < error


def labelled(memory_format):
    """Return a step whose peak is in the softmax over the classes of each pixel."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 32, 1)).to(memory_format=memory_format)
    images = torch.randn(8, 3, 32, 32).contiguous(memory_format=memory_format)
    return model, sgd(model), (images, torch.randint(0, 32, (8, 32, 32)))


def over_labels(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


def perceptron(_):
    """Return a step whose peak is in a product, which reorders what it is given in half precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512, bias=False))
    return model, sgd(model), (torch.randn(32, 512),)


class Written(nn.Module):
    """Attention written out, of heads that lie between each other."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(48, 3 * 48)

    def forward(self, x):
        queries, keys, values = self.features(x).unflatten(-1, (3, 4, 12)).permute(2, 1, 3, 0, 4)  # (4, T, B, 12) each
        scores = torch.einsum("htbd,hsbd->bhts", queries, keys).softmax(-1)
        return torch.einsum("bhts,hsbd->bthd", scores, values)


def attention(_):
    """Return a step whose peak is in a product of batches of matrices."""
    torch.manual_seed(0)
    model = Written()
    return model, sgd(model), (torch.randn(8, 96, 48),)


def squares_of_all(model, batch):
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("autocast", [contextlib.nullcontext, half])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("make", "loss"), [(labelled, over_labels), (perceptron, squares_of_all), (attention, squares_of_all)]
)
def test_what_is_copied_to_be_read_otherwise_is_counted_too(make, loss, memory_format, autocast):
    model, optimizer, batch = make(memory_format)
    told = trace_step(model, optimizer, loss, batch, autocast=autocast, counts_scratch=True)

    def step():
        with autocast():
            result = loss(model, batch)
        result.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    found = peak_bytes(step, torch.device("cpu"), lambda: [*model.parameters(), *model.buffers(), *batch])
    assert told == pytest.approx(found, rel=0.005)


def test_an_operator_that_cannot_be_run_cannot_be_traced_with_what_it_takes(monkeypatch):
    def fails(calls):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("trimtab.measure.memory_trace.measure_calls", fails)
    model, optimizer, batch = loop()
    with raises(ModelError, code="model.not_traceable", field="model"):
        trace_step(model, optimizer, loss_fn, batch, counts_scratch=True)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_two_sizes_tell_the_peak_of_every_other(num_micro_batches):
    model, optimizer, batch = loop()

    def rows(number):
        return tuple(column[:number] for column in batch)

    found = trace_peaks(model, optimizer, loss_fn, (rows(2), rows(3)), (2, 3))[0][num_micro_batches > 1]
    for number in (4, 5, 8):
        traced = trace_step(model, optimizer, loss_fn, rows(number), num_micro_batches=num_micro_batches)
        assert found.peak_bytes(number) == pytest.approx(traced, rel=1e-3)


@pytest.mark.parametrize("chunk_rows", [16, 48])
def test_a_loss_in_more_chunks_at_another_size_is_told_too(chunk_rows):
    torch.manual_seed(0)
    model = GPT(GPTShape(vocab_size=4096, context=32, num_layers=1, num_heads=2, width=32)).train()
    model.head.chunk_rows = chunk_rows
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    rows = lambda number: (torch.randint(0, 4096, (number, 33)),)  # noqa: E731
    (found,) = trace_peaks(model, optimizer, next_token_loss, (rows(4), rows(8)), (4, 8))
    for number, k in itertools.product((3, 6, 8, 16), (1, 2)):
        traced = trace_step(model, optimizer, next_token_loss, rows(number), num_micro_batches=k)
        assert (found.whole if k == 1 else found.sliced).peak_bytes(number) == pytest.approx(traced, rel=0.01)


class Joined(nn.Module):
    """A weight made of several, whose gradients lie in one storage; before it a larger one, whose comes after them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 1024)
        self.parts = nn.ParameterList(torch.randn(8, 1024) for _ in range(4))

    def forward(self, x):
        return nn.functional.linear(self.first(x).tanh(), torch.cat(tuple(self.parts)))


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3])
def test_gradients_that_share_a_storage_go_once(num_micro_batches):
    torch.manual_seed(0)
    model = Joined()
    optimizer = sgd(model)
    mean = lambda model, batch: model(batch).mean()  # noqa: E731
    rows = lambda number: torch.randn(number, 128)  # noqa: E731
    found = trace_peaks(model, optimizer, mean, (rows(4), rows(8)), (4, 8))[0][num_micro_batches > 1]
    for number in (4, 8, 64):
        traced = trace_step(model, optimizer, mean, rows(number), num_micro_batches=num_micro_batches)
        assert found.peak_bytes(number) == pytest.approx(traced, rel=0.001)
