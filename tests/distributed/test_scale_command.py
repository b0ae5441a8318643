"""`trimtab scale`: jobs of one and of two ranks are launched, timed and put into one table; nothing is timed twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ranks import Ended, run_command, run_torchrun

from trimtab import cli
from trimtab.core.serialization import read_json, to_json
from trimtab.experiments.scale import PlanOfJob
from trimtab.experiments.scaling import Scaling
from trimtab.plans.plan import Plan

pytestmark = pytest.mark.slow

TINY_TASK = Path(__file__).parents[1] / "unit" / "experiments" / "tiny_task.py"
WHICH = ["--ranks=2", "--rounds=1"]
HOW = ["tiny:task", "--quick", "--scaling=weak,strong", "--out=table", "--json"]
ARGUMENTS = [*HOW, *WHICH]


@pytest.fixture
def here(folder, monkeypatch, capsys):
    """Run the command in this process, as one that starts no ranks may be: torch is imported already."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))

    def run_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["trimtab", "scale", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    yield run_here
    sys.modules.pop("tiny", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return where one table was made, of plans that need not be measured."""
    made = tmp_path_factory.mktemp("scale")
    (made / "tiny.py").write_text(TINY_TASK.read_text())
    (made / "table").mkdir()
    for mode, ranks, plan in (
        ("weak", 1, Plan.fixed(32)),
        ("weak", 2, Plan.fixed(32, num_ranks=2, zero_stage=0)),
        ("strong", 2, Plan.fixed(16, num_ranks=2, zero_stage=0)),
    ):
        (made / "table" / f"plan-{mode}-{ranks}.json").write_text(to_json(PlanOfJob(plan)))
    found = run_command(made, "scale", *ARGUMENTS, forked_ranks=3)
    assert found.returncode == 0, found.stderr
    (made / "printed.json").write_text(found.stdout)
    return made


def test_every_recipe_has_a_row_of_each_number_of_ranks(folder):
    rows = json.loads((folder / "printed.json").read_text())["rows"]
    of = {(row["recipe"], row["ranks"], row["scaling"]): row for row in rows}
    for recipe in ("baseline", "self", "plan"):
        assert {(recipe, 1, "weak"), (recipe, 2, "weak"), (recipe, 2, "strong")} <= of.keys()
        assert of[recipe, 1, "weak"]["mean"] is None
        assert of[recipe, 2, "weak"]["pairs"] == pytest.approx([of[recipe, 2, "weak"]["mean"]])
        assert of[recipe, 2, "weak"]["samples_per_s"] > 0
    assert of["plan", 2, "weak"]["waiting_share"] is not None
    table = read_json(Scaling, folder / "table" / "scaling.json")
    samples = {
        (job.ranks, mode): {row.value % 64 for row in found.select("samples", "plan") if row.round}
        for job in table.jobs
        for mode, found in job.tables.items()
    }
    assert samples[2, "weak"] == {0}  # Each rank has the task's batch of 32.
    assert samples.keys() == {(1, "weak"), (2, "weak"), (2, "strong")}


def test_what_the_folder_holds_is_not_timed_again(folder, here):
    before = {path: path.read_bytes() for path in (folder / "table").glob("job-*.json")}
    assert len(before) == 2
    code, out, err = here(*ARGUMENTS)
    assert code == 0, err
    assert {path: path.read_bytes() for path in (folder / "table").glob("job-*.json")} == before
    again = json.loads(out)["rows"]
    assert again == json.loads((folder / "printed.json").read_text())["rows"]


def test_another_table_is_not_made_in_the_same_folder(here):
    code, _, err = here("tiny:task", "--rounds", "1", "--scaling", "weak", "--out", "table")
    assert code == 1
    assert "different settings: --scaling, --steps." in err
    assert "[folder.settings_differ]" in err


def test_a_launchers_ranks_add_a_job_of_theirs(folder):
    def launched(*arguments: str) -> Ended:
        return run_torchrun(folder, "-m", "trimtab.cli", "scale", *arguments)

    refused = launched(*ARGUMENTS)
    assert refused.returncode != 0
    assert "--ranks and --rounds" in refused.stderr
    assert "[option.conflict]" in refused.stderr
    found = launched(*HOW)
    assert found.returncode == 0, found.stderr
    assert (folder / "table" / "job-1-2.json").exists()
    rows = json.loads(found.stdout)["rows"]
    (row,) = [r for r in rows if (r["recipe"], r["ranks"], r["scaling"]) == ("plan", 2, "weak")]
    assert (row["n"], len(row["pairs"])) == (1, 1)  # its round has no job of one rank


def test_numbers_that_are_none_are_refused(here):
    code, _, err = here("tiny:task", "--ranks", "two")
    assert code == 1
    assert "--ranks" in err


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        (["--ranks", "64", "--scaling", "strong"], 32),
        (["--ranks", "64", "--scaling", "weak"], 16),
    ],
)
def test_more_ranks_than_rows_are_refused_before_any_is_started(folder, here, arguments, most):
    code, _, err = here("tiny:task", "--out", "none", *arguments)
    assert code == 1
    assert "[ranks.too_many]" in err
    assert f"at most {most} ranks" in err
    assert not (folder / "none").exists()
