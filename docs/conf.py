"""Sphinx configuration of the documentation site (`make docs`).

Pages are plain Markdown and are read in place, so that relative links also work on the site. Two parts are added
while Sphinx reads a page: the navigation tree, from the links of docs/index.md, and the docstrings of all names in
a table of docs/api.md, below the table.
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
include_patterns = ["CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md"]
exclude_patterns = [".*", "build", "dist", "runs", "src", "tests", "docs/site"]

myst_heading_anchors = 3
default_role = "code"  # Docstrings mark code with single backticks.
highlight_language = "text"

autodoc_preserve_defaults = True  # Shows default values as in the source; some representations are not valid syntax.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
pygments_style, pygments_dark_style = "friendly", "github-dark"  # Both colour added and removed lines of a diff.
html_title = "trimtab"
html_extra_path = ["site/index.html"]  # Redirects to docs/index.html.
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

_LINK = re.compile(r"\]\(([\w./-]+)\.md(?:#[\w-]+)?\)")
# `Run` inherits public methods from several classes. The excluded methods are called by windows only.
_OF_A_RUN = "   :inherited-members:\n   :exclude-members: open_window, begin_micro_batch, end_micro_batch\n"
_NAME = re.compile(r"^\| `(trimtab[\w.]+)` \|", re.MULTILINE)


def setup(app: Any) -> None:
    """Register the functions that extend pages and docstrings (called by Sphinx)."""
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _in_sections, priority=400)  # before napoleon


def _read(app: Any, name: str, source: list[str]) -> None:
    added = {"docs/index": _trees, "docs/api": _docstrings}.get(name)
    if added is not None:
        head, *sections = re.split(r"^(?=## )", source[0], flags=re.MULTILINE)
        source[0] = "".join([head, *(f"{section}\n{added(section)}\n" for section in sections)])


def _trees(section: str) -> str:
    """Return a toctree of the pages that a section of docs/index.md links to, or "" if there are none."""
    title = section.partition("\n")[0].removeprefix("## ")
    pages = dict.fromkeys(_LINK.findall(section))
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```"]) if pages else ""


def _docstrings(section: str) -> str:
    """Return autodoc directives for all names in a section's table."""
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
    """Convert a docstring of this project to the form that napoleon parses."""
    if what == "module":  # Only the first line: reST cannot parse an indented tree, and the members follow anyway.
        lines[:] = lines[:1]
    for index, line in enumerate(lines):
        if line.lstrip().startswith("The rest as in"):  # A sentence in the argument list; napoleon needs "name: text".
            lines[index] = line.replace("The rest as", "others: as", 1)
