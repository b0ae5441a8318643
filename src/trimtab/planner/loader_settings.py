"""Choice of DataLoader settings to compare in training steps, and of the settings to recommend."""

from __future__ import annotations

import math
from typing import NamedTuple

from trimtab.plans.profile import LoaderTrial, LoaderTrials

# Least gain worth a recommendation, as a fraction of a step. The loader's cost counts as removed if at most the
# fraction REST of it remains.
WORTH_GAIN, REST = 0.05, 0.1
PREFETCH, LARGER_PREFETCH = 2, 4  # torch's default number of batches that each worker prefetches, and one alternative
WORTH_PERSISTING = 0.01  # least fraction of an epoch that starting the workers takes


class LoaderSettings(NamedTuple):
    """Settings of a DataLoader; `prefetch_factor` is None without workers."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool


def settings_of(trial: LoaderTrial) -> LoaderSettings:
    """Return the settings of a trial."""
    return LoaderSettings(trial.num_workers, trial.prefetch_factor, trial.pin_memory)


def step_counts(num_workers: int, num_steps: int) -> tuple[int, int]:
    """Return the numbers of warm-up steps and of counted steps of a trial.

    Workers finish their first batches together, so batches arrive in groups, a batch from each worker: the first
    group is not counted, and of the others, whole groups are.
    """
    group = max(1, num_workers)
    return group, math.ceil(num_steps / group) * group


def next_settings(found: LoaderTrials, drawing_s: float, most_workers: int, *, pins: bool) -> LoaderSettings | None:
    """Return the settings to try next, or None if the loader's cost is removed or no settings are left.

    First the least number of workers that keeps up with the step, if each takes as long for a batch as the user's
    loader; then twice this number; then more prefetched batches. Pinned memory is tried with the best settings.

    Args:
        drawing_s: seconds per batch of the user's loader alone.
        most_workers: limit on the number of workers.
        pins: True if pinned memory can speed up copies to the device.
    """
    own, lost_s = found.own, found.own.step_s - found.alone_s
    if lost_s <= WORTH_GAIN * own.step_s:
        return None
    tried = {settings_of(each) for each in (own, *found.others)}
    best = settings_of(fastest := min((own, *found.others), key=lambda each: each.step_s))
    wanted: list[LoaderSettings] = []
    if fastest.step_s - found.alone_s > REST * lost_s:
        least = math.ceil(drawing_s * max(1, own.num_workers) / max(found.alone_s, 1e-9))
        numbers = (max(1, min(most_workers, factor * least)) for factor in (1, 2))
        wanted += [LoaderSettings(number, own.prefetch_factor or PREFETCH, own.pin_memory) for number in numbers]
        wanted += [best._replace(prefetch_factor=LARGER_PREFETCH)] if best.num_workers else []
    if pins and not any(each.pin_memory for each in tried):
        wanted.append(best._replace(pin_memory=True))
    return next((each for each in wanted if each not in tried and each.num_workers <= most_workers), None)


def best_settings(found: LoaderTrials) -> LoaderTrial | None:
    """Return the repeated trial; None if its gain may be small in one of the two rounds.

    The gains of the rounds differ from their mean by at most the A/A control.
    """
    if found.best is None:
        return None
    least_s = found.own.step_s - found.best.step_s - found.noise_s
    return found.best if least_s > WORTH_GAIN * found.own.step_s else None


def is_worth_persisting(found: LoaderTrials, trial: LoaderTrial) -> bool:
    """Return True if the user's workers persist, or if starting workers takes a notable part of an epoch."""
    waits_s = trial.starts_s - (0.0 if found.own.num_workers else found.own.starts_s)
    return found.is_persistent or waits_s > WORTH_PERSISTING * found.epoch * trial.step_s
