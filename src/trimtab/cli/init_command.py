"""Command `init`."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import print_text
from trimtab.core.errors import FormatError

_NAME = "my_task.py"


def init(
    file: Annotated[Path, typer.Argument(help="new Python file for your task")] = Path(_NAME),
) -> None:
    """Write a working task file, with three parts to replace by your own code."""
    if file.suffix != ".py" or not file.stem.isidentifier():
        raise FormatError(
            "file",
            problem=f"{file.name} is not the name of a Python module.",
            hint="Use letters, digits and underscores, and the suffix .py, as in my_task.py.",
            code="file.name_invalid",
        )
    if not file.parent.is_dir():
        raise FormatError(
            "file",
            problem=f"The folder {file.parent} does not exist.",
            hint="Create it first.",
            code="folder.missing",
        )
    import trimtab.tasks

    called = shlex.quote(f"{file.as_posix()}:task")
    text = Path(trimtab.tasks.__file__).with_name("starter.py").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(text.replace(f"{_NAME}:task", called).replace('name="my_task"', f'name="{file.stem}"'))
    except FileExistsError:
        raise FormatError(
            "file", problem=f"The file {file} exists already.", hint="Choose another name.", code="file.exists"
        ) from None
    print_text(f"Wrote {file}. Edit its parts 1 to 3, then run")
    if find_spec("matplotlib") is None:
        print_text("  pip install 'trimtab[report]'   # needed for the report's figures")
    print_text(f"  trimtab compare {called} --quick")
