"""Generate docs/api.md from docstrings, docs/commands.md from the help texts of the commands, and docs/settings.md.

`python docs/reference.py`, part of `make docs`; a test checks that the pages are current.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from definitions import first_line

API = """# Python reference

All public names with the first line of their docstrings. Full docstrings are below each table on the site, and in
`help(trimtab.plan)`. [Planning](planning.md) describes how a plan is made; all errors are in `trimtab.errors`.

<!-- made by `make docs` from docstrings -->
"""
COMMANDS = """# Command line

All commands and options. Results go to standard output and progress to standard error; `--json` prints one JSON
object. Exit status: 0 success, 1 error with explanation, 2 invalid command line, 130 interrupted.
`TRIMTAB_TRACEBACK=1` adds a traceback to errors. `python -m trimtab.cli` is the same command.

<!-- made by `make docs` from the commands -->
"""
SETTINGS_PAGE = """# Settings

Every setting that a plan can change is a field of `trimtab.Plan`, and an argument of `trimtab.Plan.fixed(batch_size,
...)`. The default leaves your loop unchanged. The numerical effect is the largest that a change can have: *bitwise*
keeps results equal bit by bit (micro-batches: up to the order of a sum), *rounding* changes rounding only, *training*
changes the training. Planning changes settings of the last kind only if `adapt` names them.

<!-- made by `make docs` from src/trimtab/settings -->
"""
CONFLICTS_TITLE = """
## Invalid combinations

| setting | with | example |
|---|---|---|"""
_RUN = ("plan", "start", "Run", "Summed", "Plan", "Choice", "Effect", "profile")
_ASKED = ("Budget", "Objective", "Reference", "BatchRule", "Stop", "StopReason", "Metering", "Checkpoints")
_TASKS = ("Task", "TaskData", "Metric", "DataSource", "StrongRecipe", "SampleDraws", "load_task", "of_datasets")
_EXPERIMENTS = ("Loop", "compare", "race", "ablate", "phases", "RunOptions", "QualityMetric", "Comparison")
_SOURCES = ("forecast_or_reason", "IntensitySource", "ConstantIntensity", "CsvIntensity")


def _of(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


GROUPS = {
    "Plan and train": _of("trimtab", *_RUN),
    "Options of plans and runs": _of("trimtab", *_ASKED),
    "Comparing loops": _of("trimtab", *_EXPERIMENTS),
    "Records": _of("trimtab", "RecordWriter", "Header", "RunRecord", "read_record"),
    "Several ranks": _of("trimtab", "process_group", "shard"),
    "Errors": _of("trimtab", "errors", "UnprovedSplitWarning"),
    "Modules": _of("trimtab.nn", "LossHead"),
    "Tasks": _of("trimtab.tasks", *_TASKS),
    "Frameworks": (
        *_of("trimtab.integrations.transformers", "TrimtabTrainer"),
        *_of("trimtab.integrations.lightning", "TrimtabStrategy", "plan", "start"),
        *_of("trimtab.integrations.accelerate", "plan", "start"),
    ),
    "Trackers": (
        *_of("trimtab.integrations.tracking", "TrackedRecord"),
        *_of("trimtab.integrations.trackers", "Tracker", "TensorBoard", "MLflow", "WandB", "Trackio"),
    ),
    "Energy": _of("trimtab.energy.energy_meter", "EnergyClock", "Meter", "MeterLost"),
    "Carbon": (
        *_of("trimtab.carbon.pause_schedule", "when_to_train", "CarbonSchedule"),
        *_of("trimtab.carbon.job", "TrainingJob", "PauseCost"),
        *_of("trimtab.carbon.intensity", "Intensity"),
        *_of("trimtab.carbon.services", *_SOURCES),
        *_of("trimtab.carbon.services", "GreatBritain", "ElectricityMaps", "WattTime"),
    ),
}


def api_page() -> str:
    """Return docs/api.md."""
    parts = [API]
    for title, names in GROUPS.items():
        rows = ((f"`{name}`", first_line(name)) for name in names)
        parts += [f"## {title}\n", *_table(("name", "description"), rows), ""]
    return "\n".join(parts)


def commands_page() -> str:
    """Return docs/commands.md."""
    from typer.main import get_command

    from trimtab.cli import app

    return "\n".join([COMMANDS, *_commands("trimtab", get_command(app))])


def _commands(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for word, each in command.commands.items():
            yield from _commands(f"{name} {word}", each)
        return
    shown = [each for each in command.params if not each.hidden]
    needed = [_spelled(each) for each in shown if each.param_type_name == "argument"]
    yield f"## {name}\n"
    yield f"`{' '.join([name, *needed, '[options]'])}`\n"
    yield f"{command.help}\n"
    if shown:
        yield from _table(("argument or option", "description", "default"), map(_row, shown))
        yield ""


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = parameter.name.upper() + ("..." if parameter.nargs != 1 else "")
        return name if parameter.required else f"[{name}]"
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _row(parameter: Any) -> tuple[str, str, str]:
    value = parameter.default
    is_silent = value is None or value is False or value == math.inf or parameter.required
    return f"`{_spelled(parameter)}`", parameter.help, "" if is_silent else f"`{value}`"


def _table(titles: tuple[str, ...], rows: Any) -> Iterator[str]:
    yield _line(titles)
    yield _line("---" for _ in titles)
    yield from map(_line, rows)


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def settings_page() -> str:
    """Return docs/settings.md."""
    from trimtab.settings import SETTINGS
    from trimtab.settings.conflicts import CONFLICTS

    titles = ("setting", "what it changes", "values", "default", "numerical effect", "tried by planning")
    rows = (
        (f"`{name}`", each.summary, each.values, f"`{each.default}`", each.effect, "yes" if each.is_searched else "")
        for name, each in SETTINGS.items()
    )
    conflicts = (
        (
            *(f"`{name}`" for name in each.settings),
            ", ".join(f"`{name}={value!r}`" for name, value in each.example.items()),
        )
        for each in CONFLICTS
    )
    return "\n".join([SETTINGS_PAGE, *_table(titles, rows), CONFLICTS_TITLE, *map(_line, conflicts), ""])


def _code(text: str) -> str:
    return f"`{text}`"


PAGES = {"settings.md": settings_page, "api.md": api_page, "commands.md": commands_page}

if __name__ == "__main__":
    for page, made in PAGES.items():
        (Path(__file__).parent / page).write_text(made(), encoding="utf-8")
