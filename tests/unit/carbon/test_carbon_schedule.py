"""When to train: never late, never in the past, never worse than now on the forecast, and the best that there is."""

from __future__ import annotations

import datetime
import itertools
import math
import zoneinfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimtab.carbon.intensity import Intensity, constant, of_csv
from trimtab.carbon.job import PauseCost, TrainingJob, TrainingPeriod, grams_of, power_draws
from trimtab.carbon.pause_schedule import MOST_MOMENTS, downsides, moments_to_pause, when_to_train
from trimtab.core.errors import ValueGivenError

HOUR, DAY = 3600.0, 86400.0
NOW = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()
FREE = PauseCost(0, 0, 0)
ROUNDING_G = 1e-8  # grams: seconds since 1970 are rounded to 2.4e-7 s, of at most some 0.02 g/s


def trace(levels, step_s=HOUR, begin_s=NOW, kind="average") -> Intensity:
    steps = tuple((begin_s + step_s * i, float(g)) for i, g in enumerate(levels))
    return Intensity(kind, steps, begin_s + step_s * len(levels))


def hours_used(schedule):
    return [((a - NOW) / HOUR, (b - NOW) / HOUR) for a, b in schedule.stretches]


# By hand


def test_a_hand_made_trace_adds_up():
    """Wait 1 h at 50 W; train at 100 g; 50 min idle and 10 min lost, both at 300 g; train at 100 g."""
    job = TrainingJob(2 * HOUR, 1000, waiting_watts=50, pause=PauseCost(600, 360e3, 100))
    found = when_to_train(trace([300, 100, 300, 100]), job, NOW, NOW + 4 * HOUR)
    assert hours_used(found) == [(1, 2), (3, 4)]
    assert found.grams == pytest.approx(0.05 * 300 + 100 + 0.1 * 5 / 6 * 300 + 0.1 * 300 + 100)
    assert found.start_now_g == pytest.approx(300 + 100)
    assert (found.saved_g, found.saved_share) == (pytest.approx(130), pytest.approx(0.325))
    assert found.code == "carbon.later"
    assert all(figure in found.describe() for figure in ("270 g CO2e", "32.5% less", "400 g", "average"))


def test_its_downside_is_that_yesterday_repeats_and_the_worst_within_the_range():
    job = TrainingJob(2 * HOUR, 1000, waiting_watts=50, pause=PauseCost(600, 360e3, 100))
    with_yesterday = trace([200] * 24 + [300, 100, 300, 100], begin_s=NOW - DAY)
    found = when_to_train(with_yesterday, job, NOW, NOW + 4 * HOUR)
    naive, worst = found.downsides
    pause_kwh = 0.1 * 5 / 6 + 0.1
    assert naive.grams == pytest.approx((0.05 + 2 + pause_kwh) * 200)
    assert naive.start_now_g == pytest.approx(400)
    assert worst.grams == pytest.approx(0.05 * 100 + 300 + pause_kwh * 300 + 300)  # the first hour is as low as may be
    assert worst.start_now_g == pytest.approx(100 + 300)  # the second hour is one for both
    assert "447 g, 46.7 g more than starting now" in found.describe()
    without = when_to_train(trace([300, 100, 300, 100]), job, NOW, NOW + 4 * HOUR)
    assert [each.hours for each in without.downsides] == [worst.hours]


def test_yesterday_repeats_for_as_many_days_as_it_takes():
    day = [100] * 12 + [300] * 12
    known = trace([*day, 400, 400, *([50] * 100)], begin_s=NOW - DAY)
    found = when_to_train(known, TrainingJob(36 * HOUR, 1000), NOW, NOW + 40 * HOUR)
    assert hours_used(found) == [(2, 38)]
    assert found.downsides[0].grams == pytest.approx(10 * 100 + 12 * 300 + 12 * 100 + 2 * 300)
    assert found.downsides[0].start_now_g == pytest.approx(12 * 100 + 12 * 300 + 12 * 100)


# (1) to (9)


@pytest.mark.parametrize("pause", [None, FREE, PauseCost(60, 1e4, 50)])
@pytest.mark.parametrize("forecast", [trace([200] * 24), constant(200, "marginal"), trace([0] * 24)])
def test_a_flat_forecast_is_start_now(forecast, pause):
    found = when_to_train(forecast, TrainingJob(5 * HOUR, 300, pause=pause), NOW + 60, NOW + 20 * HOUR)
    assert found.is_start_now
    assert found.stretches == (TrainingPeriod(NOW + 60, NOW + 60 + 5 * HOUR),)
    assert (found.saved_g, found.saved_share, found.downsides) == (0, 0, ())
    assert found.code == "carbon.no_saving"
    assert "1%" in found.describe()
    assert "the best saves" not in found.reason


START_NOW = {  # forecast, seconds of the job, its pause, seconds until the deadline -> grams, code, words
    "cleaner before": (trace([1, 50, 250, 250], begin_s=NOW - HOUR), HOUR, FREE, 3 * HOUR, 50, "no_saving", "1%"),
    "too little saved": (trace([200, 199]), HOUR, None, 2 * HOUR, 200, "no_saving", "0.5%"),
    "pauses too long": (trace([100, 300, 100]), 2 * HOUR, PauseCost(HOUR + 1, 0, 0), 3 * HOUR, 400, "no_saving", ""),
    "as clean later": (trace([100, 100, 100, 300]), 2 * HOUR, FREE, 4 * HOUR, 200, "no_saving", ""),
    "too late": (trace([300, 100, 300]), 2 * HOUR, None, HOUR, 400, "deadline_missed", "60 min 0 s"),
    "too late, unknown": (None, 2 * HOUR, None, -HOUR, None, "deadline_missed", "3.00 h"),
    "no forecast": (None, HOUR, None, DAY, None, "no_forecast", "no forecast is available"),
    "begins later": (trace([300, 200, 100], begin_s=NOW + HOUR), HOUR, None, DAY, None, "forecast_too_short", ""),
    "ends before": (trace([300, 200, 100], begin_s=NOW - 3 * HOUR), HOUR, None, DAY, None, "forecast_too_short", ""),
    "ends in between": (trace([300, 200, 100]), 3.5 * HOUR, None, DAY, None, "forecast_too_short", "2026-03-01T03:00"),
}


@pytest.mark.parametrize(("forecast", "seconds", "pause", "until_s", "grams", "code", "words"), START_NOW.values())
def test_it_starts_now_and_says_why(forecast, seconds, pause, until_s, grams, code, words):
    found = when_to_train(forecast, TrainingJob(seconds, 1000, pause=pause), NOW, NOW + until_s)
    assert found.is_start_now
    assert (found.grams, found.start_now_g) == (pytest.approx(grams), pytest.approx(grams))
    assert (found.saved_g, found.saved_share) == ((None, None) if grams is None else (0, 0))
    assert (found.code, found.kind) == (f"carbon.{code}", forecast and "average")
    assert words in found.describe()


def test_a_reason_of_the_caller_is_told():
    found = when_to_train(None, TrainingJob(HOUR, 1000), NOW, NOW + DAY, unknown="the service answered 429")
    assert found.describe() == "start now: the service answered 429"


def test_a_step_that_begins_within_a_microsecond_counts():
    now_s = math.nextafter(NOW + HOUR, 0)
    found = when_to_train(trace([100, 300, 100]), TrainingJob(HOUR, 1000), now_s, NOW + 3 * HOUR)
    assert hours_used(found) == [(2, 3)]


def test_a_deadline_that_is_just_met():
    for seconds in (HOUR, 3600.7, 1234.5678, 0.1):
        job = TrainingJob(seconds, 1000, pause=FREE)
        found = when_to_train(trace([300, 100, 300]), job, NOW + 0.3, NOW + 0.3 + seconds)
        assert found.is_start_now
        assert "deadline" not in found.reason


SUMMER = zoneinfo.ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize("zone", [datetime.UTC, SUMMER, datetime.timezone(datetime.timedelta(hours=-9.5))])
@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25", "2026-07-01"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_time_zones_changed_clocks_and_shorter_steps_say_the_same(zone, day, parts):
    levels = [300, 250, 100, 80, 300, 60, 300, 310]
    begins = datetime.datetime.fromisoformat(f"{day}T00:00Z")
    times = [begins + datetime.timedelta(hours=i / parts) for i in range(len(levels) * parts)]
    rows = [f"{time.astimezone(zone).isoformat()},{levels[i // parts]}" for i, time in enumerate(times)]
    forecast = of_csv("\n".join(["time,g_per_kwh", *rows]), "average")
    now_s = begins.timestamp()
    job = TrainingJob(2.5 * HOUR, 1000, pause=PauseCost(600, 60e3, 100))
    found = when_to_train(forecast, job, now_s, now_s + 8 * HOUR)
    assert [((a - now_s) / HOUR, (b - now_s) / HOUR) for a, b in found.stretches] == [(2.5, 4), (5, 6)]
    assert found.grams == pytest.approx(50 + 80 + 60 + 0.1 * 300)


def test_a_pause_that_costs_more_than_it_saves_is_not_made():
    known, end_s = trace([100, 300, 100]), NOW + 3 * HOUR
    for pause, stretches in ((FREE, 2), (PauseCost(600, 0.65 * 3.6e6, 0), 2), (PauseCost(600, 0.67 * 3.6e6, 0), 1)):
        found = when_to_train(known, TrainingJob(2 * HOUR, 1000, pause=pause), NOW, end_s)
        assert len(found.stretches) == stretches, pause
    for idle_watts, stretches in ((640, 2), (670, 1)):
        job = TrainingJob(2 * HOUR, 1000, pause=PauseCost(0, 0, idle_watts))
        assert len(when_to_train(known, job, NOW, end_s).stretches) == stretches


def test_a_stretch_is_worth_its_start():
    known = trace([500, 100, 500, 100, 500, 150, 150])
    found = [
        hours_used(when_to_train(known, TrainingJob(2 * HOUR, 1, pause=PauseCost(0, 0, 0, each)), NOW, NOW + 7 * HOUR))
        for each in (HOUR, HOUR + 1)
    ]
    assert found == [[(1, 2), (3, 4)], [(5, 7)]]
    known = trace([500, 100, 500, 80, 80, 80, 500, 150, 150, 150, 150])
    for least_s, grams in ((0, 100 + 240), (1.5 * HOUR, 160 + 300)):
        job = TrainingJob(4 * HOUR, 1000, pause=PauseCost(0, 0, 0, least_s))
        assert when_to_train(known, job, NOW, NOW + 11 * HOUR).grams == pytest.approx(grams)  # first and last ones too


def test_held_devices_make_waiting_dear():
    known = trace([300, 300, 280])
    waits = [when_to_train(known, TrainingJob(HOUR, 1000, waiting_watts=w), NOW, NOW + DAY) for w in (0, 20, 100)]
    assert [found.is_start_now for found in waits] == [
        False,
        False,
        True,
    ]  # 20 W take 12 g of the 20 g, 100 W more than all
    assert (
        "the best saves 2.7%"
        in when_to_train(known, TrainingJob(HOUR, 1000, waiting_watts=20), NOW, NOW + DAY, least_saving=0.05).reason
    )


@pytest.mark.parametrize(
    ("levels", "hours", "may_pause", "least_saving", "chosen"),
    [
        ([300, 200, 100], 1, True, 0.01, [(2, 3)]),  # only what is known: the deadline is later
        ([200, 199], 1, False, 0, [(1, 2)]),
        # stretches have to be worth it over a delay
        ([200, 110, 100, 109, 100], 2, True, 0.01, [(2, 3), (4, 5)]),
        ([200, 110, 100, 109, 100], 2, True, 0.05, [(2, 4)]),
        # ties go to the earlier and the simpler
        ([300, 100, 100, 300, 100, 100], 2, True, 0.01, [(1, 3)]),
        # a stretch ends at a step where beginning at one would be worse, and a first one where a later one has to
        ([400, 300, 200, 500], 1.5, False, 0.01, [(1.5, 3)]),
        ([400, 200, 900, 100, 100], 2.5, True, 0.01, [(1.5, 2), (3, 5)]),
        ([400, 100, 900, 100, 100], 2.5, True, 0.01, [(1, 2), (3, 4.5)]),
    ],
)
def test_the_hours_are_those_of_least_emissions(levels, hours, may_pause, least_saving, chosen):
    job = TrainingJob(hours * HOUR, 1000, pause=FREE if may_pause else None)
    found = when_to_train(trace(levels), job, NOW, NOW + DAY, least_saving=least_saving)
    assert hours_used(found) == chosen
    assert "ends at 2026-03-01T0" in found.reason  # the forecast's end is told, as it is before the deadline


@pytest.mark.parametrize(
    "made",
    [
        lambda: TrainingJob(0, 100),
        lambda: TrainingJob(10, 0),
        lambda: TrainingJob(math.inf, 100),
        lambda: TrainingJob(10, 100, waiting_watts=-1),
        lambda: PauseCost(-1, 0, 0),
        lambda: PauseCost(0, 5, 0),
        lambda: PauseCost(1, 5, math.nan),
        lambda: when_to_train(None, TrainingJob(1, 1), math.nan, NOW),
        lambda: when_to_train(None, TrainingJob(1, 1), NOW, math.inf),
        lambda: when_to_train(None, TrainingJob(1, 1), NOW, NOW, least_saving=-0.1),
    ],
)
def test_values_that_are_none_are_refused(made):
    with pytest.raises(ValueGivenError):
        made()


def test_many_or_uneven_moments_are_thinned_out():
    even = tuple(range(0, 864 * 300_000_000, 300_000_000))
    few = moments_to_pause(even)
    assert set(few) <= set(even)
    assert len(few) <= MOST_MOMENTS + 2
    uneven = (0, *itertools.accumulate(10**8 + 7919 * i * i for i in range(60)))
    assert (len(moments_to_pause(uneven)) <= MOST_MOMENTS + 2, moments_to_pause(uneven)[-1]) == (True, uneven[-1])
    hourly = tuple(range(0, 96 * 1_800_000_000, 1_800_000_000))
    assert moments_to_pause(hourly) == hourly


# Against everything there is


@st.composite
def cases(draw, longest=3, shortest=1, most=6):
    """Draw whole seconds and whole grams, so that the best moments are whole seconds too."""
    steps = draw(st.lists(st.integers(shortest, longest), min_size=2, max_size=most))
    levels = draw(st.lists(st.sampled_from([0, 1, 2, 5, 9, 20]), min_size=len(steps), max_size=len(steps)))
    known_s = sum(steps)
    work = draw(st.integers(1, known_s))
    lost = draw(st.integers(0, 2))
    pause = PauseCost(
        lost, draw(st.integers(0, 8)) if lost else 0, draw(st.sampled_from([0, 1, 3])), draw(st.integers(0, 2))
    )
    job = TrainingJob(work, draw(st.sampled_from([1, 5])), draw(st.sampled_from([0, 1])), pause)
    begins = itertools.accumulate(steps, initial=0)
    forecast = Intensity(
        "average", tuple((NOW + at, float(g)) for at, g in zip(begins, levels, strict=False)), NOW + known_s
    )
    return steps, levels, job, forecast, draw(st.integers(work, known_s + 2))


def by_the_second(steps, levels, job, stretches):
    """Grams of a schedule in whole seconds, second by second."""
    per_s = [g for length, g in zip(steps, levels, strict=True) for _ in range(length)]
    watts = [0.0] * len(per_s)
    for second in range(stretches[0][0]):
        watts[second] = job.waiting_watts
    for begin, end in stretches:
        watts[begin:end] = [job.watts] * (end - begin)
    for (_, stop), (go, _) in itertools.pairwise(stretches):
        lost = int(job.pause.seconds)
        watts[stop : go - lost] = [job.pause.idle_watts] * (go - lost - stop)
        watts[go - lost : go] = [job.pause.watts] * lost
    return sum(w * g for w, g in zip(watts, per_s, strict=True)) / 3.6e6


def everything(steps, job, last):
    """Every schedule whose pauses begin and end at steps, with one of its own ends on a step, in whole seconds."""
    points = sorted({min(at, last) for at in itertools.accumulate(steps, initial=0)} | {last})
    work, lost, least = int(job.seconds), int(job.pause.seconds), job.pause.least_stretch_s
    yield from ([(begin, begin + work)] for begin in range(last - work + 1))
    for count in range(2, len(points) + 1, 2):
        for inner in itertools.combinations(points, count):
            between = [(inner[i], inner[i + 1]) for i in range(1, count - 1, 2)]
            left = work - sum(end - begin for begin, end in between)
            stop, go = inner[0], inner[-1]
            ways = {(begin, go + left - (stop - begin)) for begin in points}
            ways |= {(stop - (left - (end - go)), end) for end in points}
            for begin, end in ways:
                stretches = [(begin, stop), *between, (go, end)]
                long_enough = all(b - a >= max(1, least) for a, b in stretches)
                rests = all(after[0] - before[1] >= max(1, lost) for before, after in itertools.pairwise(stretches))
                if begin >= 0 and end <= last and long_enough and rests:
                    yield stretches


@settings(max_examples=120)
@given(cases())
def test_it_is_the_best_of_everything_there_is(case):
    steps, levels, job, forecast, deadline = case
    last = min(deadline, sum(steps))
    found = when_to_train(forecast, job, NOW, NOW + deadline, least_saving=0)
    least = min(by_the_second(steps, levels, job, each) for each in everything(steps, job, last))
    assert found.grams == pytest.approx(least, rel=1e-6, abs=1e-12)


@settings(max_examples=120)
@given(cases(longest=2, shortest=2, most=5))
def test_where_all_is_whole_steps_no_schedule_of_half_steps_is_better(case):
    """But where waiting takes more than pausing, which a moment of training would end, or idling than a restart."""
    steps, levels, job, forecast, deadline = case
    work, deadline = 2 * math.ceil(job.seconds / 2), 2 * math.ceil(deadline / 2)
    lost = 2 * int(job.pause.seconds > 0)
    joules = job.pause.joules if lost else 0
    restart_w = (
        PauseCost(lost, joules, 0.0).watts if lost else math.inf
    )  # as two short pauses would be cheaper than one
    pause = PauseCost(lost, joules, min(job.pause.idle_watts, restart_w))
    least_w = min(pause.idle_watts, pause.watts) if lost else pause.idle_watts
    job = TrainingJob(work, job.watts, min(job.waiting_watts, least_w), pause)
    last = min(deadline, sum(steps))
    found = when_to_train(forecast, job, NOW, NOW + deadline, least_saving=0)
    for seconds in itertools.combinations(range(last), work):
        groups = [list(each) for _, each in itertools.groupby(enumerate(seconds), lambda at: at[1] - at[0])]
        stretches = [(each[0][1], each[-1][1] + 1) for each in groups]
        if all(after[0] - before[1] >= lost for before, after in itertools.pairwise(stretches)):
            assert found.grams <= by_the_second(steps, levels, job, stretches) * (1 + 1e-6) + 1e-12


@example([1.0], 300.0, 0.0, 60.5703125, 2.0, (0.0, 1.0, 0.0, 0.0, 0.0), 0.0)  # two sums differ in the last bits
@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=30),
    st.sampled_from([300.0, 900.0, 1800.0, 3600.0]),
    st.floats(-1, 4),
    st.floats(60, 40_000),
    st.floats(0.8, 4),
    st.tuples(st.floats(0, 0.3), st.floats(1, 1500), st.floats(0, 5e5), st.floats(0, 200), st.floats(0, 4000)),
    st.sampled_from([0.0, 0.01, 0.1]),
)
def test_whatever_the_forecast_it_keeps_its_word(levels, step_s, offset, work_s, slack, costs, least_saving):
    waiting, lost_s, joules, idle, stretch_s = costs
    forecast, now_s = trace(levels, step_s), NOW + offset * step_s
    job = TrainingJob(work_s, 500, 500 * waiting, PauseCost(lost_s, joules, idle, stretch_s))
    deadline_s = now_s + work_s * slack
    found = when_to_train(forecast, job, now_s, deadline_s, least_saving=least_saving)
    assert found.stretches[0].begin_s >= now_s
    assert math.fsum(end - begin for begin, end in found.stretches) == pytest.approx(work_s, abs=1e-5)
    assert found.reason
    if found.is_start_now:
        return
    assert found.stretches[-1].end_s <= min(deadline_s, forecast.until_s)
    for before, after in itertools.pairwise(found.stretches):
        assert after.begin_s - before.end_s >= lost_s - 1e-5
    if len(found.stretches) > 1:
        assert all(end - begin >= stretch_s - 1e-5 for begin, end in found.stretches)
    assert found.grams < found.start_now_g
    assert found.saved_share >= least_saving - 1e-9
    assert found.grams == grams_of(power_draws(job, now_s, found.stretches), forecast)
    assert found.start_now_g == pytest.approx(work_s * 500 / 3.6e6 * forecast.mean(now_s, now_s + work_s))
    worst = found.downsides[-1]
    assert worst.extra_g >= max(0.0, -found.saved_g) - ROUNDING_G
    assert all(math.isfinite(each.grams) for each in found.downsides)


@given(cases(), st.integers(0, 10**6), st.lists(st.sampled_from([0, 1, 2, 5, 9, 20]), min_size=18, max_size=18))
def test_no_hours_within_the_range_are_worse_than_the_worst(case, which, other):
    steps, levels, job, forecast, deadline = case
    last = min(deadline, sum(steps))
    ways = list(itertools.islice(everything(steps, job, last), 50))
    stretches = [TrainingPeriod(NOW + begin, NOW + end) for begin, end in ways[which % len(ways)]]
    taken, at_once = (power_draws(job, NOW, each) for each in (stretches, [TrainingPeriod(NOW, NOW + job.seconds)]))
    worst = downsides(taken, at_once, forecast, NOW, NOW + last)[-1]
    used = [g for at, g in zip(itertools.accumulate(steps, initial=0), levels, strict=False) if at < last]
    truth = trace([min(max(g, min(used)), max(used)) for g in other], 1.0)
    assert grams_of(taken, truth) - grams_of(at_once, truth) <= worst.extra_g + ROUNDING_G
    assert worst.grams <= grams_of(taken, constant(max(used), "average")) + ROUNDING_G
