"""Builds the site of these pages by Sphinx: `python docs/build_site.py [FOLDER]`. Warnings are errors.

`make docs` runs it, once docs/reference.py has written what is told of names and commands.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[1]


def main(given: Sequence[str]) -> int:
    """Build into a folder, and keep what Sphinx has read beside it; returns the exit status."""
    folder = Path(given[0]) if given else ROOT / "build" / "site"
    read = folder.parent / "doctrees"
    return build_main(["-c", str(ROOT / "docs"), "-W", "--keep-going", "-q", "-d", str(read), str(ROOT), str(folder)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
