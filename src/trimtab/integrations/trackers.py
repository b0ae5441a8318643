"""Trackers for TensorBoard, MLflow, Weights & Biases and Trackio.

Each tracker imports its package in the constructor, so that a missing package raises before training, and opens its run
in `begin`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from trimtab.core.errors import DependencyError, ValueGivenError
from trimtab.core.record import Evaluation, Event, Header, Line, StepRecord
from trimtab.core.serialization import to_jsonable

# Values sent to trackers: metrics by step, events as text, plan and environment as parameters.

# Metrics of a step, by their names in the record.
STEP_FIGURES = (
    "loss",
    "learning_rate",
    "samples",
    "wall_s",
    "num_micro_batches",
    "noise_scale",
    "grad_norm",
    "loss_scale",
)
# Keys of a header's environment, as in `measure.machine`. A header may contain private values, such as environment
# variables, so only these keys are sent.
ENVIRONMENT = (
    "trimtab",
    "sources",
    "python",
    "torch",
    "numpy",
    "os",
    "cpu",
    "cpu_cores",
    "threads",
    "gpu",
    "cuda",
)
_MOST_CHARACTERS = 500  # Largest text length that all trackers accept.


class TrackedLine(NamedTuple):
    """Values of a record line.

    Args:
        step: number of windows before the line; never decreases, as W&B requires.
        values: metrics, and texts of events, by name.
    """

    step: int
    values: Mapping[str, float | str]


def parameters(header: Header) -> dict[str, str]:
    """Return name, seed, plan and environment of a run as texts, by dotted names such as `plan.precision.value`."""
    known = {name: header.environment[name] for name in ENVIRONMENT if name in header.environment}
    given = {"name": header.name, "seed": header.seed, "plan": header.plan, "environment": known}
    return dict(_leaves("", given))


def row(step: int, line: Line) -> TrackedLine:
    """Return the values to send for a record line written after `step` windows."""
    match line:
        case StepRecord():
            return TrackedLine(step, dict(_figures(line)))
        case Evaluation():
            found = {"samples": line.samples, "train_s": line.train_s} | dict(line.metrics)
            return TrackedLine(step, {f"evaluation/{name}": float(value) for name, value in found.items()})
        case Event():
            return TrackedLine(step, {f"event/{line.name}": _text(line.detail)})
        case _:
            return TrackedLine(step, {})


def _figures(line: StepRecord) -> Iterator[tuple[str, float]]:
    for name in STEP_FIGURES:
        value = getattr(line, name)
        if value is not None:
            yield f"train/{name}", float(value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), each)
    elif value is not None:
        yield name, _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(to_jsonable(value), ensure_ascii=False)
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


CUT_OFF = "cut off"
_FAILED = ("error", CUT_OFF)
# Limits of MLflow for one request, and for the length of a name.
_MLFLOW_METRICS, _MLFLOW_PARAMETERS, _MLFLOW_NAME = 1000, 100, 250
# Settings that turn off W&B's collection of data about process and machine.
_WANDB_QUIET = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
# Documented environment variables that turn off a package's usage reports; read at import or at the start of a run.
_UNREPORTED = {"mlflow": ("MLFLOW_DISABLE_TELEMETRY", "true"), "wandb": ("WANDB_ERROR_REPORTING", "false")}


@runtime_checkable
class Tracker(Protocol):
    """Destination for the values of a run. A single thread makes all calls, in this order; each may block or raise."""

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Open a run; `parameters` are its plan and environment, by dotted names."""

    def log(self, rows: Sequence[TrackedLine]) -> None:
        """Take the values of at least one record line."""

    def end(self, reason: str) -> None:
        """Close the run; `reason` is the end reason of the record, or "cut off" without one."""


class TensorBoard:
    """TensorBoard event files, by torch's own writer.

    Args:
        folder: log directory of this run; pass it or a parent to `tensorboard --logdir`.

    Raises:
        DependencyError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        with _needed("tensorboard"):
            self._module: Any = importlib.import_module("torch.utils.tensorboard")

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Create the event file, with the parameters as a text."""
        self._writer: Any = self._module.SummaryWriter(log_dir=self._folder)
        # Indented, so that Markdown shows the lines unchanged.
        lines = "\n".join(f"    {key}: {value}" for key, value in parameters.items())
        self._writer.add_text("parameters", lines, 0)

    def log(self, rows: Sequence[TrackedLine]) -> None:
        """Add metrics as scalars and texts as texts, then flush."""
        for row in rows:
            for name, value in row.values.items():
                add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
                add(name, value, row.step)
        self._writer.flush()

    def end(self, reason: str) -> None:
        """Close the file."""
        self._writer.add_text("end", reason)
        self._writer.close()


class MLflow:
    """A run of an MLflow experiment, by a separate client: the process's active run is not affected.

    Events become tags, the last one of each name, as MLflow has no texts by step. MLflow's usage reports are turned off
    for the process (`MLFLOW_DISABLE_TELEMETRY`), unless the variable is set or MLflow was imported before.

    Args:
        experiment: name of the experiment; created if missing.
        tracking_uri: address of the store or server; None uses MLflow's default.

    Raises:
        DependencyError: mlflow is not installed.
    """

    def __init__(self, experiment: str, *, tracking_uri: str | None = None) -> None:
        self._experiment, self._tracking_uri = experiment, tracking_uri
        with _needed("mlflow"):
            self._mlflow: Any = importlib.import_module("mlflow")
            self._entities: Any = importlib.import_module("mlflow.entities")

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Create the run and log its parameters."""
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run_id = self._client.create_run(number, run_name=name).info.run_id
        texts = {_mlflow_name(key): value for key, value in parameters.items()}
        given = [self._entities.Param(key, value) for key, value in texts.items()]
        for some in _parts(given, _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=some)

    def log(self, rows: Sequence[TrackedLine]) -> None:
        """Log metrics in batches, and texts as tags."""
        now_ms, metrics, tags = int(time.time() * 1000), [], {}
        for row in rows:
            for key, value in row.values.items():
                if isinstance(value, str):
                    tags[_mlflow_name(key)] = f"step {row.step}: {value}"
                else:
                    metrics.append(self._entities.Metric(_mlflow_name(key), value, now_ms, row.step))
        for some in _parts(metrics, _MLFLOW_METRICS):
            self._client.log_batch(self._run_id, metrics=some)
        for key, text in tags.items():
            self._client.set_tag(self._run_id, key, text)

    def end(self, reason: str) -> None:
        """End the run as failed or finished."""
        self._client.set_tag(self._run_id, "end", reason)
        self._client.set_terminated(self._run_id, "FAILED" if reason in _FAILED else "FINISHED")


class WandB:
    """A run of Weights & Biases, independent of other runs in the process.

    Automatic collection (console, code, git, command, host, packages, system metrics) is off, and so are usage reports
    for the process, unless `WANDB_ERROR_REPORTING` is set.

    Args:
        project: name of the project.
        options: further arguments of `wandb.init`, such as `entity`, `mode` or `dir`. `settings` replaces the settings
            that turn off automatic collection.

    Raises:
        DependencyError: wandb is not installed.
    """

    def __init__(self, project: str, **options: Any) -> None:
        self._options = {"project": project} | options
        with _needed("wandb"):
            self._wandb: Any = importlib.import_module("wandb")

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Begin a run, with the parameters as its config."""
        ours = {"name": name, "config": dict(parameters), "reinit": "create_new"}
        if "settings" not in self._options:
            ours["settings"] = self._wandb.Settings(**_WANDB_QUIET)
        self._run: Any = self._wandb.init(**ours | self._options)

    def log(self, rows: Sequence[TrackedLine]) -> None:
        """Log each row at its step."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def end(self, reason: str) -> None:
        """Finish the run as failed or succeeded."""
        self._run.finish(exit_code=int(reason in _FAILED))


class Trackio:
    """A run of Trackio, local or in a Hugging Face Space. Logging of the machine is off.

    Args:
        project: name of the project.
        options: further arguments of `trackio.init`, such as `space_id`.

    Raises:
        DependencyError: trackio is not installed.
    """

    def __init__(self, project: str, **options: Any) -> None:
        self._options = {"project": project, "auto_log_gpu": False, "auto_log_cpu": False, "embed": False} | options
        with _needed("trackio"):
            self._trackio: Any = importlib.import_module("trackio")

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Begin a run, with the parameters as its config."""
        self._run: Any = self._trackio.init(**{"name": name, "config": dict(parameters)} | self._options)

    def log(self, rows: Sequence[TrackedLine]) -> None:
        """Log each row at its step."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def end(self, reason: str) -> None:
        """Finish the run; waits until everything is sent."""
        self._run.finish()


# Constructors by command line name, with the name of their argument.
NAMED: Mapping[str, tuple[Callable[[str], Tracker], str]] = {
    "tensorboard": (TensorBoard, "FOLDER"),
    "mlflow": (MLflow, "EXPERIMENT"),
    "wandb": (WandB, "PROJECT"),
    "trackio": (Trackio, "PROJECT"),
}


def tracker_named(given: str) -> Tracker:
    """Return the tracker for a command line argument such as `tensorboard=runs/mine`.

    Raises:
        ValueGivenError: unknown tracker, or no destination.
        DependencyError: its package is not installed.
    """
    name, _, where = given.partition("=")
    if name not in NAMED or not where.strip():
        expected = ", ".join(f"{each}={called}" for each, (_, called) in NAMED.items())
        raise ValueGivenError("--track", got=repr(given), expected=f"one of {expected}", code="tracker.unknown")
    make, _ = NAMED[name]
    return make(where.strip())


@contextlib.contextmanager
def _needed(package: str) -> Iterator[None]:
    """Convert an import error within the block into an error that names the required extra.

    Turns off the package's usage reports first, unless the environment sets them.
    """
    if package in _UNREPORTED:
        os.environ.setdefault(*_UNREPORTED[package])
    try:
        yield
    except ImportError as error:
        raise DependencyError(
            package,
            problem=f"The package {package} cannot be imported: {error}.",
            hint=f"Run `pip install 'trimtab[{package}]'`.",
        ) from error


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w.\-/ ]", "_", name)[:_MLFLOW_NAME]


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[first : first + most] for first in range(0, len(items), most))
