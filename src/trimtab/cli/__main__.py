"""`python -m trimtab.cli`, which a launcher's `-m` runs too."""

from __future__ import annotations

from trimtab.cli import main

main()
