"""Tests of the paper's evaluation: results that other tests make, the data, and a cache folder for each test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[1] / "unit"
sys.path[:0] = [str(UNIT / "experiments"), str(UNIT / "recipes")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRIMTAB_DATA", raising=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the data folder beside the checkout; tests that need it are skipped without it."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the checkout: CIFAR-10 and WikiText-2 cannot be read")
    return folder
