"""Options, text and output files of `trimtab plan TASK --ranks N`."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import LinkCalibration, ring_link
from trimtab.core.objective import Budget, Objective
from trimtab.core.parallelism import ENGINES
from trimtab.core.serialization import is_stream, to_json, write_result, write_whole
from trimtab.distributed.deepspeed_backend import config_of
from trimtab.distributed.plan_on_ranks import traces_of_ranks, with_traces
from trimtab.experiments.task_plans import loop_of, profile_task, profile_there, task_of_rank
from trimtab.measure.fake_tensors import FakeCudaMode
from trimtab.measure.machine import device_name
from trimtab.planner.zero_stage import RefusedStage, Stages, choose_stage, stages_text, ways_of
from trimtab.plans.plan import Plan, ZeroStageCost
from trimtab.profiling.communication_profile import step_shape
from trimtab.tasks import load_task
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task


def stage_figures(stages: Stages) -> tuple[ZeroStageCost, ...]:
    """Return the costs of all ways to shard the model, in table order, for JSON."""
    return tuple(
        ZeroStageCost(*each.way, each.refusal, code=each.code)
        if isinstance(each, RefusedStage)
        else ZeroStageCost(
            *each.way,
            peak_bytes=each.peak_bytes,
            window_s=each.window_s,
            waiting_s=each.cost.exposed_s,
            micro_batch=int(each.plan.micro_batch.value or 1),
            num_micro_batches=each.plan.num_micro_batches,
            reduce_dtype=str(each.plan.reduce_dtype.value),
        )
        for each in stages
    )


@dataclass(frozen=True)
class RankPlanOptions:
    """Validated options: number of ranks, link, sharding backend and target device.

    Raises:
        ValueGivenError: an unknown backend, a single rank with a backend or link, or several ranks without a link.
    """

    ranks: int
    link: str | None
    engine: str
    device: str | None

    def __post_init__(self) -> None:
        validation.one_of("--engine", self.engine, ENGINES)
        if self.ranks == 1 and self.engine != "torch":
            raise ValueGivenError(
                "--engine",
                problem=f"--engine {self.engine} needs several ranks.",
                hint="Add the number of ranks and their link, such as --ranks 8 --link nvlink.",
                code="option.required",
            )
        if self.ranks == 1:
            raise ValueGivenError(
                "--link",
                problem=f"--link {self.link} has no effect with one rank.",
                hint="Add the number of ranks, such as --ranks 8, or remove --link.",
                code="option.required",
            )
        if self.link is None:
            raise ValueGivenError(
                "--link",
                problem=f"--ranks {self.ranks} needs the link between the ranks.",
                hint="Add --link, such as --link nvlink.",
                code="option.required",
            )


@dataclass(frozen=True)
class RankPlanResult:
    """Plan for several ranks, costs of all ways to shard the model, and DeepSpeed's configuration if used."""

    plan: Plan
    stages: Stages
    config: dict[str, Any] | None

    def text(self, beside: Path | None) -> str:
        """Return the page as text.

        Args:
            beside: path of the configuration file; None to include the configuration in the text.
        """
        lines = [str(self.plan), "", stages_text(self.stages)]
        if self.config is not None:
            lines.append(configuration_line(beside) if beside else f"DeepSpeed configuration: {_as_json(self.config)}")
        return "\n".join(lines)

    def beside(self, out: Path | None) -> Path | None:
        """Return the path of the `deepspeed.initialize` configuration next to the plan file, or None if not written."""
        if self.config is None or out is None or is_stream(out):
            return None
        return out.with_suffix(".deepspeed.json")

    def write(self, out: Path) -> None:
        """Write the plan, and DeepSpeed's configuration next to it.

        Raises:
            OSError: a file cannot be written.
        """
        beside = self.beside(out)
        write_result(out, to_json(self.plan, indent=1))
        if self.config is not None and beside is not None:
            write_whole(beside, _as_json(self.config) + "\n")


def rank_page(
    name: str, asked: RankPlanOptions, *, budget: Budget, objective: Objective, progress: Callable[[str], None]
) -> RankPlanResult:
    """Return the plan of a task for every rank, made in a single process by tracing.

    Raises:
        ValueGivenError: energy is weighed or limited, there are more ranks than samples per batch, the link or device
            is unknown, or the sharding backend does not support the loop.
        InfeasibleError: no ZeRO stage meets the limits.
        ModelError: the steps cannot be traced.
    """
    task, ranks, device = load_task(name), asked.ranks, asked.device
    assert asked.link is not None
    _require_supported(task, asked, budget, objective)
    share = task_of_rank(task, ranks)
    ring_link(
        asked.link, device or device_name(device_here()), ranks
    )  # Validates the link before anything is measured.
    if device is None:
        found = profile_task(share, budget=budget, objective=objective, progress=progress)
        found = with_traces(found, loop_of(share, found.device.kind), progress)
    else:
        found = profile_there(share, device, budget=budget, objective=objective, progress=progress)
    calibration = LinkCalibration(ring_link(asked.link, found.device.name, ranks))
    loop = loop_of(share, "cpu" if device is not None else found.device.kind)
    with contextlib.nullcontext() if device is None else FakeCudaMode():
        traces = traces_of_ranks(found, loop, ranks, progress, ways_of(asked.engine))
    with torch.device("meta"):
        model = task.make_model()
    shape = functools.partial(step_shape, model, found)
    plan, stages = choose_stage(found, traces, ranks, calibration, shape, asked.engine)
    where = f"{ranks} ranks of {found.device.name}, over {calibration.link.name}"
    plan = replace(plan, target_device=where, stages=stage_figures(stages))
    numel = sum(each.numel() for each in model.parameters())
    return RankPlanResult(plan, stages, config_of(plan, numel) if asked.engine == "deepspeed" else None)


def _require_supported(task: Task, asked: RankPlanOptions, budget: Budget, objective: Objective) -> None:
    if asked.engine == "deepspeed" and task.reference.precision == "fp16":
        raise ValueGivenError(
            "--engine",
            problem=f"The loop of {task.name} is in fp16, which is not supported with --engine deepspeed.",
            hint="Use another precision, or --engine torch.",
            code="engine.precision_unsupported",
        )
    if objective.energy > 0 or budget.energy is not None:
        raise ValueGivenError(
            "energy",
            problem=f"Energy cannot be predicted for {asked.ranks} ranks, so it can have neither a weight nor a limit.",
            hint="Remove --energy-weight, or plan for one rank.",
            code="energy.several_ranks",
        )


def configuration_line(beside: Path) -> str:
    """Return the line with the path of the configuration."""
    return f"DeepSpeed configuration: {beside}"


def _as_json(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=1)
