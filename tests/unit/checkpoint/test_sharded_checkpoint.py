"""What ranks hold in shards: which state can be written, and what of groups and names has to be as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from raising import raises
from torch import nn

from trimtab.checkpoint import train_state
from trimtab.checkpoint.config import require_supported
from trimtab.checkpoint.train_state import ShardedState, WithoutParameters, merge_shards
from trimtab.core.errors import FormatError, ModelError, OptimizerError, ValueGivenError
from trimtab.plans.plan import Plan


def loop():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def stepped():
    model, optimizer = loop()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_parameters_are_left_out_by_what_they_are_and_buffers_stay():
    model, _ = stepped()
    model.register_state_dict_post_hook(  # as a wrapper that gives them other names
        lambda module, state, *_: [state.__setitem__(f"x.{name}", state.pop(name)) for name in list(state)] and None
    )
    own = WithoutParameters(model).state_dict()["own"]
    assert sorted(own) == ["x.1.num_batches_tracked", "x.1.running_mean", "x.1.running_var"]


def test_what_is_written_is_dense_and_named():
    model, optimizer = stepped()
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    found = ShardedState(model, optimizer).tensors()
    assert all(tensor.is_contiguous() for tensor in found.values())
    assert torch.equal(found["model.0.weight"], model[0].weight)
    assert torch.equal(found["optimizer.0.weight:exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
    assert len(found) == 6 + 6 * 3


def test_types_that_torchs_writer_would_give_back_as_others_are_refused():
    model, optimizer = stepped()
    optimizer.state[model[0].weight]["mask"] = torch.ones(3, dtype=torch.bool)
    with raises(FormatError, code="shards.dtype_unsupported", field="optimizer.0.weight:mask"):
        ShardedState(model, optimizer).tensors()


@pytest.mark.parametrize(
    ("shape", "placements"), [((2, 3), None), ((4, 3), ("replicated",)), ((4,), ("cut",))], ids=str
)
def test_state_that_is_not_cut_as_its_parameter_is_refused(shape, placements):
    """Ranks would write it one over the other, and all go on with that of one."""
    from trimtab.checkpoint.train_state import _require_apart

    parameter = SimpleNamespace(placements=("cut",), shape=torch.Size((4, 3)))
    state = SimpleNamespace(shape=torch.Size(shape), dim=lambda: len(shape))
    if placements is not None:
        state.placements = placements
    with raises(FormatError, code="optimizer.state_not_sharded", field="optimizer"):
        _require_apart("w", "moment", state, parameter)
    good = SimpleNamespace(shape=parameter.shape, dim=lambda: 2, placements=("cut",))
    _require_apart("w", "moment", good, parameter)
    _require_apart("w", "step", torch.tensor(3.0), parameter)
    with raises(FormatError, code="optimizer.state_key", field="optimizer"):
        _require_apart("w", 3, good, parameter)


def saved(members, groups=1):
    return {"groups": [{}] * groups, "members": members, "others": {}}


@pytest.mark.parametrize(
    ("change", "groups", "got"),
    [
        (lambda members: members.pop("0.bias"), 1, "0.bias"),
        (lambda members: members.update(more={"group": 0, "tensors": []}), 1, "more"),
        (lambda members: members["2.weight"].update(group=1), 1, "2.weight in group 0"),
        (lambda members: None, 2, "1 groups"),
    ],
)
def test_groups_are_of_the_parameters_that_they_were(tmp_path, change, groups, got):
    model, optimizer = stepped()
    members = ShardedState(model, optimizer).state_dict()["members"]
    change(members)
    with raises(OptimizerError, code="optimizer.groups_differ", field="optimizer") as refused:
        ShardedState(model, optimizer, tmp_path).loading(saved(members, groups))
    assert refused.value.got == got


def test_a_model_of_another_type_is_refused(tmp_path, monkeypatch):
    model, optimizer = stepped()
    shards = ShardedState(model, optimizer)
    files = {
        name: SimpleNamespace(size=each.shape, properties=SimpleNamespace(dtype=each.dtype))
        for name, each in shards.tensors().items()
    }
    monkeypatch.setattr(train_state, "stored_tensors", lambda folder: files)
    ShardedState(model, optimizer, tmp_path).loading(shards.state_dict())
    other, its = loop()
    other[2].double()
    with raises(ModelError, code="model.shapes_differ", field="model: 2.weight"):
        ShardedState(other, its, tmp_path).loading(shards.state_dict())


def test_what_ranks_said_of_their_shards_is_put_together():
    one, other = ({"group": 0, "tensors": []}, {"group": 1, "tensors": ["exp_avg"]})
    first = {"groups": [{"lr": 1}], "members": {"a": one}, "others": {"a": {"k": 1}}}
    found = merge_shards(iter([first, {"groups": [{"lr": 1}], "members": {"b": other}, "others": {"b": {"k": 2}}}]))
    assert found == {"groups": [{"lr": 1}], "members": {"a": one, "b": other}, "others": {"a": {"k": 1}, "b": {"k": 2}}}
    with raises(FormatError, code="shards.inconsistent", field="state.shards"):
        merge_shards(iter([first, {"groups": [], "members": {"a": other}, "others": {}}]))


def test_files_that_are_no_shards_are_named(tmp_path):
    (tmp_path / "tensors.safetensors").write_bytes(b"not looked at")
    assert dict(train_state.stored_tensors(tmp_path)) == {}
    (tmp_path / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"no shard")
    with raises(FormatError, code="shards.unreadable"):
        train_state.stored_tensors(tmp_path)


def test_shards_are_not_written_beside_the_training():
    """In one process too: what is written would be the very tensors that are trained on."""
    model, optimizer = loop()
    alone = SimpleNamespace(num_ranks=1, has_peers=False)
    require_supported(model, optimizer, Plan.fixed(4), alone, background=True)
    model.set_requires_gradient_sync = None  # as fully_shard leaves it
    with raises(ValueGivenError, code="checkpoints.background_unsupported", field="checkpoints.background"):
        require_supported(model, optimizer, Plan.fixed(4), alone, background=True)
