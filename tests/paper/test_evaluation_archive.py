"""Archives of evaluations: equal content after unpacking, reproducible bytes, refusal of unsafe members, resumption."""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from benchmarks.paper.evaluation_archive import archive_of, summary_of, unpack_all
from raising import raises

from benchmarks.paper import evaluation, evaluation_record
from benchmarks.paper import evaluation_archive as archive
from benchmarks.paper.evaluation_slices import Ran, slices
from trimtab.core.errors import FormatError
from trimtab.core.serialization import to_json

ROOT = Path(__file__).parents[2]
NAME = "evaluation-here"
FILES = {
    "machine.json": '{"cpu": "Some CPU"}',
    "done/one.json": "{}",
    "run/race-0/plan.jsonl": "line\n" * 100,
    "run/report.json": "{}",
    "evaluation.md": "# Page\n",
    "summary.json": "{}",
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path):
    """Return a checkout with one archived evaluation."""
    folder, packed = archive.folder_of(tmp_path, NAME), archive.archive_of(tmp_path, NAME)
    write(folder, FILES)
    packed.parent.mkdir(parents=True)
    assert archive.pack(folder, packed)
    return tmp_path


def test_a_checkout_without_the_folder_gets_the_same_files(root):
    folder = archive.folder_of(root, NAME)
    shutil.rmtree(root / "runs")
    assert archive.unpack_all(root) == [folder]
    assert read(folder) == FILES
    assert archive.is_packed(folder, archive.archive_of(root, NAME))


def test_an_archive_is_unpacked_once_with_the_same_files(root):
    folder, packed = archive.folder_of(root, NAME), archive.archive_of(root, NAME)
    assert not archive.unpack(packed, folder)
    (folder / "run" / "report.json").write_text("a new result")  # not packed yet
    assert not archive.unpack(packed, folder)
    assert not archive.is_packed(folder, packed)
    assert archive.pack(folder, packed)
    assert not archive.pack(folder, packed)
    assert not archive.unpack(packed, folder)


def test_equal_files_yield_equal_bytes(root, tmp_path):
    other = tmp_path / "elsewhere" / NAME
    write(other, dict(reversed(FILES.items())))
    for path in other.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o700)
    write(other, {"run/.report.json.x.partial": "being written"})
    second = tmp_path / "elsewhere" / "second.tar.xz"
    assert archive.pack(other, second)
    assert second.read_bytes() == archive.archive_of(root, NAME).read_bytes()
    with tarfile.open(second) as tar:
        members = tar.getmembers()
    assert {(each.mtime, each.uid, each.gid, each.uname, each.gname, each.mode) for each in members} == {
        (0, 0, 0, "", "", 0o644)
    }
    records = ["done/one.json", "machine.json", "run/race-0/plan.jsonl", "run/report.json"]
    names = [each.name.removeprefix(f"{NAME}/") for each in members]
    assert names == [*records, "evaluation.md", "summary.json"]
    # The content of a compressed stream begins with all records, so that git stores only its end again.
    folder, packed = archive.folder_of(root, NAME), archive.archive_of(root, NAME)
    before = lzma.decompress(packed.read_bytes())
    write(folder, {"evaluation.md": "# Another page\n"})
    assert archive.pack(folder, packed)
    after = lzma.decompress(packed.read_bytes())
    same = next(at for at, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    assert same >= before.index(b"evaluation.md")
    assert before[:same].count(b"report.json") == 1


def test_a_new_archive_replaces_its_files_and_keeps_those_of_an_interrupted_slice(root):
    folder, packed = archive.folder_of(root, NAME), archive.archive_of(root, NAME)
    old = packed.read_bytes()
    (folder / "run" / "report.json").unlink()
    write(folder, {"machine.json": "changed", "more/report.json": "{}"})
    archive.pack(folder, packed)
    new = packed.read_bytes()
    packed.write_bytes(old)  # as in another checkout, which has unpacked the old archive
    archive.unpack(packed, folder)
    assert read(folder) == FILES
    write(folder, {"next/race-0/plan.jsonl": "partial"})
    packed.write_bytes(new)
    assert archive.unpack(packed, folder)
    found = read(folder)
    assert found.pop("next/race-0/plan.jsonl") == "partial"
    assert found == {name: text for name, text in FILES.items() if name != "run/report.json"} | {
        "machine.json": "changed",
        "more/report.json": "{}",
    }


def tar_of(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
        tar.addfile(member, io.BytesIO(b"evil"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        tar_of("/tmp/evil"),
        tar_of("../evil"),
        tar_of(f"{NAME}/../evil"),
        tar_of(f"{NAME}/../../evil"),
        tar_of("evaluation-other/machine.json"),
        tar_of(f"{NAME}/link", tarfile.SYMTYPE, "../../evil"),
        tar_of(f"{NAME}/link", tarfile.SYMTYPE, "machine.json"),
        tar_of(f"{NAME}/link", tarfile.LNKTYPE, f"{NAME}/machine.json"),
        tar_of(f"{NAME}/pipe", tarfile.FIFOTYPE),
        b"no archive",
        b"",
    ],
)
def test_members_outside_the_folder_and_damaged_archives_are_refused(root, data):
    folder, packed = archive.folder_of(root, NAME), archive.archive_of(root, NAME)
    good = packed.read_bytes()
    for wrong in (data, good[: len(good) // 2]):
        packed.write_bytes(wrong)
        with raises(FormatError, code="format.invalid", field=str(packed)):
            archive.unpack(packed, folder)
        assert read(folder) == FILES
        assert sorted(path.name for path in folder.parent.iterdir()) == [NAME, f"{NAME}.json"]
        assert not list(root.rglob("evil"))


def test_an_evaluation_resumes_from_its_archive(monkeypatch, tmp_path):
    """A new checkout finds completed slices done; another completed slice is packed."""
    monkeypatch.setattr(evaluation, "ROOT", tmp_path)
    found = slices("cpu")
    first, second = (each for each in found if each.name in ("monitor", "no-harm"))
    place = evaluation.here("cpu")
    assert place.folder.parent == tmp_path / "runs" / "evaluations"
    assert place.state(first)[0] == place.state(second)[0] == "to do"

    def complete(each, place):
        ran = Ran(each.name, evaluation.shlex.join(each.command), place.environment["sources"], {}, 1.0, each.result)
        write(place.folder, {f"done/{each.name}.json": to_json(ran), each.result: json.dumps({"rows": []})})
        return evaluation.RUN, "1 s"

    monkeypatch.setattr(evaluation, "run_slice", complete)
    place.archive.parent.mkdir(parents=True)
    lines = evaluation.run_slices(
        (first, second), place, most=1, completed=lambda: evaluation.summary("cpu", found, place)
    )
    assert len(list(lines)) == 2
    assert place.archive.is_file()

    shutil.rmtree(tmp_path / "runs")
    place = evaluation.here("cpu")
    states = {each.name: place.state(each)[0] for each in found}
    assert {name for name, state in states.items() if state == "done"} == {first.name}
    before = place.archive.read_bytes()
    list(evaluation.run_slices((first, second), place, completed=lambda: evaluation.summary("cpu", found, place)))
    assert place.archive.read_bytes() != before
    shutil.rmtree(tmp_path / "runs")
    assert evaluation.here("cpu").state(second)[0] == "done"


def test_the_compact_record_has_the_goals_and_the_figures_without_their_pairs():
    found = {
        folder.name: json.loads(summary_of(archive_of(ROOT, folder.name)).read_text()) for folder in unpack_all(ROOT)
    }
    for name, each in found.items():
        summary = json.loads((ROOT / "runs" / "evaluations" / name / "summary.json").read_text())
        goals = [row for row in summary["rows"] if row["metric"] == "goal"]
        assert [(goal["says"], goal["status"]) for goal in each["goals"]] == [
            (row["says"], row["status"]) for row in goals
        ]
        done = [row["slice"] for row in summary["rows"] if row["metric"] == "slice" and row["state"] == "done"]
        assert [row["slice"] for row in each["slices"]["done"]] == done
        assert all(run["environment"]["torch"] and run["sentence"] and run["figures"] for run in each["runs"])
    (run,) = (run for run in found["evaluation-h200-x1"]["runs"] if run["name"] == "gpt2-timed")
    report = json.loads((ROOT / "runs/evaluations/evaluation-h200-x1/gpt2-timed/report.json").read_text())
    (ratio,) = (
        row["ratio"] for row in report["ratios"] if (row["metric"], row["arm"]) == ("throughput", "equivalent_plan")
    )
    (row,) = (row for row in run["figures"]["throughput_ratio"] if row["arm"] == "equivalent_plan")
    assert row["low"] == pytest.approx(ratio["low"], rel=1e-4)
    assert "pairs" not in row
    assert json.loads(evaluation_record.text_of(found)) == found
    assert max(map(len, evaluation_record.text_of(found).splitlines())) < 2000
