"""Paired runs of two plans over a few training steps on the user's data; state is restored."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from trimtab.calibrate.example_batch import own_loss
from trimtab.calibrate.training_loop import TrainingLoop
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.decide.paired_training_verdict import ShortPair, ShortRun, is_lost
from trimtab.losses import parts_of
from trimtab.measure.data_state import draw_and_restore_data
from trimtab.measure.loop_state import unchanged_by
from trimtab.measure.timing import synchronize
from trimtab.runtime.batch import iterate, to_device
from trimtab.runtime.run import Run

NUM_STEPS = 60
NUM_PAIRS = 5  # Fewer pairs cannot give a verdict (math: section 8).


def short_race(
    subject: TrainingLoop,
    stands: Plan,
    rival: Plan,
    batches: Iterable[Any],
    progress: Callable[[str], None],
    num_steps: int = NUM_STEPS,
    num_pairs: int = NUM_PAIRS,
    *,
    by_unseen: bool = False,
    same_step: bool = False,
) -> tuple[ShortPair, ...]:
    """Return the completed pairs: all, or up to the first that the rival lost. State is restored.

    A schedule by progress is completed in every training. Pairs differ in batches (in the order of batches, if there
    are few) and random seeds. Within a pair, both plans use the same batches and seed; the repeated run of the
    current plan uses another seed.

    Args:
        stands: the current plan.
        rival: the plan to compare with it.
        batches: training batches; repeated if they run out. A loader is restored by `draw_and_restore_data`.
        by_unseen: True to compare the loss of each batch in evaluation mode before training on it, for settings that
            change the training loss itself. No training repeats data then.
        same_step: True to assume equal step times, so that only samples are compared.

    Raises:
        ValueGivenError: there are too few batches.
        BatchError: the data are not iterable.
    """
    pairs: list[ShortPair] = []
    with (
        draw_and_restore_data(batches) as lent,
        unchanged_by(own_loss(subject.loss_fn), subject.trained, subject.optimizer) as snapshot,
    ):
        drawn = _of_one_pass(lent, num_steps) if by_unseen else _endless(lent)
        for index in range(num_pairs):
            data = list(itertools.islice(drawn, num_steps))
            if len(data) < num_steps:
                raise ValueGivenError(
                    "data",
                    got=f"{len(data)} batches",
                    expected=f"at least {num_steps} batches",
                    problem=f"data yielded {len(data)} batches for pair {index + 1} of {num_pairs}, but each pair of "
                    f"short trainings takes {num_steps}.",
                    hint=f"Pass a loader (not an iterator) with at least {num_steps} batches per epoch.",
                    code="data.too_few_batches",
                )
            if index:
                # Few batches, never shuffled by the loader, would come in the same order in each pair.
                random.Random(index).shuffle(data)

            def run(name: str, plan: Plan, seed: int, data: list[Any] = data, index: int = index) -> ShortRun:
                progress(f"short training with {name}: pair {index + 1} of {num_pairs}")
                snapshot.restore()
                torch.manual_seed(seed)
                found = _train(subject, plan, data, by_unseen=by_unseen)
                return replace(found, step_s=1.0) if same_step else found

            pair = ShortPair(run("the current plan", stands, index), run("the rival plan", rival, index))
            if is_lost(pair):
                return (*pairs, pair)
            again = run("the current plan, repeated", stands, num_pairs + index)
            pairs.append(ShortPair(pair.stands, pair.rival, again))
    return tuple(pairs)


def _train(subject: TrainingLoop, plan: Plan, data: list[Any], *, by_unseen: bool) -> ShortRun:
    rows = sum(map(subject.batching.require, data))
    losses, seconds = [], []
    with Run(
        subject.model,
        subject.optimizer,
        plan,
        total_samples=rows,
        out_of_memory="stop",
        modules=subject.modules,
        on_trial=True,
        batching=subject.batching,
    ) as run:
        for batch in data:
            unseen = _evaluated(run, subject, batch) if by_unseen else None
            synchronize(subject.device)
            begin = time.perf_counter()
            loss = run.train_step(run.window(batch), subject.loss_fn)
            synchronize(subject.device)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss if unseen is None else unseen)
    return ShortRun(tuple(float(loss) for loss in losses), statistics.median(seconds))


@torch.no_grad()
def _evaluated(run: Run, subject: TrainingLoop, batch: Any) -> torch.Tensor:
    """Return the mean loss of a batch in evaluation mode, in the plan's precision and micro-batches."""
    modes = [(module, module.training) for module in run.model.modules()]
    rows = subject.batching.require(batch)
    total, terms = torch.zeros((), device=subject.device), torch.zeros((), device=subject.device)
    run.model.eval()
    try:
        for part, size in subject.batching.slices(
            to_device(batch, subject.device), rows, run.plan.micro_batch_of(rows)
        ):
            with run.autocast():
                result = subject.loss_fn(run.model, part)
            loss, count, _ = parts_of(result)
            total += loss * size if count is None else loss
            terms += size if count is None else count
    finally:
        for module, mode in modes:
            module.training = mode
    return total / terms


def _of_one_pass(data: Iterable[Any], number: int) -> Iterator[Any]:
    """Yield groups of `number` batches, each from a single epoch; an incomplete last group is dropped."""
    while True:
        found = 0
        for batches in _batched(iterate("data", data), number):
            found += 1
            yield from batches
        if not found or isinstance(data, Iterator):
            return


def _batched(data: Iterator[Any], number: int) -> Iterator[list[Any]]:
    while len(batches := list(itertools.islice(data, number))) == number:
        yield batches


def _endless(data: Iterable[Any]) -> Iterator[Any]:
    """Yield batches over repeated epochs; ends if an epoch is empty or an iterator is exhausted."""
    while True:
        count = 0
        for batch in iterate("data", data):
            count += 1
            yield batch
        if not count or isinstance(data, Iterator):
            return
