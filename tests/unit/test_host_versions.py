"""Of hosts the oldest and the newest of the versions that are promised are tested: `hosts-oldest`, and `make test`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOSTS = ("accelerate", "lightning", "transformers")


def pinned(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.mark.parametrize("host", HOSTS)
def test_the_lowest_version_of_a_host_is_the_one_that_is_tested(host: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    oldest = pinned("constraints-oldest.txt")[host]
    lowest = [each for name in HOSTS for each in extras[name] if each.startswith(f"{host}>=")]
    assert lowest
    assert {f"{each.partition('>=')[2]}.0" for each in lowest} == {oldest}


@pytest.mark.parametrize("host", HOSTS)
def test_the_docs_name_both_ends(host: str) -> None:
    text = (ROOT / "docs" / "hosts.md").read_text(encoding="utf-8")
    assert f"{pinned('constraints-oldest.txt')[host]} to {pinned('constraints.txt')[host]}" in text
