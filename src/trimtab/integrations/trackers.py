"""TensorBoard, MLflow, Weights & Biases and Trackio as trackers: three methods, which one thread calls in order.

Each imports its package where it is made, so that a missing one is known before training, and opens its run in `begin`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trimtab.core.errors import DependencyError, ValueGivenError
from trimtab.integrations.tracked_values import Row

CUT_OFF = "cut off"
_FAILED = ("error", CUT_OFF)
# What one request to MLflow may hold, and how long a name may be.
_MLFLOW_METRICS, _MLFLOW_PARAMETERS, _MLFLOW_NAME = 1000, 100, 250
# What W&B would collect of its own accord, of the process and of the machine.
_WANDB_QUIET = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
# What turns off a package's own reports on its use, by its documentation; read where it is imported, or begins.
_UNREPORTED = {"mlflow": ("MLFLOW_DISABLE_TELEMETRY", "true"), "wandb": ("WANDB_ERROR_REPORTING", "false")}


@runtime_checkable
class Tracker(Protocol):
    """Where a run is shown. One thread of its own calls these, in this order; each may wait, and may raise."""

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Open a run; `parameters` are its plan and environment, by dotted names."""

    def log(self, rows: Sequence[Row]) -> None:
        """Take what lines of the record say: at least one, and as many as were waiting."""

    def end(self, reason: str) -> None:
        """Close the run: why it ended, as its record says, or "cut off" where it does not."""


class TensorBoard:
    """Event files, by torch's own writer.

    Args:
        folder: of this run; `tensorboard --logdir` is given it, or one above.

    Raises:
        DependencyError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)
        with _needed("tensorboard"):
            self._module: Any = importlib.import_module("torch.utils.tensorboard")

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Begin a file, with the parameters as a text."""
        self._writer: Any = self._module.SummaryWriter(log_dir=self._folder)
        lines = "\n".join(f"    {key}: {value}" for key, value in parameters.items())  # indented: shown as it stands
        self._writer.add_text("parameters", lines, 0)

    def log(self, rows: Sequence[Row]) -> None:
        """Add each figure as a scalar and each text as one, and hand them to the file."""
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
    """A run of an experiment, by a client of its own: the process's active run is not touched.

    Events are tags, the last of each name, as MLflow has no texts by step. Its reports on its use are turned off for
    the process (`MLFLOW_DISABLE_TELEMETRY`), unless that is set, or MLflow was imported before.

    Args:
        experiment: its name; made where there is none.
        tracking_uri: of the store or server; None: as MLflow finds it.

    Raises:
        DependencyError: mlflow is not installed.
    """

    def __init__(self, experiment: str, *, tracking_uri: str | None = None) -> None:
        self._experiment, self._tracking_uri = experiment, tracking_uri
        with _needed("mlflow"):
            self._mlflow: Any = importlib.import_module("mlflow")
            self._entities: Any = importlib.import_module("mlflow.entities")

    def begin(self, name: str, parameters: Mapping[str, str]) -> None:
        """Make a run, and log its parameters."""
        self._client: Any = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri)
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run_id = self._client.create_run(number, run_name=name).info.run_id
        texts = {_mlflow_name(key): value for key, value in parameters.items()}
        given = [self._entities.Param(key, value) for key, value in texts.items()]
        for some in _parts(given, _MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=some)

    def log(self, rows: Sequence[Row]) -> None:
        """Log figures, many in one request, and texts as tags."""
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
        """End the run, as failed or finished."""
        self._client.set_tag(self._run_id, "end", reason)
        self._client.set_terminated(self._run_id, "FAILED" if reason in _FAILED else "FINISHED")


class WandB:
    """A run of Weights & Biases, beside any that the process has.

    What it would collect by itself (console, code, git, command, host, packages, system figures) is off; so are its
    reports on its use, for the process, unless that is set (`WANDB_ERROR_REPORTING`).

    Args:
        project: its name. options: further arguments of `wandb.init`, such as `entity`, `mode` or `dir`; `settings`
            replace those that turn its own collecting off.

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

    def log(self, rows: Sequence[Row]) -> None:
        """Log each row at its step."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def end(self, reason: str) -> None:
        """Finish the run, as failed or not."""
        self._run.finish(exit_code=int(reason in _FAILED))


class Trackio:
    """A run of Trackio: on this machine, or in a Space of Hugging Face. Its own log of the machine is off.

    Args:
        project: its name. options: further arguments of `trackio.init`, such as `space_id`.

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

    def log(self, rows: Sequence[Row]) -> None:
        """Log each row at its step."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)

    def end(self, reason: str) -> None:
        """Finish the run; waits until all of it is sent."""
        self._run.finish()


# What a command names a tracker by, and what it calls where that sends to.
NAMED: Mapping[str, tuple[Callable[[str], Tracker], str]] = {
    "tensorboard": (TensorBoard, "FOLDER"),
    "mlflow": (MLflow, "EXPERIMENT"),
    "wandb": (WandB, "PROJECT"),
    "trackio": (Trackio, "PROJECT"),
}


def tracker_named(given: str) -> Tracker:
    """Return what a command names, such as `tensorboard=runs/mine`.

    Raises:
        ValueGivenError: it is none. DependencyError: its package is not installed.
    """
    name, _, where = given.partition("=")
    if name not in NAMED or not where.strip():
        expected = ", ".join(f"{each}={called}" for each, (_, called) in NAMED.items())
        raise ValueGivenError("--track", given=repr(given), expected=f"one of {expected}")
    make, _ = NAMED[name]
    return make(where.strip())


@contextlib.contextmanager
def _needed(package: str) -> Iterator[None]:
    """Say, of an import inside the block that fails, which extra has the package.

    The package's own reports are turned off before, where the environment says nothing of them.
    """
    if package in _UNREPORTED:
        os.environ.setdefault(*_UNREPORTED[package])
    try:
        yield
    except ImportError as error:
        raise DependencyError(
            package,
            given=f"no importable package ({error})",
            expected=f"{package}, which this tracker sends to",
            way_out=f"Run `pip install 'trimtab[{package}]'`.",
        ) from error


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w.\-/ ]", "_", name)[:_MLFLOW_NAME]


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[first : first + most] for first in range(0, len(items), most))
