"""Windows of joules: measured ones of a second or more, estimates labelled, and nothing where nothing is known."""

from __future__ import annotations

import math
import socket
from types import SimpleNamespace

import pytest
import torch
from meter_machine import Clock, Gpu, Library, Tree
from raising import raises

from trimtab.core.energy_reading import Energy, Provenance, absent_energy, sum_energy
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.energy import meter_selection
from trimtab.energy.energy_meter import EnergyClock, GivenWatts, MeterLost, NoMeter, SeveralMeters
from trimtab.energy.meter_selection import Metering, ReadCounters, find_meter, measurable, with_idle

CPU = torch.device("cpu")


class Counter:
    """A meter that shows what it is set to."""

    provenance, sources, period_s = Provenance.MEASURED, ("a counter",), math.inf

    def __init__(self) -> None:
        self.shows, self.lost, self.reads = 0.0, "", 0

    def joules(self) -> float:
        self.reads += 1
        if self.lost:
            raise MeterLost(self.lost)
        return self.shows


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def counter():
    return Counter()


def started(meter, clock) -> EnergyClock:
    laps = EnergyClock(meter, clock=clock)
    laps.start()
    return laps


def passes(clock, counter, seconds: float, joules: float) -> None:
    clock.now, counter.shows = clock.now + seconds, counter.shows + joules


def test_a_clock_counts_while_it_runs(clock, counter):
    laps = started(counter, clock)
    passes(clock, counter, 2, 60.0)
    found = laps.read()
    assert (found.joules, found.seconds, found.watts) == (60.0, 2.0, 30.0)
    laps.pause()
    assert laps.seconds == 0
    passes(clock, counter, 5, 1e6)
    laps.tick()
    laps.start()
    passes(clock, counter, 1, 10.0)
    assert laps.seconds == 1
    laps.start()  # it runs
    found = laps.read()
    assert (found.joules, found.seconds) == (70.0, 3.0)


def test_a_pause_is_from_the_last_reading_on(clock, counter):
    laps = started(counter, clock)
    passes(clock, counter, 2, 60.0)
    laps.tick()
    passes(clock, counter, 0.9, 1e6)
    laps.pause()
    assert (laps.read().joules, laps.read().seconds) == (60.0, 2.0)


@pytest.mark.parametrize("measures", [True, False])
def test_what_ran_since_the_last_reading_is_a_stretch_too_short_to_be_told(clock, counter, measures):
    counter.provenance = Provenance.MEASURED if measures else Provenance.ESTIMATED
    laps = started(counter, clock)
    for _ in range(10):  # readings after 0.4, 0.8 and 1.2 s, a tick at 1.4 s that is not due, and a pause
        for _ in range(7):
            passes(clock, counter, 0.2, 10.0)
            laps.tick()
        laps.pause()
        laps.start()
    found = laps.read()
    if measures:
        assert (found.joules, found.seconds) == (None, pytest.approx(14.0))
        assert "2 s were in intervals of less than 1 s" in found.reason
    else:  # an estimate of any stretch is as good
        assert (found.joules, found.seconds) == (pytest.approx(600.0), pytest.approx(12.0))


def test_who_reads_a_clock_often_makes_no_stretch_shorter(clock, counter):
    laps = started(counter, clock)
    for half in range(1, 9):
        passes(clock, counter, 0.5, 5.0)
        assert laps.read().joules == (None if half < 2 else 5.0 * half)
    assert laps.seconds == 4.0
    assert laps.lap().joules == 40.0
    assert (laps.read().joules, laps.read().seconds) == (40.0, 4.0)


def test_a_lap_is_a_stretch_of_what_is_read(clock, counter):
    laps = EnergyClock(counter, clock=clock)
    assert "not started" in laps.lap().reason
    laps.start()
    for joules in (10.0, 20.0):
        passes(clock, counter, 2, joules)
        laps.tick()
        assert laps.lap().joules == joules
    assert laps.read().joules == 30.0


@pytest.mark.parametrize(
    ("seconds", "joules", "reason"),
    [
        (0.9, 60.0, "0.9 s were in intervals of less than 1 s, which are too short for the meter"),
        (3, 0.0, "a counter changed by 0 J in 3 s, which is not a valid energy"),
        (3, -5.0, "a counter changed by -5 J in 3 s, which is not a valid energy"),
        (3, math.nan, "a counter changed by nan J in 3 s, which is not a valid energy"),
    ],
)
def test_a_window_that_says_nothing_is_no_zero(clock, counter, seconds, joules, reason):
    laps = started(counter, clock)
    passes(clock, counter, seconds, joules)
    found = laps.read()
    assert (found.joules, found.provenance, found.reason) == (None, Provenance.ABSENT, reason)


def test_short_stretches_are_left_out_until_they_are_much(clock, counter):
    laps = started(counter, clock)
    passes(clock, counter, 9, 90.0)
    laps.tick()
    for number, known in ((1, 90.0), (2, None)):
        laps.pause()
        laps.start()
        passes(clock, counter, 0.8, 8.0)
        found = laps.read()
        assert found.joules == known, number


def test_a_stretch_in_which_the_meter_was_lost_has_no_joules_and_the_next_one_has(clock, counter):
    laps = started(counter, clock)
    clock.now, counter.lost = clock.now + 1, "the GPU is lost"
    laps.tick()
    counter.lost = ""
    passes(clock, counter, 1, 5.0)
    laps.tick()
    assert laps.lap().reason == "the GPU is lost"
    passes(clock, counter, 1, 4.0)
    laps.tick()
    assert laps.lap().joules == 4.0
    assert laps.read().reason == "the GPU is lost"  # of all of it, a part is not known


def test_a_meter_that_is_gone_is_told_by_every_stretch(clock, counter):
    laps = started(counter, clock)
    counter.lost = "gone for good"
    for _ in range(2):
        clock.now += 1
        laps.tick()
        assert laps.lap().reason == "gone for good"


@pytest.mark.parametrize("failure", [OSError("no such device"), MeterLost("")])
def test_whatever_a_meter_raises_makes_joules_unknown(clock, counter, failure):
    def fails() -> float:
        raise failure

    laps = started(counter, clock)
    counter.joules = fails
    clock.now += 2
    assert "could not be read" in laps.read().reason


def test_what_a_counter_lost_before_a_start_is_no_matter(clock):
    told = iter([MeterLost("not read for a minute")])

    class Late(Counter):
        def joules(self) -> float:
            for lost in told:
                raise lost
            return super().joules()

    laps = started(late := Late(), clock)
    passes(clock, late, 2, 8.0)
    assert laps.read().joules == 8.0


def test_ticks_read_no_more_often_than_is_due(clock, counter):
    laps = started(counter, clock)
    before = counter.reads
    for _ in range(100):
        clock.now += 0.05
        laps.tick()
    assert 15 <= counter.reads - before <= 20  # four a second


def test_watts_that_were_given_are_estimates_of_any_window(clock):
    laps = started(GivenWatts(250, clock), clock)
    clock.now += 0.5
    found = laps.read()
    assert (found.joules, found.provenance, found.sources) == (125.0, Provenance.ESTIMATED, ("250 W, as given",))
    assert "estimated" in found.describe()


def test_meters_of_several_devices_are_one_and_lost_together(clock):
    one, two = Counter(), Counter()
    both = started(SeveralMeters((one, two)), clock)
    clock.now, one.shows, two.shows = clock.now + 1, 3.0, 4.0
    assert both.read().joules == 7.0
    clock.now, one.shows, two.lost = clock.now + 1, 8.0, "gone"
    assert both.read().reason == "gone"
    assert SeveralMeters((one, GivenWatts(5))).provenance is Provenance.ESTIMATED
    assert SeveralMeters((one, NoMeter("none"))).provenance is Provenance.ABSENT


def measured(joules: float, seconds: float = 1.0, kind: Provenance = Provenance.MEASURED) -> Energy:
    return Energy(seconds, joules, kind, ("a counter",))


def test_sums_are_absent_or_estimated_as_soon_as_a_part_is():
    assert sum_energy([measured(1.0), measured(2.0, 3.0)]).joules == 3.0
    assert sum_energy([measured(1.0), measured(2.0, 3.0)]).seconds == 3.0
    assert sum_energy([measured(1.0), measured(2.0, 3.0)], in_turn=True).seconds == 4.0
    assert sum_energy([measured(1.0), measured(1.0, kind=Provenance.ESTIMATED)]).provenance is Provenance.ESTIMATED
    found = sum_energy([measured(1.0), absent_energy("no meter")])
    assert (found.joules, found.reason) == (None, "no meter")
    assert sum_energy([]).joules is None


@pytest.mark.parametrize(
    ("joules", "kind"),
    [(0.0, "measured"), (-1.0, "measured"), (math.nan, "estimated"), (None, "measured"), (0.0, "absent")],
)
def test_zero_is_no_reading_and_absence_no_zero(joules, kind):
    with raises(ValueGivenError, code="value.invalid", field="energy"):
        Energy(1.0, joules, Provenance(kind))


def test_on_a_machine_without_a_meter_it_is_absent_and_says_why(tmp_path):
    found = find_meter(CPU, Metering(root=tmp_path / "powercap"))
    assert found.facts.is_absent
    assert str(tmp_path / "powercap") in found.facts.describe()
    assert with_idle(found) is found


def test_idle_watts_are_those_of_a_second(tmp_path, clock, monkeypatch):
    found = find_meter(CPU, Metering(meter=(counter := Counter())))
    monkeypatch.setattr(meter_selection, "EnergyClock", lambda meter: EnergyClock(meter, clock=clock))

    def sleep(seconds: float) -> None:
        clock.now, counter.shows = clock.now + seconds, counter.shows + 40 * seconds

    assert with_idle(found, sleep).facts.idle_w == pytest.approx(40.0)


@pytest.mark.parametrize("own", [object(), NoMeter("none"), SimpleNamespace(provenance="measured")])
def test_a_meter_that_is_none_is_refused(own):
    with raises(ValueGivenError, code="meter.invalid", field="meter"):
        find_meter(CPU, Metering(meter=own))


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """Return what is found for a rank on a GPU of a machine with one package and two GPUs."""
    tree, library = Tree(tmp_path), Library([Gpu("GPU-a"), Gpu("GPU-b")])
    tree.add("intel-rapl:0", "package-0")
    monkeypatch.setattr(meter_selection, "uuid_of", lambda device: library.gpus[device.index].uuid)

    def found(index=0, reads=None, root=tree.root, library=library):
        return find_meter(torch.device("cuda", index), Metering(root=root), reads=reads, library=library)

    return found


@pytest.mark.parametrize(
    ("index", "reads", "sources"),
    [
        (0, None, ("nvml gpu 0", "rapl package-0")),
        (1, ReadCounters(False, True), ("nvml gpu 1",)),
        (1, ReadCounters(True, False), ("rapl package-0",)),
    ],
)
def test_a_gpu_is_counted_with_its_processor_as_far_as_a_rank_reads_them(on_gpu, index, reads, sources):
    found = on_gpu(index, reads)
    assert found.facts.sources == sources
    assert [limit.device for limit in found.facts.limits] == [f"gpu {index}"] * ("nvml" in sources[0])


def test_a_gpu_whose_processor_is_not_counted_says_so(on_gpu, tmp_path):
    found = on_gpu(root=tmp_path / "nothing")
    assert (found.facts.sources, found.facts.is_absent) == (("nvml gpu 0",), False)
    assert f"the CPU: {tmp_path / 'nothing'}" in found.facts.describe()


def test_a_processor_alone_is_no_meter_of_a_gpu(on_gpu):
    found = on_gpu(library=Library(starts=False))
    assert found.facts.is_absent
    assert "NVML" in found.facts.reason


@pytest.mark.parametrize("given", [{"watts": 100}, {"meter": Counter()}])
@pytest.mark.parametrize(
    ("reads", "counts"),
    [(ReadCounters(True, True), True), (ReadCounters(True, False), True), (ReadCounters(False, True), False)],
)
def test_what_is_of_a_machine_is_counted_by_who_reads_its_processor(given, reads, counts):
    assert find_meter(CPU, Metering(**given), reads=reads).facts.is_absent is not counts


def test_who_reads_nothing_has_no_meter():
    assert "another rank" in find_meter(CPU, reads=ReadCounters(processor=False, device=False)).facts.reason


@pytest.fixture
def nothing(tmp_path):
    return find_meter(CPU, Metering(root=tmp_path / "powercap"))


@pytest.mark.parametrize(
    ("objective", "budget", "without", "code"),
    [
        (Objective(energy=0.5), Budget(), "refuse", "energy.no_meter"),
        (Objective(), Budget(energy=1), "refuse", "energy.no_meter"),
        (Objective(), Budget(energy=1), "renormalise", "energy.no_meter"),
        (Objective(0, 0, 1), Budget(), "refuse", "energy.no_meter"),
        (Objective(0, 0, 1), Budget(), "renormalise", "energy.no_meter"),
    ],
)
def test_energy_that_counts_without_a_meter_is_refused(nothing, objective, budget, without, code):
    with raises(ValueGivenError, code=code, field="energy"):
        measurable(objective, budget, nothing, without)


def test_a_weight_is_left_out_where_that_is_accepted_and_the_plan_says_so(nothing):
    objective, facts = measurable(Objective(2, 1, 1), Budget(memory=10), nothing, "renormalise")
    assert objective == Objective(2, 1)
    assert "Its weight of 0.25 in the objective was set to 0" in facts.describe()
    assert measurable(Objective(2, 1), Budget(), nothing, "renormalise")[1].left_out == 0


@pytest.mark.parametrize("given", [{"watts": 5}, {"meter": Counter()}])
def test_energy_counts_where_it_is_known(given):
    objective = Objective(energy=1)
    assert measurable(objective, Budget(energy=1), find_meter(CPU, Metering(**given)))[0] == objective


@pytest.mark.parametrize(
    ("given", "code", "field"),
    [
        *(({"watts": w}, "value.invalid", "energy_watts") for w in (0, -1, math.nan, math.inf, "250", True)),
        ({"watts": 5, "meter": Counter()}, "energy.watts_and_meter", "energy_watts"),
        ({"without": "guess"}, "value.invalid", "metering.without"),
    ],
)
def test_wishes_that_are_contrary_or_none_are_refused(given, code, field):
    with raises(ValueGivenError, code=code, field=field):
        Metering(**given)


def test_no_socket_is_opened(tmp_path, on_gpu, clock, monkeypatch):
    def refuse(*args, **given):
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo", "gethostbyname"):
        monkeypatch.setattr(socket, name, refuse)
    for found in (on_gpu(), find_meter(CPU), find_meter(CPU, Metering(watts=5))):
        laps = started(found.meter, clock)
        clock.now += 2
        laps.tick()
        laps.read()
