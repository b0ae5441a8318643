"""`trimtab compare`: validate the options, then run in this process or start ranks."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from trimtab.api import Metering
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget
from trimtab.core.progress import silent
from trimtab.core.serialization import read_json
from trimtab.distributed.launch import launch
from trimtab.distributed.process_group import job_position, process_group
from trimtab.experiments.comparison.compare import USUAL_ADAPT, CompareOptions, compare
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison_context import comparison_ranks
from trimtab.experiments.output_folder import folder_of
from trimtab.experiments.progress_bar import ProgressBar
from trimtab.experiments.task_ranks import ranks_of_job, refuse_on_ranks
from trimtab.plans.plan import Plan
from trimtab.tasks import load_task


@dataclass(frozen=True)
class CompareRequest:
    """The command's options; None for an option not given.

    Args:
        adapt: settings a tuned plan may change; () runs no tuned plan.
        against: names of baseline recipes.
        memory: memory limit, as in the plan's budget.
        plan: path of a plan file.
        ranks: number of processes to start without a launcher.
        energy_watts: power in watts, to estimate energy.
        reference_cap_s: time cap of the reference, in training seconds.
    """

    task: str
    pairs: int = 5
    whole: int | None = None
    quick: bool = False
    adapt: tuple[str, ...] | None = None
    peers: bool | None = None
    cap_s: float = math.inf
    memory: str | None = None
    plan: Path | None = None
    out: Path | None = None
    ranks: int = 1
    energy_watts: float | None = None
    against: tuple[str, ...] | None = None
    reference_cap_s: float | None = None

    @property
    def folder(self) -> Path:
        """The output folder.

        Raises:
            FormatError: the path is a file.
        """
        return folder_of("compare", self.task, self.out)

    def given(self) -> Plan | None:
        """Return the plan read from the given file, or None.

        Raises:
            ValueGivenError: a memory limit was given together with a plan.
        """
        if self.plan is not None and self.memory is not None:
            raise ValueGivenError(
                "--memory",
                problem=f"--memory {self.memory} cannot be combined with --plan, because the plan was made before.",
                hint="Pass --memory to `trimtab plan`, or remove --plan.",
                code="option.conflict",
            )
        return None if self.plan is None else read_json(Plan, self.plan)

    def settings(self, num_ranks: int) -> CompareOptions:
        """Return the comparison's options, with defaults for options not given."""
        usual = USUAL_ADAPT if not self.quick and self.plan is None and num_ranks == 1 else ()
        adapt = usual if self.adapt is None else self.adapt
        peers = self.races_peers if self.races_peers is not None else not self.quick and num_ranks == 1
        whole = 0 if self.quick and self.whole is None else self.whole
        how = {"quick": self.quick, "adapt": adapt, "peers": peers, "cap_s": self.cap_s, "against": self.against}
        return CompareOptions(self.pairs, whole_pairs=whole, reference_cap_s=self.reference_cap_s, **how)

    @property
    def races_peers(self) -> bool | None:
        """True if baseline recipes were requested, also by name; None without a request.

        Raises:
            ValueGivenError: recipes are named but excluded.
        """
        if self.against is not None and self.peers is False:
            raise ValueGivenError(
                "--against",
                problem="--against names recipes to compare with, and --no-peers excludes all recipes.",
                hint="Remove one of the two options.",
                code="option.conflict",
            )
        return True if self.against is not None else self.peers


def run_comparison(asked: CompareRequest, command: str) -> Comparison | None:
    """Run a comparison in this process, as a rank of a launcher's job, or start ranks.

    Args:
        asked: the options.
        command: command line recorded in the report.

    Returns:
        The comparison; None if another process writes the report.
    """
    metering = Metering(asked.energy_watts)
    given, budget, here, task = asked.given(), Budget(asked.memory), job_position(), load_task(asked.task)
    num_ranks = ranks_of_job(asked.ranks)
    if num_ranks > 1:
        refuse_on_ranks(task, num_ranks, adapts=bool(asked.adapt), peers=asked.races_peers)
    settings, folder = asked.settings(num_ranks), asked.folder
    if num_ranks > here.num_ranks:
        launch(sys.argv[1:], num_ranks)
        return None
    with process_group(), ProgressBar() as progress, comparison_ranks() as ranks:
        told = progress if here.rank == 0 else silent
        found = compare(
            task,
            folder,
            settings,
            command=command,
            budget=budget,
            plan=given,
            progress=told,
            together=ranks,
            metering=metering,
        )
    return found if here.rank == 0 else None
