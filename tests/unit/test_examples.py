"""The examples and all Python blocks of pages run, and the two examples compute the same thing."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from markdown_pages import NAMES, blocks, read

import trimtab
from trimtab.core.progress import silent
from trimtab.experiments.train import TrainingOptions, train_whole
from trimtab.tasks import load_task

ROOT = Path(__file__).parents[2]


def load(name: str, folder: str = "examples") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("brief_trials")
def test_the_trimmed_example_reaches_the_plain_examples_loss(capsys: pytest.CaptureFixture[str]) -> None:
    plain = load("plain").main(epochs=2)
    trimmed = load("trimmed").main(epochs=2)
    assert trimmed == pytest.approx(plain, rel=2e-3)  # a plan may change rounding, never more
    assert "your loop: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("host", "length"),
    [
        ("transformers", {"steps": 4}),
        ("lightning", {"steps": 12}),
        ("accelerate", {"epochs": 1}),
        ("fabric", {"epochs": 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*treespec.*:FutureWarning")
@pytest.mark.usefixtures("brief_trials")
def test_a_hosts_examples_train_alike_and_are_one_diff_apart(monkeypatch, tmp_path, host, length) -> None:
    from accelerate.state import AcceleratorState

    monkeypatch.chdir(tmp_path)
    losses = {}
    for kind in ("plain", "trimmed"):
        AcceleratorState._reset_state(reset_partial_state=True)  # a process has one, and each example is its own
        losses[kind] = load(f"{host}_{kind}").main(**length)
    assert losses["trimmed"] == pytest.approx(losses["plain"], rel=2e-3)  # a plan may change rounding, never more
    before, after = (
        (ROOT / "examples" / f"{host}_{kind}.py").read_text().splitlines() for kind in ("plain", "trimmed")
    )
    added = [line for line in difflib.ndiff(before[1:], after[1:]) if line.startswith("+") and line[1:].strip()]
    assert 1 <= len(added) <= 6


def test_the_two_examples_are_a_handful_of_lines_apart() -> None:
    plain, trimmed = ((ROOT / "examples" / f"{name}.py").read_text().splitlines() for name in ("plain", "trimmed"))
    body = [line for line in difflib.ndiff(plain[1:], trimmed[1:]) if line[0] in "+-" and line[1:].strip()]
    assert len([line for line in body if line.startswith("+")]) <= 8
    assert len([line for line in body if line.startswith("-")]) <= 5


def test_the_task_of_your_own_can_be_planned_and_trained() -> None:
    task = load_task(f"{ROOT / 'src' / 'trimtab' / 'tasks' / 'starter.py'}:task")
    data = task.load_data()
    assert data.num_samples >= task.batch_size
    plan = trimtab.Plan.fixed(task.batch_size)
    found = train_whole(TrainingOptions(task, plan, 200), silent)
    assert found["accuracy"] > task.targets[0]


# Which examples a page's diffs stand for, in their order.
DIFFS = {"README.md": ("",), "docs/hosts.md": ("transformers_", "lightning_", "fabric_", "accelerate_")}


class Called(NamedTuple):
    """A call: the last part of its name, how many arguments it has, and which of them by name."""

    name: str
    number: int
    keywords: frozenset[str]

    def is_within(self, others: set[Called]) -> bool:
        same = (each for each in others if each.name == self.name)
        return any(self.number <= each.number and self.keywords <= each.keywords for each in same)


def calls(text: str) -> set[Called]:
    found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {
        Called(ast.unparse(node.func).rpartition(".")[2], len(node.args) + len(node.keywords), keywords(node))
        for node in found
    }


def keywords(call: ast.Call) -> frozenset[str]:
    return frozenset(each.arg for each in call.keywords if each.arg)


def added(diff: str) -> str:
    """Return the lines that a diff adds, as a program of their own."""
    return "\n".join(line[2:] for line in diff.splitlines() if line.startswith("+"))


@pytest.mark.parametrize(
    ("page", "number", "example"),
    [(page, number, name) for page, names in DIFFS.items() for number, name in enumerate(names)],
)
def test_what_a_diff_adds_is_called_in_its_example(page: str, number: int, example: str) -> None:
    diffs = [block.text for block in blocks(read(page)) if block.language == "diff"]
    assert len(diffs) == len(DIFFS[page])
    shown = calls(added(diffs[number]))
    there = calls((ROOT / "examples" / f"{example}trimmed.py").read_text(encoding="utf-8"))
    assert shown
    assert [each for each in shown if not each.is_within(there)] == []


def test_a_call_that_the_example_has_not_is_seen() -> None:
    there = calls("run = trimtab.start(model, optimizer, plan, record=record)")
    assert all(each.is_within(there) for each in calls("start(model, optimizer)"))
    for gone in ("begin(model)", "start(model, optimizer, plan, stop=stop)", "start(1, 2, 3, 4, 5)"):
        assert not any(each.is_within(there) for each in calls(gone))


def test_every_diff_of_a_page_stands_for_an_example() -> None:
    assert {page for page in NAMES if any(block.language == "diff" for block in blocks(read(page)))} == set(DIFFS)


WITH_PYTHON = [page for page in NAMES if any(block.language == "python" for block in blocks(read(page)))]


def test_python_blocks_are_found() -> None:
    assert {"docs/start.md", "docs/nanogpt.md", "docs/memory.md"} <= set(WITH_PYTHON)


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*treespec.*:FutureWarning",
    "ignore:.*is_gradient_checkpointing:FutureWarning",  # of PEFT
)
@pytest.mark.usefixtures("brief_trials")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run(page: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # A block may write a file.
    names = {"__name__": "page"}  # The blocks of a page build on each other.
    for block in blocks(read(page)):
        if block.language == "python":
            exec(compile(block.text, page, "exec", dont_inherit=True), names)


def test_the_readme_is_short() -> None:
    """Tables of measured figures do not count."""
    text = re.sub(
        r"<!-- \w+: made by.*?<!-- end of", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert len(text.split()) <= 500


def test_the_readme_leads_to_every_page() -> None:
    """By way of their table, which `test_pages.py` holds to have them all; and to none that is not there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/index.md)" in text
    assert all((ROOT / page).is_file() for page in re.findall(r"\]\((docs/[^)#]+)\)", text))


def test_the_figures_shown_are_those_measured(monkeypatch) -> None:
    """README.md, pages and drawings in docs are what is made of benchmarks/results."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import figures

    made = figures.pages(ROOT)
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is out of date: run `make figures`"
        shown = {"memory.md": r"worst \d[.\d]*%", "evaluation.md": r"\d% to \d[.\d]*%"}
        shown |= {
            "micro_batch.md": r"\d MiB, \d",
            "start.md": r"took \d+ s",
            "ranks.md": r"\d% to \+\d",
        }  # of single runs
        shown = shown.get(path.name, r"\dx? \(\d[.\d]* to \d")
        assert path.suffix != ".md" or re.search(shown, text), f"{path.name} shows no figure"
    held = [*(ROOT / "docs" / "figures").glob("*.svg")]  # A picture of a report is made by hand.
    assert held
    assert set(held) <= made.keys()


# As the statistics write an interval, "1.23 (1.20 to 1.26", "63% (58 to 67", "n=5"; and as steps and speeds are told.
INTERVAL = re.compile(r"\d%? \([+-]?\d[\d.]*%? to [+-]?\d|\bn ?= ?\d")
STEP = re.compile(r"\d\s*(?:ms|us|[µμ]s)\b|\d\s+(?:images|tokens)(?:/s|\s+(?:a|per)\s+second)")
CONSTANTS = {
    "planning.md": r"(?<!\d)4 us at least",
    "scaling.md": r"waits 10 ms after each collective",
}  # set by us, not measured


@pytest.mark.parametrize("page", ["../README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md"))])
def test_measured_figures_are_not_typed_by_hand(page: str) -> None:
    """They stand between marks, where `make figures` writes them; only the log tells of single runs."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = re.sub(r"<!-- (\w+): made by .*?<!-- end of \1 -->", "", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text, constants = re.subn(CONSTANTS.get(page, r"(?!)"), "", text)
    assert constants == (page in CONSTANTS)
    assert page == "LOG.md" or (INTERVAL.findall(text), STEP.findall(text)) == ([], [])
