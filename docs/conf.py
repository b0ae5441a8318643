"""How the site is built: `make docs`. Pages are plain Markdown, read where they lie, so that their links hold here too.

What plain Markdown cannot say is added as a page is read: the tree of pages, from the links of docs/index.md, and below
each table of docs/api.md the docstrings of its names.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

project = "trimtab"
author = "the trimtab authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "benchmarks/results/*/**.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "docs/site"]

myst_heading_anchors = 3
default_role = "code"  # docstrings have single backticks for code
highlight_language = "text"

autodoc_preserve_defaults = True  # as they are written, of which a signature can be made
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
pygments_style, pygments_dark_style = "friendly", "github-dark"  # which show what a diff adds and removes
html_title = "trimtab"
html_extra_path = ["site/index.html"]  # leads to docs/index.html
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

_LINK = re.compile(r"\]\(([\w./-]+)\.md(?:#[\w-]+)?\)")
# Its verbs are in several classes, and some of its methods are its window's to call.
_OF_A_RUN = "   :inherited-members:\n   :exclude-members: open_window, begin_micro_batch, end_micro_batch\n"
_NAME = re.compile(r"^\| `(trimtab[\w.]+)` \|", re.MULTILINE)


def setup(app: Any) -> None:
    """Add what plain Markdown cannot say."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _in_sections, priority=400)  # before napoleon


def _read(app: Any, name: str, source: list[str]) -> None:
    if name.startswith("benchmarks/"):  # records, to which pages link
        source[0] = f"---\norphan: true\n---\n{source[0]}"
    added = {"docs/index": _trees, "docs/api": _docstrings}.get(name)
    if added is not None:
        head, *sections = re.split(r"^(?=## )", source[0], flags=re.MULTILINE)
        source[0] = "".join([head, *(f"{section}\n{added(section)}\n" for section in sections)])


def _trees(section: str) -> str:
    """Return the part of the site's tree that a section of docs/index.md links to."""
    title = section.partition("\n")[0].removeprefix("## ")
    pages = dict.fromkeys(_LINK.findall(section))
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]) if pages else ""


def _docstrings(section: str) -> str:
    """Return directives that show the docstrings of the names that a section's table has."""
    return "\n".join(["```{eval-rst}", *map(_directive, _NAME.findall(section)), "```"])


def _directive(name: str) -> str:
    module, _, last = name.rpartition(".")
    found = getattr(importlib.import_module(module), last)
    if inspect.ismodule(found):
        return f".. automodule:: {found.__name__}\n   :members:\n"
    if inspect.isclass(found):
        inherited = _OF_A_RUN if name == "trimtab.Run" else ""
        return f".. autoclass:: {name}\n   :members:\n{inherited}"
    return f".. autofunction:: {name}\n"


def _in_sections(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put docstrings of the house's form into that which napoleon reads."""
    if what == "module":  # its tree of types is drawn by spaces, and each type follows
        lines[:] = lines[:1]
    for index, line in enumerate(lines):
        if line.lstrip().startswith("The rest as in"):  # no argument, though it stands among them
            lines[index] = line.replace("The rest as", "others: as", 1)
