"""Every cell of schedule x precision x block x eager or compiled x one process, DDP, FSDP2: never a wrong gradient.

Blocks with dropout or batch norm run by the loop, in windows of two micro-batches: weights, losses, buffers and the
random numbers left are those of the same loop that keeps all. Compiled, masks are drawn otherwise as a graph is cut
otherwise; there gradients say themselves whether a mask was the same in both forwards: of `y = w1 * m1 * w2 * m2 ...`
each weight's gradient times the weight is y.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from ranks import run_cases

Cell = tuple[str, str, str, str, str]  # how, block, precision, mode, name of the schedule

RANK = """
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    how, block, precision, compiled, text = case
    torch.compiler.reset()  # or the cell's code would count as recompiled for those before
    L, ROWS, WIDTH, STEPS = 4, 6, 8, 4
    compiled, names = compiled == "compiled", tuple(f"blocks.{index}" for index in range(L))
    NEAR = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}[precision]

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + torch.tanh(self.one(self.norm(x)))

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.one, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

        def forward(self, x):
            return x + self.drop(torch.tanh(self.one(self.norm(x))))

    class Masking(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.drop = nn.Parameter(1 + torch.rand(ROWS, WIDTH)), nn.Dropout(0.2)

        def forward(self, x):
            return self.drop(x * self.weight)

    class Net(nn.Module):
        def __init__(self, block, head):
            super().__init__()
            self.blocks, self.head = nn.ModuleList(block() for _ in range(L)), head

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def wrapped(model):
        if how == "ddp":
            return DistributedDataParallel(model)
        if how == "fsdp2":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        return model

    def full(value):
        return getattr(value, "full_tensor", lambda: value)().detach().clone()

    def started(model, optimizer, rows, micro_batch, text):
        plan = trimtab.Plan.fixed(rows, micro_batch, precision=precision, compiled=compiled)
        return trimtab.start(model, optimizer, plan.recomputing(text, names, "a cell") if text else plan)

    def check_swapped(model, text):
        # A schedule that is not applied would pass all that follows.
        inner = model.module if how == "ddp" else model
        swapped = [index for index, each in enumerate(inner.blocks) if "_trimtab_call" in vars(each)]
        recomputing = [] if text is None else [0, 1] if text == "((0) 1) 2 3" else list(range(L))
        assert swapped == recomputing, (swapped, text)

    def trained(text):
        torch.manual_seed(0)
        model = wrapped(Net({"batch_norm": Normed, "dropout": Dropping}[block], nn.Linear(WIDTH, 2)).train())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1 + rank)
        found = []
        with started(model, optimizer, ROWS, ROWS // 2, text) as run:
            check_swapped(model, text)
            for _ in range(STEPS):
                run.train_step(run.window(torch.randn(ROWS, WIDTH)), lambda m, x: m(x).square().mean())
                found.append(run.loss.clone())
            assert run.applied_steps > 0
        return [*found, *map(full, model.parameters()), *map(full, model.buffers()), torch.rand(3)]

    def check_the_same():
        for ours, theirs in zip(trained(text), trained(None), strict=True):
            assert torch.equal(ours, theirs), (ours, theirs)

    def check_masks():
        torch.manual_seed(0)
        model = wrapped(Net(Masking, nn.Identity()).train())
        weights = [p for name, p in model.named_parameters()]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        made = []

        def loss(m, x):
            made.append(m(x))
            return made[-1].float().sum()

        with started(model, optimizer, ROWS, ROWS, text) as run:
            check_swapped(model, text)
            for _ in range(STEPS):
                before = [full(p) for p in weights]
                steps = run.applied_steps
                run.train_step(run.window(torch.ones(ROWS, WIDTH)), loss)
                y = made.pop().detach().float()
                if how != "alone":
                    dist.all_reduce(y)
                    y /= 2
                if run.applied_steps == steps:
                    continue
                assert 0 < (y == 0).float().mean() < 1
                for old, new in zip(before, map(full, weights), strict=True):
                    torch.testing.assert_close((old - new) * old, y, rtol=NEAR, atol=NEAR)
                with torch.no_grad():  # as they were: a gradient is told by the step that it makes
                    for p, old in zip(weights, before, strict=True):
                        (p.to_local() if hasattr(p, "to_local") else p).copy_(shard_of(p, old))
            assert run.applied_steps > 0

    def shard_of(p, whole):
        if not hasattr(p, "to_local"):
            return whole
        return whole.chunk(2)[rank]

    (check_masks if compiled else check_the_same)()
"""

SCHEDULES = {
    "every_block": "every_block",
    "sqrt": "(0-1) (2-3)",
    "nested": "((0) 1) 2 3",
    "in_part": "~0-3",
    "mixed": "(0-1) ~2 (3)",
}
ALONE_IN_THEIR_SEGMENT = ("every_block", "in_part")  # a block that is sharded by itself has hooks, and is in no other


def cells() -> Iterator[Cell]:
    """Yield the cells; what is refused, by a test in the other suites, is none."""
    parts = (SCHEDULES, ("fp32", "bf16", "fp16"), ("dropout", "batch_norm"), ("eager", "compiled"))
    for name, precision, block, mode in itertools.product(*parts):
        for how in ("alone", "ddp", "fsdp2"):
            is_refused = mode == "compiled" and block == "batch_norm"  # whose statistics would move twice
            is_refused |= how == "fsdp2" and name not in ALONE_IN_THEIR_SEGMENT
            if not is_refused:
                yield how, block, precision, mode, name


def pairs_of(cell: Cell) -> set[tuple[str, str]]:
    """Return each two values that meet in a cell."""
    return set(itertools.combinations(cell, 2))


def covering() -> list[Cell]:
    """Return few cells in which every two values meet that meet in any: each time the one with most that are new."""
    every, chosen = list(cells()), list[Cell]()
    missing = set().union(*map(pairs_of, every))
    while missing:
        chosen.append(max(every, key=lambda cell: len(missing & pairs_of(cell))))
        missing -= pairs_of(chosen[-1])
    return chosen


def check_cells(which: Sequence[Cell], folder: Path) -> None:
    """Run cells that are all alone or all of two ranks; the first that is not the loop that keeps all is named."""
    given = [(how, block, precision, mode, SCHEDULES[name]) for how, block, precision, mode, name in which]
    compiles = any("compiled" in cell for cell in which)
    run_cases(RANK, folder, *given, ranks=1 if "alone" in which[0] else 2, compiles=compiles)
