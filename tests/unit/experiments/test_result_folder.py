"""Output folders: an interrupted command continues, another command is refused, damage is named."""

from __future__ import annotations

import pytest
from raising import raises
from tiny_task import BATCH_SIZE
from tiny_task import task as tiny

import trimtab
from trimtab.core.errors import DamagedError, FormatError, InUseError
from trimtab.experiments import paired_run
from trimtab.experiments.result_folder import ResultFolder, folder_of
from trimtab.experiments.results import SETTINGS, read_settings
from trimtab.experiments.subject import RunOptions
from trimtab.plans.plan import Plan


def test_parts_are_made_once(tmp_path):
    folder, calls = ResultFolder(tmp_path), []

    def make():
        calls.append(1)
        return Plan.fixed(4)

    assert not folder.has("plan")
    assert folder.part("plan", Plan, make) == folder.part("plan", Plan, make) == Plan.fixed(4)
    assert folder.has("plan")
    assert len(calls) == 1
    assert ResultFolder(None).part("plan", Plan, make) == Plan.fixed(4)
    assert not ResultFolder(None).has("plan")


def test_a_folder_of_other_settings_or_in_use_is_refused(tmp_path):
    with ResultFolder(tmp_path).claimed({"steps": 5, "plan": None}):
        assert read_settings(tmp_path)["steps"] == "5"
        with raises(InUseError, code="output.in_use"), ResultFolder(tmp_path).claimed({"steps": 5}):
            pass
    with ResultFolder(tmp_path).claimed({"steps": 5}):
        pass
    with raises(FormatError, code="folder.settings_differ") as caught, ResultFolder(tmp_path).claimed({"steps": 6}):
        pass
    assert "steps" in caught.value.problem
    (tmp_path / SETTINGS).write_text('{"steps": 5}')
    with raises(DamagedError, code="settings.damaged"):
        read_settings(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(FormatError, code="folder.is_file"):
        folder_of("compare", "task", tmp_path / "file")
    assert str(folder_of("compare", "a/b.py:task", None)) == "runs/compare-a-b.py-task"


@pytest.mark.slow
def test_an_interrupted_comparison_continues_and_a_longer_one_adds_pairs(tmp_path, monkeypatch):
    plan, own, runs = Plan.fixed(BATCH_SIZE, fused_optimizer=True), paired_run.PairedRun.run, []

    def counted(self):
        runs.append(self._seed)
        if len(runs) == 2:
            raise KeyboardInterrupt
        return own(self)

    monkeypatch.setattr(paired_run.PairedRun, "run", counted)

    def compare(pairs, steps=6):
        return trimtab.compare(tiny, plan=plan, options=RunOptions(steps, pairs, out=tmp_path))

    with pytest.raises(KeyboardInterrupt):
        compare(2)
    found = compare(2)
    assert runs == [0, 1, 1]
    assert any("read from" in note for note in found.notes)
    assert compare(3).num_pairs == 3
    assert runs == [0, 1, 1, 2]
    assert compare(3).table == compare(3).table
    with raises(FormatError, code="folder.settings_differ"):
        compare(3, steps=7)
