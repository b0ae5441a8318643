"""When a call is launched, and when it runs as it would without: by a stand-in for what is recorded, on any device."""

from __future__ import annotations

import enum
import random
import warnings

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.measure.fake_tensors import EagerDispatchMode
from trimtab.plans.plan import Plan
from trimtab.techniques import cuda_graphs
from trimtab.techniques.compiled_call import is_compiled
from trimtab.techniques.cuda_graphs import (
    LAUNCHES_FROM,
    MOST_KINDS,
    GraphReplayer,
    UncapturableModel,
    copy_in_place,
    without_expanded_dimensions,
)


class Arrives(torch.autograd.Function):
    """Holds a forward's token until its backward."""

    @staticmethod
    def forward(ctx, token, found):
        ctx.token = token
        return found.view_as(found)

    @staticmethod
    def backward(ctx, gradient):
        ctx.token.is_open = False
        return None, gradient


class StandIn:
    """A recording on any device: it computes what the model does, and counts."""

    made: list[StandIn] = []  # noqa: RUF012

    def __init__(self, model, forward, args, kwargs, beside):
        self.forward, self.args, self.kwargs = forward, args, kwargs
        self.beside, self.launches, self.is_closed = beside, 0, False
        self.made.append(self)

    def launch(self, tensors, token):
        self.launches += 1
        return Arrives.apply(token, self.forward(*tensors))

    def close(self):
        self.is_closed = True


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, rows, scale=1.0):
        return scale * self.body(rows)


@pytest.fixture
def recorder():
    StandIn.made.clear()
    torch.manual_seed(0)
    model = Model()
    return GraphReplayer(model, model._call_impl, record=StandIn)


ROWS = torch.randn(4, 6)


def call(recorder, rows=ROWS, times=5, **kwargs):
    """Call and go back; returns how often that was launched."""
    before = recorder.launches
    for _ in range(times):
        recorder(rows, **kwargs).sum().backward()
    return recorder.launches - before


def test_it_is_launched_from_the_third_call_of_its_kind_on(recorder):
    assert call(recorder) == 5 - (LAUNCHES_FROM - 1)
    assert call(recorder, 2 * ROWS) == 5  # other values are no other kind
    (made,) = StandIn.made
    assert made.launches == 8
    assert made.args[0] is ROWS


@pytest.mark.parametrize(
    ("rows", "kwargs"),
    [
        (torch.randn(5, 6), {}),
        (torch.randn(6, 4).T, {}),
        (ROWS.double(), {}),
        (ROWS, {"scale": 2.0}),
        (ROWS, {"scale": torch.tensor(2.0)}),
    ],
)
def test_another_kind_is_recorded_for_itself_in_the_memory_of_the_first(recorder, rows, kwargs):
    if rows.dtype == torch.float64:
        recorder._forward = lambda rows: recorder._model.body(rows.float())
    assert call(recorder) == 3
    assert call(recorder, rows, times=2, **kwargs) == 0
    first, *others = StandIn.made
    assert not others
    if kwargs:
        return  # the stand-in passes tensors alone on
    assert call(recorder, rows, times=1) == 1
    assert StandIn.made[1].beside is first
    assert call(recorder, times=1) == 1


def test_a_part_in_evaluation_is_another_kind(recorder):
    assert call(recorder) == 3
    recorder._model.body[1].eval()
    assert call(recorder, times=2) == 0
    assert call(recorder, times=1) == 1


def test_kinds_beyond_those_that_are_held_run_as_they_are(recorder):
    for rows in range(2, MOST_KINDS + 4):
        call(recorder, torch.randn(rows, 6))
    assert [made.args[0].shape[0] for made in StandIn.made] == list(range(2, MOST_KINDS + 2))
    assert call(recorder, torch.randn(2, 6)) == 5


def test_without_a_gradient_nothing_is_launched(recorder):
    call(recorder)
    with torch.no_grad():
        for _ in range(5):
            recorder(ROWS)
    assert recorder.launches == 3
    leaf = ROWS.clone().requires_grad_()
    assert call(recorder, leaf) == 0
    assert leaf.grad is not None
    assert call(recorder, nn.Parameter(ROWS.clone(), requires_grad=False)) == 0


def test_while_a_backward_is_waited_for_the_next_forward_is_not_launched(recorder):
    call(recorder)
    first = recorder(ROWS)
    second = recorder(2 * ROWS)
    assert recorder.launches == 3 + 1
    (first - second).sum().backward()
    assert call(recorder, times=1) == 1
    held = recorder(ROWS)
    assert call(recorder, times=1) == 0
    del held  # given up
    assert call(recorder, times=1) == 1


def test_what_is_looked_into_is_not_launched(recorder):
    class Looking(EagerDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    call(recorder)
    seen: list[object] = []
    with Looking():
        assert call(recorder, times=1) == 0
    assert seen
    calls: list[int] = []
    hook = recorder._model.body[0].register_forward_hook(lambda *_: calls.append(1))
    assert call(recorder, times=2) == 0
    assert len(calls) == 2
    hook.remove()
    assert call(recorder, times=1) == 1


def test_weights_that_lie_elsewhere_or_are_no_longer_trained_are_recorded_anew(recorder):
    call(recorder)
    weight = recorder._model.body[0].weight
    weight.data = weight.data.clone()
    assert call(recorder) == 3
    weight.requires_grad_(False)
    assert call(recorder) == 3
    recorder._model.body[3].bias = nn.Parameter(torch.zeros(1))
    assert call(recorder) == 3
    assert [made.is_closed for made in StandIn.made] == [True, True, True, False]
    recorder.forget()
    assert StandIn.made[-1].is_closed


@pytest.mark.parametrize(
    ("error", "code", "named"),
    [
        (UncapturableModel("the forward draws", "graphs.draws"), "graphs.draws", "the forward draws"),
        (RuntimeError("no\nmore"), "graphs.capture_failed", "(RuntimeError: no)"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is(recorder, error, code, named):
    def fails(*_):
        raise error

    recorder._record = fails
    assert call(recorder) == 0
    assert recorder.refusal_code == code
    assert recorder.refusal.endswith(named)


def test_of_a_recording_that_fails_and_cannot_be_ended_the_first_error_is_told(recorder):
    def fails(*_):
        try:
            raise ValueError("first")
        finally:
            raise RuntimeError("then")

    recorder._record = fails
    call(recorder)
    assert recorder.refusal_code == "graphs.capture_failed"
    assert "ValueError: first" in recorder.refusal


def test_where_memory_runs_out_while_it_is_recorded_it_runs_as_it_is(recorder):
    def fails(*_):
        raise torch.cuda.OutOfMemoryError

    recorder._record = fails
    assert call(recorder) == 0
    assert recorder.refusal_code == "graphs.out_of_memory"
    assert "during capture" in recorder.refusal


def test_where_memory_runs_out_beside_what_is_recorded_that_is_given_up(recorder):
    call(recorder)
    own, short = recorder._forward, [True]

    def runs_out(rows):
        if short.pop():
            raise torch.cuda.OutOfMemoryError
        return own(rows)

    short[:] = [False, True]
    recorder._forward = runs_out
    assert call(recorder, torch.randn(5, 6), times=1) == 0
    assert StandIn.made[0].is_closed
    assert recorder.refusal_code == "graphs.out_of_memory"
    assert "eager call" in recorder.refusal
    short[:] = [True]
    with pytest.raises(torch.cuda.OutOfMemoryError):  # the run's to deal with
        call(recorder, times=1)


class Way(enum.Enum):
    ONE, OTHER = 1, 2


class Fills(Model):
    """A cache of tensors, and what the loop sets."""

    def __init__(self):
        super().__init__()
        self.cache, self.tau, self.where = torch.ones(6), 1.0, torch.ones(3, device="meta")
        self.masks, self.sizes, self.mode = {4: torch.ones(4)}, [1, 2], Way.ONE
        self.register_buffer("sparse", torch.eye(3).to_sparse())

    def forward(self, rows):
        return self.tau * self.body(self.cache * rows)


def put(name, value):
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    "change",
    [
        put("cache", torch.zeros(6)),
        put("tau", 0.5),
        put("tau", None),
        put("tau", __import__("numpy").ones(3)),
        put("new", 3),
        put("mode", Way.OTHER),
        lambda model: model.masks.update({4: torch.zeros(4)}),
        lambda model: model.sizes.append(3),
        lambda model: model.where.mul_(2),  # of another device than the model's: what was read of it is fixed
    ],
)
def test_what_a_module_holds_besides_is_looked_at(change):
    StandIn.made.clear()
    model = Fills()
    recorder = GraphReplayer(model, lambda rows: model.body(rows), record=StandIn)
    assert call(recorder) == 3
    change(model)
    assert call(recorder, times=2) == 0
    assert call(recorder, times=2) == 2
    assert [made.is_closed for made in StandIn.made] == [True, False]


def test_what_changes_from_call_to_call_is_never_launched(recorder):
    model = recorder._model
    model.steps = 0

    def counts(rows):
        model.steps += 1
        return model._call_impl(rows)

    recorder._forward = counts
    assert call(recorder) == 0
    assert recorder.left_code == "graphs.state_changes"
    assert recorder.left


def test_what_its_recording_changes_is_refused(recorder):
    model = recorder._model

    class Leaves(StandIn):
        def __init__(self, *given):
            super().__init__(*given)
            model.left_behind = torch.ones(1)

    recorder._record = Leaves
    assert call(recorder) == 0
    assert recorder.refusal_code == "graphs.state_changes"
    assert StandIn.made[-1].is_closed


def test_a_module_that_is_put_in_another_ones_place_is_recorded_anew(recorder):
    call(recorder)
    recorder._model.body[3] = nn.Linear(8, 1)
    assert call(recorder) == 3
    assert len(StandIn.made) == 2


def test_after_launches_nothing_is_left_to_be_told(recorder):
    assert recorder.left == ""
    call(recorder)
    assert recorder.left == recorder.refusal == recorder.left_code == recorder.refusal_code == ""
    call(recorder, nn.Parameter(ROWS.clone()), times=1)
    assert recorder.left_code == "graphs.inputs"
    call(recorder)
    assert recorder.left == recorder.left_code == ""


def test_a_host_that_waits_in_another_kind_gives_up_what_was_recorded(recorder):
    call(recorder)
    own = recorder._forward

    def warns(rows):
        warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        return own(rows)

    recorder._forward = warns
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(recorder, torch.randn(5, 6), times=2)
    assert StandIn.made[0].is_closed
    assert recorder.refusal_code == "graphs.synchronizes"


def test_under_a_transformation_of_functions_nothing_is_launched(recorder):
    call(recorder)
    recorder._model.eval()
    own = dict(recorder._model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(recorder._model, parameters, (ROWS,)).sum()

    recorder._model._compiled_call_impl = recorder
    try:
        gradients = torch.func.grad(loss)(own)
    finally:
        del recorder._model._compiled_call_impl
    assert recorder.launches == 3
    assert gradients["body.0.weight"].shape == own["body.0.weight"].shape


def test_a_kind_that_came_once_gives_its_place_away(recorder):
    for rows in range(2, 2 + MOST_KINDS):
        call(recorder, torch.randn(rows, 6), times=1)
    assert call(recorder, torch.randn(30, 6)) == 3


def test_a_host_that_waits_is_told_before_anything_is_recorded_and_other_warnings_are_passed_on(recorder):
    def warns(rows):
        warnings.warn("mine", UserWarning, stacklevel=1)
        if is_waiting:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=1)
        return recorder._model._call_impl(rows)

    recorder._forward, is_waiting = warns, False
    with pytest.warns(UserWarning, match="mine"):
        call(recorder, times=2)
    assert recorder.refusal == ""
    is_waiting = True
    recorder.forget()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call(recorder, times=2)
    assert [str(each.message)[:4] for each in told] == ["mine", "call", "mine"]  # of waiting the first call's alone
    assert recorder.refusal_code == "graphs.synchronizes"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call(recorder) == 0
    assert not StandIn.made


def test_graphs_need_a_gpu():
    model = Model()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for way in ("cuda_graphs", "compiled_cuda_graphs"):
        with raises(ValueGivenError, code="compiled.no_cuda", field="plan.compiled"):
            trimtab.start(model, optimizer, Plan.fixed(4, compiled=way))
    assert not is_compiled(model)
    torch.testing.assert_close(model.state_dict(), before)
    trimtab.start(model, optimizer, Plan.fixed(4)).close()


# What is looked at of a forward that is recorded.


def reached(outputs, model, parameters=()):
    return cuda_graphs._reached(outputs, tuple(model.parameters()), parameters)


def test_what_an_output_reaches_is_told_by_parameter():
    model = Model()
    hidden = model.body[0](ROWS)
    found = reached((model.body[3](hidden), hidden, hidden.argmax(1), model.body[1].weight), model)
    names = [name for name, _ in model.named_parameters()]
    assert [{names[index] for index in each} for each in found] == [
        {"body.0.weight", "body.0.bias", "body.3.weight", "body.3.bias"},
        {"body.0.weight", "body.0.bias"},
        set(),
        {"body.1.weight"},
    ]


def test_parameters_that_are_held_elsewhere_too_are_told():
    model = Model()
    elsewhere = tuple(model.parameters())
    with pytest.raises(UncapturableModel) as caught:
        cuda_graphs._reached((model(ROWS),), [nn.Parameter(p.detach()) for p in elsewhere], elsewhere)
    assert caught.value.code == "graphs.parameters_referenced"


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda model: (model(ROWS), 3), "graphs.outputs"),
        (lambda model: (model(ROWS).detach(),), "graphs.no_gradient"),
        (lambda model: (model(ROWS * nn.Parameter(torch.ones(6))),), "graphs.other_tensor_trained"),
        (lambda model: (model(ROWS), nn.Parameter(torch.ones(6))), "graphs.other_tensor_trained"),
    ],
)
def test_outputs_that_a_launch_could_not_give_are_refused(make, code):
    model = Model()
    with pytest.raises(UncapturableModel) as caught:
        reached(make(model), model)
    assert caught.value.code == code


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1), lambda: __import__("numpy").random.rand()])
def test_random_numbers_of_the_host_are_refused(draw):
    with cuda_graphs._same_random_numbers():
        pass
    with pytest.raises(UncapturableModel) as caught, cuda_graphs._same_random_numbers():
        draw()
    assert caught.value.code == "graphs.random_on_cpu"


def test_others_stand_for_parameters_and_give_their_place_back():
    model = Model()
    model.tied = model.body[0]
    model.body[0].weight.note = "mine"
    before = dict(model.named_parameters(remove_duplicate=False))
    seen: list[torch.Tensor] = []
    model.body[0].weight.register_hook(seen.append)

    def look() -> tuple[torch.Tensor, ...]:
        with cuda_graphs._stood_for(model, tuple(model.parameters())) as others:
            assert model.tied.weight is model.body[0].weight is others[0]
            assert others[0].data_ptr() == before["body.0.weight"].data_ptr()
            assert others[0].note == "mine"
            found.extend(torch.autograd.grad(model(ROWS).sum(), others))
            raise ZeroDivisionError

    found: list[torch.Tensor] = []
    with pytest.raises(ZeroDivisionError):
        look()
    assert not seen
    model(ROWS).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    assert len(seen) == 1
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is each for name, each in before.items())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(15).view(3, 5)[:, :-1],  # tokens less the last of each row: gaps, which a clone closes
        torch.arange(15).view(3, 5)[:, 1:],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.arange(3.0)[:, None].expand(3, 4),
        torch.zeros(()),
        torch.zeros(0, 3),
        torch.arange(6.0)[::2],
    ],
    ids=["whole", "turned", "last", "first", "channels_last", "expanded", "number", "empty", "every_second"],
)
def test_copies_of_inputs_keep_their_strides_and_are_written_to(tensor):
    """By other strides a compiled model would be compiled anew, in the middle of being recorded."""
    found = copy_in_place(tensor)
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(found, tensor)
    assert found.data_ptr() != tensor.data_ptr() or not tensor.numel()
    other = copy_in_place(tensor)  # of the same strides, as of the same kind of call
    without_expanded_dimensions(other).zero_()
    without_expanded_dimensions(found).copy_(without_expanded_dimensions(other))
    assert not found.any()


def test_of_a_column_of_much_more_no_gaps_are_copied():
    column = torch.arange(300.0).view(3, 100)[:, 7]
    found = copy_in_place(column)
    assert torch.equal(found, column)
    assert found.untyped_storage().nbytes() == column.nbytes


def test_a_copy_with_the_strides_of_tokens_is_not_compiled_anew():
    """What torch guards: the strides of what it was compiled for. Held by counting what was compiled."""
    counted = []

    def backend(graph, inputs):
        counted.append(1)
        return graph

    torch._dynamo.reset()
    called = torch.compile(lambda tokens: tokens * 2 + 1, backend=backend)
    for tokens in (torch.arange(15).view(3, 5)[:, :-1], torch.arange(20).view(4, 5)[1:, :-1]):
        called(tokens)
        called(copy_in_place(tokens))
    assert len(counted) == 1
    called(torch.arange(15).view(3, 5)[:, :-1].clone())
    assert len(counted) == 2
