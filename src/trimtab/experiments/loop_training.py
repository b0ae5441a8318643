"""`trimtab train FILE:FUNCTION`: train the loop of a function `setup(seed)` with a plan and a record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trimtab.api import start
from trimtab.checkpoint.config import Checkpoints
from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.progress import Progress
from trimtab.core.record import Header
from trimtab.core.serialization import to_jsonable
from trimtab.distributed.process_group import total
from trimtab.distributed.rank_energy import meter_of_rank
from trimtab.energy.energy_meter import EnergyClock
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import Loop, evaluated
from trimtab.experiments.task_loops import Setup
from trimtab.experiments.train import RunSettings, carbon_figures, record_of, told_carbon
from trimtab.measure.finite_check import nonfinite_parameter
from trimtab.measure.machine import environment
from trimtab.measure.timing import synchronize
from trimtab.plans.plan import Plan
from trimtab.training.run import Run


@dataclass(frozen=True)
class LoopTraining(RunSettings):
    """Options of a training run of a function's loop.

    Args:
        setup: the function.
        name: its name.
        steps: optimizer steps of the whole run.
        The rest as in `RunSettings`.
    """

    setup: Setup
    name: str
    steps: int

    def plan(self, *, budget: Budget, adapt: Collection[str], dry_runs: bool, progress: Progress) -> Plan:
        """Make a plan on a separate loop, for a run of this length."""
        reference = loop_setup.observed_reference(self.setup, loop_setup.PLANNING_SEED, self.name)
        loop = loop_setup.build(self.setup, loop_setup.PLANNING_SEED, self.name)
        how: dict[str, Any] = {"budget": budget, "adapt": tuple(adapt) or None, "dry_runs": dry_runs}
        return loop_setup.plan_of(loop, reference, total_steps=self.steps, progress=progress, **how)

    def train(self, plan: Plan, progress: Progress) -> dict[str, Any]:
        """Train from the start or the newest checkpoint and evaluate; return the final figures.

        The loss is `loss_fn`, with the precision of the plan: a user's `step` is not called.

        Raises:
            ValueGivenError: checkpoints cannot hold the state of `after_step`.
            LoopError: the loader has no batches.
        """
        reference = loop_setup.observed_reference(self.setup, self.seed, self.name)
        loop = loop_setup.build(self.setup, self.seed, self.name)
        kept = None if self.checkpoints is None else _with_after_step(self.checkpoints, loop)
        metered = meter_of_rank(loop.device, self.metering, idle=self.begins_record)
        header = Header(self.name, self.seed, to_jsonable(plan), environment(), {"meter": to_jsonable(metered.own)})
        writer = record_of(self.record, header, self.tracks, continues=kept is not None)
        clock, last = EnergyClock(metered.meter), None
        how: dict[str, Any] = {"modules": loop.modules, "count": loop.count, "split": loop.split, "record": writer}
        how |= {"energy": None if writer is None or metered.own.is_absent else clock, "checkpoints": kept}
        how |= {"clip_norm": reference.clip_norm, "nonfinite": self.nonfinite}
        if plan.schedule.value != "user":
            how["total_samples"] = self.steps * loop.accumulate * plan.batch_size
        with writer or contextlib.nullcontext(), start(loop.model, loop.optimizer, plan, **how) as run:
            if loop.accumulate > 1 and plan.batch_rule is None:
                run.of_batches(loop.accumulate)
            before, begin = run.consumed_samples, time.perf_counter()
            clock.start()
            for loss in self._steps(run, loop):
                clock.tick()
                last, done = loss, run.num_windows
                progress(f"step {done} of {self.steps}", min(1.0, done / self.steps))
            synchronize(loop.device)
            seconds, energy = time.perf_counter() - begin, metered.of_all(clock.read(), total)
            if name := nonfinite_parameter(loop.model):
                run.report_nonfinite(f"NaN or infinity in parameter {name} at the end of training")
            values = evaluated(loop)
            for name, value in values.items():
                run.evaluated(value, name)
            samples, steps = run.consumed_samples, run.num_windows
        found = {"loop": self.name, "steps": steps, "samples": samples}
        found |= {"resumed_at_samples": before} if before else {}
        found |= {"train_s": round(seconds, 3), "samples_per_s": round((samples - before) / seconds, 1)}
        found |= {"energy": energy.describe(), "energy_j": energy.joules}
        found |= carbon_figures([] if self.grid is None else [told_carbon(seconds, energy, self.grid)])
        found |= {} if last is None else {"loss": float(last)}
        return found | {f"held_out_{name}" if name in found else name: value for name, value in values.items()}

    def _steps(self, run: Run, loop: Loop) -> Iterator[Tensor]:
        """Train, epoch after epoch; yield the loss after every optimizer step."""
        num_empty = 0  # Epochs in a row; a resumed run may begin at the end of an epoch.
        while run.num_windows < self.steps and run.stop_reason is None:
            before = run.num_windows
            for window in run.windows(loop.loader):
                loss = run.train_step(window, loop.loss_fn)
                if loop.after_step is not None:
                    loop.after_step()
                yield loss
                if run.num_windows >= self.steps:
                    if self.checkpoints is not None:
                        run.checkpoint()  # Within the epoch, so that the run can be extended.
                    return
            num_empty = num_empty + 1 if run.num_windows == before else 0
            if num_empty == 2 and run.stop_reason is None:
                raise LoopError(
                    "loader",
                    problem=f"The loader, a {type(loop.loader).__name__}, has no batches.",
                    hint="A loader must yield its batches each time it is iterated.",
                    code="loader.empty",
                )


def _with_after_step(kept: Checkpoints, loop: Loop) -> Checkpoints:
    """Return settings whose checkpoints include the state of `after_step`, such as that of a scheduler.

    Raises:
        ValueGivenError: `after_step` is no method of an object with `state_dict` and `load_state_dict`.
    """
    if loop.after_step is None:
        return kept
    owner = getattr(loop.after_step, "__self__", None)
    if not all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict")):
        raise ValueGivenError(
            "Loop.after_step",
            problem="Checkpoints cannot save the state of after_step, which is not a method of a scheduler.",
            hint="Pass a bound method, such as scheduler.step, or remove --checkpoints.",
            code="after_step.no_state",
        )
    return replace(kept, also={**kept.also, "after_step": owner})
