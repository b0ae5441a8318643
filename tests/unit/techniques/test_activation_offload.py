"""Activation offload on a CPU, with copies that take effect late: bitwise results, order of copies, memory, undo."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from late_copies import LateCopies
from raising import raises
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.core.recompute_schedule import schedule_of
from trimtab.measure.block_memory import trace_stages
from trimtab.measure.blocks import blocks_of
from trimtab.plans.plan import Plan
from trimtab.techniques import activation_offload
from trimtab.techniques.activation_checkpointing import use_schedule
from trimtab.techniques.activation_offload import require_offload, use_offload

late_or_not = pytest.mark.parametrize("is_late", [True, False], ids=["late", "at_once"])


class Attention(nn.Module):
    """With views of one storage, dropout, and a mask that all blocks save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = F.dropout((q @ k.transpose(1, 2) * mask.exp()).softmax(-1), 0.2)
        return x + self.out(weights @ v)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Attention() for _ in range(4)), nn.Linear(8, 3)

    def forward(self, x):
        mask = torch.linspace(0, 1, 16, requires_grad=True).reshape(4, 4).exp()
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def conv_model() -> nn.Module:
    def block():
        return nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))

    return nn.Sequential(*(block() for _ in range(4))).to(memory_format=torch.channels_last)


def chain(width: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))


MODELS = {
    "attention": (Decoder, (2, 4, 8)),
    "convolution": (conv_model, (2, 3, 5, 5)),
    "chain": (chain, (3, 4)),
}


def trained(make, shape, num_blocks, transfers=None, *, bf16=False):
    """Return the gradients of three steps of two micro-batches, and the buffers allocated after each step."""
    torch.manual_seed(0)
    model, found, buffers = make(), [], []
    undo = use_offload(model, num_blocks, transfers, least_bytes=1) if transfers else lambda: None
    for _ in range(3):
        model.zero_grad()
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(torch.randn(shape)).square().mean()
            loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        found.append([b.clone() for b in model.buffers()])
        buffers.append(transfers.num_buffers if transfers else 0)
    undo()
    return found, buffers


@late_or_not
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bitwise_the_same_and_buffers_are_reused(name, num_blocks, is_late):
    transfers = LateCopies(is_late=is_late)
    make, shape = MODELS[name]
    found, buffers = trained(make, shape, num_blocks, transfers)
    expected, _ = trained(make, shape, num_blocks)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert transfers.errors == []
    assert buffers[0] == buffers[-1] > 0


def test_gradients_are_bitwise_the_same_under_autocast():
    transfers = LateCopies()
    found, _ = trained(Decoder, (2, 4, 8), 3, transfers, bf16=True)
    torch.testing.assert_close(found, trained(Decoder, (2, 4, 8), 3, bf16=True)[0], rtol=0, atol=0)
    assert transfers.errors == []


def test_copies_run_beside_the_next_block_and_waits_come_as_late_as_possible():
    model, transfers = chain(), LateCopies()
    undo = use_offload(model, 2, transfers, least_bytes=1)
    log = transfers.log
    for number, block in enumerate(model):

        def ended(_, args, result, number=number):
            log.append(f"end {number}")
            result.register_hook(lambda _: log.append(f"backward {number}"))

        block.register_forward_hook(ended)
    model(torch.randn(3, 4)).sum().backward()
    # A linear layer saves its input, and tanh its output, which is the next block's input: one copy of both.
    forward = ["to_host 0", "to_host 1", "end 0", "to_host 2", "wait 0", "wait 1", "end 1", "wait 2", "end 2", "end 3"]
    backward = ["backward 3", "to_device 3", "to_device 4", "backward 2", "to_device 5", "backward 1"]
    assert log == [*forward, *backward, "wait 3", "wait 4", "backward 0", "wait 5"]
    undo()


@pytest.mark.parametrize("name", MODELS)
def test_the_traced_bytes_of_the_blocks_are_the_bytes_that_are_copied(name):
    make, shape = MODELS[name]
    model, batch, transfers = make(), torch.randn(shape), LateCopies()

    def loss_fn(model, batch):
        return model(batch).square().mean()

    blocks = blocks_of(model, loss_fn, batch)
    stages = trace_stages(model, loss_fn, batch, blocks, drops=False, twice=False).first.stages
    use_offload(model, 3, transfers, least_bytes=1)
    loss_fn(model, batch).backward()
    # The trace counts the batch as held before the first block.
    assert transfers.num_bytes == sum(stage.saved_bytes for stage in stages[:3]) + batch.nbytes * (name != "attention")


def test_small_storages_parameters_and_later_blocks_stay_on_the_device():
    model, transfers = chain(width=64), LateCopies()
    undo = use_offload(model, 1, transfers, least_bytes=64 * 4 * 4)
    model(torch.randn(3, 64)).sum().backward()
    assert transfers.log == []
    model(torch.randn(4, 64)).sum().backward()
    assert [each.split()[0] for each in transfers.log].count("to_host") == 2  # the input and the output of the block
    undo()


def test_a_slice_of_a_large_storage_stays_on_the_device():
    model, transfers = chain(), LateCopies()
    use_offload(model, 1, transfers, least_bytes=1)
    model(torch.randn(1000, 4)[:3])
    assert [each.split()[0] for each in transfers.log].count("to_host") == 1  # the output


@late_or_not
def test_a_forward_without_backward_frees_nothing_early_and_gives_buffers_back(is_late):
    model, transfers = chain(), LateCopies(is_late=is_late)
    use_offload(model, 3, transfers, least_bytes=1)
    for _ in range(3):
        loss = model(torch.randn(3, 4)).sum()
        del loss
    count = transfers.num_buffers
    loss = model(torch.randn(3, 4)).sum()
    assert transfers.num_buffers == count == 4
    model[0](torch.randn(3, 4))  # Its copies have not ended when its graph is freed.
    loss.backward()
    assert transfers.errors == []


def test_several_backwards_and_forwards_of_a_graph():
    torch.manual_seed(0)
    model, transfers, x = chain(), LateCopies(), torch.randn(3, 4, requires_grad=True)

    def gradients():
        first, second = model(x).square().sum(), model(2 * x).square().sum()
        (slope,) = torch.autograd.grad(first, x, create_graph=True)
        loss = second + slope.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found = [each.grad.clone() for each in (x, *model.parameters())]
        model.zero_grad()
        x.grad = None
        return found

    expected = gradients()
    use_offload(model, 3, transfers, least_bytes=1)
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    assert transfers.errors == []


class Changes(nn.Module):
    """A block that changes its input after a layer has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            x.mul_(2)
        return y.tanh()


@pytest.mark.parametrize("least_bytes", [1, 2**16], ids=["moved", "kept"])
def test_a_saved_tensor_that_changes_in_place_is_an_error_as_without_offload(least_bytes):
    model = nn.Sequential(Changes(), *chain())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(3, 4)).sum().backward()
    use_offload(model, 1, LateCopies(), least_bytes=least_bytes)
    with raises(ModelError, code="offload.changed_in_place", field="plan.offload"):
        model(torch.randn(3, 4)).sum().backward()


class SavesAgain(Changes):
    """A block that saves its input, changes it, and saves it again; backward needs the second alone."""

    def forward(self, x):
        unused = x.tanh() * self.layer(x)
        with torch.no_grad():
            x.mul_(2)
        return self.layer(x) + 0 * unused.detach()


@late_or_not
def test_a_storage_that_changed_is_moved_again(is_late):
    torch.manual_seed(0)
    model, transfers, x = nn.Sequential(SavesAgain(), *chain()), LateCopies(is_late=is_late), torch.randn(3, 4)
    (model(x.clone()) ** 2).sum().backward()
    expected = model[0].layer.weight.grad.clone()
    model.zero_grad()
    use_offload(model, 1, transfers, least_bytes=1)
    (model(x.clone()) ** 2).sum().backward()
    assert torch.equal(model[0].layer.weight.grad, expected)
    assert transfers.errors == []


def test_a_weight_that_changes_before_backward_is_an_error():
    model = chain()
    use_offload(model, 3, LateCopies(), least_bytes=1)
    loss = model(torch.randn(3, 4)).sum()
    with torch.no_grad():
        model[1][0].weight.mul_(2)
    with raises(ModelError, code="offload.changed_in_place"):
        loss.backward()


def test_evaluation_and_function_transforms_move_nothing():
    model, transfers = chain(), LateCopies()
    use_offload(model, 3, transfers, least_bytes=1)
    with torch.no_grad():
        model(torch.randn(3, 4))
    torch.func.grad(lambda x: model(x).sum())(torch.randn(3, 4))
    assert transfers.log == []


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.layer(x)
        raise KeyboardInterrupt


def test_a_forward_that_raises_leaves_no_hooks():
    model, transfers = nn.Sequential(Fails(), Fails()), LateCopies()
    use_offload(model, 1, transfers, least_bytes=1)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(3, 4))
    count = len(transfers.log)
    nn.Linear(4, 4)(torch.randn(3, 4)).sum().backward()
    assert len(transfers.log) == count
    assert transfers.errors == []


def test_undo_restores_the_blocks_and_copies_are_plain():
    model, transfers = chain(), LateCopies()
    kinds, names = [type(each) for each in model], list(model.state_dict())
    undo = use_offload(model, 2, transfers, least_bytes=1)
    assert list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(each) for each in other] == kinds
    loss = model(torch.randn(3, 4)).sum()
    undo()
    loss.backward()  # A graph from before the undo keeps its copies.
    log = list(transfers.log)
    model(torch.randn(3, 4)).sum().backward()
    assert [type(each) for each in model] == kinds
    assert not any("_trimtab_call" in vars(each) for each in model)
    assert transfers.log == log


def replaced() -> nn.Module:
    model = chain()
    use_schedule(model, ["1"], schedule_of("(0)", 1))
    return model


def with_own_forward() -> nn.Module:
    model = chain()
    model[0].forward = lambda x: x
    return model


def compiled() -> nn.Module:
    model = chain()
    model[0].compile()
    return model


@pytest.mark.parametrize(
    ("model", "num_blocks", "code"),
    [
        (chain, 4, "offload.blocks"),
        (lambda: nn.Linear(2, 2), 1, "offload.blocks"),
        (replaced, 1, "offload.forward_replaced"),
        (with_own_forward, 1, "offload.forward_replaced"),
        (compiled, 1, "offload.compiled"),
        (lambda: torch.jit.script(chain()), 1, "offload.compiled"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_cannot_offload_are_refused(model, num_blocks, code):
    with raises(ModelError, code=code, field="plan.offload"):
        require_offload(model(), num_blocks)


def test_a_cpu_is_refused_before_anything_changes():
    model = chain()
    kinds = [type(each) for each in model]
    with raises(ValueGivenError, code="offload.no_cuda", field="plan.offload"):
        trimtab.start(model, torch.optim.SGD(model.parameters(), 0.1), Plan.fixed(3, offload=2))
    assert [type(each) for each in model] == kinds


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"recompute": "every_block"}, "offload.recompute"),
        ({"compiled": "cuda_graphs"}, "offload.compiled"),
        ({"compiled": "compiled_blocks"}, "offload.compiled"),
        ({"zero_stage": 2}, "offload.zero_stage"),
        ({"zero_stage": 3}, "offload.zero_stage"),
    ],
)
def test_settings_that_decide_what_is_saved_are_refused(other, code):
    with raises(ValueGivenError, code=code, field="plan.offload"):
        Plan.fixed(8, offload=2, **other)


def test_a_plan_moves_the_first_blocks(monkeypatch):
    torch.manual_seed(0)
    model, transfers = chain(128), LateCopies()
    monkeypatch.setattr(activation_offload, "CudaTransfers", lambda device: transfers)
    monkeypatch.setattr(activation_offload, "require_cuda", lambda device: None)
    with trimtab.start(model, torch.optim.SGD(model.parameters(), 0.1), Plan.fixed(256, offload=2)) as run:
        run.train_step(run.window(torch.randn(256, 128)), lambda model, rows: model(rows).square().mean())
    assert [each.split()[0] for each in transfers.log].count("to_device") == 3
    assert transfers.errors == []


def test_the_pretended_device_finds_memory_that_is_freed_or_read_early():
    transfers = LateCopies()
    source, host = torch.ones(4, dtype=torch.uint8), transfers.new_buffer(4)
    event = transfers.to_host(source, host)
    back, other = transfers.to_device(host, 4)
    assert back.tolist() == [255] * 4
    del source
    assert len(transfers.errors) == 1
    transfers.wait(event)
    transfers.wait(other)
    del back
    assert len(transfers.errors) == 1
