"""Forecasts come from a constant, a file or a service, and training starts whatever these do."""

from __future__ import annotations

import base64
import datetime
import http.server
import json
import threading
import time

import pytest
from raising import raises

from trimtab.carbon.intensity import Intensity
from trimtab.carbon.job import TrainingJob
from trimtab.carbon.pause_schedule import when_to_train
from trimtab.carbon.services import (
    MOST_BYTES,
    ConstantIntensity,
    CsvIntensity,
    ElectricityMaps,
    GreatBritain,
    WattTime,
    forecast_or_reason,
    json_of,
    known_around,
    source_named,
)
from trimtab.core.errors import DataMissingError, TrimtabError, ValueGivenError

MIDNIGHT = datetime.datetime(2026, 3, 1, tzinfo=datetime.UTC).timestamp()
NOW = MIDNIGHT + 600.0
SECRET = "s3cret-t0ken"
JOB = TrainingJob(1800, 500)


class Service(http.server.ThreadingHTTPServer):
    """Answers by path, and keeps what was asked; an answer is (status, body) or what writes one itself."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, object] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is what is tested."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        answer = self.server.answers.get(self.path.partition("?")[0], self.server.answers.get("*", (404, b"")))
        if callable(answer):
            answer(self)
            return
        status, body = answer
        self.begin(status, len(body))
        self.wfile.write(body)

    def begin(self, status: int, num_bytes: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(num_bytes))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def service(monkeypatch):
    monkeypatch.delenv("TRIMTAB_OFFLINE", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which this machine itself is not asked through
    for name in ("ELECTRICITYMAPS_TOKEN", "WATTTIME_USER", "WATTTIME_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    found = Service()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.over.set()
    found.shutdown()
    thread.join()
    found.server_close()


def stamp(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")


def gb_rows(levels, begin_s=MIDNIGHT):
    return [
        {
            "from": stamp(begin_s + 1800 * i),
            "to": stamp(begin_s + 1800 * (i + 1)),
            "intensity": {"forecast": g, "actual": None, "index": "low"},
        }
        for i, g in enumerate(levels)
    ]


def gb_body(levels, begin_s=MIDNIGHT) -> bytes:
    return json.dumps({"data": gb_rows(levels, begin_s)}).encode()


def steps_of(forecast: Intensity):
    return [((time_s - MIDNIGHT) / 60, g) for time_s, g in forecast.steps], (forecast.until_s - MIDNIGHT) / 60


def refused(source, code: str, now_s: float = NOW) -> TrimtabError:
    """Check that a source raises an error with a code, and that `forecast_or_reason` returns the text; return it."""
    with raises(TrimtabError, code=code) as caught:
        source.forecast(now_s)
    found, reason = forecast_or_reason(source, now_s)
    assert found is None
    assert source.name in reason
    assert (caught.value.problem or str(caught.value)) in reason
    return caught.value


# What is here


def test_a_constant():
    found, reason = forecast_or_reason(ConstantIntensity(350, "average"), NOW)
    assert (found.mean(NOW, NOW + 1e6), found.kind, reason) == (350, "average", "")
    found, reason = forecast_or_reason(ConstantIntensity(-1, "average"))
    assert found is None
    assert "g_per_kwh" in reason


CSV = "time,g_per_kwh\n2026-03-01T00:00Z,100\n2026-03-01T00:30Z,300\n2026-03-01T01:00Z,50\n"


def test_a_file(tmp_path):
    path = tmp_path / "grid.csv"
    path.write_text("\ufeff" + CSV, encoding="utf-8")
    found, reason = forecast_or_reason(CsvIntensity(path, "marginal"), NOW)
    assert (steps_of(found), found.kind, reason) == (([(0, 100), (30, 300), (60, 50)], 90), "marginal", "")
    plan = when_to_train(found, JOB, NOW, NOW + 7200)
    assert (plan.kind, plan.stretches[0].begin_s) == ("marginal", MIDNIGHT + 3600)


@pytest.mark.parametrize(
    ("content", "code", "field"),
    [
        (None, "intensity.unreadable", "intensity"),
        (b"\xff\xfe\x00", "file.not_text", "carbon"),
        (b"", "csv.columns", "carbon"),
        (CSV.replace("300", "nan").encode(), "csv.number", "carbon:3"),
        (CSV.replace("2026-03-01T00:30Z", "2026-03-01T00:30").encode(), "csv.time", "carbon:3"),
        (CSV.replace("2026-03-01", "2025-03-01").encode(), "intensity.not_current", "intensity"),
    ],
)
def test_a_file_that_does_not_say_is_a_reason(tmp_path, content, code, field):
    path = tmp_path / "grid.csv"
    if content is not None:
        path.write_bytes(content)
    assert refused(CsvIntensity(path, "average"), code).field == field


def test_hours_that_are_missing_are_never_guessed():
    """What is known is the hours in a row around now: those beyond a hole are left alone."""
    steps = [(MIDNIGHT + 3600 * i, 100.0 + i) for i in (0, 1, 2, 4, 5, 7)]
    for now_h, hours, until_h in ((1.5, [0, 1, 2], 3), (4, [4, 5], 6), (7.9, [7], 8)):
        found = known_around(MIDNIGHT + 3600 * now_h, "average", steps, 3600)
        assert steps_of(found) == ([(60 * hour, 100 + hour) for hour in hours], 60 * until_h)
    for now_h in (-1, 3.5, 6, 8):
        with raises(DataMissingError, code="intensity.not_current", field="intensity"):
            known_around(MIDNIGHT + 3600 * now_h, "average", steps, 3600)
    with raises(DataMissingError, code="intensity.empty", field="intensity"):
        known_around(NOW, "average", [], 3600)


def test_a_file_with_a_missing_row_is_known_up_to_it(tmp_path):
    path = tmp_path / "grid.csv"
    path.write_text(CSV + "2026-03-01T03:00Z,1\n", encoding="utf-8")
    found, _ = forecast_or_reason(CsvIntensity(path, "average"), NOW)
    assert steps_of(found)[1] == 90
    plan = when_to_train(found, JOB, NOW, NOW + 4 * 3600)
    assert plan.stretches[0].begin_s == MIDNIGHT + 3600  # not 03:00, of which the hours before are missing
    assert "2026-03-01T01:30" in plan.reason


def test_what_a_source_of_somebody_elses_raises_is_a_reason_without_its_words():
    class Broken:
        def forecast(self, now_s):
            raise RuntimeError(SECRET)

    found, reason = forecast_or_reason(Broken())
    assert found is None
    assert all(word in reason for word in ("Broken", "RuntimeError"))
    assert SECRET not in reason


# Services


def test_great_britain(service):
    service.answers["*"] = 200, gb_body([200, 150, 90.5, 300], MIDNIGHT - 1800)
    found, reason = forecast_or_reason(GreatBritain(service.url), NOW)
    assert reason == ""
    assert steps_of(found) == ([(-30, 200), (0, 150), (30, 90.5), (60, 300)], 90)
    assert found.kind == "average"
    assert service.asked[0][0] == "/intensity/2026-03-01T00:10Z/fw48h"


def test_electricity_maps(service):
    hours = [{"datetime": f"2026-03-01T{hour:02}:00:00.000Z", "carbonIntensity": 300 - hour} for hour in range(3)]
    service.answers["*"] = 200, json.dumps({"zone": "DE", "forecast": hours, "updatedAt": "x"}).encode()
    found, reason = forecast_or_reason(ElectricityMaps("DE", service.url), NOW)
    assert (steps_of(found), found.kind, reason) == (([(0, 300), (60, 299), (120, 298)], 180), "average", "")
    path, headers = service.asked[0]
    assert path == "/v3/carbon-intensity/forecast?zone=DE"
    assert headers["auth-token"] == SECRET
    assert forecast_or_reason(ElectricityMaps("FR", service.url), NOW)[0] is None  # answered for another zone


def watttime_body(**meta) -> bytes:
    points = [{"point_time": f"2026-03-01T00:{5 * i:02}:00+00:00", "value": 1000.0 + i} for i in range(6)]
    head = {"units": "lbs_co2_per_mwh", "signal_type": "co2_moer", "region": "CAISO_NORTH"} | meta
    return json.dumps({"data": points, "meta": head}).encode()


def test_watttime(service):
    service.answers |= {"/login": (200, b'{"token": "abc"}'), "/v3/forecast": (200, watttime_body())}
    found, reason = forecast_or_reason(WattTime("CAISO_NORTH", base_url=service.url), NOW)
    assert reason == ""
    assert found.kind == "marginal"
    assert found.until_s == MIDNIGHT + 1800
    assert found.mean(NOW, NOW + 300) == pytest.approx(1002 * 453.59237 / 1e3)
    (_, login), (path, headers) = service.asked
    assert base64.b64decode(login["authorization"].removeprefix("Basic ")) == f"{SECRET}:{SECRET}".encode()
    assert headers["authorization"] == "Bearer abc"
    assert path == "/v3/forecast?region=CAISO_NORTH&signal_type=co2_moer&horizon_hours=72"


@pytest.mark.parametrize("meta", [{"units": "kg_co2_per_mwh"}, {"signal_type": "co2_aoer"}, {"region": "X"}])
def test_watttime_in_another_unit_is_refused(service, meta):
    service.answers |= {"/login": (200, b'{"token": "abc"}'), "/v3/forecast": (200, watttime_body(**meta))}
    error = refused(WattTime("CAISO_NORTH", base_url=service.url), "intensity.format_differs")
    assert f"meta.{next(iter(meta))}" in error.problem


def test_a_figure_that_is_null_is_an_hour_that_is_missing(service):
    service.answers["*"] = 200, gb_body([200, 150, None, 10])
    found, _ = forecast_or_reason(GreatBritain(service.url), NOW)
    assert steps_of(found) == ([(0, 200), (30, 150)], 60)
    service.answers["*"] = 200, gb_body([None, 150, 10])
    refused(GreatBritain(service.url), "intensity.not_current")


def hangs(handler) -> None:
    handler.server.over.wait(5)


def sends_away(handler) -> None:
    handler.begin(302, 0, Location="/elsewhere")


def breaks_off(handler) -> None:
    handler.close_connection = True


def is_huge(handler) -> None:
    handler.begin(200, 64 * MOST_BYTES)
    for _ in range(64):
        handler.wfile.write(b" " * MOST_BYTES)


def echoes(handler) -> None:
    body = json.dumps({"zone": handler.headers["auth-token"], "forecast": handler.headers["auth-token"]}).encode()
    handler.begin(200, len(body))
    handler.wfile.write(body)


FAULTS = {
    "429": ((429, b"slow down"), "intensity.http_status", "127.0.0.1 answered with HTTP status 429"),
    "500": ((500, b"oops"), "intensity.http_status", "500"),
    "401": ((401, b"who?"), "intensity.http_status", "401"),
    "redirect": (sends_away, "intensity.http_status", "302"),
    "silence": (hangs, "intensity.timeout", "0.2 s"),
    "broken off": (breaks_off, "intensity.unreachable", "RemoteDisconnected"),
    "huge": (is_huge, "intensity.too_large", "1,048,576 bytes"),
    "empty": ((200, b""), "intensity.not_json", "127.0.0.1"),
    "garbage": ((200, b"<html>\xff"), "intensity.not_json", "127.0.0.1"),
    "half": ((200, gb_body([100, 200])[:-10]), "intensity.not_json", "127.0.0.1"),
    "nan": ((200, gb_body([100, 200]).replace(b"200", b"NaN")), "intensity.format_differs", "forecast"),
    "deep": ((200, b"[" * 100_000), "intensity.not_json", "127.0.0.1"),
    "a list": ((200, b"[]"), "intensity.format_differs", "answer"),
    "echo": (echoes, "intensity.format_differs", ""),
}


WITH_SECRETS = [(name, kind) for name in ("401", "echo", "broken off") for kind in (ElectricityMaps, WattTime)]


@pytest.mark.parametrize(("fault", "source"), [*((name, GreatBritain) for name in FAULTS), *WITH_SECRETS])
def test_training_starts_whatever_a_service_does(service, fault, source):
    answer, code, words = FAULTS[fault]
    service.answers["*"] = answer
    began = time.monotonic()
    asked = source(*(["X"] if source is not GreatBritain else []), base_url=service.url, timeout_s=0.2)
    found, reason = forecast_or_reason(asked, NOW)
    assert time.monotonic() - began < 2
    assert found is None
    with raises(TrimtabError, code=code, field="intensity"):
        asked.forecast(NOW)
    assert words in reason or source is not GreatBritain
    assert SECRET not in reason
    assert "slow down" not in reason
    assert all(path != "/elsewhere" for path, _ in service.asked)
    plan = when_to_train(found, JOB, NOW, NOW + 7200, unknown=reason)
    assert plan.is_start_now
    assert plan.describe() == f"start now: {reason}"


ROW = gb_rows([100])[0]


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"from": None}, "from"),
        ({"from": "today"}, "from"),
        ({"from": "2026-03-01T00:00"}, "from"),
        ({"to": ROW["from"]}, "lengths"),
        ({"intensity": None}, "intensity"),
        ({"intensity": {}}, "forecast"),
        ({"intensity": {"forecast": "100"}}, "forecast"),
        ({"intensity": {"forecast": True}}, "forecast"),
        ({"intensity": {"forecast": -1}}, "forecast"),
        ({"intensity": {"forecast": 10**400}}, "forecast"),
    ],
)
def test_a_row_of_another_format_is_refused(service, row, word):
    service.answers["*"] = 200, json.dumps({"data": [ROW | row]}).encode()
    assert word in refused(GreatBritain(service.url), "intensity.format_differs").problem


def test_rows_out_of_order_are_refused(service):
    service.answers["*"] = 200, json.dumps({"data": gb_rows([100, 200])[::-1]}).encode()
    assert refused(GreatBritain(service.url), "value.invalid").field == "carbon.steps"


def test_nobody_listens(service):
    url = service.url
    service.shutdown()
    service.server_close()
    assert "ConnectionRefusedError" in refused(GreatBritain(url), "intensity.unreachable").problem


@pytest.mark.parametrize("token", ["", " ", "line\nbreak-s3cret"])
def test_a_token_that_is_none_is_a_reason(service, monkeypatch, token):
    monkeypatch.setenv("ELECTRICITYMAPS_TOKEN", token)
    error = refused(ElectricityMaps("DE", service.url), "intensity.unreachable" if token.strip() else "token.missing")
    assert "s3cret" not in str(error)
    assert token.strip() or "ELECTRICITYMAPS_TOKEN" in error.problem
    assert service.asked == []


def test_no_secret_is_kept():
    assert SECRET not in repr([ElectricityMaps("DE"), WattTime("X"), GreatBritain()])


@pytest.mark.parametrize(
    "url", ["http://example.org", "ftp://example.org", "file:///etc/passwd", "example.org", "//[x"]
)
def test_nothing_but_https_is_asked(monkeypatch, url):
    monkeypatch.delenv("TRIMTAB_OFFLINE", raising=False)
    with raises(ValueGivenError, code="url.not_https", field="intensity.base_url"):
        json_of(url, {})
    refused(GreatBritain(url), "url.not_https")


def test_offline_nothing_is_fetched(service, monkeypatch):
    monkeypatch.setenv("TRIMTAB_OFFLINE", "1")
    assert "TRIMTAB_OFFLINE=1" in refused(GreatBritain(service.url), "intensity.offline").problem
    assert service.asked == []


# What a command names.


def test_a_source_is_named_by_a_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hours").write_text("")
    assert source_named("great-britain", None) == GreatBritain()
    assert source_named("electricity-maps:DE", "average") == ElectricityMaps("DE")
    assert source_named("watttime:CAISO_NORTH", None) == WattTime("CAISO_NORTH")
    assert source_named("350", "marginal") == ConstantIntensity(350, "marginal")
    for file in ("hours", "absent.csv"):  # which may be there when it is asked
        assert source_named(file, "average") == CsvIntensity(file, "average")


@pytest.mark.parametrize(
    ("given", "kind", "code"),
    [
        ("greatbritain", "average", "carbon.source_unknown"),
        ("electricity-maps", None, "carbon.source_unknown"),
        ("watttime:", None, "carbon.source_unknown"),
        ("great-britain", "marginal", "carbon.kind_differs"),
        ("350", None, "carbon.kind_missing"),
        ("350", "mean", "value.invalid"),
        ("-5", "average", "value.invalid"),
        ("nan", "average", "value.invalid"),
        ("no.csv", "average", "intensity.unreadable"),
    ],
)
def test_a_source_that_is_none_is_refused(given, kind, code):
    with raises(TrimtabError, code=code):
        source_named(given, kind).forecast(0.0)
