"""The repository's Markdown, in parts: code blocks by language, code within lines, links, and anchors of headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

_FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: what it says it is, and what is in it."""

    language: str
    text: str


def read(page: str) -> str:
    """Return a page's text."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks, without what they are indented by."""
    found = []
    for indent, language, body in _FENCE.findall(text):
        found.append(Block(language.strip(), re.sub(f"^{indent}", "", body, flags=re.MULTILINE)))
    return found


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", text)


def codes(text: str) -> list[str]:
    """Return the code that stands within lines, each on one line."""
    return [" ".join(code.split()) for _, code in _CODE.findall(prose(text))]


def links(text: str) -> list[str]:
    """Return where links and pictures lead, but for what is on the web."""
    found = _LINK.findall(_CODE.sub("", prose(text)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """Return the anchors of headings as GitHub names them; the site's are the same."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(text)):
        shown = _LINK.sub(lambda link: link[0].partition("]")[0].lstrip("!["), heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower().strip()).replace(" ", "-")
        numbered = (f"{slug}-{number}" for number in range(1, 1000))
        found.add(slug if slug not in found else next(name for name in numbered if name not in found))
    return found


def commands(text: str) -> Iterator[str]:
    """Yield the lines of a page's blocks that are typed in a shell."""
    for block in blocks(text):
        if block.language in ("", "console", "bash"):
            lines = block.text.replace("\\\n", " ").splitlines()  # one that ends in a backslash goes on
            yield from (line for line in lines if line.strip())
