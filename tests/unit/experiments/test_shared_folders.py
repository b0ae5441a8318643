"""Folders that two commands would write at once: the second is refused before it measures anything."""

from __future__ import annotations

import pytest
from tiny_task import task

from trimtab.checkpoint.run_lock import NAME, locked
from trimtab.core.errors import InUseError
from trimtab.core.progress import silent
from trimtab.experiments.ablation.ablate import AblateSettings, ablate
from trimtab.experiments.comparison.compare import CompareOptions, compare
from trimtab.experiments.scaling.scale import ScaleSettings, scale

COMMANDS = {
    "compare": lambda out: compare(task, out, CompareOptions(1, adapt=(), peers=False), command="it"),
    "ablate": lambda out: ablate(task, out, AblateSettings(1), command="it"),
    "scale": lambda out: scale(task, out, ScaleSettings((1,), 1), lambda ranks, number: None, silent),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_share_no_folder(tmp_path, command):
    with locked(tmp_path):
        with pytest.raises(InUseError) as raised:
            COMMANDS[command](tmp_path)
        assert raised.value.code == "output.in_use"
    assert [each.name for each in tmp_path.iterdir()] == [NAME]
