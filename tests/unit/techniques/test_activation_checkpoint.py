"""Blocks that recompute: the same loss, gradients, buffers and random numbers, whatever the schedule."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
import trimtab.plans.plan
from trimtab.core.block_costs import BlockCost, ExpensivePart
from trimtab.core.errors import UsageError
from trimtab.core.recompute_schedule import KeptBlock, RecomputedSegment, schedule_of
from trimtab.planner.recompute_cost import every_block, keep_all, predict, sqrt_segments
from trimtab.settings.recompute import use_plan
from trimtab.techniques.activation_checkpointing import use_schedule

L = 6
NESTED = (
    KeptBlock(0),
    RecomputedSegment((RecomputedSegment((KeptBlock(1),)), KeptBlock(2), KeptBlock(3))),
    KeptBlock(4),
    KeptBlock(5),
)
IN_PART = tuple(KeptBlock(index, in_part=index < 4) for index in range(L))
SCHEDULES = {
    "none": keep_all(L), "every_block": every_block(L), "sqrt": sqrt_segments(L), "nested": NESTED, "in_part": IN_PART,
    "mixed": (
        RecomputedSegment((KeptBlock(0), KeptBlock(1))), KeptBlock(2, in_part=True), RecomputedSegment((KeptBlock(3),)),
        KeptBlock(4), KeptBlock(5),
    ),
    "levels": (
        KeptBlock(0, in_part=True, results=()), KeptBlock(1, in_part=True, results=(0,)),
        KeptBlock(2, in_part=True, results=(1, 2)), KeptBlock(3, in_part=True, results=(0, 1, 2)),
        RecomputedSegment((KeptBlock(4),)), KeptBlock(5),
    ),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width, dropout, norm):
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)
        self.one, self.two, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        return x + scale * self.drop(self.two(torch.nn.functional.gelu(self.one(self.norm(x)))))


class Net(nn.Module):
    """A list that the model's own code runs."""

    def __init__(self, dropout=0.1, norm="batch", tied=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, dropout, norm) for _ in range(L))
        if tied:
            self.blocks[3].one.weight = self.blocks[1].one.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x, scale=1.0):
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x)


NAMES = [f"blocks.{index}" for index in range(L)]


def trained(model, schedule, *, autocast=False, steps=3):
    """Return losses, gradients, buffers and the random numbers left after a few steps."""
    undo = use_schedule(model, NAMES, schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [*losses, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers()), torch.rand(3)]
    undo()
    return found


def net(**how):
    torch.manual_seed(0)
    return Net(**how).train()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("norm", ["batch", "layer"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_is_the_same_whatever_is_recomputed(name, norm, autocast):
    plain, other = net(norm=norm), net(norm=norm)
    for ours, theirs in zip(
        trained(other, SCHEDULES[name], autocast=autocast), trained(plain, keep_all(L), autocast=autocast), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["every_block", "sqrt", "nested"])
def test_tied_weights_and_frozen_blocks(name):
    def made():
        model = net(tied=True)
        model.blocks[0].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        return model

    def steps(model, schedule):
        undo = use_schedule(model, NAMES, schedule)
        torch.manual_seed(1)
        nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 3, (16,))).backward()
        undo()
        return [p.grad for p in model.parameters()]

    for ours, theirs in zip(steps(made(), SCHEDULES[name]), steps(made(), keep_all(L)), strict=True):
        assert (ours is None) is (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


class Pairing(nn.Module):
    """Takes and returns a tuple, and a keyword."""

    def __init__(self):
        super().__init__()
        self.one, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, pair, *, scale):
        first, second = pair
        return self.drop(torch.tanh(self.one(first))) + scale * second, first


class Tupled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pairing() for _ in range(4))

    def forward(self, x):
        pair = x, x
        for block in self.blocks:
            pair = block(pair, scale=0.5)
        return pair[0] * pair[1]


class Twice(nn.Module):
    """Its blocks are called twice each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 0.2, "layer") for _ in range(4))

    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x


class Bound(nn.Module):
    """Its blocks share a weight with each other."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 0.2, "layer") for _ in range(4))
        self.blocks[3].one.weight = self.blocks[0].one.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("schedule", ["every_block", "~0-3", "~0-3[]", "(0) ~1[1] 2 (3)"])
@pytest.mark.parametrize("make", [Tupled, Twice, Bound])
def test_blocks_with_tuples_called_twice_or_tied_have_the_same_gradients(make, schedule, autocast):
    def steps(text):
        torch.manual_seed(0)
        model = make().train()
        plan = trimtab.Plan.fixed(16, recompute=text, precision="bf16" if autocast else "fp32")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        with trimtab.start(model, optimizer, plan) as run:
            for _ in range(3):
                run.train_step(run.window(torch.randn(16, 8)), lambda m, x: m(x).float().square().mean())
        return [*(p.detach().clone() for p in model.parameters()), torch.rand(3)]

    for ours, theirs in zip(steps(schedule), steps(None), strict=True):
        assert torch.equal(ours, theirs)


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SCHEDULES)
def test_matrix_products_run_as_often_as_a_schedule_says(name):
    """Forward two a block and run, backward four; of what is kept in part none again."""
    part = ExpensivePart(1, 1, 0.0)
    levels = tuple(dataclasses.replace(part, results=results) for results in ((), (0,), (1, 2), (0, 1, 2)))
    runs = predict([BlockCost(1.0, 1, 2, 2, 1, 1, parts=(part, *levels))] * L, SCHEDULES[name]).runs
    again = 2 + 1 + 1 if name == "levels" else 0  # products of the first three blocks
    model = net(dropout=0.0, norm="layer")
    for block in model.blocks:  # whose last operator needs its result: nothing of a block is left out when run again
        block.register_module("drop", nn.Tanh())
    undo = use_schedule(model, NAMES, SCHEDULES[name])
    x = torch.randn(4, 8, requires_grad=True)
    with Counted() as counted:
        model(x).sum().backward()
    undo()
    assert counted.count == 2 * sum(runs) + 4 * L + 3 + again


def test_names_state_and_class_stay_and_all_is_put_back():
    model = net()
    before = [(name, type(module)) for name, module in model.named_modules()]
    state = list(model.state_dict())
    undo = use_schedule(model, NAMES, NESTED)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in before]
    assert all(isinstance(module, kind) for (_, kind), module in zip(before, model.modules(), strict=True))
    assert list(model.state_dict()) == state
    undo()
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert not any("_trimtab_call" in vars(module) for module in model.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_plain_model_of_its_own_weights(copied):
    model = net(norm="layer", dropout=0.0)
    undo = use_schedule(model, NAMES, NESTED)
    other = copied(model)
    undo()
    assert {type(block) for block in other.blocks} == {Block}
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    x = torch.randn(4, 8)
    assert not torch.equal(other(x), model(x))
    assert torch.equal(other(x), torch.zeros(4, 3))


def test_nothing_is_recomputed_where_no_gradient_is_asked_for():
    model = net(norm="layer", dropout=0.0).eval()
    x = torch.randn(4, 8)
    expected = model(x)
    undo = use_schedule(model, NAMES, NESTED)
    with torch.no_grad(), Counted() as counted:
        assert torch.equal(model(x), expected)
    assert counted.count == 2 * L + 1
    undo()


def test_blocks_that_are_no_chain_are_an_error_and_no_wrong_gradient():
    class Skips(Net):
        def forward(self, x, scale=1.0):
            for block in self.blocks:
                x = block(x, scale=scale) + x
            return self.head(x)

    torch.manual_seed(0)
    model = Skips()
    undo = use_schedule(model, NAMES, SCHEDULES["sqrt"])
    with raises(UsageError, code="recompute.not_a_chain", field="plan.recompute"):
        model(torch.randn(4, 8))
    undo()
    undo = use_schedule(model, NAMES, every_block(L))  # single blocks need no chain
    model(torch.randn(4, 8)).sum().backward()
    undo()


def test_a_block_with_hooks_is_refused_in_a_segment_of_several():
    model = net()
    model.blocks[1].register_forward_hook(lambda *_: None)
    with raises(UsageError, code="recompute.hooks", field="plan.recompute"):
        use_schedule(model, NAMES, SCHEDULES["sqrt"])
    assert {type(block) for block in model.blocks} == {Block}
    use_schedule(model, NAMES, every_block(L))()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["every_block", "nested", "mixed"])
def test_a_compiled_model_recomputes_too(name):
    """As one graph, which keeps batch statistics by itself; without a code generator, so that it runs anywhere."""

    def steps(schedule):
        torch._dynamo.reset()
        model = net(dropout=0.0)
        undo = use_schedule(model, NAMES, schedule)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad()
            loss = nn.functional.cross_entropy(compiled(torch.randn(16, 8)), torch.randint(0, 3, (16,)))
            loss.backward()
        undo()
        return [loss.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]

    for ours, theirs in zip(steps(SCHEDULES[name]), steps(keep_all(L)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["every_block", "sqrt", "mixed"])
def test_the_run_computes_the_same_in_fp16_with_a_loss_scale(name):
    """Windows of two micro-batches; one that overflows is void, and recomputing changes nothing of that."""

    def trained(schedule):
        model = net(dropout=0.1)
        undo = use_schedule(model, NAMES, schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision = trimtab.plans.plan.Choice("fp16", "by hand", trimtab.plans.plan.Effect.ROUNDING, changed=True)
        plan = dataclasses.replace(trimtab.Plan.fixed(16, 8), precision=precision)
        torch.manual_seed(1)
        with trimtab.start(model, optimizer, plan) as run:
            for _ in range(4):
                batch = torch.randn(16, 8), torch.randint(0, 3, (16,))
                run.train_step(run.window(batch), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
            scale = run.loss_scale
        undo()
        return [torch.tensor(scale), *(p.detach().clone() for p in model.parameters()), *model.buffers()]

    for ours, theirs in zip(trained(SCHEDULES[name]), trained(keep_all(L)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"recompute": "0 (1)"}, "6 blocks"),
        ({"recompute": "0 (1)", "recompute_blocks": ("blocks.0", "other")}, "module other"),
    ],
)
def test_a_plan_of_another_model_is_refused_and_nothing_is_changed(values, named):
    model = net()
    blocks = values.pop("recompute_blocks", ())
    plan = dataclasses.replace(trimtab.Plan.fixed(16, **values), recompute_blocks=blocks)
    with raises(UsageError, code="recompute.blocks_differ", field="plan.recompute") as caught:
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    assert named in caught.value.problem
    assert {type(block) for block in model.blocks} == {Block}
    lone, plan = nn.Linear(2, 2), trimtab.Plan.fixed(4, recompute="every_block")
    with raises(UsageError, code="recompute.no_blocks", field="plan.recompute"):
        trimtab.start(lone, torch.optim.SGD(lone.parameters(), lr=0.1), plan)


@pytest.mark.parametrize("text", ["every_block", "~0 (1) 2-4 (5)", "0 (1-3) ((4) 5)"])
def test_a_run_recomputes_as_its_plan_says_and_puts_all_back(text):
    def trained(**values):
        model = net()
        plan = dataclasses.replace(trimtab.Plan.fixed(16, 8), recompute_blocks=tuple(NAMES))
        choice = trimtab.plans.plan.Choice(values.get("recompute"), "by hand", changed=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1)
        with trimtab.start(model, optimizer, dataclasses.replace(plan, recompute=choice)) as run:
            assert ({type(block) for block in model.blocks} != {Block}) is bool(values)
            for _ in range(3):
                batch = torch.randn(16, 8), torch.randint(0, 3, (16,))
                run.train_step(run.window(batch), lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]))
        assert {type(block) for block in model.blocks} == {Block}
        return [*(p.detach() for p in model.parameters()), *model.buffers()]

    for ours, theirs in zip(trained(recompute=text), trained(), strict=True):
        assert torch.equal(ours, theirs)


class Wrapped(nn.Module):
    """As DistributedDataParallel, and as a compiled model, hold what they wrap."""

    def __init__(self, model, name):
        super().__init__()
        self.add_module(name, model)

    def forward(self, x):
        (model,) = self.children()
        return model(x)


@pytest.mark.parametrize("blocks", [(), tuple(NAMES), tuple(f"module._orig_mod.{name}" for name in NAMES)])
def test_a_plan_finds_its_blocks_in_a_model_that_was_wrapped_since(blocks):
    model = net()
    wrapped = Wrapped(Wrapped(model, "_orig_mod"), "module")
    plan = trimtab.Plan.fixed(16).recomputing("(0) 1 (2) 3-5", blocks, "by hand")
    with trimtab.start(wrapped, torch.optim.SGD(model.parameters(), lr=0.1), plan) as run:
        swapped = [index for index, block in enumerate(model.blocks) if type(block) is not Block]
        run.train_step(run.window(torch.randn(16, 8)), lambda m, x: m(x).square().mean())
    assert swapped == [0, 2]
    assert {type(block) for block in model.blocks} == {Block}


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_plan_finds_its_blocks_in_a_compiled_model_that_wraps_another(prefix):
    """What torch compiles hands on the attributes of what it wraps, so that its name comes before any other."""
    model = net()
    compiled = torch.compile(Wrapped(model, "module"), backend="eager")
    plan = trimtab.Plan.fixed(16).recomputing("(0) 1-5", tuple(prefix + name for name in NAMES), "by hand")
    undo = use_plan(compiled, plan)
    assert [type(block) is not Block for block in model.blocks] == [True, *[False] * 5]
    undo()


class Beside(Net):
    """A model of blocks, and a part that is called as a wrapper calls what it wraps."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 3)


def test_a_part_called_module_is_no_wrapped_model():
    model = Beside()
    use_plan(model, trimtab.Plan.fixed(16, recompute="every_block"))
    assert all(type(block) is not Block for block in model.blocks)


class Ways(Net):
    """A model whose own code runs its blocks as it is told."""

    def __init__(self, run):
        torch.manual_seed(0)
        super().__init__(dropout=0.0, norm="layer")
        self.run = run

    def forward(self, x):
        return self.head(self.run(self.blocks, x))


def skipping(blocks, x):
    for index, block in enumerate(blocks):
        x = x if index == 1 else block(x)
    return x


def ending_early(blocks, x):
    for block in blocks[:2]:
        x = block(x)
    return x


def under_another_autocast(blocks, x):
    for index, block in enumerate(blocks):
        with torch.autocast("cpu", torch.bfloat16, enabled=index == 1):
            x = block(x)
    return x


@pytest.mark.parametrize("run", [skipping, ending_early, under_another_autocast])
def test_a_segment_that_is_not_run_as_one_raises_and_the_next_forward_is_none_the_worse(run):
    model = Ways(run)
    undo = use_schedule(model, NAMES, SCHEDULES["sqrt"])
    with raises(UsageError, code="recompute.not_a_chain", field="plan.recompute"):
        model(torch.randn(4, 8))
    model.run = lambda blocks, x: functools.reduce(lambda y, block: block(y), blocks, x)
    model(torch.randn(4, 8)).sum().backward()
    undo()


def test_blocks_without_gradients_run_by_themselves():
    """As in validation, where every layer's result may be looked at; and where only the first are frozen."""

    def half(blocks, x):
        with torch.no_grad():
            for block in blocks[:2]:
                x = block(x)
        for block in blocks[2:]:
            x = block(x)
        return x

    x = torch.randn(4, 8)
    found = []
    for schedule in (SCHEDULES["sqrt"], keep_all(L)):
        model = Ways(half)
        undo = use_schedule(model, NAMES, schedule)
        model(x).sum().backward()
        with torch.no_grad():
            each = [model.blocks[0](x), model.blocks[1](x)]
        undo()
        found.append([*each, *(torch.zeros(1) if p.grad is None else p.grad for p in model.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


class Normed(nn.Module):
    """Moves a buffer and then reads it, as spectral normalisation does; and takes what it is given by keyword."""

    def __init__(self):
        super().__init__()
        self.one = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.drop = nn.Dropout(0.2)

    def forward(self, *, x, debug=False):
        assert debug is True
        return x + self.drop(torch.tanh(self.one(x)))


@pytest.mark.parametrize("text", ["every_block", "~0-2"])
def test_a_buffer_that_is_moved_and_read_is_read_as_it_was(text):
    def grads(recompute):
        torch.manual_seed(0)
        model = nn.ModuleList(Normed() for _ in range(3)).train()
        undo = use_schedule(model, ("0", "1", "2"), schedule_of(text, 3) if recompute else keep_all(3))
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(4, 8)
            for block in model:
                x = block(x=x, debug=True)
            x.square().sum().backward()
        undo()
        return [*(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers()), torch.rand(2)]

    assert all(torch.equal(ours, theirs) for ours, theirs in zip(grads(True), grads(False), strict=True))


def test_a_second_backward_runs_again_too():
    """As for a gradient penalty."""

    def grads(schedule):
        model = net(norm="batch", dropout=0.1)
        undo = use_schedule(model, NAMES, schedule)
        torch.manual_seed(1)
        x = torch.randn(8, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        undo()
        return [*(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    assert all(torch.allclose(*both, atol=1e-6) for both in zip(grads(NESTED), grads(keep_all(L)), strict=True))


def test_what_cannot_be_swapped_is_refused_and_nothing_is_changed():
    model = net()
    model.blocks[5] = model.blocks[0]
    with raises(UsageError, code="recompute.block_repeated", field="plan.recompute"):
        use_schedule(model, NAMES, every_block(L + 1)[:L])
    model = net()
    model.blocks[2].forward = lambda x, scale=1.0: x
    with raises(UsageError, code="recompute.forward_replaced", field="plan.recompute"):
        use_schedule(model, NAMES, every_block(L))
    model = net()
    undo = use_schedule(model, NAMES, every_block(L))
    with raises(UsageError, code="recompute.in_use", field="plan.recompute"):
        use_schedule(model, NAMES, every_block(L))
    undo()
    assert {type(block) for block in model.blocks} == {Block}


def test_compiling_blocks_with_buffers_and_recomputing_them_is_refused():
    plan = trimtab.Plan.fixed(16, recompute="every_block", compiled=True)
    model = net(norm="batch")
    with raises(UsageError, code="recompute.compiled_buffers", field="plan.recompute"):
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    assert {type(block) for block in model.blocks} == {Block}


@pytest.mark.parametrize("schedule", ["every_block", "(0 1)"])
def test_gradients_per_sample_by_a_transform_are_those_of_a_plain_model(schedule):
    def gradients(model):
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, x):
            return torch.func.functional_call(model, weights, x[None]).square().mean()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, torch.ones(3, 4))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    expected = gradients(model)
    plan = trimtab.Plan.fixed(4).recomputing(schedule, ("0", "1"), "asked for")
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), plan):
        torch.testing.assert_close(gradients(model), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "in a wrapper"])
def test_a_scripted_model_is_refused(wrapped):
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model = nn.Sequential(model) if wrapped else model
    with raises(UsageError, code="recompute.scripted", field="plan.recompute"):
        trimtab.start(
            model, torch.optim.SGD(model.parameters(), lr=0.1), trimtab.Plan.fixed(4, recompute="every_block")
        )


def test_statistics_that_were_frozen_and_are_not_any_more_move_once_a_step():
    """Whether a module moves its buffers is looked at in each mode that it runs in."""

    def made():
        model = net(norm="batch")
        for block in model.blocks:
            block.norm.eval()
        return model

    def both(model, schedule):
        return [*trained(model, schedule), *trained(model.train(), schedule)]

    for ours, theirs in zip(both(made(), SCHEDULES["every_block"]), both(made(), keep_all(L)), strict=True):
        assert torch.equal(ours, theirs)
