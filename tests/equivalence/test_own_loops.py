"""Loaders and loops as people have them: to the weights of the plain loop, or refused with the way out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from call_counts import OutOfReach
from plain_loop import Case, assert_close, assert_same_training, train_ours, train_plain
from raising import raises
from state_digest import fingerprint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from training_cases import ROWS, class_mean, mlp, sgd

import trimtab
from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import LoopError, OptimizerError
from trimtab.losses import Summed
from trimtab.measure import machine
from trimtab.plans.plan import Plan
from trimtab.profiling import trials

NUM_ROWS = 4 * ROWS + 5  # the last batch is short


class Rows(Dataset):
    """Rows and labels, made anew each time they are read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, dtype=torch.float64, generator=generator), index % 4


class Stream(IterableDataset):
    """The same rows, one by one, without a length."""

    def __iter__(self):
        return iter([Rows()[index] for index in range(NUM_ROWS)])


def shuffled(kind=DataLoader, **options):
    return kind(Rows(), ROWS, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


LOADERS = {
    "in this process": shuffled,
    "workers": lambda: shuffled(num_workers=2),
    "workers that stay": lambda: shuffled(num_workers=2, persistent_workers=True),
    "pinned": lambda: shuffled(num_workers=1, pin_memory=True),
    "stateful": lambda: shuffled(StatefulDataLoader),
    "stateful, with workers": lambda: shuffled(StatefulDataLoader, num_workers=2),
    "a stream": lambda: DataLoader(Stream(), ROWS),
    "a generator": lambda: (batch for batch in shuffled()),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("micro_batch", [12, 5])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # there may be no accelerator
def test_a_loader_trains_as_in_the_plain_loop(micro_batch, make):
    case = Case(mlp, sgd, class_mean, None)
    plain = train_plain(case.having(batches=make()))
    assert len(plain.losses) == 5
    assert_same_training(train_ours(case.having(batches=make()), Plan.fixed(ROWS, micro_batch)), plain, 1e-12)


# Lengths that vary: each batch padded to its own longest row, the loss over the words alone.


class Reader(nn.Module):
    """Says a word for each word, by it and by the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        seen = self.words(tokens)
        counts = torch.arange(1, tokens.shape[1] + 1, dtype=seen.dtype)
        return self.head(torch.tanh(seen + seen.cumsum(1) / counts[:, None]))


def padded(lengths):
    """Return a batch of sentences as long as said, padded with 0; labels of padding are -100."""
    rows = [torch.randint(1, 11, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return tokens, torch.where(tokens == 0, -100, tokens)


def word_loss(model, batch):
    tokens, labels = batch
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return Summed(loss, (labels != -100).sum())


SENTENCES = [padded(lengths) for lengths in ((3, 9, 2, 4), (5, 5, 1, 2), (7, 12, 1, 1), (2, 3))]


@pytest.mark.parametrize("micro_batch", [4, 3, 1])
def test_lengths_that_vary_train_as_in_the_plain_loop(micro_batch):
    case = Case(Reader, sgd, word_loss, SENTENCES)
    assert_same_training(train_ours(case, Plan.fixed(4, micro_batch)), train_plain(case), 1e-12)


@pytest.fixture
def in_no_time(monkeypatch):
    """Trials take no time, and only fp32 is worth one."""
    monkeypatch.setattr(trials, "BLOCK_S", 1e-4)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})


@pytest.mark.usefixtures("in_no_time")
def test_a_plan_is_made_for_the_longest_batch():
    """It is measured on that alone; the example is proved to split besides, before anything is."""
    model, optimizer = Case(Reader, sgd, word_loss, SENTENCES, torch.float32).build()
    example, longest = SENTENCES[0], SENTENCES[2]
    seen = OutOfReach(lengths=[])

    def noting(model, batch):
        seen.held.lengths.append(batch[0].shape[1])
        return word_loss(model, batch)

    trimtab.plan(model, optimizer, noting, example, longest_batch=longest, num_blocks=3)
    assert [length for length, _ in itertools.groupby(seen.held.lengths)] == [12, example[0].shape[1], 12]


# Two networks: a run of each.


class Maker(nn.Sequential):
    """Makes rows of noise."""

    def __init__(self, *, normalises: bool = False) -> None:
        super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8) if normalises else nn.Tanh(), nn.Linear(8, 6))


class Judge(nn.Sequential):
    """Tells rows that were made from others."""

    def __init__(self, *, normalises: bool = False) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8) if normalises else nn.Tanh(), nn.Linear(8, 1))


def told(scores, is_real):
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


@dataclass
class Pair:
    """Two networks that train by each other, and batches of rows and noise."""

    maker: nn.Module
    judge: nn.Module
    makers: torch.optim.Optimizer
    judges: torch.optim.Optimizer

    @classmethod
    def build(cls, **options):
        torch.manual_seed(0)
        maker, judge = Maker(**options).double(), Judge(**options).double()
        return cls(
            maker,
            judge,
            torch.optim.AdamW(maker.parameters(), eps=1e-3),
            torch.optim.AdamW(judge.parameters(), eps=1e-3),
        )

    def judged(self, judge, batch):
        rows, noise = batch
        with torch.no_grad():
            made = self.maker(noise)
        return told(judge(rows), True) + told(judge(made), False)

    def fooled(self, maker, noise):
        return told(self.judge(maker(noise)), True)

    def weights(self):
        return {
            f"{name} {key}": value
            for name in ("maker", "judge")
            for key, value in getattr(self, name).state_dict().items()
        }


def pairs(num=6):
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(12, width, dtype=torch.float64, generator=generator) for width in (6, 3)) for _ in range(num)
    ]


def train_pair_plain(pair, batches):
    for rows, noise in batches:
        pair.judges.zero_grad()
        pair.judged(pair.judge, (rows, noise)).backward()
        pair.judges.step()
        pair.makers.zero_grad()
        pair.fooled(pair.maker, noise).backward()
        pair.makers.step()
    return pair.weights()


def train_pair(pair, batches, of_judge, of_maker):
    with (
        trimtab.start(pair.judge, pair.judges, of_judge) as judging,
        trimtab.start(pair.maker, pair.makers, of_maker) as making,
    ):
        for rows, noise in batches:
            judging.train_step(judging.window((rows, noise)), pair.judged)
            making.train_step(making.window(noise), pair.fooled)
    return pair.weights()


PLANS = {
    "whole": (Plan.fixed(12), Plan.fixed(12)),
    "split": (Plan.fixed(12, 5), Plan.fixed(12, 4)),
    "one of them split": (Plan.fixed(12, 5), Plan.fixed(12)),
    "measured": (Plan.fixed(12, 5, batch_rule=BatchRule("fixed")), Plan.fixed(12, 3, batch_rule=BatchRule("fixed"))),
}


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_two_networks_in_a_run_each_train_as_in_the_plain_loop(plans, each_measured):
    ours = train_pair(Pair.build(), pairs(), *plans)
    assert_close(ours, train_pair_plain(Pair.build(), pairs()), 1e-11, "weights")


def test_two_networks_with_batch_statistics_train_as_in_the_plain_loop():
    ours = train_pair(Pair.build(normalises=True), pairs(), Plan.fixed(12), Plan.fixed(12))
    assert_close(ours, train_pair_plain(Pair.build(normalises=True), pairs()), 1e-11, "weights and statistics")


def test_both_networks_compute_in_the_precision_of_the_step_they_are_in():
    pair, seen = Pair.build(), []
    for network in (pair.maker.float(), pair.judge.float()):
        network[0].register_forward_hook(lambda module, rows, made: seen.append(made.dtype))
    rows, noise = (each.float() for each in pairs(1)[0])
    with (
        trimtab.start(pair.judge, pair.judges, Plan.fixed(12, precision="bf16")) as judging,
        trimtab.start(pair.maker, pair.makers, Plan.fixed(12)) as making,
    ):
        judging.train_step(judging.window((rows, noise)), pair.judged)
        making.train_step(making.window(noise), pair.fooled)
    assert seen == [torch.bfloat16] * 3 + [torch.float32] * 2


@pytest.mark.usefixtures("in_no_time")
@pytest.mark.parametrize("memory", [None, "1GiB"])
def test_planning_for_one_network_leaves_the_other_as_it_was(memory):
    """Its statistics move in the loss, and it has gradients from it."""
    pair, (batch, *_) = Pair.build(normalises=True), pairs(1)
    pair.fooled(pair.maker, batch[1]).backward()

    def facts():
        return fingerprint(pair.maker, pair.makers), fingerprint(pair.judge, pair.judges)

    before, budget = facts(), trimtab.Budget(memory=memory)
    trimtab.plan(pair.judge, pair.judges, pair.judged, batch, num_blocks=3, budget=budget)
    assert facts() == before
    trimtab.plan(pair.maker, pair.makers, pair.fooled, batch[1], num_blocks=3, budget=budget)
    assert facts() == before


def test_two_networks_go_on_together_by_the_checkpoints_of_one(tmp_path):
    def train(pair, folder, num_windows):
        """Return the losses of both; every window saves what the next one needs."""
        found = []
        with trimtab.start(pair.maker, pair.makers, Plan.fixed(12, 4)) as making:
            also = {"maker": pair.maker, "maker's optimizer": pair.makers, "maker's run": making}
            kept = trimtab.Checkpoints(folder, every_steps=1, every_s=None, also=also)
            with trimtab.start(pair.judge, pair.judges, Plan.fixed(12, 5), checkpoints=kept) as judging:
                for window in judging.windows(pairs()):
                    if judging.num_windows == num_windows:
                        break
                    found.append(judging.train_step(window, pair.judged).item())
                    noise = torch.randn(12, 3, dtype=torch.float64)
                    found.append(making.train_step(making.window(noise), pair.fooled).item())
        return found, pair.weights()

    torch.manual_seed(5)
    whole, expected = train(Pair.build(), tmp_path / "whole", 6)
    torch.manual_seed(5)
    cut, _ = train(Pair.build(), tmp_path / "cut", 3)
    torch.manual_seed(77)
    rest, found = train(Pair.build(), tmp_path / "cut", 6)
    assert cut + rest == whole
    assert_close(found, expected, 0.0, "weights")


def test_an_optimizer_of_the_other_network_is_refused_with_the_way_out():
    pair = Pair.build()
    both = torch.optim.AdamW([*pair.maker.parameters(), *pair.judge.parameters()])
    for optimizer in (both, pair.makers):
        with raises(OptimizerError, code="optimizer.foreign_parameters", field="optimizer"):
            trimtab.start(pair.judge, optimizer, Plan.fixed(12))


# Two optimizers of one model.


class Both(torch.optim.Optimizer):
    """Two optimizers as one, which has their groups and their state."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts

    def step(self, closure=None):
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = list(itertools.islice(groups, len(part.param_groups)))
            part.state = self.state
            part.step()


def of_two(parameters):
    first, *others = parameters
    return Both(torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01, eps=1e-3))


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_two_optimizers_as_one_train_as_in_the_plain_loop(micro_batch):
    case = Case(mlp, of_two, class_mean, None)
    ours = train_ours(case.having(batches=shuffled()), Plan.fixed(ROWS, micro_batch), clip_norm=0.5)
    assert_same_training(ours, train_plain(case.having(batches=shuffled()), clip_norm=0.5), 1e-12)
    assert len(ours.optimizer.state) == 4


def test_gradients_that_the_optimizer_does_not_have_are_left_alone():
    case = Case(mlp, lambda parameters: torch.optim.SGD(parameters[:2], lr=0.0), class_mean, None)
    batches = list(itertools.islice(shuffled(), 2))
    ours = train_ours(case.having(batches=batches), Plan.fixed(ROWS, 5), clip_norm=1e-3)
    plain = train_plain(case.having(batches=batches))
    for name in ("2.weight", "2.bias"):  # the sum over both steps, as no loop dropped it
        assert_close({name: ours.gradients[-1][name]}, {name: plain.gradients[-1][name]}, 1e-12, "a gradient")


def test_a_second_run_of_a_model_is_refused_with_the_way_out():
    model = mlp()
    parameters = list(model.parameters())
    with (
        trimtab.start(model, torch.optim.SGD(parameters[:2], lr=0.1), Plan.fixed(12)),
        raises(LoopError, code="run.model_in_use", field="model"),
    ):
        trimtab.start(model, torch.optim.SGD(parameters[2:], lr=0.1), Plan.fixed(12))
