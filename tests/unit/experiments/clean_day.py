"""A day with clean and dirty hours, a clock that goes only while it sleeps and trains, and a task that notes itself."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import tiny_task
import torch

from trimtab.carbon.intensity import Intensity
from trimtab.carbon.services import IntensitySource
from trimtab.checkpoint.config import Checkpoints
from trimtab.experiments import train as train_module
from trimtab.experiments import train_command
from trimtab.experiments.train import TrainingOptions
from trimtab.experiments.train_command import Clock, LowCarbonOptions
from trimtab.plans.plan import Plan

HOUR = 3600.0
NOW = 1772323200.0  # 2026-03-01T00:00Z
STEPS, STEP_S = 24, 600.0
LEVELS = (100, 300, 300, 100, 300, 100, 300, 100, 300, 300)  # g/kWh, by the hour: four of them are enough


class Hourly:
    """A source of an hourly forecast, which fails from one asking on."""

    name = "a made-up grid"

    def __init__(self, levels=LEVELS, fails_from=None) -> None:
        self.levels, self.fails_from, self.asked_at = levels, fails_from, []

    def forecast(self, now_s: float) -> Intensity:
        self.asked_at.append(now_s)
        if self.fails_from is not None and len(self.asked_at) > self.fails_from:
            raise ConnectionError("a token may be in here")
        steps = tuple((NOW + HOUR * i, float(g)) for i, g in enumerate(self.levels))
        return Intensity("average", steps, NOW + HOUR * len(self.levels))


class Day:
    """The clock, the task, and what was seen of them.

    Attributes:
        losses: of every window, in hexadecimal. trained_at: when each ended. weights: as they were evaluated.
        asleep, making, in_window: called before each sleep, as each model is made, and in each window.
    """

    def __init__(self, monkeypatch, now_s: float = NOW) -> None:
        self.now_s, self.losses, self.trained_at, self.weights = now_s, [], [], None
        self.asleep: Callable[[], None] = lambda: None
        self.making: Callable[[], None] = lambda: None
        self.in_window: Callable[[], None] = lambda: None
        self.models: list[weakref.ref] = []
        self.told: list[str] = []
        self.slept_s = 0.0
        readings = itertools.count()  # no two at one moment, as of any clock
        stopwatch = SimpleNamespace(perf_counter=lambda: self.now_s + next(readings) * 1e-6)
        monkeypatch.setattr(train_module, "time", stopwatch)
        monkeypatch.setattr(train_command, "Clock", lambda: Clock(lambda: self.now_s, self.sleep))
        self.task = replace(
            tiny_task.task,
            make_model=self.make_model,
            loss_fn=self.loss_fn,
            metric=replace(tiny_task.task.metric, evaluate=self.evaluate),
        )

    def sleep(self, seconds: float) -> None:
        self.asleep()
        self.slept_s += seconds
        self.now_s += seconds

    def make_model(self):
        model = tiny_task.make_model()
        self.models.append(weakref.ref(model))
        self.making()
        return model

    def loss_fn(self, model, batch):
        loss = tiny_task.loss_fn(model, batch)
        self.now_s += STEP_S
        self.losses.append(float(loss.detach()).hex())
        self.trained_at.append(self.now_s)
        self.in_window()
        return loss

    def evaluate(self, model, batches):
        self.weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return tiny_task.accuracy(model, batches)

    def training(self, folder: Path | None = None, **options) -> TrainingOptions:
        kept = None if folder is None else Checkpoints(folder, every_s=None)
        return TrainingOptions(self.task, Plan.fixed(tiny_task.BATCH_SIZE), STEPS, checkpoints=kept, **options)

    def train(self, source: IntensitySource, folder: Path | None = None, *, by_h: float = 10, **options) -> dict:
        """Train as the command does, with pauses where the run is kept."""
        pause_s = None if folder is None else STEP_S
        hours = LowCarbonOptions(source, NOW + by_h * HOUR, pause_s, STEPS * STEP_S, watts=1000.0)
        return train_command.train_clean(self.training(folder, **options), hours, self.told.append)
