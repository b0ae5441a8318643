"""Two ranks whose blocks are compiled: weights are those of ranks in eager mode, and the model is restored."""

from __future__ import annotations

import shutil

import pytest
from ranks import run_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
]

RANK = """
    from torch._dynamo.utils import counters
    from torch.distributed.fsdp import FSDPModule
    from trimtab.core.choice import COMPILED_BLOCKS
    from trimtab.techniques.compiled_call import is_compiled

    stage, recompute, scales = case
    torch.compiler.reset()
    L, ROWS, WIDTH, STEPS, NEAR = 4, 6, 8, 4, 1e-12

    class Block(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.norm, self.one, self.scale = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), scale

        def forward(self, x):
            return x + self.scale * torch.tanh(self.one(self.norm(x)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
            self.blocks = nn.ModuleList(Block(scale) for scale in scales)

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def full(tensor):
        return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()

    def trained(compiled):
        torch.manual_seed(0)
        model = Net().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = trimtab.Plan.fixed(ROWS, ROWS // 2, num_ranks=2, zero_stage=stage, compiled=compiled)
        if recompute:
            plan = plan.recomputing(recompute, tuple(f"blocks.{index}" for index in range(L)), "asked for")
        rows = torch.Generator().manual_seed(1 + rank)
        before = counters["stats"]["unique_graphs"]
        with trimtab.start(model, optimizer, plan) as run:
            for _ in range(STEPS):
                batch = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=rows)
                run.train_step(run.window(batch), lambda model, batch: model(batch).square().mean())
        graphs = counters["stats"]["unique_graphs"] - before
        assert not is_compiled(model)
        kinds = {type(block) for block in model.blocks}
        assert kinds == {Block} or stage > 1 and all(kind.__mro__[1:3] == (FSDPModule, Block) for kind in kinds), kinds
        return list(map(full, model.parameters())), graphs

    (ours, graphs), (theirs, none) = trained(COMPILED_BLOCKS), trained(False)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= NEAR * other.abs().max(), (one, other)
    found = {"compiled": graphs, "eager": none}
"""
ALIKE, UNLIKE = [1.0] * 4, [1.0, 1.0, 0.5, 0.5]
CASES = [(0, None), (0, "every_block"), (1, "every_block"), (2, None), (3, None), (3, "every_block")]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the number of compiled graphs by rank; the ranks compare their weights themselves."""
    cases = [*((stage, recompute, ALIKE) for stage, recompute in CASES), (3, None, UNLIKE)]
    return run_cases(RANK, tmp_path_factory.mktemp("compiled"), *cases, compiles=True)


def test_equal_blocks_are_compiled_once_on_every_rank(found):
    assert found[:-1] == [[{"compiled": 1, "eager": 0}] * 2] * len(CASES)


def test_blocks_with_other_constants_have_code_of_their_own(found):
    """A sharded block, whose parameters torch gathers before its forward, is guarded as a block of replicas is."""
    assert found[-1] == [{"compiled": 2, "eager": 0}] * 2
