"""`python -m trimtab.cli`, which a launcher's `-m` runs too."""

from __future__ import annotations

from trimtab.cli import main
from trimtab.distributed.launched import Launched

launched = Launched()
launched.follow()
main(launched)
