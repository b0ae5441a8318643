"""Stand-ins for the trackers' packages: what is used of each documented interface, strict in its arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

WANDB_SETTINGS = {
    "console",
    "disable_code",
    "disable_git",
    "x_disable_machine_info",
    "x_disable_meta",
    "x_disable_stats",
    "x_save_requirements",
}
NAME = re.compile(r"^[/\w.\- ]*$")  # of MLflow: parameters, metrics and tags


def module(name: str, **members: object) -> ModuleType:
    found = ModuleType(name)
    vars(found).update(members)
    return found


@dataclass
class Calls:
    """What a package was told."""

    opened: dict = field(default_factory=dict)
    rows: list = field(default_factory=list)
    texts: list = field(default_factory=list)
    closed: list = field(default_factory=list)


def tensorboard(calls: Calls) -> dict[str, ModuleType]:
    class SummaryWriter:
        def __init__(self, log_dir=None, comment="", purge_step=None, max_queue=10, flush_secs=120):
            calls.opened = {"folder": log_dir}

        def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
            assert isinstance(scalar_value, float)
            calls.rows.append((global_step, tag, scalar_value))

        def add_text(self, tag, text_string, global_step=None, walltime=None):
            assert isinstance(text_string, str)
            calls.texts.append((global_step, tag, text_string))

        def flush(self):
            calls.opened["flushed"] = len(calls.rows)

        def close(self):
            calls.closed.append("closed")

    return {"torch.utils.tensorboard": module("torch.utils.tensorboard", SummaryWriter=SummaryWriter)}


def mlflow(calls: Calls, experiments: dict[str, str]) -> dict[str, ModuleType]:
    @dataclass
    class Metric:
        key: str
        value: float
        timestamp: int
        step: int

    @dataclass
    class Param:
        key: str
        value: str

    class MlflowClient:
        def __init__(self, tracking_uri=None, registry_uri=None):
            calls.opened = {"uri": tracking_uri, "parameters": {}}

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id=experiments[name]) if name in experiments else None

        def create_experiment(self, name, artifact_location=None, tags=None):
            experiments[name] = "new"
            return "new"

        def create_run(self, experiment_id, start_time=None, tags=None, run_name=None):
            calls.opened |= {"experiment": experiment_id, "name": run_name}
            return SimpleNamespace(info=SimpleNamespace(run_id="a run"))

        def log_batch(self, run_id, metrics=(), params=(), tags=(), synchronous=None):
            assert run_id == "a run"
            assert len(metrics) <= 1000
            assert len(params) <= 100
            for each in (*metrics, *params):
                assert NAME.match(each.key), each.key
                assert len(each.key) <= 250
            for each in params:
                assert each.key not in calls.opened["parameters"], "a parameter is written once"
                assert len(each.value) <= 500
                calls.opened["parameters"][each.key] = each.value
            calls.rows += [(each.step, each.key, each.value) for each in metrics]
            assert all(each.timestamp > 1.7e12 for each in metrics), "milliseconds"

        def set_tag(self, run_id, key, value, synchronous=None):
            assert NAME.match(key), key
            calls.texts.append((None, key, value))

        def set_terminated(self, run_id, status=None, end_time=None):
            calls.closed.append(status)

    entities = module("mlflow.entities", Metric=Metric, Param=Param)
    return {
        "mlflow": module("mlflow", MlflowClient=MlflowClient, entities=entities),
        "mlflow.entities": entities,
    }


def _logs(calls: Calls, metrics: dict, step: int | None) -> None:
    assert step is not None
    assert not calls.rows or step >= calls.rows[-1][0], "W&B drops what goes back"
    for name, value in metrics.items():
        (calls.texts if isinstance(value, str) else calls.rows).append((step, name, value))


def wandb(calls: Calls) -> dict[str, ModuleType]:
    class Settings(dict):
        def __init__(self, **settings):
            assert settings.keys() <= WANDB_SETTINGS
            super().__init__(settings)

    class Run:
        def log(self, data, step=None, commit=None):
            _logs(calls, data, step)

        def finish(self, exit_code=None, quiet=None):
            calls.closed.append(exit_code)

    def init(
        entity=None, project=None, dir=None, id=None, name=None, config=None, mode=None, reinit=None, settings=None
    ):
        assert reinit == "create_new", "else the run that the process has would be finished, or taken"
        calls.opened = {"project": project, "name": name, "parameters": config, "mode": mode, "settings": settings}
        return Run()

    return {"wandb": module("wandb", Settings=Settings, init=init)}


def trackio(calls: Calls) -> dict[str, ModuleType]:
    class Run:
        def log(self, metrics, step=None):
            _logs(calls, metrics, step)

        def finish(self):
            calls.closed.append("finished")

    def init(
        project,
        name=None,
        group=None,
        space_id=None,
        config=None,
        resume="never",
        embed=True,
        auto_log_gpu=None,
        auto_log_cpu=None,
    ):
        assert auto_log_gpu is auto_log_cpu is embed is False
        assert not any(key.startswith("_") for key in config), "reserved"
        calls.opened = {"project": project, "name": name, "parameters": config, "space": space_id}
        return Run()

    return {"trackio": module("trackio", init=init)}
