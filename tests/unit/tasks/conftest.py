"""Every test here has a cache folder of its own and no data named in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRIMTAB_DATA", raising=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the data folder beside the checkout; the tests that need it are skipped where it is absent."""
    folder = Path(__file__).resolve().parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside the checkout: CIFAR-10 and WikiText-2 cannot be read")
    return folder
