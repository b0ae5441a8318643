"""Cases of regret.py, and the training of an arm."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import statistics
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trimtab
from benchmarks.paper.cifar10 import normalise
from benchmarks.paper.datasets import cifar10
from benchmarks.paper.tasks import load_task
from trimtab.adaptive_batch import batch_size_decider
from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate
from trimtab.adaptive_batch.step_time_model import StepTimes, WindowTimes
from trimtab.core.serialization import write_whole
from trimtab.losses import parts_of
from trimtab.plans.plan import Plan
from trimtab.tasks.embedded import python_topics
from trimtab.tasks.evaluation import evaluation_mode
from trimtab.tasks.language_modelling import windows
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet
from trimtab.tasks.task import Task, TaskData
from trimtab.training.batch_size_controller import BatchSizeController
from trimtab.training.run import Run
from trimtab.training.window import Window

SMOOTHED = 3  # evaluations averaged for a point of a curve


def small_resnet() -> Task:
    """Return cifar10_resnet at 1% of its cost: 16x16 pixels, no augmentation, single blocks, width 8, SGD."""
    return replace(
        load_task("cifar10_resnet"),
        make_model=_small_resnet,
        make_optimizer=_sgd,
        load_data=_small_images,
        batch_size=8,
    )


def _small_resnet() -> ResNet:
    return ResNet(width=8, depths=(1, 1, 1), in_channels=3, num_classes=10)


def _small_images() -> TaskData:
    data = cifar10()
    judged = slice(None, None, len(data.test_images) // JUDGED)
    held_out = _shrunk(data.test_images[judged]), torch.from_numpy(data.test_labels[judged]).long()
    columns = _shrunk(data.train_images), torch.from_numpy(data.train_labels).long()
    return TaskData(columns=columns, held_out=(held_out,), source=data.source)


def _shrunk(images: np.ndarray) -> torch.Tensor:
    """Return normalised images (N, 3, 16, 16) float32 by average pooling."""
    parts = torch.from_numpy(images).split(5_000)
    return torch.cat([torch.nn.functional.avg_pool2d(normalise(part), 2) for part in parts])


def _sgd(model: nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


CONTEXT, HELD_OUT, JUDGED = 64, 128, 1_000


def small_gpt() -> Task:
    """Return source_gpt at 1/40 of its cost: context 64, two layers of width 128."""
    return replace(
        load_task("source_gpt"), make_model=_small_model, make_optimizer=_adamw, load_data=_short_rows, batch_size=4
    )


def _small_model() -> GPT:
    return GPT(GPTShape(vocab_size=256, context=CONTEXT, num_layers=2, num_heads=4, width=128, dropout=0.0))


def _adamw(model: nn.Module, rate: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), fused=True)


def _short_rows() -> TaskData:
    text, source = python_topics()
    stream = np.frombuffer(text, np.uint8)
    cut = int(0.9 * len(stream))
    judged = windows(stream[cut:], CONTEXT)
    judged = judged[:: len(judged) // HELD_OUT][:HELD_OUT]
    return TaskData(columns=(windows(stream[:cut], CONTEXT),), held_out=((judged,),), source=source)


@dataclass(frozen=True)
class Case:
    """A task with its training settings.

    Args:
        name: Name of the case.
        make: Returns the task.
        rows: Samples per micro-batch, which is a loader batch.
        rate: Learning rate at k = 1.
        targets: Validation losses in decreasing order, from the part of a run that takes most of the time.
        eval_every: Samples between evaluations.
        most_samples: Samples after which an arm is stopped.
        warmup: Samples of linear learning-rate warm-up in every arm.
    """

    name: str
    make: Callable[[], Task]
    rows: int
    rate: float
    targets: tuple[float, ...]
    eval_every: int
    most_samples: int
    warmup: int = 0

    def warmed(self, samples: int) -> float:
        """Return the learning-rate factor after `samples` samples."""
        return min(1.0, samples / self.warmup) if self.warmup else 1.0


CASES = (
    Case("cifar10_resnet_small", small_resnet, 8, 0.01, (1.4, 1.35, 1.3, 1.25), 2_048, 240_000),
    Case("source_gpt_small", small_gpt, 4, 1e-3, (1.7, 1.6, 1.55, 1.5), 512, 40_000, warmup=2_048),
)


@dataclass
class Course:
    """Learning curve of an arm.

    Args:
        points: (samples, windows, micro-batches of all ranks, validation loss). A split micro-batch counts as two,
            which overestimates its time.
        noise: Final noise estimate.
        price: Overhead of measuring, as a fraction of the time.
    """

    points: list[tuple[float, float, float, float]] = field(default_factory=list)
    noise: NoiseEstimate | None = None
    price: float = 0.0

    @property
    def mean_k(self) -> float:
        """Micro-batches of all ranks per window."""
        _, num_windows, micro, _ = self.points[-1]
        return micro / num_windows

    def losses(self) -> list[float]:
        """Return the smoothed loss of each evaluation."""
        each = [loss for *_, loss in self.points]
        return [statistics.fmean(each[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(each))]

    def reached(self, target: float) -> bool:
        """Return True if the curve ends at or below the target."""
        return bool(self.points) and self.losses()[-1] <= target

    def arrival(self, targets: Sequence[float], times: StepTimes, ranks: int) -> tuple[float, float]:
        """Return the geometric means over targets of samples and seconds until the curve first met the target.

        Infinite if a target was never met. Several targets are averaged because the time to a single target varies by a
        tenth by chance.

        Args:
            targets: Validation losses.
            times: Step time model that converts windows and micro-batches to seconds.
            ranks: Number of ranks.
        """
        met = [self._met(target) for target in targets]
        if any(point is None for point in met):
            return math.inf, math.inf
        points = [point for point in met if point is not None]
        seconds = [micro / ranks * times.micro_s + num_windows * times.fixed_s for _, num_windows, micro in points]
        samples = statistics.geometric_mean(point[0] for point in points)
        return samples, statistics.geometric_mean(seconds) * (1 + self.price)

    def _met(self, target: float) -> tuple[float, float, float] | None:
        """Return interpolated samples, windows and micro-batches until the curve met the target; None if never."""
        losses = self.losses()
        found = next((i for i, loss in enumerate(losses) if loss <= target), None)
        if found is None:
            return None
        samples, num_windows, micro, _ = self.points[found]
        if not found or losses[found] >= losses[found - 1]:
            return samples, num_windows, micro
        share = (losses[found - 1] - target) / (losses[found - 1] - losses[found])
        before = self.points[found - 1]
        samples, num_windows, micro = (
            a + share * (b - a) for a, b in zip(before[:3], (samples, num_windows, micro), strict=True)
        )
        return samples, num_windows, micro


class Told(WindowTimes):
    """Replacement of `WindowTimes` that returns given times once enough steps were measured."""

    def __init__(self, told: StepTimes) -> None:
        super().__init__()
        self._told = told

    def times(self, micro_batch_samples: float) -> StepTimes | None:
        """Return the given times, None while too few steps were measured."""
        return self._told if self.is_known else None


def kept(path: Path, run: Callable[..., Course], *arguments: Any) -> Course:
    """Return a cached course if it was made by the same sources and arguments. Otherwise train and cache it."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    made_by = f"{sources()}, {arguments[1:]}"
    if found.get("made_by") != made_by:
        course = run(*arguments)
        found = {"points": course.points, "price": course.price, "made_by": made_by}
        write_whole(path, json.dumps(found))
    return Course([tuple(point) for point in found["points"]], price=found["price"])


@functools.cache
def sources() -> str:
    """Return a fingerprint of the source files that affect training."""
    files = sorted(Path(trimtab.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(each.read_bytes() for each in [*files, Path(__file__)])).hexdigest()[:16]


def train_fixed(case: Case, seed: int, total: int, rate: float | None = None) -> Course:
    """Train to the target with a fixed number of micro-batches and the corresponding learning rate.

    The plan measures nothing. The order of data equals that of the policies, except for the last samples of an epoch.

    Args:
        case: Case to train.
        seed: Seed.
        total: Micro-batches per window, of all ranks.
        rate: Learning rate at k = 1; None for the case's.
    """
    task, plan = case.make(), Plan.fixed(case.rows * total, micro_batch=case.rows)

    def window(run: Run, batches: Iterator[Any]) -> Window:
        columns = zip(*itertools.islice(batches, total), strict=True)
        return run.window(tuple(torch.cat(column) for column in columns))

    return _train(case, seed, plan, (rate or case.rate) * _follows(task, total), case.rows, window)


def train(
    case: Case,
    seed: int,
    rule: trimtab.BatchRule,
    ranks: int = 1,
    times: StepTimes | None = None,
    most: int | None = None,
) -> Course:
    """Train to the target with a batch size policy.

    Ranks are simulated in a single process: a loader batch contains a micro-batch of each rank.

    Args:
        case: Case to train.
        seed: Seed.
        rule: Policy; its k counts micro-batches of all ranks.
        ranks: Number of simulated ranks.
        times: Step times to use instead of measured times; None to measure.
        most: Maximum number of samples; None for the case's.
    """
    task, rows = case.make(), case.rows * ranks
    plan = Plan.fixed(rows, micro_batch=case.rows, batch_rule=rule)

    # Seconds per micro-batch, counting the micro-batches of all ranks.
    told = None if times is None else StepTimes(times.micro_s / ranks, times.fixed_s)

    def window(run: Run, batches: Iterator[Any]) -> Window:
        return run.window(*itertools.islice(batches, run.num_batches))

    return _train(case, seed, plan, case.rate * _follows(task, ranks), rows, window, told, most)


def _train(
    case: Case,
    seed: int,
    plan: Plan,
    rate: float,
    rows: int,
    next_window: Callable[[Run, Iterator[Any]], Window],
    told: StepTimes | None = None,
    most: int | None = None,
) -> Course:
    task = case.make()
    data = task.load_data()
    torch.manual_seed(seed)
    model = task.make_model().train()
    optimizer = task.make_optimizer(model, rate=rate)  # type: ignore[call-arg]
    batches, course, due = data.batches(seed, rows), Course(), 0
    micro, num_windows = 0, 0
    with _telling(told), trimtab.start(model, optimizer, plan) as run:
        if told is not None:
            _as_ranks(run, told, rows // case.rows)
        while run.consumed_samples < (most or case.most_samples):
            window = next_window(run, batches)
            for group in optimizer.param_groups:
                group["lr"] = rate * case.warmed(run.consumed_samples + case.rows)
            run.train_step(window, task.loss_fn)
            micro, num_windows = micro + window.num_micro_batches, num_windows + 1
            if run.consumed_samples >= due:
                due = (run.consumed_samples // case.eval_every + 1) * case.eval_every
                course.points.append((run.consumed_samples, num_windows, micro, held_out_loss(task, model, data)))
                if course.reached(case.targets[-1]):
                    break
        course.noise = run.noise
        if plan.batch_rule is not None and plan.batch_rule.policy != "fixed":
            course.price = run._control._account.share  # type: ignore[union-attr]
    return course


def _telling(told: StepTimes | None) -> contextlib.AbstractContextManager[Any]:
    """Context manager: runs started inside use the given times instead of measured times."""
    if told is None:
        return contextlib.nullcontext()
    return unittest.mock.patch.object(batch_size_decider, "WindowTimes", functools.partial(Told, told))


def _as_ranks(run: Run, told: StepTimes, num_ranks: int) -> None:
    """Charge overhead relative to the given window times, and treat micro-batches as those of separate ranks."""
    control = run._control
    assert isinstance(control, BatchSizeController)
    account = control._account
    control._probing._shows_one = num_ranks > 1
    charge = account.charge

    def charged(window_s: float, spent_s: float) -> None:
        charge(control.k * told.micro_s + told.fixed_s, spent_s)

    account.charge = charged  # type: ignore[method-assign]


def _follows(task: Task, ratio: int) -> float:
    """Return the learning-rate factor for a batch `ratio` times as large: linear for SGD, otherwise square root."""
    return float(ratio) if task.make_optimizer is _sgd else math.sqrt(ratio)


def held_out_loss(task: Task, model: nn.Module, data: TaskData) -> float:
    """Return the mean validation loss."""
    total, terms = 0.0, 0.0
    with evaluation_mode(model):
        for batch in data.held_out:
            loss, count, _ = parts_of(task.loss_fn(model, batch))
            loss, count = (loss * len(batch[0]), len(batch[0])) if count is None else (loss, count)
            total, terms = total + float(loss), terms + float(count)
    return total / terms
