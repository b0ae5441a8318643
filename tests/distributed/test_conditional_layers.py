"""Layers that only some micro-batches or ranks use: every gradient is reduced, or every rank stops with an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from conditional_rank import CASES
from ranks import DEEPSPEED, TESTS, reports, run_program, started

pytestmark = pytest.mark.slow

PROGRAM = TESTS / "conditional_rank.py"
EXACT = 1e-12  # relative, per parameter, in double precision
SOME = ("first", "drawn", "whole-drawn", "used-by-none", "heads", "last-without-graph", "clipped")
DENSE = tuple(name for name in CASES if name not in ("sparse", "unfrozen-later"))
# FSDP2: every rank runs the same blocks in a micro-batch, if not all of their parameters.
ALIKE = ("first", "used-by-none")
# By wrap: trimtab's own of stages 0 and 1, and DistributedDataParallel as the user made it.
TRAINED = [
    *(f"ddp/{name}" for name in (*DENSE, "sparse")),
    *(f"zero-1/{name}" for name in SOME),
    *(f"own/{name}" for name in (*DENSE, "sparse")),
    *(f"own-views/{name}" for name in SOME),
    *(f"own-unused/{name}" for name in DENSE),
    *(f"own-unused-views/{name}" for name in SOME),
    *(f"{stage}/{name}" for stage in ("zero-2", "zero-2-each", "zero-3", "zero-3-each") for name in ALIKE),
    *(f"own-shards/{name}" for name in (*ALIKE, "heads", "heads-drawn", "whole-heads", "unused-later")),
    *(f"own-small/{name}" for name in (*SOME, "sparse")),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conditional")
    run_program(PROGRAM, folder, "|".join(f"^{name}$" for name in TRAINED))
    return reports(folder)


@pytest.fixture(scope="module")
def on_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    run_program(PROGRAM, folder, "^(ddp|own)/(drawn|heads-drawn|whole-drawn)$", ranks=3)
    return reports(folder, ranks=3)


def check(found: list[dict], name: str) -> None:
    ranks = [each[name] for each in found]
    assert all("error" not in each for each in ranks), ranks
    assert max(each["difference"] for each in ranks) <= EXACT, ranks
    assert all(each["sums"] == ranks[0]["sums"] for each in ranks)


@pytest.mark.parametrize("name", TRAINED)
def test_weights_equal_those_of_a_plain_loop_over_whole_windows(trained, name):
    check(trained, name)


@pytest.mark.parametrize("wrap", ["ddp", "own"])
@pytest.mark.parametrize("name", ["drawn", "heads-drawn", "whole-drawn"])
def test_three_ranks_do_too(on_three, wrap, name):
    check(on_three, f"{wrap}/{name}")


def failed(folder: Path, pattern: str) -> list[dict]:
    """Return what each rank reports of one case that ends in an error; the ranks may have been killed."""
    arguments = [(rank, 2, folder, pattern) for rank in range(2)]
    with started(PROGRAM.read_text(), folder, arguments, name=str(PROGRAM), imports=DEEPSPEED) as running:
        for each in running:
            each.wait(30)
    return [each for report in reports(folder) for each in report.values()]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("own-static/drawn", "ranks.static_graph"),
        ("own-static/whole-without-graph", "ranks.gradient_unreduced"),
        ("own/unfrozen-later", "ranks.gradient_unreduced"),
        ("ddp/unfrozen-later", "ranks.gradient_unreduced"),
        ("zero-2/drawn", "ranks.gradient_unreduced"),
        ("zero-3/first-of-one-rank", "ranks.gradient_unreduced"),
        ("zero-3/heads", "ranks.gradient_unreduced"),
        ("zero-3-each/unlike-later", "ranks.gradient_unreduced"),
        ("own-shards/last-of-one-rank", "ranks.gradient_unreduced"),
        ("deepspeed-1/heads", "ranks.gradient_unreduced"),
        ("deepspeed-1/used-by-none", "ranks.gradient_unreduced"),
        ("deepspeed-2/unlike", "ranks.gradient_unreduced"),
        ("deepspeed-2/unused-later", "ranks.gradient_unreduced"),
    ],
)
def test_gradients_that_cannot_be_reduced_end_every_rank_before_the_step(tmp_path, name, code):
    found = failed(tmp_path, f"^{name}$")
    assert len(found) == 2
    assert all("error" in each for each in found), found
    assert code in {each["code"] for each in found}
    assert all(each["code"] != "untyped" for each in found), found
