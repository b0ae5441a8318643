"""Fused steps of shards: which torch has, and what is refused before anything is sharded."""

from __future__ import annotations

import pytest
from ranks import run_cases

RANK = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from trimtab.core.errors import OptimizerError

    mesh = init_device_mesh("cpu", (2,))

    def by_torch(kind):
        model = nn.Linear(6, 4)
        fully_shard(model, mesh=mesh)
        optimizer = kind(model.parameters(), lr=0.1, fused=True)
        model(torch.ones(2, 6)).sum().backward()
        try:
            optimizer.step()
        except Exception as error:
            return type(error).__name__
        return "stepped"

    def by_us(kind, stage, fused, planned):
        model = nn.Linear(6, 4)
        optimizer = kind(model.parameters(), lr=0.1, fused=fused)
        plan = trimtab.Plan.fixed(2, num_ranks=2, zero_stage=stage, fused_optimizer=planned)
        try:
            with trimtab.start(model, optimizer, plan) as run:
                run.train_step(run.window(torch.ones(2, 6)), lambda model, rows: model(rows).square().mean())
        except OptimizerError as error:
            assert type(model.weight) is nn.Parameter and optimizer.param_groups[0]["params"][0] is model.weight
            return {"code": error.code, "got": error.got, "hint": error.hint}
        return "stepped"

    sgd, adamw = torch.optim.SGD, torch.optim.AdamW
    found = {"torch": [by_torch(sgd), by_torch(adamw)]}
    for name, *case in (
        ("the loop's", sgd, 2, True, False), ("the plan's", sgd, 3, None, True), ("plain", sgd, 2, None, False),
        ("replicas", sgd, 0, True, False), ("adamw", adamw, 3, True, False),
    ):
        found[name] = by_us(*case)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_cases(RANK, tmp_path_factory.mktemp("fused"), "all")[0]


def test_torch_steps_shards_fused_by_adamw_and_not_by_sgd(found):
    """What `steps_shards_fused` says; a torch that can do both is to change it."""
    assert [rank["torch"][0] != "stepped" for rank in found] == [True, True]
    assert [rank["torch"][1] for rank in found] == ["stepped", "stepped"]


@pytest.mark.parametrize("case", ["the loop's", "the plan's"])
def test_a_fused_sgd_of_shards_is_refused_before_anything_is_sharded(found, case):
    for rank in found:
        assert rank[case]["code"] == "optimizer.fused_with_shards"
        assert rank[case]["got"] == "SGD(fused=True)"
        assert "ZeRO stage 0 or 1" in rank[case]["hint"]


@pytest.mark.parametrize("case", ["plain", "replicas", "adamw"])
def test_what_torch_can_step_is_stepped(found, case):
    assert [rank[case] for rank in found] == ["stepped", "stepped"]
