"""Build the documentation site with Sphinx: `python docs/build_site.py [FOLDER]`. Warnings are errors.

`make docs` runs this script after docs/reference.py, which generates docs/api.md and docs/commands.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[1]


def main(given: Sequence[str]) -> int:
    """Build the site and return Sphinx's exit status.

    Args:
        given: the output folder; build/site if empty. Sphinx caches parsed pages next to it, in "doctrees".
    """
    folder = Path(given[0]) if given else ROOT / "build" / "site"
    read = folder.parent / "doctrees"
    return build_main(["-c", str(ROOT / "docs"), "-W", "--keep-going", "-q", "-d", str(read), str(ROOT), str(folder)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
