"""Two plans raced over a few steps of training in pairs, on the user's own data; puts everything back."""

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
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import Plan
from trimtab.decide.short_race import ShortPair, ShortRun, is_lost
from trimtab.losses import parts_of
from trimtab.measure.data_state import undisturbed
from trimtab.measure.loop_state import unchanged_by
from trimtab.measure.timing import synchronize
from trimtab.runtime.batches import iterate, to_device
from trimtab.runtime.engine import Run

NUM_STEPS = 60
NUM_PAIRS = 5  # fewer have no verdict (math: section 8)


def short_race(
    subject: Subject,
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
    """Return the pairs that were run: all, or until the rival lost one. Leaves no trace.

    A schedule by progress is run through whole in each training. Pairs differ in batches, or in their order where there
    are few, and in random numbers; within one they are the same, but that the plan as it stands, run again, draws
    others.

    Args:
        batches: training batches; gone through again where they end. A loader is left as `undisturbed` says.
        by_unseen: whether what counts is the loss of each batch in evaluation mode before it is trained on, and not
            that of its own step, in which what is raced may change what a loss is. No training goes over data again.
        same_step: whether a step of the two takes the same, whatever was measured: samples alone are compared.

    Raises:
        ValueGivenError: there are too few batches. BatchError: there is nothing to iterate over.
    """
    pairs: list[ShortPair] = []
    with (
        undisturbed(batches) as lent,
        unchanged_by(own_loss(subject.loss_fn), subject.trained, subject.optimizer) as snapshot,
    ):
        drawn = _of_one_pass(lent, num_steps) if by_unseen else _endless(lent)
        for index in range(num_pairs):
            data = list(itertools.islice(drawn, num_steps))
            if len(data) < num_steps:
                given, expected = f"{len(data)} batches", f"at least the {num_steps} of one training of the race"
                raise ValueGivenError("data", given=given, expected=expected)

            if index:
                random.Random(index).shuffle(data)  # few batches, never shuffled, are the same in each pair

            def run(name: str, plan: Plan, seed: int, data: list[Any] = data, index: int = index) -> ShortRun:
                progress(f"race of {name}, pair {index + 1} of {num_pairs}")
                snapshot.restore()
                torch.manual_seed(seed)
                found = _train(subject, plan, data, by_unseen=by_unseen)
                return replace(found, step_s=1.0) if same_step else found

            pair = ShortPair(run("the plan as it stands", stands, index), run("its rival", rival, index))
            if is_lost(pair):
                return (*pairs, pair)
            again = run("the plan as it stands, again", stands, num_pairs + index)
            pairs.append(ShortPair(pair.stands, pair.rival, again))
    return tuple(pairs)


def _train(subject: Subject, plan: Plan, data: list[Any], *, by_unseen: bool) -> ShortRun:
    rows = sum(map(subject.batching.require, data))
    losses, seconds = [], []
    given = {"total_samples": rows, "out_of_memory": "stop", "modules": subject.modules, "on_trial": True}
    given["batching"] = subject.batching
    with Run(subject.model, subject.optimizer, plan, **given) as run:  # type: ignore[arg-type]
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
def _evaluated(run: Run, subject: Subject, batch: Any) -> torch.Tensor:
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
    """Yield so many batches at a time, all of one pass; what is left of a pass is dropped. None, where it has fewer."""
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
    """Yield batches, again from the start where they end; none where a whole pass has none, or an iterator ended."""
    while True:
        count = 0
        for batch in iterate("data", data):
            count += 1
            yield batch
        if not count or isinstance(data, Iterator):
            return
