"""What every test runs under: no network, and property tests that never fail for being slow."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ["TRIMTAB_OFFLINE"] = "1"  # before any import of trimtab, and inherited by every child process

settings.register_profile("house", deadline=None, max_examples=60, derandomize=bool(os.environ.get("CI")))
settings.load_profile("house")
