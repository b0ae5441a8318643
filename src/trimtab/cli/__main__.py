"""Entry point of `python -m trimtab.cli`, also used by launchers with `-m`."""

from __future__ import annotations

from trimtab.cli import main
from trimtab.distributed.launched_rank import LaunchedRank

launched = LaunchedRank()
launched.follow()
main(launched)
