"""Batches of every kind train as in a plain loop: split if that is proved, whole if their samples are unknown."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

import trimtab
from trimtab.core.errors import BatchError, ModelError, ValueGivenError
from trimtab.core.record import Header, RecordWriter, read_record
from trimtab.losses import Summed
from trimtab.measure.memory_trace import trace_step
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate
from trimtab.profiling.gradient_equivalence import check_splitting
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.training.batch import BatchSplitting

STEPS = 3


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.vision, self.head = nn.Embedding(9, 8), nn.Linear(12, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor, patches: Tensor) -> Tensor:
        each = self.vision(patches).unflatten(0, (len(ids), -1)).mean(1, keepdim=True)
        return self.head(torch.tanh(self.words(ids) + each))


def vision_batch(seed: int, rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(0, 9, (rows, 6), generator=generator(seed))
    return {"ids": ids, "labels": ids.flip(1), "patches": randn(rows * 10, 12, seed=seed)}


def vision_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["patches"]).flatten(0, 1), batch["labels"].flatten())


def split_vision(batch: Any, start: int, stop: int) -> Any:
    return {name: each[start * len(each) // 4 : stop * len(each) // 4] for name, each in batch.items()}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][-1])


def time_first(seed: int) -> tuple[Tensor, Tensor]:
    return randn(7, 4, 3, seed=seed), torch.arange(4) % 2


def time_first_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids: Tensor, bounds: Tensor) -> Tensor:
        parts = [self.words(part).cumsum(0) for part in ids.tensor_split(bounds[1:-1].tolist())]
        return self.head(torch.tanh(torch.cat(parts)))


def packed(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 9, (12,), generator=generator(seed))
    return {"ids": ids, "labels": ids.flip(0), "bounds": torch.tensor([0, 5, 8, 12])}


def packed_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["ids"], batch["bounds"]), batch["labels"])


def split_packed(batch: Any, start: int, stop: int) -> Any:
    first, last = int(batch["bounds"][start]), int(batch["bounds"][stop])
    return {name: batch[name][first:last] for name in ("ids", "labels")} | {
        "bounds": batch["bounds"][start : stop + 1] - first
    }


def summed_packed(model: nn.Module, batch: Any) -> Summed:
    return Summed(packed_loss(model, batch) * len(batch["ids"]), len(batch["ids"]))


class Graph:
    """A graph, in a class of another package."""

    def __init__(self, seed: int, nodes: int = 5) -> None:
        self.x, self.y = randn(nodes, 3, seed=seed), randn(2, seed=seed)
        self.edges = torch.randint(0, nodes, (2, 8), generator=generator(seed))

    def to(self, device: Any) -> Graph:
        moved = copy.copy(self)
        moved.x, moved.y, moved.edges = self.x.to(device), self.y.to(device), self.edges.to(device)
        return moved


class Joined(Graph):
    """Several graphs in one, as graph packages batch them."""

    def __init__(self, graphs: list[Graph]) -> None:
        self.x, self.y = torch.cat([each.x for each in graphs]), torch.cat([each.y for each in graphs])
        starts = torch.tensor([0] + [len(each.x) for each in graphs]).cumsum(0)
        self.edges = torch.cat([each.edges + start for each, start in zip(graphs, starts, strict=False)], 1)
        self.graph = torch.cat([torch.full((len(each.x),), index) for index, each in enumerate(graphs)])


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, graph: Any) -> Tensor:
        each = torch.tanh(self.inner(graph.x)).index_add(0, graph.edges[0], self.inner(graph.x)[graph.edges[1]])
        return self.head(each).mean(0)


def graph_loss(model: nn.Module, graph: Any) -> Tensor:
    return (model(graph) - graph.y.unflatten(0, (-1, 2)).mean(0)).square().mean()


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, images: Any, targets: Any) -> Tensor:
        losses = []
        for image, target in zip(images, targets, strict=True):
            assert image.shape[0] == 3
            feature = self.head(self.convolution(image[None]).tanh().mean((2, 3)))
            losses.append((feature - target["boxes"].mean(0)).square().mean())
        return torch.stack(losses).mean()


def detections(seed: int, number: int = 4, kind: Any = list) -> Any:
    sizes = ((8, 8), (9, 7), (8, 8), (5, 6))[:number]
    images = kind(randn(3, *size, seed=seed + i) for i, size in enumerate(sizes))
    return images, kind({"boxes": randn(1 + i % 3, 4, seed=i)} for i in range(number))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def rows(seed: int, number: int = 8) -> dict[str, Tensor]:
    return {"x": randn(number, 4, seed=seed), "labels": torch.arange(number) % 3}


def entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def square(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean()


def jagged(seed: int) -> tuple[Tensor, Tensor]:
    parts = [randn(length, 4, seed=seed + length) for length in (2, 5, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged), torch.tensor([0, 1, 2])


def jagged_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(torch.stack([model(part).mean(0) for part in batch[0].unbind()]), batch[1])


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(6, 3, seed=0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight)


def sparse(seed: int) -> tuple[Tensor, Tensor]:
    return (randn(4, 6, seed=seed) > 0.5).double().to_sparse(), torch.arange(4) % 3


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(128, 2)

    def forward(self, texts: Any) -> Tensor:
        return torch.stack([self.words(torch.tensor(list(text.encode()))).sum(0) for text in texts])


@dataclass
class Case:
    """A model, its batches, and what is expected of them."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Any]
    samples: int | None
    splits: bool = False


CASES = {
    "vision and language": Case(Vision, vision_batch, vision_loss, None),
    "packed": Case(Packed, packed, packed_loss, None),
    "time first": Case(Recurrent, time_first, time_first_loss, None),
    "a graph": Case(Messages, lambda seed: Joined([Graph(seed), Graph(seed + 9, 3)]), graph_loss, None),
    "graphs alone": Case(
        Messages,
        lambda seed: [Graph(seed + i) for i in range(3)],
        lambda model, batch: torch.stack([graph_loss(model, each) for each in batch]).mean(),
        None,
    ),
    "graphs beside labels": Case(
        Messages,
        lambda seed: ([Graph(seed + i) for i in range(4)], randn(4, 2, seed=seed)),
        lambda model, batch: (torch.stack([model(each) for each in batch[0]]) - batch[1]).square().mean(),
        4,
        splits=True,
    ),
    "detection": Case(Detector, detections, lambda model, batch: model(*batch), 4, splits=True),
    "detection, in tuples": Case(
        Detector, lambda seed: detections(seed, kind=tuple), lambda model, batch: model(*batch), 4, splits=True
    ),
    "as many images as channels": Case(
        Detector, lambda seed: detections(seed, 3), lambda model, batch: model(*batch), 3
    ),
    "images alone": Case(
        Detector,
        lambda seed: detections(seed)[0],
        lambda model, batch: model(batch, [{"boxes": torch.ones(1, 4)}] * len(batch)),
        None,
    ),
    "jagged": Case(mlp, jagged, jagged_loss, 3),
    "sparse": Case(Sparse, sparse, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), 4),
    "a packed sequence": Case(
        mlp,
        lambda seed: pack_sequence([randn(3, 4, seed=seed), randn(2, 4, seed=seed + 1)]),
        lambda model, batch: model(batch.data).square().mean(),
        None,
    ),
    "texts": Case(Texts, lambda seed: ["ab", "c", "defg", "h"], square, 4, splits=True),
    "user dict": Case(mlp, lambda seed: UserDict(rows(seed)), entropy, 8, splits=True),
    "batch encoding": Case(mlp, lambda seed: BatchEncoding(rows(seed)), entropy, 8, splits=True),
    "arrays": Case(
        mlp,
        lambda seed: {name: value.numpy() for name, value in rows(seed).items()},
        lambda model, batch: entropy(model, {name: torch.from_numpy(value) for name, value in batch.items()}),
        8,
        splits=True,
    ),
    "a step number": Case(mlp, int, lambda model, seed: square(model, randn(4, 4, seed=seed)), None),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:A batch was not split"),
]


def built(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = case.model().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain(case: Case, seeds: Any = range(1, 1 + STEPS)) -> nn.Module:
    model, optimizer = built(case)
    for seed in seeds:
        optimizer.zero_grad()
        found = case.loss(model, case.batch(seed))
        (found.loss_sum / found.count if isinstance(found, Summed) else found).backward()
        optimizer.step()
    return model


def trained(case: Case, plan: Plan, **start: Any) -> tuple[nn.Module, list[int]]:
    """Return the model, and the micro-batches of each window."""
    model, optimizer = built(case)
    sizes = []
    with trimtab.start(model, optimizer, plan, **start) as run:
        for window in run.windows([case.batch(seed) for seed in range(1, 1 + STEPS)]):
            sizes.append(len(window))
            run.train_step(window, case.loss)
    return model, sizes


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@each_case
@pytest.mark.parametrize("plan", [Plan.fixed(8), Plan.fixed(8, 2)], ids=["whole", "split"])
def test_every_batch_trains_as_in_a_plain_loop(case, plan):
    model, sizes = trained(case, plan)
    assert_same(model, plain(case))
    assert set(sizes) == ({-(-case.samples // 2)} if case.splits and plan.splits else {1})


@each_case
def test_splitting_is_proved_or_refused_for_every_batch(case):
    model, optimizer = built(case)
    check = check_splitting(TrainingLoop(model, optimizer, case.loss, case.batch(1)))
    assert check.splittable is case.splits, check.reason
    assert (check.code == "batch.samples_unknown") is (case.samples is None)


@pytest.mark.parametrize("name", ["packed", "a graph"])
def test_a_plan_is_made_of_a_batch_of_unknown_samples_and_trains_others_whole(name):
    case = CASES[name]
    model, optimizer = built(case)
    plan = trimtab.plan(model, optimizer, case.loss, case.batch(1), num_blocks=3)
    assert (plan.check.code, plan.batch_size, plan.splits) == ("batch.samples_unknown", 1, False)
    plan = replace(Plan.fixed(1), check=plan.check)
    trained_by_plan, sizes = trained(case, plan)
    assert_same(trained_by_plan, plain(case))
    other = CASES["user dict"]  # of known samples, as a batch by chance may be
    trained_by_plan, sizes = trained(other, plan)
    assert set(sizes) == {1}
    assert_same(trained_by_plan, plain(other))


@pytest.mark.parametrize("name", ["vision and language", "detection"])
def test_records_hold_an_unknown_number_of_samples_as_null(tmp_path, name):
    case = CASES[name]
    writer = RecordWriter(tmp_path / "run.jsonl", Header("run"))
    trained(case, Plan.fixed(8), record=writer)
    writer.close()
    assert [step.samples for step in read_record(tmp_path / "run.jsonl").steps] == [case.samples] * STEPS


def test_a_schedule_by_samples_needs_their_number():
    case = CASES["vision and language"]
    model, optimizer = built(case)
    before = copy.deepcopy(model.state_dict())
    plan = Plan.fixed(4, schedule="warmup_cosine")
    with trimtab.start(model, optimizer, plan, total_samples=100) as run:
        with pytest.raises(BatchError) as caught:
            next(run.windows([case.batch(1)]))
        assert (caught.value.code, run.num_windows) == ("batch.samples_unknown", 0)
        assert "count=" in caught.value.hint
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with trimtab.start(model, optimizer, plan, total_samples=12, count=lambda batch: len(batch["ids"])) as run:
        for window in run.windows([case.batch(seed) for seed in range(STEPS)]):
            run.train_step(window, case.loss)
        assert run.consumed_samples == 12


# The user's functions.

SPLITS = {
    "vision and language": (CASES["vision and language"], lambda batch: len(batch["ids"]), split_vision, 4),
    "time first": (
        CASES["time first"],
        lambda batch: len(batch[1]),
        lambda batch, start, stop: (batch[0][:, start:stop], batch[1][start:stop]),
        4,
    ),
    "packed": (
        Case(Packed, packed, summed_packed, None),
        lambda batch: len(batch["bounds"]) - 1,
        split_packed,
        3,
    ),
    "jagged": (
        CASES["jagged"],
        lambda batch: len(batch[1]),
        lambda batch, start, stop: (
            torch.nested.nested_tensor(list(batch[0].unbind()[start:stop]), layout=torch.jagged),
            batch[1][start:stop],
        ),
        3,
    ),
}


@pytest.mark.parametrize(("case", "count", "split", "samples"), SPLITS.values(), ids=SPLITS)
def test_functions_of_the_user_split_in_planning_and_training(case, count, split, samples):
    subject = TrainingLoop(*built(case), case.loss, case.batch(1), batching=BatchSplitting(count, split))
    check = check_splitting(subject)
    assert check.splittable, check.reason
    assert subject.rows == samples
    trained_model, sizes = trained(case, Plan.fixed(samples, 2), count=count, split=split)
    assert set(sizes) == {2}
    assert_same(trained_model, plain(case))


def test_a_split_that_loses_samples_is_refused_by_the_proof():
    case, count, split, _ = SPLITS["time first"]
    batching = BatchSplitting(count, lambda batch, start, stop: split(batch, 0, stop - start))
    assert not check_splitting(TrainingLoop(*built(case), case.loss, case.batch(1), batching=batching)).splittable


def test_a_plan_splits_by_the_functions_of_the_user():
    case, count, split, samples = SPLITS["vision and language"]
    how = {"num_blocks": 3, "count": count, "split": split}
    plan = trimtab.plan(*built(case), case.loss, case.batch(1), **how)
    assert (plan.check.splittable, plan.batch_size) == (True, samples)


@pytest.mark.parametrize("given", [{"count": 3}, {"split": "half"}])
def test_functions_that_cannot_be_called_are_refused_everywhere(given):
    case = CASES["user dict"]
    model, optimizer = built(case)
    (name,) = given
    for call in (
        lambda: trimtab.plan(model, optimizer, case.loss, case.batch(1), **given),
        lambda: trimtab.profile(model, optimizer, case.loss, case.batch(1), **given),
        lambda: trimtab.start(model, optimizer, Plan.fixed(8), **given),
    ):
        with pytest.raises(ValueGivenError) as caught:
            call()
        assert caught.value.code == f"{name}.not_callable"


# Losses that change their batch.


@dataclass
class Example:
    x: Tensor
    labels: Tensor | None


def as_example(seed: int) -> Example:
    return Example(**rows(seed))


def pops(model: nn.Module, batch: Any) -> Tensor:
    labels = batch.pop("labels")
    return F.cross_entropy(model(batch["x"]), labels)


def pops_inside(model: nn.Module, batch: Any) -> Tensor:
    return pops(model, batch["inner"])


def pops_from_lists(model: nn.Module, batch: Any) -> Tensor:
    labels = batch.pop()
    return F.cross_entropy(model(batch.pop()), labels)


def empties(model: nn.Module, batch: Example) -> Tensor:
    labels, batch.labels = batch.labels, None
    return F.cross_entropy(model(batch.x), labels)


def normalizes(model: nn.Module, batch: Any) -> Tensor:
    batch["x"].div_(2.0)
    return entropy(model, batch)


def subtracts(model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"]
    x -= 0.1
    return entropy(model, batch)


def by_data(model: nn.Module, batch: Any) -> Tensor:
    batch["x"].data.mul_(0.5)
    return entropy(model, batch)


def by_array(model: nn.Module, batch: Any) -> Tensor:
    batch["x"].numpy()[:] *= 0.5
    return entropy(model, batch)


def requires(model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"].requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch["labels"]) + slope.square().sum(1).mean()


def on_object(model: nn.Module, batch: Any) -> Tensor:
    batch.x.mul_(0.5)
    labels = batch.__dict__.pop("labels")
    return F.cross_entropy(model(batch.x), labels)


class Holder:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


CHANGES = {
    "pops": (rows, pops),
    "pops from a user dict": (lambda seed: UserDict(rows(seed)), pops),
    "pops from a batch encoding": (lambda seed: BatchEncoding(rows(seed)), pops),
    "pops inside": (lambda seed: {"inner": rows(seed)}, pops_inside),
    "pops from a list": (lambda seed: list(rows(seed).values()), pops_from_lists),
    "empties a dataclass": (as_example, empties),
    "normalizes": (rows, normalizes),
    "subtracts": (rows, subtracts),
    "changes data": (rows, by_data),
    "changes by an array": (rows, by_array),
    "requires grad": (rows, requires),
    "an object": (lambda seed: Holder(**rows(seed)), on_object),
}


def tensors(batch: Any) -> dict[str, Tensor]:
    if isinstance(batch, list):
        return dict(enumerate(batch))
    if isinstance(batch, Example):
        return dataclasses.asdict(batch)
    found = batch.__dict__ if isinstance(batch, Holder) else dict(batch)
    return found.get("inner", found)


@pytest.mark.parametrize(("batch", "loss"), CHANGES.values(), ids=CHANGES)
def test_planning_leaves_the_example_batch_as_it_was(batch, loss):
    case = Case(mlp, batch, loss, 8)
    model, optimizer = built(case)
    given, reference = case.batch(1), tensors(case.batch(1))
    subject = TrainingLoop(model, optimizer, loss, given)
    check_splitting(subject)
    with subject.start(Candidate(subject.rows)) as run:
        for _ in range(3):
            run.train_step(run.window(subject.batch), subject.loss_fn)
    with contextlib.suppress(ModelError):  # of a loss that reads values
        trace_step(model, optimizer, subject.loss_fn, given)
    assert {name: value is not None for name, value in tensors(given).items()} == dict.fromkeys(reference, True)
    for name, value in tensors(given).items():
        assert torch.equal(value, reference[name])
        assert not value.requires_grad


@pytest.mark.parametrize("name", ["normalizes"])
def test_a_whole_plan_leaves_the_example_batch_as_it_was(name):
    make, loss = CHANGES[name]
    given = make(1)
    trimtab.plan(*built(Case(mlp, make, loss, 8)), loss, given, num_blocks=3)
    assert all(torch.equal(value, given[name]) for name, value in make(1).items())


@pytest.mark.parametrize("micro_batch", [8, 3])
@pytest.mark.parametrize(("batch", "loss"), CHANGES.values(), ids=CHANGES)
def test_training_is_that_of_the_plain_loop(batch, loss, micro_batch):
    case = Case(mlp, batch, loss, 8)
    model, _ = trained(case, Plan.fixed(8, micro_batch))
    assert_same(model, plain(case))


@pytest.mark.parametrize("name", [name for name in CHANGES if "pops" in name])
def test_training_leaves_the_containers_of_a_loader_whole(name):
    make, loss = CHANGES[name]
    data = [make(seed) for seed in range(2)]
    model, optimizer = built(Case(mlp, make, loss, 8))
    with trimtab.start(model, optimizer, Plan.fixed(8)) as run:
        for _ in range(2):
            for window in run.windows(data):
                run.train_step(window, loss)
    assert all(len(tensors(batch)) == 2 for batch in data)


# Windows that memory runs out in.


def runs_out(loss: Callable[[nn.Module, Any], Any], most: int) -> Callable[[nn.Module, Any], Any]:
    """Return a loss that changes its batch first, and does not fit if that has more than `most` samples."""

    def failing(model: nn.Module, batch: Any) -> Any:
        size = len(batch["x"])
        found = loss(model, batch)
        if size > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    return failing


def test_a_window_whose_labels_were_popped_is_run_again():
    case = Case(mlp, rows, runs_out(pops, 4), 8)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        model, _ = trained(case, Plan.fixed(8))
    assert_same(model, plain(Case(mlp, rows, pops, 8)))


@pytest.mark.parametrize("loss", [normalizes, subtracts])
def test_a_window_whose_batch_was_changed_in_place_is_not_run_again(loss):
    case = Case(mlp, rows, runs_out(loss, 4), 8)
    model, optimizer = built(case)
    before = copy.deepcopy(model.state_dict())
    with trimtab.start(model, optimizer, Plan.fixed(8)) as run:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run.train_step(run.window(case.batch(1)), case.loss)
        assert any("in place" in note for note in caught.value.__notes__)
        assert run.num_windows == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_window_that_cannot_be_split_is_not_run_again():
    case = Case(Vision, vision_batch, vision_loss, None)
    model, optimizer = built(case)

    def failing(model: nn.Module, batch: Any) -> Any:
        vision_loss(model, batch)
        raise torch.OutOfMemoryError("CUDA out of memory")

    with trimtab.start(model, optimizer, Plan.fixed(4)) as run, pytest.raises(torch.OutOfMemoryError) as caught:
        run.train_step(run.window(case.batch(1)), failing)
    assert any("cannot be split" in note for note in caught.value.__notes__)


def test_a_scripted_model_trains_and_is_planned():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def build() -> nn.Module:
            return torch.jit.script(mlp())

        case = Case(build, rows, entropy, 8)
        model, sizes = trained(case, Plan.fixed(8, 4))
        assert set(sizes) == {2}
        assert_same(model, plain(case))
        assert check_splitting(TrainingLoop(*built(case), entropy, rows(1))).splittable
