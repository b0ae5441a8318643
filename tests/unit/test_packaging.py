"""What is handed out: the wheel and the sdist, built here without the network, hold the package and nothing else."""

from __future__ import annotations

import ast
import email.message
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = """
import sys

def block(event, given):
    if event.startswith("socket.") and event != "socket.gethostname":
        raise RuntimeError(f"a socket was asked for: {event}")

sys.addaudithook(block)
import hatchling.build
for build in sys.argv[2:]:
    getattr(hatchling.build, f"build_{build}")(sys.argv[1])
"""
AROUND = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}


def ran(*command: object, folder: Path, path: Path | None = None) -> str:
    """Return what a command prints, with the package of `path` in front of any that is installed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"TRIMTAB_OFFLINE": "1"} | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel and the sdist."""
    made = tmp_path_factory.mktemp("dist")
    ran(sys.executable, "-c", BUILD, made, "wheel", "sdist", folder=ROOT)
    return made


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel_of(dist)) as wheel:
        wheel.extractall(folder)
    return folder


def wheel_of(folder: Path) -> Path:
    (found,) = folder.glob("*.whl")
    return found


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def package_files() -> set[str]:
    """Return the package's files, as paths below src."""
    source = ROOT / "src"
    files = (path for path in (source / "trimtab").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(source).as_posix() for path in files}


def metadata(folder: Path) -> email.message.Message:
    (found,) = folder.glob("*.dist-info/METADATA")
    return message_from_bytes(found.read_bytes())


def test_the_wheel_holds_the_package_and_nothing_else(dist):
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    version = PROJECT_VERSION
    found = names_in(wheel_of(dist))
    assert found == package_files() | {f"trimtab-{version}.dist-info/{name}" for name in about}
    assert "trimtab/py.typed" in found
    assert {Path(name).suffix for name in found if name.startswith("trimtab/")} == {".py", ".typed", ".jinja"}
    # Workloads and evaluation of the paper are in the checkout only.
    assert not [name for name in found if re.search("cifar10|wikitext2|paper|benchmarks", name)]


def test_the_sdist_holds_what_the_wheel_is_made_of(dist, tmp_path):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
        sdist.extractall(tmp_path, filter="data")
    assert names == AROUND | {f"src/{name}" for name in package_files()}
    (folder,) = (each for each in tmp_path.iterdir() if each.is_dir())
    ran(sys.executable, "-c", BUILD, tmp_path, "wheel", folder=folder)
    assert names_in(wheel_of(tmp_path)) == names_in(wheel_of(dist))


def declared_versions() -> list[str]:
    """Return every version that a file of the package gives itself."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return [found for text in texts for found in re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)]


(PROJECT_VERSION,) = declared_versions()


def test_the_version_is_in_one_place(unpacked):
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert metadata(unpacked)["Version"] == PROJECT_VERSION
    assert f"## [{PROJECT_VERSION}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    said = ran(sys.executable, "-c", "import trimtab; print(trimtab.__version__)", folder=unpacked, path=unpacked)
    assert said.strip() == PROJECT_VERSION


def test_the_metadata_are_those_of_the_project(unpacked):
    found = metadata(unpacked)
    assert found["Name"] == "trimtab"
    assert found["Requires-Python"] == PROJECT["requires-python"] == ">=3.11"
    assert found["License-Expression"] == "Apache-2.0"
    required = [each for each in found.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(required) == sorted(PROJECT["dependencies"]) == ["numpy>=1.26", "torch>=2.9"]
    (scripts,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert scripts.read_text(encoding="utf-8").split() == ["[console_scripts]", "trimtab", "=", "trimtab.cli:main"]


def test_every_extra_is_in_the_table_of_docs(unpacked):
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, flags=re.MULTILINE))
    assert set(rows) == set(metadata(unpacked).get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    for extra, packages in PROJECT["optional-dependencies"].items():
        named = {re.match(r"[\w-]+(\[.*\])?", each)[0] for each in packages}
        assert set(re.findall(r"`([^`]+)`", rows[extra])) == named, extra


def test_every_python_that_is_claimed_can_read_the_sources():
    """Syntax alone: that nothing is newer than the oldest Python there is a classifier for."""
    minors = [int(each.rsplit(".", 1)[1]) for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    assert min(minors) == 11
    for path in (ROOT / "src").rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), path.name, feature_version=(3, min(minors)))


# Of the standard library of 3.11, what 3.12 and 3.13 no longer have (PEP 594 and their notes of what is new).
REMOVED = {
    *("aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp"),
    *("lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau"),
    *("telnetlib", "uu", "xdrlib"),
}


def test_nothing_is_imported_that_a_later_python_lacks():
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not REMOVED & {name.partition(".")[0] for name in named}, path.name


IMPORTED = "import trimtab; print(trimtab.__file__)"


def test_the_wheel_works_in_an_empty_folder(unpacked, tmp_path):
    assert Path(ran(sys.executable, "-c", IMPORTED, folder=tmp_path, path=unpacked).strip()).is_relative_to(unpacked)

    def trimtab(*arguments: str) -> str:
        return ran(sys.executable, "-m", "trimtab.cli", *arguments, folder=tmp_path, path=unpacked)

    shown = trimtab("--help")
    assert all(command in shown for command in ("doctor", "init", "plan", "compare", "report"))
    assert "trimtab compare my_task.py:task --quick" in trimtab("init", "--kind", "task")
    loads = "from trimtab.tasks import load_task; print(load_task('my_task.py:task').name)"
    assert ran(sys.executable, "-c", loads, folder=tmp_path, path=unpacked).strip() == "my_task"
    for kind in ("plain", "images", "text", "transformers"):
        assert f"trimtab plan {kind}.py:setup" in trimtab("init", f"{kind}.py", "--kind", kind)
    kinds = {"images.py", "my_task.py", "plain.py", "text.py", "transformers.py"}
    assert {each.name for each in tmp_path.iterdir() if each.suffix == ".py"} == kinds


# What `trimtab init` asks its reader to make theirs: parts 1 to 3 of the file, by a line of each,
# and the length of the training.
MADE_ONES_OWN = {
    "nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4)": (
        "nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)"
    ),
    "torch.randn(20_000, 32,": "2 * torch.randn(20_000, 32,",
    "cross_entropy(model(inputs), targets)": "cross_entropy(model(inputs), targets, label_smoothing=0.1)",
    "budget_samples=400 * 256": "budget_samples=60 * 256",
}


def test_a_task_that_the_wheel_begins_is_made_ones_own_and_compared(unpacked, tmp_path):
    """The whole way of a new reader, from an empty folder."""
    pytest.importorskip("jinja2", reason="needs the extra cli")

    def trimtab(*arguments: str) -> str:
        return ran(sys.executable, "-m", "trimtab.cli", *arguments, folder=tmp_path, path=unpacked)

    trimtab("init", "--kind", "task")
    text = (tmp_path / "my_task.py").read_text(encoding="utf-8")
    for before, after in MADE_ONES_OWN.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "my_task.py").write_text(text, encoding="utf-8")
    assert "the speed of your loop" in trimtab("compare", "my_task:task", "--quick")
    assert (tmp_path / "runs" / "compare-quick-my_task-task" / "report.html").is_file()
