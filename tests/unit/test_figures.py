"""What `make figures` writes: figures of records, and of too few pairs the pairs themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def third(n: int, **more):
    """Return a row of a third of training, of so many pairs."""
    head = {"metric": "third_speed_ratio", "task": "t", "third": "early", "tier": "S", "arm": "plan_S"}
    return head | {"mean": 1.2, "low": 1.1, "high": 1.3, "n": n, "pairs": [1.2] * n} | more


def test_of_fewer_than_five_pairs_the_pairs_stand_alone():
    from phases_figures import phases

    few, enough = ("\n".join(phases([third(n)])) for n in (3, 5))
    assert "| 1.200x, 1.200x, 1.200x | 3 |" in few
    assert "to" not in few.partition("---|\n")[2]
    assert "| 1.200x (1.100x to 1.300x) | 5 |" in enough
    share = third(3, metric="third_saved_share", mean=0.3, pairs=[0.2, 0.3, 0.4])
    assert "| 20.0%, 30.0%, 40.0% | 3 |" in "\n".join(phases([share]))
    saved = {"metric": "phase_saved_s", "task": "t", "phase": "data", "reference_s": 1.0, "plan_s": 0.5, "share": None}
    saved |= {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 3}
    assert "| 500 ms | 3 | not clear |" in "\n".join(phases([saved]))


def test_of_fewer_than_five_rounds_or_seeds_there_is_no_interval():
    import figures
    from scaling_figures import scaling

    row = {"metric": "in_step", "task": "t", "mbit": 1, "loop": "ddp", "mean": 0.9, "low": 0.8, "high": 1.0, "n": 3}
    rows = [row | {"kept": kept} for kept in ("in step", "over the link", "of in step")]
    assert "| 0.900 | 0.900 | 0.900 |" in "\n".join(scaling(rows))
    assert "0.900 (0.800 to 1.000, n=24)" in "\n".join(scaling([each | {"n": 24} for each in rows]))
    loss = {"easiest": 1.7, "target": 1.7, "policy": "goodput", "task": "t", "link": "local", "mean_k": 2.0}
    loss |= {
        "median_s": 1.0,
        "median_samples": 10.0,
        "regret": 0.1,
        "best": "k=2",
        "mean": 1.1,
        "low": 1.0,
        "high": 1.2,
    }
    (few,), (enough,) = (list(figures._regret([loss | {"n": n}]))[2:] for n in (3, 5))
    assert "| 1.100 |" in few
    assert "| 1.100 (1.000 to 1.200) |" in enough


def test_months_to_double_have_the_interval_of_the_speed_up():
    from phases_figures import phases

    row = {
        "metric": "doubling_months",
        "task": "t",
        "cycle_months": 5.0,
        "mean": 33.4,
        "low": 14.0,
        "high": None,
        "n": 8,
    }
    assert "33.4 months (95% 14.0 months to never, n = 8), if every cycle" in "\n".join(phases([row]))
    assert "| 33.4 months, if every cycle" in "\n".join(phases([row | {"n": 4}]))
    assert "| never (95% 14.0 months to never, n = 8), if" in "\n".join(phases([row | {"mean": None}]))
