"""What every test runs under: no network, and property tests that never fail for being slow."""

from __future__ import annotations

import gc
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

collect_ignore = ["soak"]  # long matrices: `make soak`

# Before any import of trimtab or torch, and inherited by every child process. One thread: the tests' models are tiny,
# and on a busy machine a second thread waits longer than it works.
os.environ["TRIMTAB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import Phase, settings
except ImportError:  # a GPU machine may carry pytest and torch alone; the gpu tests need no more
    pass
else:
    settings.register_profile(
        "house",
        deadline=None,
        max_examples=60,
        derandomize=bool(os.environ.get("CI")),
        phases=set(Phase) - {Phase.explain},  # explaining a failure of a large value takes minutes
    )
    settings.load_profile("house")


# Files that take longest, in the order in which they are begun: where each is one process's, as by `make test`, a long
# one that came last would be waited for by all.
LONGEST = (
    "test_training_patterns.py",
    "test_backends.py",
    "test_block_profile.py",
    "test_cli.py",
    "test_kept_shards.py",
    "test_kept_ranks.py",
    "test_launched_ranks.py",
    "test_stage_chosen.py",
    "test_conditional_layers.py",
    "test_target_device_blocks.py",
    "test_scale_shards.py",
    "test_host_ranks.py",
    "test_rank_peaks.py",
    "test_rehearsal.py",
    "test_compared_ranks.py",
    "test_signalled_jobs.py",
    "test_site.py",
    "test_no_trace.py",
    "test_packaging.py",
    "test_scale_command.py",
    "test_joined_windows.py",
    "test_notebook.py",
)


LONG_TESTS = Path(__file__).parent / "soak" / "long_tests.txt"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--long`."""
    choices = {"choices": ("no", "also", "only"), "default": "no"}
    parser.addoption("--long", help=f"tests listed in {LONG_TESTS.name}; those named one by one always run", **choices)


def _leave_out_long_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed, wanted = set(LONG_TESTS.read_text(encoding="utf-8").splitlines()), config.getoption("--long")
    if wanted == "also" or any("::" in each for each in config.args):
        return
    kept = [item for item in items if (item.nodeid in listed) == (wanted == "only")]
    config.hook.pytest_deselected(items=[item for item in items if (item.nodeid in listed) != (wanted == "only")])
    items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, begin with the longest files, and skip the tests marked `gpu` without a CUDA device."""
    _leave_out_long_tests(config, items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # stable: a file's tests stay together
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def _imports_are_not_searched():
    """Leave what is imported by now out of garbage collection, which planning asks for: 0.2 s each with torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _idle_machine(monkeypatch):
    """Let planning take the machine for idle: other tests load it, and would decide which clock a test reads."""
    timing = sys.modules.get("trimtab.measure.timing")
    if timing is not None:
        monkeypatch.setattr(timing, "processor_fraction", lambda num_threads: 1.0)


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch):
    """Write no lines of progress, which appear after ten seconds: other tests decide how long a command takes."""
    display = sys.modules.get("trimtab.progress_display")
    if display is not None:
        monkeypatch.setattr(display, "_LINE_S", math.inf)


@pytest.fixture
def brief_trials(monkeypatch):
    """Time trials briefly (`brief`)."""
    import brief

    brief.shorten(monkeypatch.setattr)


@pytest.fixture
def each_measured(monkeypatch):
    """Measure every window, from a run's first, whatever that costs; counts those that were watched, and to the end."""
    from trimtab.adaptive_batch.noise_probes import OverheadBudget
    from trimtab.training.noise_monitor import NoiseMonitor

    counts = SimpleNamespace(opened=0, closed=0)

    def counted(does, count):
        def run(self, *given):
            vars(counts)[count] += 1
            return does(self, *given)

        return run

    monkeypatch.setattr(NoiseMonitor, "open", counted(NoiseMonitor.open, "opened"))
    monkeypatch.setattr(NoiseMonitor, "close", counted(NoiseMonitor.close, "closed"))
    monkeypatch.setattr(OverheadBudget, "is_due", lambda self, sparse=0: True)
    return counts
