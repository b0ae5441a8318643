"""Each tracker tells its package what a record says; a package that is missing is named where the tracker is made."""

from __future__ import annotations

import importlib
import math
import os
import sys

import pytest
import tracker_packages
from raising import raises
from tracker_packages import Calls

from trimtab.core.errors import DependencyError, ValueGivenError
from trimtab.core.record import End, Evaluation, Event, Header, StepRecord
from trimtab.core.serialization import to_jsonable
from trimtab.integrations.trackers import (
    ENVIRONMENT,
    MLflow,
    TensorBoard,
    Trackio,
    WandB,
    parameters,
    row,
    tracker_named,
)
from trimtab.integrations.tracking import TrackedRecord
from trimtab.measure.machine import environment
from trimtab.plans.plan import Plan

HEADER = Header("digits", 3, to_jsonable(Plan.fixed(8)), {"torch": "2.13", "WANDB_API_KEY": "secret"}, {"data": "here"})
LINES = (
    StepRecord(0, 8, 8.0, 2.5, 0.1, 0.25, grad_norm=3.0, loss_scale=1024.0, num_micro_batches=2, noise_scale=40.0),
    Event("precision", 1, {"from": "fp16", "to": "fp32"}),
    StepRecord(1, 8, 8.0, math.inf, 0.1, 0.5, applied=False),
    Evaluation(16, 0.75, {"accuracy": 0.5}),
)
FIGURES = [
    (0, "train/loss", 2.5),
    (0, "train/learning_rate", 0.1),
    (0, "train/samples", 8.0),
    (0, "train/wall_s", 0.25),
    (0, "train/num_micro_batches", 2.0),
    (0, "train/noise_scale", 40.0),
    (0, "train/grad_norm", 3.0),
    (0, "train/loss_scale", 1024.0),
    (1, "train/loss", math.inf),
    (1, "train/learning_rate", 0.1),
    (1, "train/samples", 8.0),
    (1, "train/wall_s", 0.5),
    (1, "train/num_micro_batches", 1.0),
    (2, "evaluation/samples", 16.0),
    (2, "evaluation/train_s", 0.75),
    (2, "evaluation/accuracy", 0.5),
]
PRECISION = '{"from": "fp16", "to": "fp32"}'


@pytest.fixture
def packages(monkeypatch):
    """Put the stand-in of a package where it is imported from; returns what it was told."""

    def put(name, *given):
        calls = Calls()
        for each, stand_in in getattr(tracker_packages, name)(calls, *given).items():
            monkeypatch.setitem(sys.modules, each, stand_in)
        return calls

    return put


def send(tmp_path, tracker, reason="closed", lines=LINES):
    with TrackedRecord(tmp_path / f"{reason}.jsonl", HEADER, [tracker]) as record:
        for line in lines:
            record.write(line)
        if reason:
            record.write(End(reason))


def test_tensorboard_has_scalars_and_texts(tmp_path, packages):
    calls = packages("tensorboard")
    send(tmp_path, TensorBoard(tmp_path / "events"))
    assert calls.opened == {"folder": str(tmp_path / "events"), "flushed": len(FIGURES)}
    assert calls.rows == FIGURES
    (_, _, first), *rest = calls.texts
    assert "    plan.precision.value: " in first
    assert rest == [(1, "event/precision", PRECISION), (None, "end", "closed")]
    assert calls.closed == ["closed"]


@pytest.mark.parametrize(("reason", "status"), [("closed", "FINISHED"), ("error", "FAILED"), ("", "FAILED")])
def test_mlflow_has_a_run_of_the_experiment(tmp_path, packages, reason, status):
    calls = packages("mlflow", {"mine": "7"})
    send(tmp_path, MLflow("mine", tracking_uri="sqlite:///runs.db"), reason)
    assert calls.opened.pop("parameters") == parameters(HEADER)
    assert calls.opened == {"uri": "sqlite:///runs.db", "experiment": "7", "name": "digits"}
    assert calls.rows == FIGURES
    ending = (None, "end", reason or "cut off")
    assert calls.texts == [(None, "event/precision", f"step 1: {PRECISION}"), ending]
    assert calls.closed == [status]


def test_mlflow_makes_an_experiment_and_takes_what_it_cannot_name_or_have_at_once(packages):
    calls = packages("mlflow", {})
    tracker = MLflow("new one")
    tracker.begin("a run", {f"plan.{each}": "" for each in range(250)})
    tracker.log([row(each, Evaluation(8, 1.0, {"F1: macro" + "x" * 300: 0.5})) for each in range(400)])
    assert calls.opened["experiment"] == "new"
    assert (len(calls.opened["parameters"]), len(calls.rows)) == (250, 1200)  # the stand-in limits each request
    assert calls.rows[2][1].startswith("evaluation/F1_ macro")


@pytest.mark.parametrize(("reason", "code"), [("target", 0), ("error", 1), ("", 1)])
def test_wandb_has_a_run_beside_any_other_and_collects_nothing(tmp_path, packages, reason, code):
    calls = packages("wandb")
    send(tmp_path, WandB("mine", mode="offline"), reason)
    settings = calls.opened.pop("settings")
    assert settings.keys() == tracker_packages.WANDB_SETTINGS
    assert settings["console"] == "off"
    assert calls.opened == {"project": "mine", "name": "digits", "parameters": parameters(HEADER), "mode": "offline"}
    assert (calls.rows, calls.texts) == (FIGURES, [(1, "event/precision", PRECISION)])
    assert calls.closed == [code]


def test_options_are_the_users(tmp_path, packages):
    calls = packages("wandb")
    send(tmp_path, WandB("mine", name="of my own", settings={"console": "wrap"}))
    assert (calls.opened["name"], calls.opened["settings"]) == ("of my own", {"console": "wrap"})


def test_trackio_has_a_run(tmp_path, packages):
    calls = packages("trackio")
    send(tmp_path, Trackio("mine", space_id="me/space"))
    assert calls.opened == {
        "project": "mine",
        "name": "digits",
        "parameters": parameters(HEADER),
        "space": "me/space",
    }
    assert (calls.rows, calls.texts) == (FIGURES, [(1, "event/precision", PRECISION)])
    assert calls.closed == ["finished"]


@pytest.mark.parametrize(
    ("make", "switch", "off"),
    [
        (lambda: MLflow("mine"), "MLFLOW_DISABLE_TELEMETRY", "true"),
        (lambda: WandB("mine"), "WANDB_ERROR_REPORTING", "false"),
    ],
    ids=["mlflow", "wandb"],
)
def test_a_package_reports_nothing_of_itself_unless_its_user_says_so(monkeypatch, make, switch, off):
    def imported(name):  # where the package reads its switch
        seen.append(os.environ.get(switch))
        return tracker_packages.module(name)

    seen = []
    monkeypatch.setattr(importlib, "import_module", imported)
    monkeypatch.delenv(switch, raising=False)
    make()
    assert set(seen) == {off}
    monkeypatch.setenv(switch, "as the user has it")
    make()
    assert (seen[-1], os.environ[switch]) == ("as the user has it", "as the user has it")


@pytest.mark.parametrize(
    ("missing", "make", "extra"),
    [
        ("torch.utils.tensorboard", lambda: TensorBoard("folder"), "tensorboard"),
        ("mlflow", lambda: MLflow("mine"), "mlflow"),
        ("wandb", lambda: WandB("mine"), "wandb"),
        ("trackio", lambda: Trackio("mine"), "trackio"),
    ],
    ids=["tensorboard", "mlflow", "wandb", "trackio"],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, missing, make, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    with raises(DependencyError, code="dependency.missing", field=extra) as caught:
        make()
    assert f"'trimtab[{extra}]'" in caught.value.hint


def test_files_of_the_real_tensorboard_can_be_read(tmp_path):
    pytest.importorskip("tensorboard")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    send(tmp_path, TensorBoard(tmp_path / "events"))
    found = reader.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(0, 2.5), (1, math.inf)]
    assert "event/precision/text_summary" in found.Tags()["tensors"]


def test_parameters_are_plan_and_known_environment_and_nothing_else():
    found = parameters(HEADER)
    assert (found["name"], found["seed"], found["environment.torch"]) == ("digits", "3", "2.13")
    assert "secret" not in repr(found)
    assert {key.split(".")[0] for key in found} == {"name", "seed", "plan", "environment"}
    assert parameters(Header("bare")) == {"name": "bare"}
    assert environment().keys() <= set(ENVIRONMENT)
    text = row(3, Event("resumed", 3, {"why": "x" * 1000})).values["event/resumed"]
    assert (len(text), text[-1]) == (500, "…")
    assert parameters(Header("x" * 500))["name"] == "x" * 500


@pytest.mark.parametrize(
    ("given", "kind", "place"),
    [
        ("tensorboard=runs/a=b", TensorBoard, {"folder": "runs/a=b"}),
        ("mlflow=vision", MLflow, {"experiment": "new"}),
        ("wandb=vision", WandB, {"project": "vision"}),
        ("trackio=vision", Trackio, {"project": "vision"}),
    ],
)
def test_a_tracker_is_named_by_a_command(packages, given, kind, place):
    calls = packages(given.partition("=")[0], *([{}] if kind is MLflow else []))
    tracker = tracker_named(given)
    assert isinstance(tracker, kind)
    tracker.begin("digits", {})
    assert place.items() <= calls.opened.items()


@pytest.mark.parametrize("given", ["tensorboard", "tensorboard=", "aim=runs", "", "=runs"])
def test_a_tracker_that_is_none_is_refused(given):
    with raises(ValueGivenError, code="tracker.unknown", field="--track"):
        tracker_named(given)
