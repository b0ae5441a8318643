"""P1: the paper's recipe, equation by equation."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from recipe_tasks import CPU, ROWS, batches, gpt, gradient, make_task, mlp, resnet, sgd, weights
from torch import Tensor, nn

from benchmarks.paper.recipes import paper
from benchmarks.paper.recipes.paper import ALLOWED_K, PaperLoop, Segment, checkpoint_every_sqrt, half_precision
from benchmarks.paper.tasks import load_task
from trimtab.core.batch_rule import warmup_cosine
from trimtab.core.objective import Reference
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import plain_steps
from trimtab.experiments.task_loops import TaskLoops

BUDGET = 3200


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    """fp32 on any processor, so that gradients can be compared."""
    monkeypatch.setattr(paper, "half_precision", lambda device: "fp32")


def paper_loop(task) -> PaperLoop:
    torch.manual_seed(3)
    return PaperLoop(task, CPU)


@pytest.mark.parametrize("kind", ["mlp", "gpt"])
# Equations 4 and 5: the mean of k gradients.
def test_the_mean_of_k_gradients_is_that_of_one_big_batch(kind):
    task = make_task(kind, (lambda: mlp(0.0)) if kind == "mlp" else None, make_optimizer=sgd(0.1))
    loop = paper_loop(task)
    before, data = weights(loop.model), batches(task)
    torch.manual_seed(3)
    plain = task.make_model()
    assert torch.equal(weights(plain), before)
    drawn = [next(data) for _ in range(4)]
    whole = gradient(task, plain, tuple(torch.cat(columns) for columns in zip(*drawn, strict=True)))
    assert loop.step(iter(drawn)) == 4 * ROWS
    taken = (before - weights(loop.model)) / loop.optimizer.param_groups[0]["lr"]
    assert torch.linalg.vector_norm(taken - whole) < 1e-4 * torch.linalg.vector_norm(whole)


def test_a_gradient_of_any_norm_is_applied_as_it_is():
    """Section IV.B lists no clipping: equation 12 with its threshold of 1 would take a step of 1 here."""
    loop = paper_loop(
        make_task(make_model=Weight, loss_fn=lambda m, batch: 50 * m(batch[0]).mean(), make_optimizer=sgd(1e-3))
    )
    loop.step(iter([(torch.ones(ROWS, 1),)] * 4))
    taken = -loop.model.weight.item() / loop.optimizer.param_groups[0]["lr"]
    assert taken == pytest.approx(50.0)


# Equations 6 and 7: k from the variance. The gradient of a weight that the input is multiplied with is that input.


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def spread(deviation: float, k: int) -> Iterator[tuple[Tensor]]:
    """Yield k batches whose gradients are 1 +- deviation in turn."""
    return iter([(torch.full((ROWS, 1), 1.0 + (-1) ** i * deviation),) for i in range(k)])


def weight_loop(**changes) -> PaperLoop:
    return paper_loop(
        make_task(
            make_model=Weight, loss_fn=lambda model, batch: model(batch[0]).mean(), make_optimizer=sgd(1e-3), **changes
        )
    )


def test_k_is_four_at_first_and_eight_while_the_variance_is_above_its_first():
    loop = weight_loop()
    assert loop.k == 4
    for deviation, expected in ((1.0, 4), (1.1, 8), (2.0, 8), (1.05, 4), (0.1, 4), (100.0, 8)):
        taken = loop.k
        assert loop.step(spread(deviation, taken)) == taken * ROWS
        # The unbiased variance of 8 gradients is 6/7 of that of 4 with the same deviation: 1.05 is below the first.
        assert loop.k == expected, deviation
        assert loop.k in ALLOWED_K
    for _ in range(3):
        loop.step(spread(0.0, loop.k))
        assert loop.k == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_gradient_that_is_not_finite_keeps_k(value):
    loop = weight_loop()
    assert loop.step(spread(value, 4)) == 4 * ROWS
    assert loop.k == 4
    loop.step(spread(1.0, 4))
    loop.step(spread(2.0, 4))
    assert loop.k == 8  # the first variance that was one set the target


def test_the_variance_is_that_of_the_gradients(monkeypatch):
    """Equation 7, against all k of them held at once."""
    task = make_task("gpt", make_optimizer=sgd(0.0))
    loop, found = paper_loop(task), []
    drawn = [next(batches(task, seed=i)) for i in range(4)]
    each = torch.stack([gradient(task, loop.model, batch) for batch in drawn]).double()
    monkeypatch.setattr(loop, "_choose_k", found.append)
    loop.step(iter(drawn))
    assert found == [pytest.approx(float(each.var(0, unbiased=True).sum()), rel=1e-5)]


def test_of_k_gradients_the_mean_and_one_are_held(monkeypatch):
    """Eight of GPT-2 would be 4 GB, and none of the paper's method."""
    loop, held, own = paper_loop(make_task("gpt")), [], PaperLoop._gradients

    def counted(self, batch):
        gradients = own(self, batch)
        alive = sum(each() is not None for each in held)
        held.extend(weakref.ref(gradient) for gradient in gradients)
        assert alive <= len(gradients)
        return gradients

    monkeypatch.setattr(PaperLoop, "_gradients", counted)
    loop.k = 8
    loop.step(batches(make_task("gpt")))
    assert len(held) == 8 * len(list(loop.model.parameters()))


def test_an_optimizer_that_zeroes_in_place_takes_no_gradient_away():
    class Zeroes(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none=False)

    task = make_task("gpt", make_optimizer=sgd(0.1))
    plain, other = paper_loop(task), paper_loop(replace(task, make_optimizer=lambda m: Zeroes(m.parameters(), lr=0.1)))
    before = weights(plain.model)
    for loop in (plain, other):
        for seed in (0, 1):
            loop.step(batches(task, seed))
    assert torch.equal(weights(plain.model), weights(other.model))
    assert not torch.equal(weights(plain.model), before)


# Equations 10 and 11: the rate.
def test_the_rate_is_linear_in_k_and_follows_the_rows():
    loop, rows = weight_loop(), 0
    for deviation in (1.0, 2.0, 2.0, 0.1, 2.0, 1.0):
        k = loop.k
        rows += loop.step(spread(deviation, k))
        rate = loop.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(1e-3 * k * warmup_cosine(rows / BUDGET))
    assert rows == (4 + 4 + 8 + 8 + 4 + 8) * ROWS

    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.01}])

    task = make_task(make_optimizer=two_groups)
    loop = paper_loop(task)
    for _ in range(3):
        loop.step(batches(task))
    first, second = (group["lr"] for group in loop.optimizer.param_groups)
    assert first == pytest.approx(10 * second)


def test_a_comparison_takes_the_same_steps_from_the_weights_of_its_baseline(monkeypatch):
    """Also where k changes within training: a step of the comparison is then half a step of the recipe."""
    monkeypatch.setattr(PaperLoop, "_choose_k", lambda self, sigma2: setattr(self, "k", 8))
    task = make_task("gpt", make_optimizer=sgd(0.1), baselines={"paper": paper.paper})
    own = TaskLoops(task)
    loop, baseline = (loop_setup.build(setup, 3) for setup in (own.recipe("paper"), own.setup))
    assert torch.equal(weights(loop.model), weights(baseline.model))
    assert loop.reference == Reference("fp32")
    running = plain_steps(loop, batches(task))
    assert [next(running).samples for _ in range(5)] == [4 * ROWS] * 5  # of 4, 8 and 8 batches
    alone, data = paper_loop(task), batches(task)
    assert torch.equal(weights(alone.model), weights(baseline.model))
    assert [alone.step(data) for _ in range(3)] == [4 * ROWS, 8 * ROWS, 8 * ROWS]
    assert torch.equal(weights(loop.model), weights(alone.model))
    assert not torch.equal(weights(loop.model), weights(baseline.model))


# Equations 13 to 17: half precision.
def test_half_precision_is_what_the_device_has(monkeypatch):
    assert half_precision(torch.device("cuda")) == "fp16"
    for capabilities, expected in (({"avx512_bf16": True}, "bf16"), ({"avx512_bf16": False, "avx2": True}, "fp32")):
        monkeypatch.setattr(paper.torch, "cpu", SimpleNamespace(get_capabilities=lambda c=capabilities: c))
        assert half_precision(CPU) == expected
    monkeypatch.setattr(paper.torch, "cpu", SimpleNamespace())
    assert half_precision(CPU) == "fp32"


def test_bf16_trains(monkeypatch):
    monkeypatch.setattr(paper, "half_precision", lambda device: "bf16")
    task = make_task("gpt")
    loop = paper_loop(task)
    before = weights(loop.model)
    loop.step(batches(task))
    assert loop.precision == "bf16"
    assert torch.isfinite(weights(loop.model)).all()
    assert not torch.equal(weights(loop.model), before)


# Equations 18 to 20: checkpoints.
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 9, 10, 12])
def test_blocks_are_cut_into_segments_of_the_root_of_their_number(num_layers):
    model = gpt(num_layers=num_layers)
    blocks = list(model.blocks)
    checkpoint_every_sqrt(model)
    size = math.ceil(math.sqrt(num_layers))
    assert isinstance(model.blocks, nn.ModuleList)
    assert all(isinstance(segment, Segment) for segment in model.blocks)
    sizes = [len(segment) for segment in model.blocks]
    assert len(sizes) == math.ceil(num_layers / size)
    assert set(sizes[:-1]) <= {size}
    assert [block for segment in model.blocks for block in segment] == blocks


def test_chains_are_cut_into_segments_and_a_model_without_one_is_left_as_it_is():
    model = resnet()
    blocks = [block for stage in model.stages for block in stage]
    checkpoint_every_sqrt(model)
    assert [len(segment) for segment in model.stages] == [3, 2]
    assert [block for segment in model.stages for block in segment] == blocks
    model = mlp()
    modules = list(model.modules())
    checkpoint_every_sqrt(model)
    assert list(model.modules()) == modules
    task, runs = make_task("gpt"), []
    model = task.make_model().train()
    checkpoint_every_sqrt(model)
    model.blocks[0][0].register_forward_hook(lambda *_: runs.append(1))
    gradient(task, model, next(batches(task)))
    assert len(runs) == 2


@pytest.mark.parametrize("kind", ["gpt", "resnet"])
def test_gradients_with_checkpoints_are_those_without(kind):
    """The same dropout masks, the same batch statistics."""
    task = make_task(kind, (lambda: gpt(dropout=0.3)) if kind == "gpt" else None)
    batch, found = next(batches(task)), []
    for cut in (False, True):
        torch.manual_seed(5)
        model = task.make_model().train()
        if cut:
            checkpoint_every_sqrt(model)
        found.append(gradient(task, model, batch))
    assert torch.linalg.vector_norm(found[0]) > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_a_parameter_that_is_not_reached_or_frozen_stays():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    task = make_task(make_model=Idle, make_optimizer=sgd())
    loop = paper_loop(task)
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.step(batches(task))
    moved = [not torch.equal(p, q) for p, q in zip(loop.model.parameters(), before, strict=True)]
    assert moved == [True, True, False, False]

    def frozen() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    task = make_task(make_model=frozen)
    loop = paper_loop(task)
    before = loop.model[0].weight.clone()
    loop.step(batches(task))
    assert torch.equal(loop.model[0].weight, before)


@pytest.mark.parametrize(
    ("name", "where", "sizes"), [("cifar10_resnet50", "stages", [4] * 4), ("wikitext2_gpt2", "blocks", [4] * 3)]
)
def test_the_models_at_the_papers_size_are_cut_at_the_root_of_their_blocks(name, where, sizes):
    with torch.device("meta"):
        model = load_task(name).make_model()
    checkpoint_every_sqrt(model)
    segments = list(getattr(model, where))
    assert [len(segment) for segment in segments] == sizes
    assert all(isinstance(segment, Segment) for segment in segments)
