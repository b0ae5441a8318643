"""The processor's counters on a tree that is made up: each is counted once, over wraps, or not at all, with why."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meter_machine import Clock, Tree

from trimtab.core.energy_reading import PowerLimit, Provenance
from trimtab.energy.energy_meter import EnergyClock, MeterLost, NoMeter
from trimtab.energy.rapl import MOST_W, Rapl, rapl, zones


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.fixture
def clock():
    return Clock()


def one_package(tree: Tree, **given) -> None:
    tree.add("intel-rapl:0", "package-0", **given)


def damaged(tree: Tree, text: str) -> None:
    one_package(tree)
    tree.file("intel-rapl:0").write_text(text)


def test_joules_are_what_a_counter_moved_by(tree, clock):
    one_package(tree, joules=5.0)
    meter = Rapl(tree.root, clock)
    clock.now += 1
    tree.show("intel-rapl:0", 47.5)
    assert meter.joules() == pytest.approx(42.5)
    assert (meter.provenance, meter.sources) == (Provenance.MEASURED, ("rapl package-0",))


@given(st.lists(st.floats(0.5, 400.0), min_size=1, max_size=40), st.floats(0.0, 5000.0))
def test_joules_go_on_over_any_number_of_wraps(tmp_path_factory, watts, begins):
    tree, clock, range_j = Tree(tmp_path_factory.mktemp("tree")), Clock(), 5000.0
    one_package(tree, joules=begins % range_j, range_j=range_j)
    meter = Rapl(tree.root, clock)
    shown, found = begins % range_j, 0.0
    for each in watts:
        clock.now += 2.0
        shown += 2.0 * each
        tree.show("intel-rapl:0", shown % range_j)
        found = meter.joules()
    assert found == pytest.approx(2.0 * sum(watts), rel=1e-6, abs=1e-4)


def test_it_says_how_often_it_has_to_be_read(tree, clock):
    one_package(tree, range_j=65_000.0)
    meter = Rapl(tree.root, clock)
    assert meter.period_s == 65_000.0 / MOST_W / 2
    clock.now += meter.period_s + 1
    tree.show("intel-rapl:0", 100.0)
    with pytest.raises(MeterLost, match=r"33\.5 s") as caught:
        meter.joules()
    assert caught.value.code == "meter.read_too_late"
    clock.now += 1
    tree.show("intel-rapl:0", 110.0)
    assert meter.joules() == pytest.approx(10.0)  # what was lost is not added, nor is anything after it


def test_a_counter_that_is_begun_anew_is_no_wrap(tree, clock):
    one_package(tree, joules=200_000.0)
    meter = Rapl(tree.root, clock)
    clock.now += 1
    tree.show("intel-rapl:0", 3.0)  # were it a wrap, 62,146 J in a second
    with pytest.raises(MeterLost, match="package-0") as caught:
        meter.joules()
    assert caught.value.code == "rapl.reset"


def test_packages_and_their_memory_add_up_and_cores_are_in_them(tree, clock):
    for number in (0, 1):
        tree.add(f"intel-rapl:{number}", f"package-{number}", joules=0)
        tree.add(f"intel-rapl:{number}:0", "core", joules=0)
        tree.add(f"intel-rapl:{number}:1", "uncore", joules=0)
        tree.add(f"intel-rapl:{number}:2", "dram", joules=0)
    meter = Rapl(tree.root, clock)
    clock.now += 1
    for number in (0, 1):
        for part, joules in (("", 10), (":0", 6), (":1", 2), (":2", 3)):
            tree.show(f"intel-rapl:{number}{part}", joules + number)
    assert meter.joules() == pytest.approx(10 + 11 + 3 + 4)
    names = ("package-0", "package-0 dram", "package-1", "package-1 dram")
    assert meter.sources == tuple(f"rapl {name}" for name in names)


PACKAGE, MIRROR, PLATFORM = ("intel-rapl:0", "package-0"), ("intel-rapl-mmio:0", "package-0"), ("intel-rapl:1", "psys")


@pytest.mark.parametrize(
    ("there", "counted"), [((MIRROR, PACKAGE, PLATFORM), PACKAGE), ((MIRROR,), MIRROR), ((PLATFORM,), PLATFORM)]
)
def test_mirrors_and_the_platform_are_counted_only_without_packages(tree, there, counted):
    (tree.root / "intel-rapl").mkdir()  # the control type, which is no zone
    for zone in there:
        tree.add(*zone)
    assert [(zone.folder.name, zone.name) for zone in zones(tree.root)] == [counted]
    assert Rapl(tree.root).sources == (f"rapl {counted[1]}",)


def test_one_of_several_that_may_not_be_read_makes_the_sum_unknown(tree, monkeypatch):
    one_package(tree)
    tree.add("intel-rapl:1", "package-1")
    denied = tree.file("intel-rapl:1")
    read = Path.read_text

    def guarded(path, *args, **given):
        if path == denied:
            raise PermissionError(13, "Permission denied")
        return read(path, *args, **given)

    monkeypatch.setattr(Path, "read_text", guarded)
    found = rapl(tree.root)
    assert isinstance(found, NoMeter)
    assert found.code == "rapl.not_readable"
    assert "package-1" in found.reason
    assert "chmod a+r" in found.reason


@pytest.mark.parametrize("zone", ["intel-rapl:1", "intel-rapl:0:2"])
def test_one_whose_name_cannot_be_read_makes_the_sum_unknown(tree, zone):
    """It may be a package, or memory: the sum of the others is not the machine's."""
    one_package(tree)
    tree.add("intel-rapl:0:1", "core")
    tree.add(zone, "dram")
    tree.file(zone, "name").unlink()
    tree.file(zone, "name").mkdir()
    assert rapl(tree.root).code == "rapl.unknown_zone"
    assert zone in rapl(tree.root).reason


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read anything")
def test_a_file_of_roots_own_is_told_as_such(tree):
    one_package(tree)
    tree.file("intel-rapl:0").chmod(0)
    assert rapl(tree.root).code == "rapl.not_readable"


def test_a_counter_that_vanishes_is_lost_and_not_zero(tree, clock):
    one_package(tree)
    meter = Rapl(tree.root, clock)
    tree.file("intel-rapl:0").unlink()
    with pytest.raises(MeterLost, match="package-0") as caught:
        meter.joules()
    assert caught.value.code == "rapl.invalid_counter"


@pytest.mark.parametrize(
    ("make", "code", "named"),
    [
        (lambda tree: tree.root.rmdir(), "rapl.missing", "does not exist"),
        (lambda tree: None, "rapl.missing", "no RAPL package"),
        (lambda tree: tree.add("dtpm:0", "package-0"), "rapl.missing", "no RAPL package"),
        (lambda tree: one_package(tree, range_j=None), "rapl.invalid_counter", "package-0"),
        (lambda tree: one_package(tree, range_j=0), "rapl.invalid_counter", "package-0"),
        (lambda tree: damaged(tree, "none"), "rapl.invalid_counter", "package-0"),
    ],
)
def test_where_there_is_no_meter_it_says_why(tree, make, code, named):
    make(tree)
    found = rapl(tree.root)
    assert found.provenance is Provenance.ABSENT
    with pytest.raises(MeterLost, match=named) as caught:
        found.joules()
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("most", "watts"),
    [({"constraint_0_max_power_uw": 250_000_000}, 250.0), ({"constraint_0_max_power_uw": 0}, None), ({}, None)],
)
def test_power_limits_are_read_and_no_file_is_written(tree, most, watts):
    one_package(tree, constraint_0_power_limit_uw=125_000_000, **most)
    before = {path: path.stat().st_mtime_ns for path in tree.root.rglob("*")}
    assert Rapl(tree.root).limits() == (PowerLimit("package-0", 125.0, None, watts),)
    assert {path: path.stat().st_mtime_ns for path in tree.root.rglob("*")} == before


def test_reading_starts_no_thread_and_no_process(tree, clock, monkeypatch):
    one_package(tree)

    def refuse(*args, **given):
        raise AssertionError("something was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(os, "fork", refuse)
    laps = EnergyClock(Rapl(tree.root, clock), clock=clock)
    laps.start()
    clock.now += 2
    tree.show("intel-rapl:0", 31.0)
    assert laps.read().joules == pytest.approx(30.0)
