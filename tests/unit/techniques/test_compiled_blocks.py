"""A model compiled by block: each kind of block is compiled once, training is the same, and the model is restored."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from raising import raises
from torch import nn
from torch._dynamo.utils import counters

import trimtab
from trimtab.core.choice import COMPILED_BLOCKS
from trimtab.core.errors import ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.techniques.compiled_blocks import repeated_blocks
from trimtab.techniques.compiled_call import CompiledCall, is_compiled

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


class Block(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(width, inner), nn.Dropout(0.3), nn.Linear(inner, width)

    def forward(self, x):
        return x + self.outer(self.drop(torch.nn.functional.gelu(self.inner(x))))


class Model(nn.Module):
    def __init__(self, inners=(8, 8, 8, 12)):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block(6, inner) for inner in inners)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        x = self.first(x)  # So that the inputs of all blocks need a gradient.
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loop(**how):
    torch.manual_seed(0)
    model = Model(**how)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)


def loss_fn(model, batch):
    return model(batch).square().mean()


def train(plan, steps=3):
    model, optimizer, batch = loop()
    torch.manual_seed(1)
    with trimtab.start(model, optimizer, plan) as run:
        losses = [run.train_step(run.window(batch), loss_fn) for _ in range(steps)]
    return torch.stack(losses), model


@needs_compiler
@pytest.mark.parametrize("recompute", [None, "every_block", "(0-1) ~2 3"])
def test_training_is_the_same_with_and_without_recomputation(recompute):
    """Dropout masks are the same, and a recomputed block draws its mask again."""
    plan = Plan.fixed(4, compiled=COMPILED_BLOCKS)
    blocks = tuple(f"blocks.{index}" for index in range(4))
    ours, model = train(plan if recompute is None else plan.recomputing(recompute, blocks, "asked for"))
    plain, other = train(Plan.fixed(4))
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def saved_bytes(plan):
    """Return the bytes that autograd saves in a forward of the second step."""
    model, optimizer, _ = loop(inners=(24, 24, 24, 24))
    batch, seen = torch.randn(64, 6), {}

    def keep(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    def watched(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return loss_fn(model, batch)

    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(batch), loss_fn)
        run.train_step(run.window(batch), watched)
    return sum(seen.values())


@needs_compiler
@pytest.mark.parametrize("compiled", [True, COMPILED_BLOCKS])
def test_compiled_blocks_are_recomputed(compiled):
    plan, blocks = Plan.fixed(64, compiled=compiled), tuple(f"blocks.{index}" for index in range(4))
    kept = saved_bytes(plan)
    assert saved_bytes(plan.recomputing("every_block", blocks, "asked for")) < 0.6 * kept


@needs_compiler
def test_each_kind_of_block_is_compiled_once_however_often_it_is_started():
    graphs = []
    for _ in range(3):
        torch._dynamo.reset() if not graphs else None
        before = counters["stats"]["unique_graphs"]
        train(Plan.fixed(4, compiled=COMPILED_BLOCKS), steps=1)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [2, 0, 0]


@needs_compiler
def test_layers_of_transformers_are_one_kind():
    """Each layer fills its own part of the cache of keys and values, which training does not need."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(20, (2, 8))
    before = counters["stats"]["unique_graphs"]
    with trimtab.start(model, optimizer, Plan.fixed(2, compiled=COMPILED_BLOCKS)) as run:
        run.train_step(run.window(batch), lambda model, ids: model(input_ids=ids, labels=ids).loss)
        assert model.config.use_cache is True  # Saved with the model, and used by generate().
        model.generate(batch[:, :4], max_new_tokens=2, pad_token_id=0)
    assert counters["stats"]["unique_graphs"] - before == 1


@needs_compiler
def test_a_compiled_model_of_transformers_is_recomputed_in_compiled_code():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(20, (2, 8))
    plan = Plan.fixed(2, compiled=True).recomputing("every_block", ("transformer.h.0", "transformer.h.1"), "asked for")
    before = counters["unimplemented"].copy()
    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(batch), lambda model, ids: model(input_ids=ids, labels=ids).loss)
    assert not [reason for reason in counters["unimplemented"] - before if "side effect" in reason]


@needs_compiler
@pytest.mark.parametrize("when", ["before the run", "in the run", "inside a block"])
def test_a_hook_of_a_block_is_called(when):
    """torch reuses the code of blocks without hooks for blocks with hooks."""

    def halve(module, args, result):
        calls.append(module)
        return result * 0.5

    trained = []
    for plan in (Plan.fixed(4, compiled=COMPILED_BLOCKS), Plan.fixed(4)):
        model, optimizer, batch = loop()
        hooked, calls = model.blocks[1].inner if when == "inside a block" else model.blocks[1], []
        if when == "before the run":
            hooked.register_forward_hook(halve)
        torch.manual_seed(1)
        with trimtab.start(model, optimizer, plan) as run:
            run.train_step(run.window(batch), loss_fn)
            if when != "before the run":
                hooked.register_forward_hook(halve)
            run.train_step(run.window(batch), loss_fn)
        assert calls
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained)


def test_blocks_of_an_encoder_and_of_a_decoder_are_found_inside_of_them():
    model = nn.ModuleDict({"encoder": Model((8, 8)), "decoder": Model((12, 12, 12))})
    assert sorted(map(len, repeated_blocks(model).values())) == [2, 3]
    assert not repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


def test_the_model_is_restored():
    model, optimizer, _ = loop()
    before = [dict(vars(module)) for module in model.modules()]
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=COMPILED_BLOCKS)):
        assert all(type(block) is not Block and isinstance(block, Block) for block in model.blocks)
        copied = copy.deepcopy(model)
        assert not is_compiled(copied)
        assert all(type(block) is Block for block in copied.blocks)
    assert not is_compiled(model)
    assert all(type(block) is Block for block in model.blocks)
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in before]


def test_blocks_that_another_run_compiles_are_refused():
    model, optimizer, _ = loop()
    other = Model()
    other.blocks = model.blocks
    plan = Plan.fixed(4, compiled=COMPILED_BLOCKS)
    with trimtab.start(model, optimizer, plan):
        with raises(ValueGivenError, code="compiled.twice", field="plan.compiled"):
            trimtab.start(other, torch.optim.SGD(other.parameters(), lr=0.1), plan)
        assert is_compiled(other)
    assert not is_compiled(other)


def test_a_class_that_registers_its_subclasses_is_left_alone():
    registered = {}

    class Registered(Block):
        def __init_subclass__(cls, *, tag):
            registered[tag] = cls

    class Layer(Registered, tag="layer"):
        pass

    model, _, _ = loop()
    model.blocks = nn.ModuleList(Layer(6, 8) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=COMPILED_BLOCKS)):
        assert all(type(block) is not Layer and isinstance(block, Layer) for block in model.blocks)
    assert registered == {"layer": Layer}


@needs_compiler
def test_blocks_run_in_eager_mode_while_compilation_is_off():
    model, _, batch = loop()
    torch._dynamo.reset()
    call = CompiledCall(model, lambda: None, COMPILED_BLOCKS)
    before = counters["stats"]["unique_graphs"]
    call.is_on = False
    model(batch)
    assert counters["stats"]["unique_graphs"] == before
    call.is_on = True
    model(batch)
    assert counters["stats"]["unique_graphs"] > before
    call.undo()


def test_a_block_with_a_forward_on_the_instance_is_left_to_the_user():
    model, _, _ = loop(inners=(8, 8, 8))
    model.blocks[1].forward = model.blocks[1].forward
    assert [len(group) for group in repeated_blocks(model).values()] == [2]


def test_a_model_without_equal_blocks_is_refused():
    model, optimizer, _ = loop(inners=(8, 12))
    assert not repeated_blocks(model)
    with raises(ValueGivenError, code="compiled.no_blocks", field="plan.compiled"):
        trimtab.start(model, optimizer, Plan.fixed(4, compiled=COMPILED_BLOCKS))
    assert not is_compiled(model)


def test_several_ranks_are_allowed():
    """`tests/distributed/test_compiled_ranks.py` trains on ranks."""
    assert Plan.fixed(4, compiled=COMPILED_BLOCKS, num_ranks=2, zero_stage=0).compiled.value == COMPILED_BLOCKS
