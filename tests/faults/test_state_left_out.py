"""What defines a run is all kept: where one part of it is not put back, what follows is another run."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashing import FORGOTTEN, WINDOWS, train
from test_crash import said

from trimtab.checkpoint.state_files import read_state

pytestmark = pytest.mark.slow

DIED, SAVED = 14, 12  # in the second pass: the order of the first is that of a new loader's
# Runs in which the parts matter, and these parts.
RUNS = {
    "plain": (
        {},
        (
            *("weights", "hidden buffers", "optimizer", "scheduler", "progress", "place in the data"),
            *("torch's random numbers", "Python's random numbers", "NumPy's random numbers"),
            "the loader's random numbers",
        ),
    ),
    "fp16": ({"precision": "fp16", "factor": 64.0}, ("loss scale",)),
    "short of memory": ({"faults": {"out_of_memory_in": [5]}}, ("memory limit",)),
    "Muon": ({"plan": {"optimizer": "muon"}}, ("Muon's momentum",)),
    "planned": ({"micro_batch": 4}, ("plan",)),
    "adaptive": (
        {
            "rule": {"policy": "variance", "sigma2_target": 1e-12, "k_max": 8, "min_windows": 2},
            "micro_batch": 4,
            "says_noise": True,
        },
        ("noise averages", "decided batch", "rate that follows the batch"),
    ),
    "lost under fp16": ({"precision": "fp16", "faults": {"no_number": [*range(6, 14)]}}, ("lost windows",)),
    "left fp16": ({"precision": "fp16", "faults": {"no_number": [*range(8)]}}, ("fp16 that was left",)),
    "counted": ({"tokens": True, "precision": "fp16", "micro_batch": 2, "factor": 64.0}, ("tokens", "terms a row")),
    "told": ({"told": True}, ("a loader's own place",)),
    "recorded": ({"record": True}, ("record",)),
}
# Which part each leaf of a checkpoint is of, by how its name begins.
IN_STATE = {
    "model.own": "weights",
    "model.hidden": "hidden buffers",
    "optimizer": "optimizer",
    "also.scheduler": "scheduler",
    "run.consumed.scheduled": "progress",
    "run.consumed.tokens": "tokens",
    "run.voids": "lost windows",
    "run.weights": "terms a row",
    "run.memory": "memory limit",
    "run.muon": "Muon's momentum",
    "run.precision.name": "fp16 that was left",
    "run.precision.scaler": "loss scale",
    "run.batch.decided.batches": "decided batch",
    "run.batch.decided.base_batches": "decided batch",
    "run.batch.decided.noise": "noise averages",
    "run.batch.rate": "rate that follows the batch",
    "data.drawn": "place in the data",
    "data.is_drawn": "place in the data",
    "data.begun": "place in the data",
    "data.loader": "a loader's own place",
    "data.here.random.cpu": "torch's random numbers",
    "data.here.random.python": "Python's random numbers",
    "data.here.random.numpy": "NumPy's random numbers",
    "data.here.generators": "the loader's random numbers",
    "record": "record",
}
# Leaves that decide no loss of these runs, and why.
NO_LOSS = {
    "run.consumed.rows": "counts rows for the record and the user",
    "run.consumed.applied": "counts steps for the user",
    "run.consumed.windows": "names windows and checkpoints: a run that counts anew is refused by a save that is there",
    "run.consumed.per_sample": "stands in for a count on an accelerator, which is read a window late",
    "run.stop": "decides where a run ends, which tests/unit/training/test_early_stopping.py holds; no window before",
    "run.batch.decided.times": "are seconds, others each time: what they decide is in decisions.jsonl",
    "run.batch.decided.account": "weighs seconds too; which windows are measured these runs decide otherwise",
    "run.batch.probing": "decides when a larger window is tried, which none of these runs does",
    "data.passes": "is for the loop, which may end by it",
    "data.length": "refuses other data",
    "data.epoch": "is of a loader that counts its passes, as none of these does (test_data_position.py)",
    "data.here.random.cuda": "is of accelerators",
}
NAMED = IN_STATE | NO_LOSS
CASES = [(kind, part) for kind, (_, parts) in RUNS.items() for part in parts if part != "record"]


def trained(folder: Path, losses: str, options: dict) -> dict[str, set[str]]:
    """Return what a run says of each window, in this process: it leaves as one does that dies, if it is to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "dies_after" in options:
            with pytest.raises(SystemExit):
                train(folder / "run", folder / losses, options)
        else:
            train(folder / "run", folder / losses, options)
    return said(folder / losses)


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """Return what makes a folder with a run of a kind that died, saved some windows before; once of each."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = folder = tmp_path_factory.mktemp("left-out")
            trained(folder, "dead.txt", RUNS[kind][0] | {"dies_after": DIED})
            assert (folder / "run" / f"step-{SAVED}").exists()
            (folder / "run" / "decisions.jsonl").unlink()  # which would tell what the state does, for windows it has
        return made[kind]

    return of


@pytest.fixture(scope="module")
def whole(dead, tmp_path_factory):
    """Return what gives all that a run of a kind says which lacks nothing; once of each."""
    found: dict[str, dict[str, set[str]]] = {}

    def of(kind: str) -> dict[str, set[str]]:
        if kind not in found:
            found[kind] = went_on(dead, tmp_path_factory.mktemp("whole"), kind)
        return found[kind]

    return of


def went_on(dead, folder: Path, kind: str, **options) -> dict[str, set[str]]:
    shutil.copytree(dead(kind), folder, dirs_exist_ok=True)
    given = {name: value for name, value in RUNS[kind][0].items() if kind != "planned"}  # its plan is in its checkpoint
    return trained(folder, "again.txt", given | options)


@pytest.mark.parametrize("kind", [kind for kind in RUNS if kind != "adaptive"])
def test_with_all_of_it_no_loss_differs(whole, tmp_path, kind):
    found, expected = whole(kind), trained(tmp_path, "never.txt", RUNS[kind][0])
    assert {str(SAVED), "end"} <= found.keys()
    assert str(SAVED - 1) not in found
    assert found == {window: loss for window, loss in expected.items() if window in found}


def test_what_chooses_its_batch_goes_on_twice_alike(dead, whole, tmp_path):
    """Not as one that was never cut, whose figures of noise were on their way: its decisions are kept for that."""
    assert went_on(dead, tmp_path, "adaptive") == whole("adaptive")


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_without_one_part_they_do(dead, whole, tmp_path, kind, part):
    found, expected = went_on(dead, tmp_path, kind, forgets=part), whole(kind)
    differing = [window for window in expected if found.get(window) != expected[window]]
    assert "end" in differing
    assert len(differing) > len(expected) / 2


def leaves(state, name: str = "") -> Iterator[str]:
    """Yield the names of all that a state holds, as far down as they are named here."""
    if isinstance(state, dict) and name not in NAMED:
        for key, value in state.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name


def test_every_part_is_left_out_once():
    """The plan is beside the state, and what the run's record says is no loss: it has a test of its own."""
    assert sorted(part for _, parts in RUNS.values() for part in parts) == sorted(FORGOTTEN)
    assert set(FORGOTTEN) == {*IN_STATE.values(), "plan"}


@pytest.mark.parametrize("kind", RUNS)
def test_all_that_a_checkpoint_holds_is_left_out_or_decides_no_loss(dead, kind):
    found = {*leaves(read_state(dead(kind) / "run" / f"step-{SAVED}"))}
    named = {leaf: name for leaf in found for name in NAMED if leaf == name or leaf.startswith(name + ".")}
    assert found == named.keys()
    parts = {IN_STATE[name] for name in named.values() if name in IN_STATE}
    assert parts >= {*RUNS[kind][1]} - {"plan"}


def test_no_leaf_is_named_that_no_checkpoint_holds(dead):
    found = {leaf for kind in RUNS for leaf in leaves(read_state(dead(kind) / "run" / f"step-{SAVED}"))}
    assert [name for name in NAMED if not any(f"{leaf}.".startswith(name + ".") for leaf in found)] == []
    assert not IN_STATE.keys() & NO_LOSS.keys()


@pytest.mark.parametrize("forgets", [None, "record"])
def test_without_its_place_a_record_has_windows_twice(dead, tmp_path, forgets):
    went_on(dead, tmp_path, "recorded", forgets=forgets)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    samples = [line["samples"] for line in lines if line["kind"] == "step"]
    assert (len(samples) == WINDOWS) is (forgets is None)
