"""The site is built from docs without a warning, and asks the network for nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab

pytestmark = pytest.mark.slow

pytest.importorskip("sphinx", reason="needs the extra docs")
pytest.importorskip("myst_parser", reason="needs the extra docs")
pytest.importorskip("furo", reason="needs the extra docs")

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(
    r"""(?:<(?:script|img|iframe|source)[^>]*\ssrc|<link[^>]*\shref)=["'](https?:)?//|url\(["']?https?:|@import"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once, as `make docs` does."""
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "docs/build_site.py", folder]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def test_what_is_tested_is_what_make_docs_runs() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "python docs/build_site.py" in makefile
    assert "-m sphinx" not in makefile


def test_every_page_is_built(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    pages = {f"docs/{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    assert pages | {"index.html", "CHANGELOG.html", "CONTRIBUTING.html"} <= built


def test_it_fetches_nothing(site: Path) -> None:
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    fetching = {file.name: FETCHED.search(file.read_text(encoding="utf-8")) for file in files}
    assert [name for name, found in fetching.items() if found] == []


def test_what_would_be_fetched_is_seen() -> None:
    assert FETCHED.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert FETCHED.search('<script async src="//cdn.example/x.js">')
    assert FETCHED.search("src: url(https://fonts.example/a.woff2)")
    assert not FETCHED.search('<a href="https://example.org">elsewhere</a> <link rel="icon" href="../_static/x.svg">')


def test_the_reference_has_whole_docstrings(site: Path) -> None:
    page = (site / "docs" / "api.html").read_text(encoding="utf-8")
    for anchor in ("trimtab.plan", "trimtab.Run.train_step", "trimtab.errors.UsageError", "trimtab.nn.LossHead"):
        assert f'id="{anchor}"' in page, anchor
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page))
    for function in (trimtab.plan, trimtab.start):
        assert " ".join((function.__doc__ or "").split()[:5]) in text


def test_links_of_pages_lead_to_pages(site: Path) -> None:
    """Of the site itself: what is a page is linked as one, records and tests as files to keep."""
    found: list[str] = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'<a [^>]*href="([^"#:]+)(?:#[^"]*)?"', page.read_text(encoding="utf-8")):
            if not (page.parent / link).exists():
                found.append(f"{page.relative_to(site)}: {link}")
    assert found == []
