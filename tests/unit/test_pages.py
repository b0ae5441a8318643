"""What pages name exists: links, anchors, symbols, files, commands and their options; and the reference is current."""

from __future__ import annotations

import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from markdown_pages import NAMES, PAGES, ROOT, anchors, blocks, codes, commands, links, read
from typer.main import get_command

import trimtab
from trimtab.cli import app

sys.path.append(str(ROOT / "docs"))
import definitions
import reference

# Of what is no more: a log and a list of changes tell of names as they were.
LOGS = ("CHANGELOG.md", "docs/LOG.md")
LIVING = [name for name in NAMES if name not in LOGS]
LANGUAGES = {"", "python", "console", "bash", "diff", "text"}
EXAMPLES = {"my_loop.py", "my_task.py", "file.py"}  # of a reader's own
TARGET = re.compile(r"^([\w-]+):", re.MULTILINE)


@cache
def files() -> list[str]:
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path.relative_to(ROOT).as_posix() for path in found]


@cache
def command_line():
    return get_command(app)


def exists(name: str) -> bool:
    """Return whether a file is there, by a path or the end of one; `*` stands for anything."""
    pattern = re.compile(r"(?:.*/)?" + re.escape(name).replace(r"\*", ".*"))
    return any(pattern.fullmatch(file) for file in files()) or (ROOT / name).is_dir()


def dead_links(page: Path) -> list[str]:
    text, found = page.read_text(encoding="utf-8"), []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(link)
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_what_is_gone_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](#one-two) [b](#three) [c](gone.md) [d](page.md#one-two) ![e](gone.svg) `[f](x)`\n"
    )
    assert dead_links(page) == ["#three: no such heading", "gone.md", "gone.svg"]
    assert exists("tests/unit/test_pages.py")
    assert exists("benchmarks/results/regret-*.json")
    assert not exists("tests/unit/test_page.py")
    assert not exists("est_pages.py")  # the end of a name is not the end of a path
    assert unknown_options("trimtab plan TASK --memory 8GiB -o p.json") == []
    assert unknown_options("trimtab plan TASK --memori 8GiB") == ["--memori"]
    assert unknown_options("trimtab plam TASK") == ["plam"]
    assert unknown_options("trimtab checkpoint verify runs/mine --jason") == ["--jason"]


@pytest.mark.parametrize("page", LIVING)
def test_symbols_exist(page: str) -> None:
    named = {name for code in codes(read(page)) for name in re.findall(r"(?<![\w./-])trimtab(?:\.[A-Za-z_]\w*)+", code)}
    missing = sorted(name for name in named if definitions.definition(name) is None)
    assert missing == []


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("trimtab.plan", True),
        ("trimtab.Plan.fixed", True),
        ("trimtab.Plan.precision", True),
        ("trimtab.Plan.precisions", False),
        ("trimtab.Run.windows", True),  # of a base class
        ("trimtab.Run.loss", True),  # set on self
        ("trimtab.errors.UsageError", True),
        ("trimtab.plans_of", False),
        ("trimtab.Run.window_s", False),
        ("trimtab.integrations.lightning.stop", False),
    ],
)
def test_a_symbol_that_is_gone_is_seen(name: str, is_there: bool) -> None:
    assert (definitions.definition(name) is not None) is is_there


@pytest.mark.parametrize("page", LIVING)
def test_files_exist(page: str) -> None:
    named = {name for code in codes(read(page)) for name in re.findall(r"[\w./*-]+\.(?:py|ipynb)\b", code)}
    named = {name.removeprefix("../../") for name in named}
    assert sorted(name for name in named if Path(name).name not in EXAMPLES and not exists(name)) == []


def unknown_options(line: str) -> list[str]:
    """Return what the command line does not know of `trimtab COMMAND --option`, in prose: values may be left out."""
    words = line.split()[1:]
    command = command_line()
    while hasattr(command, "commands") and words:
        word = words.pop(0)
        if word not in command.commands:
            return [] if word.isupper() or word.startswith("[") else [word]
        command = command.commands[word]
    known = {"--help"} | {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    return [word for word in words if re.match(r"--?[a-z]", word) and word not in known]


@pytest.mark.parametrize("page", LIVING)
def test_commands_and_options_exist(page: str) -> None:
    lines = [code for code in codes(read(page)) if re.match(r"trimtab [a-z]", code)]
    assert [(line, unknown) for line in lines if (unknown := unknown_options(line))] == []


def parse(line: str) -> None:
    """Parse a line that is typed in a shell, without running it; raises where it does not parse."""
    program, *words = shlex.split(line, comments=True)
    if program == "trimtab":
        command = command_line()
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        command.make_context(command.name, words)
    elif program == "make":
        targets = TARGET.findall(read("Makefile"))
        assert {word for word in words if "=" not in word} <= set(targets), line
    else:
        assert program == "pip", f"{line}: nothing that a page may ask for"


@pytest.mark.parametrize("page", NAMES)
def test_lines_of_a_shell_parse(page: str) -> None:
    for line in commands(read(page)):
        parse(line)


@pytest.mark.parametrize("line", ["trimtab plan", "trimtab plam x", "trimtab plan x --ranks z", "make cake", "rm -r x"])
def test_a_line_that_does_not_parse_is_seen(line: str) -> None:
    with pytest.raises(Exception, match=r"plam|task|integer|cake|rm|Missing"):
        parse(line)


@pytest.mark.parametrize("page", NAMES)
def test_blocks_say_what_they_are(page: str) -> None:
    assert {block.language for block in blocks(read(page))} <= LANGUAGES


@pytest.mark.parametrize(("page", "made"), reference.PAGES.items(), ids=reference.PAGES)
def test_the_reference_is_current(page: str, made) -> None:
    assert read(f"docs/{page}") == made(), f"docs/{page} is out of date: run `make docs`"


def test_the_reference_and_the_table_of_contents_are_complete() -> None:
    named = {name for names in reference.GROUPS.values() for name in names}
    assert {f"trimtab.{name}" for name in trimtab.__all__} <= named
    hosts = ("transformers", "lightning", "accelerate", "tracking", "trackers")
    for module in (*(f"trimtab.integrations.{host}" for host in hosts), "trimtab.carbon.services"):
        assert any(name.startswith(f"{module}.") for name in named), module
    listed = {link.partition("#")[0] for link in links(read("docs/index.md"))}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= listed
