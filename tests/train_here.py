"""`trimtab train` in this process, of the tiny task, in a folder of its own."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from trimtab import cli
from trimtab.core.serialization import to_json
from trimtab.energy import meter_selection
from trimtab.energy.energy_meter import NoMeter
from trimtab.plans.plan import Plan

TINY_TASK = Path(__file__).parent / "unit" / "experiments" / "tiny_task.py"


@contextlib.contextmanager
def trained_here(monkeypatch, capsys, folder: Path) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Give what runs the command in a folder with `tiny.py` and `plan.json`; it tells status, output and errors."""
    shutil.copy(TINY_TASK, folder / "tiny.py")
    (folder / "plan.json").write_text(to_json(Plan.fixed(32)))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(meter_selection, "rapl", lambda root: NoMeter("none that tests read"))

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trimtab", "train", "tiny.py:task", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as exit:
            code = exit.code or 0
        return code, *capsys.readouterr()

    yield run
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(folder)):
            del sys.modules[name]
