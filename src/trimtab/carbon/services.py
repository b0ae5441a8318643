"""Sources of carbon intensity forecasts: a constant, a CSV file, and public web services over https.

The formats of the services are from public documents and were not tried with the live services; tests use a local
server. Answers in another format are refused, and a null value is a missing hour. Error messages contain no secrets.
"""

from __future__ import annotations

import base64
import datetime
import http.client
import itertools
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode, urlsplit

from trimtab.carbon.intensity import KINDS, Intensity, constant, number_or_none, of_csv
from trimtab.core.errors import DataMissingError, FormatError, TrimtabError, ValueGivenError
from trimtab.core.files import CSV_BYTES, read_bytes
from trimtab.core.units import format_moment, time_of

TIMEOUT_S = 5.0
MOST_BYTES = 2**20
MOST_G = 1e6  # Upper bound for plausible values; the worst fuels emit a few thousand g/kWh.
LITTLE_S = 1e-3  # Tolerance for equal times, in seconds.
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # This machine, for which http discloses nothing.
HINT = "Use a CSV file or a constant as the source, or start without a forecast."


class IntensitySource(Protocol):
    """A source of carbon intensity forecasts.

    `forecast` returns a forecast without gaps that includes `now_s`, in seconds since 1970, and may begin earlier. It
    raises a `TrimtabError` without secrets if no forecast is available.
    """

    @property
    def name(self) -> str:
        """Name of the source in reports."""

    def forecast(self, now_s: float) -> Intensity: ...


def forecast_or_reason(source: IntensitySource, now_s: float | None = None) -> tuple[Intensity | None, str]:
    """Return a forecast and "", or None and the reason; never raises.

    Args:
        now_s: seconds since 1970; None for the current time.
    """
    name = type(source).__name__
    try:
        name = str(getattr(source, "name", name))
        return source.forecast(time.time() if now_s is None else now_s), ""
    except TrimtabError as error:
        why = error.problem or str(error)
    except Exception as error:  # A user-defined source; its error text may contain a token.
        why = f"The source raised {type(error).__name__}."
    return None, f"no carbon intensity forecast from {name}. {why}"


@dataclass(frozen=True)
class ConstantIntensity:
    """A constant intensity, so that no hour is better than others."""

    g_per_kwh: float
    kind: str

    @property
    def name(self) -> str:
        return f"a constant of {self.g_per_kwh:g} g/kWh"

    def forecast(self, now_s: float) -> Intensity:
        """Return the constant forecast."""
        return constant(self.g_per_kwh, self.kind)


@dataclass(frozen=True)
class CsvIntensity:
    """A CSV file in the format of `trimtab.carbon.intensity.of_csv`, with regular times.

    The smallest distance between two rows is the length of a step; a larger distance is a gap. The forecast is the part
    without gaps around the current time.
    """

    path: str | os.PathLike[str]
    kind: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    def forecast(self, now_s: float) -> Intensity:
        """Return the file's forecast around `now_s`."""
        expected = "a CSV file in UTF-8"
        try:
            text = read_bytes(Path(self.path), expected, limit=CSV_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            found = f"{self.path}, which is not UTF-8 text"
            raise FormatError("carbon", got=found, expected=expected, code="file.not_text") from None
        except FormatError as error:
            if error.code != "file.unreadable":
                raise
            problem = f"The carbon intensity file cannot be read: {error}"
            raise forecast_error(problem, "intensity.unreadable") from None
        return known_around(now_s, self.kind, of_csv(text, self.kind).steps)


@dataclass(frozen=True)
class GreatBritain:
    """Average intensity of Great Britain, 48 hours ahead in half hours (NESO, api.carbonintensity.org.uk)."""

    base_url: str = "https://api.carbonintensity.org.uk"
    timeout_s: float = TIMEOUT_S
    kind = "average"
    name = "Great Britain (NESO)"

    def forecast(self, now_s: float) -> Intensity:
        """Return the forecast from the current half hour on."""
        now = datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
        rows = _field(json_of(f"{self.base_url}/intensity/{now}/fw48h", {}, self.timeout_s), "data", _list)
        steps = [(_field(row, "from", _time), _field(row, "intensity.forecast", _number)) for row in rows]
        periods_s = {_field(row, "to", _time) - begin_s for row, (begin_s, _) in zip(rows, steps, strict=True)}
        if len(periods_s) > 1 or not min(periods_s, default=1.0) > 0:
            raise _unfit("The periods of the forecast have different lengths.")
        return known_around(now_s, self.kind, steps, max(periods_s, default=0.0))


@dataclass(frozen=True)
class ElectricityMaps:
    """Average intensity of a zone of Electricity Maps, for accounts that include forecasts.

    The environment variable ELECTRICITYMAPS_TOKEN has the token of the account.
    """

    zone: str
    base_url: str = "https://api.electricitymaps.com"
    timeout_s: float = TIMEOUT_S
    kind = "average"

    @property
    def name(self) -> str:
        return f"Electricity Maps, zone {self.zone}"

    def forecast(self, now_s: float) -> Intensity:
        """Return the forecast from the current hour on."""
        url = f"{self.base_url}/v3/carbon-intensity/forecast?{urlencode({'zone': self.zone})}"
        answer = json_of(url, {"auth-token": _secret("ELECTRICITYMAPS_TOKEN")}, self.timeout_s)
        _field(answer, "zone", _equal(self.zone))
        rows = _field(answer, "forecast", _list)
        steps = [(_field(row, "datetime", _time), _field(row, "carbonIntensity", _number)) for row in rows]
        return known_around(now_s, self.kind, steps)


@dataclass(frozen=True)
class WattTime:
    """Marginal intensity (MOER) of a region of WattTime, in steps of five minutes.

    Values are pounds of CO2 per MWh: `g_per_kwh = lb_per_mwh x 453.59237 / 1000`. The environment variables
    WATTTIME_USER and WATTTIME_PASSWORD have the account.
    """

    region: str
    horizon_hours: int = 72
    base_url: str = "https://api.watttime.org"
    timeout_s: float = TIMEOUT_S
    kind = "marginal"

    @property
    def name(self) -> str:
        return f"WattTime, region {self.region}"

    def forecast(self, now_s: float) -> Intensity:
        """Return the forecast from the current five minutes on."""
        account = base64.b64encode(f"{_secret('WATTTIME_USER')}:{_secret('WATTTIME_PASSWORD')}".encode()).decode()
        login = json_of(f"{self.base_url}/login", {"Authorization": f"Basic {account}"}, self.timeout_s)
        token = _field(login, "token", _text)
        place = {"region": self.region, "signal_type": "co2_moer"}
        url = f"{self.base_url}/v3/forecast?{urlencode({**place, 'horizon_hours': self.horizon_hours})}"
        answer = json_of(url, {"Authorization": f"Bearer {token}"}, self.timeout_s)
        for name, expected in {**place, "units": "lbs_co2_per_mwh"}.items():
            _field(answer, f"meta.{name}", _equal(expected))
        rows = _field(answer, "data", _list)
        steps = [(_field(row, "point_time", _time), _field(row, "value", _number)) for row in rows]
        factor = 453.59237 / 1000  # A pound is 453.59237 g by definition.
        return known_around(now_s, self.kind, [(at_s, None if lb is None else lb * factor) for at_s, lb in steps])


def named(given: str, kind: str | None) -> ConstantIntensity | CsvIntensity:
    """Return the source named by a constant in g/kWh or the path of a CSV file; `ValueGivenError` without a kind."""
    if kind is None:
        problem, hint = f"The carbon intensity {given} has no kind.", f"Pass the kind {' or '.join(KINDS)}."
        raise ValueGivenError("carbon.kind", problem=problem, hint=hint, code="carbon.kind_missing")
    g_per_kwh = number_or_none(given)
    return CsvIntensity(given, kind) if g_per_kwh is None else ConstantIntensity(g_per_kwh, kind)


def source_named(given: str, kind: str | None) -> IntensitySource:
    """Return the intensity source for a command line argument; `ValueGivenError` if the source or kind is unknown.

    Args:
        given: `great-britain`, `electricity-maps:ZONE`, `watttime:REGION`, a number in g/kWh, or a CSV file's path.
        kind: "average" or "marginal"; None for services, which have a fixed kind.
    """
    name, _, place = given.partition(":")
    service: GreatBritain | ElectricityMaps | WattTime
    if given == "great-britain":
        service = GreatBritain()
    elif name == "electricity-maps" and place:
        service = ElectricityMaps(place)
    elif name == "watttime" and place:
        service = WattTime(place)
    elif number_or_none(given) is not None or Path(given).suffix or Path(given).exists():
        return named(given, kind)
    else:
        expected = "a CSV file, grams per kWh, great-britain, electricity-maps:ZONE or watttime:REGION"
        raise ValueGivenError("carbon", got=repr(given), expected=expected, code="carbon.source_unknown")
    if kind not in (None, service.kind):
        problem = f"{service.name} forecasts {service.kind} intensity, not {kind}."
        hint = f"Pass {service.kind}, or leave the kind out."
        raise ValueGivenError("carbon.kind", problem=problem, hint=hint, code="carbon.kind_differs")
    return service


def known_around(
    now_s: float, kind: str, steps: Iterable[tuple[float, float | None]], period_s: float | None = None
) -> Intensity:
    """Return the part of a forecast without gaps that includes `now_s`, or raise a `TrimtabError`.

    Args:
        steps: (seconds since 1970, grams per kWh or None if missing), in order.
        period_s: length of a step in seconds; None for the smallest distance of two times.
    """
    steps = list(steps)
    if period_s is None:
        period_s = min((after[0] - before[0] for before, after in itertools.pairwise(steps)), default=0.0)
        if not period_s > 0:
            raise _unfit("The forecast has fewer than two times, or its times are out of order.")
    found = [(begin_s, per_kwh) for begin_s, per_kwh in steps if per_kwh is not None]
    if not found:
        raise forecast_error("The forecast is empty.", "intensity.empty")
    whole = Intensity(kind, tuple(found), found[-1][0] + period_s)  # Validates all steps before they are selected.
    gaps = [at for at, (a, b) in enumerate(itertools.pairwise(found), 1) if b[0] - a[0] > period_s + LITTLE_S]
    for begin, end in itertools.pairwise([0, *gaps, len(found)]):
        until_s = found[end - 1][0] + period_s
        if found[begin][0] <= now_s < until_s:
            return Intensity(kind, tuple(found[begin:end]), until_s)
    known = f"{format_moment(found[0][0])} to {format_moment(whole.until_s)}"
    raise forecast_error(f"The forecast, from {known}, does not cover {format_moment(now_s)}.", "intensity.not_current")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would send the token to another host, possibly over http."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, so that a redirect is treated as an error."""


def json_of(url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> object:
    """Return the JSON answer of a service, or raise a `TrimtabError`; `timeout_s` limits each wait in seconds."""
    try:
        parts = urlsplit(url)
        host, scheme = parts.hostname or "", parts.scheme
    except ValueError:
        host, scheme = "", ""
    if not host or not (scheme == "https" or (scheme == "http" and host in LOOPBACK)):
        found = f"an address with {f'the scheme {scheme}' if scheme else 'no scheme'}"
        raise ValueGivenError("intensity.base_url", got=found, expected="an https address", code="url.not_https")
    if os.environ.get("TRIMTAB_OFFLINE") == "1":
        raise forecast_error("TRIMTAB_OFFLINE=1 forbids requests to web services.", "intensity.offline")
    handlers = [_NoRedirect(), *([urllib.request.ProxyHandler({})] if host in LOOPBACK else [])]
    request = urllib.request.Request(url, headers={"User-Agent": "trimtab", "Accept": "application/json", **headers})
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            body = response.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise forecast_error(f"{host} answered with HTTP status {error.code}.", "intensity.http_status") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None)  # The cause of a URLError, as an exception or a text.
        cause = reason if isinstance(reason, Exception) else error
        if isinstance(cause, TimeoutError):
            raise forecast_error(f"{host} did not answer within {timeout_s:g} s.", "intensity.timeout") from None
        problem = f"The request to {host} failed with {type(cause).__name__}."
        raise forecast_error(problem, "intensity.unreachable") from None
    if len(body) > MOST_BYTES:
        raise _unfit(f"The answer of {host} has more than {MOST_BYTES:,} bytes.", "intensity.too_large")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise _unfit(f"The answer of {host} is not JSON.", "intensity.not_json") from None


def _secret(name: str) -> str:
    found = os.environ.get(name, "").strip()
    if not found:
        raise forecast_error(f"The environment variable {name} is not set.", "token.missing")
    return found


def forecast_error(problem: str, code: str) -> DataMissingError:
    """Return the error for an unavailable forecast."""
    return DataMissingError("intensity", problem=problem, hint=HINT, code=code)


def _unfit(problem: str, code: str = "intensity.format_differs") -> FormatError:
    return FormatError("intensity", problem=problem, hint=HINT, code=code)


T = TypeVar("T")


def _field(answer: object, path: str, parse: Callable[[object], T]) -> T:
    """Return the parsed field of an answer; `FormatError` if the field is missing, or `parse` raises `ValueError`."""
    try:
        for name in path.split("."):
            if not isinstance(answer, dict):
                raise ValueError
            answer = answer.get(name, ...)
        return parse(answer)
    except ValueError:
        raise _unfit(f"The field {path} of the answer is missing or has another format.") from None


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _equal(expected: object) -> Callable[[object], None]:
    def parse(value: object) -> None:
        if value != expected:
            raise ValueError

    return parse


def _time(value: object) -> float:
    return time_of(_text(value))


def _number(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_G:
        raise ValueError
    return float(value)
