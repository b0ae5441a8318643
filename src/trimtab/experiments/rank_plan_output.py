"""Options, text and output files of `trimtab plan TASK --ranks N`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.parallelism import ENGINES
from trimtab.core.plan import Plan
from trimtab.core.serialization import is_stream, to_json, write_result, write_whole
from trimtab.distributed.deepspeed_backend import config_for
from trimtab.experiments.plan_ranks import plan_ranks
from trimtab.planner.zero_stage import Stages, stages_text
from trimtab.tasks import load_task
from trimtab.tasks.task import Task


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
    """Return the plan of a task for several ranks.

    Raises:
        ValueGivenError: the loop does not support the sharding backend. For further errors see `plan_ranks`.
    """
    task = load_task(name)
    assert asked.link is not None
    if asked.engine == "deepspeed":
        _check_precision(task)
    how = {"device": asked.device, "engine": asked.engine, "budget": budget, "objective": objective}
    plan, stages, _ = plan_ranks(task, asked.ranks, asked.link, progress=progress, **how)
    if asked.engine != "deepspeed":
        return RankPlanResult(plan, stages, None)
    with torch.device("meta"):
        model = task.make_model()
    return RankPlanResult(plan, stages, config_for(model, plan))


def _check_precision(task: Task) -> None:
    """Raise an error, before planning, for an fp16 loop with DeepSpeed."""
    if task.reference.precision == "fp16":
        raise ValueGivenError(
            "--engine",
            problem=f"The loop of {task.name} is in fp16, which is not supported with --engine deepspeed.",
            hint="Use another precision, or --engine torch.",
            code="engine.precision_unsupported",
        )


def configuration_line(beside: Path) -> str:
    """Return the line with the path of the configuration."""
    return f"DeepSpeed configuration: {beside}"


def _as_json(config: dict[str, Any]) -> str:
    return json.dumps(config, indent=1)
