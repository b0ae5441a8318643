"""Results folder of paired runs: plans, measurements of arms and records. Existing results are reused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from trimtab.core.choice import Choice
from trimtab.core.progress import Progress
from trimtab.core.record import RunRecord, read_record, read_together, write_record
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.paired_runs.inspect_arm import measure_arm
from trimtab.experiments.paired_runs.paired_run import PairedArm, PairedRunMeter, end_with, race
from trimtab.experiments.task_plans import Plans
from trimtab.measure.machine import environment
from trimtab.profiling.measurement_notes import describe
from trimtab.tasks.placement import place_data
from trimtab.tasks.task import Task, TaskData

# The arm all other arms are compared with; a comparison needs it.
REFERENCE = "reference"


class ResultsFolder:
    """Results folder of a task's paired runs on a device; only rank 0 reads and writes it.

    Attributes:
        path: path of the folder.
        device: device of the runs.
    """

    def __init__(
        self,
        path: Path,
        task: Task,
        data: TaskData,
        device: torch.device,
        progress: Progress,
        together: Coordinator = ALONE,
    ) -> None:
        self.path, self._task, self._data, self.device = path, task, data, device
        self._progress, self._together = progress, together

    @functools.cached_property
    def held(self) -> tuple[TaskData, Choice]:
        """The training data as placed for the runs (host or device), with the reason; placed once, at the first run."""
        return place_data(self._data, self.device)

    def plans(self, make: Callable[[], Plans]) -> Plans:
        """Return the stored plans, or make and store them."""
        path = self.path / "plans.json"
        if (kept := self._together.read(Plans, path)) is not None:
            return kept
        plans = make()
        self._together.write(path, plans, indent=1)
        return plans

    def facts(self, entries: Sequence[PairedArm], peaks_alone: Collection[str] = ()) -> dict[str, ArmMetrics]:
        """Return the measurements of all arms; for arms in `peaks_alone`, only peak memory."""
        facts = {}
        for entry in entries:
            path = self.path / f"arm-{entry.name}.json"
            fact = self._together.read(ArmMetrics, path)
            if fact is None or not fact.is_current:
                is_peak = entry.name in peaks_alone
                self._progress(f"{'memory' if is_peak else 'memory and phases'} of {entry.name}")
                fact = self._measured(entry, is_peak=is_peak)
                self._together.write(path, fact, indent=1)
            facts[entry.name] = fact
        return facts

    def _measured(self, entry: PairedArm, *, is_peak: bool) -> ArmMetrics:
        try:
            return measure_arm(entry.make, self._task, self._data, self.device, self._together, peak_alone=is_peak)
        except Exception as error:  # A failed arm is reported as such; a failed reference ends the comparison.
            is_reference = entry.name == REFERENCE
            if is_reference or not self._together.may_leave(error):
                end_with(error, self._together, is_reference=is_reference)
            return ArmMetrics(None, error=describe(error))

    def of_race(self, seed: int, *, brief: bool) -> Path:
        """Return the folder of a seed's paired run, brief or full."""
        return self.path / (f"brief-{seed}" if brief else f"race-{seed}")

    def race(
        self,
        entries: Sequence[PairedArm],
        seed: int,
        num: int,
        *,
        brief: bool,
        cap_s: float = math.inf,
        reference_cap_s: float | None = None,
        meter: PairedRunMeter | None = None,
    ) -> dict[str, RunRecord]:
        """Return the records of all arms for a seed, read from the folder or from a new paired run.

        Args:
            entries: the arms.
            seed: the seed.
            num: total number of paired runs, for progress messages.
            brief: True if all arms are only timed.
            cap_s, reference_cap_s, meter: see `race`.
        """
        folder, together = self.of_race(seed, brief=brief), self._together

        def told(text: str, share: float | None = None) -> None:
            self._progress(f"paired run {seed + 1} of {num}: {text}", (seed + (share or 0.0)) / num)

        if together.each(folder.exists())[0]:
            return {path.stem: read_record(path) for path in sorted(folder.glob("*.jsonl"))}
        records = race(
            entries,
            self._task,
            self.held[0],
            seed,
            self.device,
            cap_s=cap_s,
            reference_cap_s=reference_cap_s,
            environment=environment() | ({"ranks": str(together.num_ranks)} if together.num_ranks > 1 else {}),
            progress=told,
            together=together,
            meter=meter,
        )
        if together.rank == 0:
            _write(folder, records)
        return {record.header.name: record for record in records}


def _write(folder: Path, records: Sequence[RunRecord]) -> None:
    partial_folder = folder.with_suffix(".partial")
    partial_folder.mkdir(exist_ok=True)
    for record in records:
        path = partial_folder / f"{record.header.name}.jsonl"
        path.unlink(missing_ok=True)
        write_record(path, record)
    partial_folder.rename(folder)  # A paired run counts only when all its arms are on disk.


def read_back(done: int, races: int, out: Path) -> tuple[str, ...]:
    """Return a note with the number of paired runs read from an earlier comparison."""
    if not done:
        return ()
    return (f"{done} of {races} paired runs were completed by an earlier call and read from {out}.",)


def environment_of(races: Mapping[int, Mapping[str, RunRecord]]) -> Mapping[str, str]:
    """Return the environment recorded in the runs, possibly on different days; differing values are all listed."""
    headers = [record.header for race in races.values() for record in race.values()]
    return read_together(header.environment for header in headers) or environment()


def reference_s(plans: Plans, facts: Mapping[str, ArmMetrics], num_ranks: int = 1) -> float:
    """Return the approximate seconds of a reference step.

    A given plan may come from another machine, and a plan for several ranks was made for a shard, so both use the
    measured phases.
    """
    baseline = plans.plans["equivalent"].baseline if plans.profiles and num_ranks == 1 else None
    return baseline.step_s if baseline else sum(facts[REFERENCE].phases_s.values()) or 1.0
