"""Hooks of DDP and FSDP2 are not the user's; modules beside the model are refused on several ranks."""

from __future__ import annotations

import pytest
from ranks import run_cases

RANK = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from trimtab.core.errors import TrimtabError
    from trimtab.training.user_hooks import gradient_hooks

    mesh = init_device_mesh("cpu", (2,))

    def built(wrapper, hook=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        if hook:
            model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        if wrapper == "ddp":
            return DistributedDataParallel(model)
        if wrapper == "fsdp":
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    def trained(wrapper, hook=False, modules=(), **planned):
        model = built(wrapper, hook)
        parameters = [*model.parameters(), *(p for module in modules for p in module.parameters())]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        plan = trimtab.Plan.fixed(4, 2, **planned)
        try:
            with trimtab.start(model, optimizer, plan, modules=modules) as run:
                for _ in range(2):
                    run.train_step(run.window(torch.ones(4, 6)), lambda model, rows: model(rows).square().mean())
                    if gradient_hooks(run.model):
                        return "hooks of a wrapper"
        except TrimtabError as error:
            return error.code
        return "trained"

    def planned(modules):
        model = built("none")
        optimizer = torch.optim.AdamW([*model.parameters(), *modules[0].parameters()])
        try:
            trimtab.plan(model, optimizer, lambda model, rows: model(rows).mean(), torch.ones(4, 6), modules=modules)
        except TrimtabError as error:
            return error.code

    found = {
        "ddp": trained("ddp"),
        "fsdp": trained("fsdp"),
        "fsdp, fused": trained("fsdp", fused_optimizer=True),
        "ddp with a hook": trained("ddp", hook=True),
        "shared with a hook": trained("none", hook=True, num_ranks=2, zero_stage=0),
        "modules": trained("ddp", modules=[nn.Linear(2, 2)]),
        "modules planned": planned([nn.Linear(2, 2)]),
    }
"""

EXPECTED = {
    "ddp": "trained",
    "fsdp": "trained",
    "fsdp, fused": "trained",
    "ddp with a hook": "hooks.gradient_split",
    "shared with a hook": "hooks.gradient_split",
    "modules": "modules.several_ranks",
    "modules planned": "modules.several_ranks",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_cases(RANK, tmp_path_factory.mktemp("hooks"), "all")[0]


@pytest.mark.parametrize("case", EXPECTED)
def test_each_rank_trains_or_is_refused(found, case):
    assert [rank[case] for rank in found] == [EXPECTED[case]] * 2
