"""Entry point of `python -m trimtab.cli`, also used by launchers with `-m`."""

from __future__ import annotations

from trimtab.cli import main
from trimtab.distributed.launch import LaunchedRank

launched = LaunchedRank()
launched.follow()
main(launched)
