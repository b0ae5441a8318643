"""Carbon intensity forecasts: constants, files, and public web services over https.

Expected answers, all in JSON with ISO 8601 times:

    Great Britain (NESO): average, no credentials
        GET /intensity/{now}/fw48h             data[]: from, to, intensity.forecast in g/kWh
    Electricity Maps: average, requires ELECTRICITYMAPS_TOKEN
        GET /v3/carbon-intensity/forecast      zone, forecast[]: datetime, carbonIntensity in g/kWh
    WattTime: marginal, requires WATTTIME_USER and WATTTIME_PASSWORD
        GET /login                             token
        GET /v3/forecast                       meta: units, signal_type, region; data[]: point_time, value in lb/MWh

The formats are from public documents and were not tried with the live services; tests use a local server. Answers in
another format are refused. A null value is a missing hour. Error messages contain no secrets.
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode, urlsplit

from trimtab.carbon.intensity import KINDS, Intensity, constant, of_csv
from trimtab.core.errors import DataMissingError, FormatError, TrimtabError, ValueGivenError
from trimtab.core.files import CSV_BYTES, read_bytes
from trimtab.core.units import format_moment, time_of

TIMEOUT_S = 5.0
MOST_BYTES = 2**20
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # This machine, for which http discloses nothing.
HINT = "Use a CSV file or a constant as the source, or start without a forecast."


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would send the token to another host, possibly over http."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, so that a redirect is treated as an error."""


def json_of(url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> object:
    """Return the JSON answer of a service.

    Args:
        timeout_s: limit in seconds of each wait, and of the whole body. Excludes name resolution, which has a system
            limit.

    Raises:
        ValueGivenError: the address is not https, or a header has invalid characters.
        DataMissingError: no answer, or an HTTP error.
        FormatError: the answer is not JSON, or too long.
    """
    host, is_here = _host(url)
    if any(not value.isascii() or not value.isprintable() for value in headers.values()):
        raise ValueGivenError(
            "token",
            problem="The token has characters that an HTTP header cannot contain.",
            hint="Set the environment variable to printable ASCII text, without a line break.",
            code="token.invalid",
        )
    if os.environ.get("TRIMTAB_OFFLINE") == "1":
        raise forecast_error("TRIMTAB_OFFLINE=1 forbids requests to web services.", "intensity.offline")
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if is_here:
        handlers.append(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"User-Agent": "trimtab", "Accept": "application/json", **headers})
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as response:
            body = _body(response, host, timeout_s)
    except FormatError:  # FormatError is a ValueError too.
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise forecast_error(f"{host} answered with HTTP status {error.code}.", "intensity.http_status") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _unanswered(host, error, timeout_s) from None
    return _parsed(body, host)


def forecast_error(problem: str, code: str) -> DataMissingError:
    """Return the error for an unavailable forecast."""
    return DataMissingError("intensity", problem=problem, hint=HINT, code=code)


def _host(url: str) -> tuple[str, bool]:
    """Return the host of an address, and True if it is this machine."""
    try:
        parts = urlsplit(url)
        host, scheme = parts.hostname or "", parts.scheme
    except ValueError:
        host, scheme = "", ""
    is_here = host in LOOPBACK
    if not host or not (scheme == "https" or (scheme == "http" and is_here)):
        raise ValueGivenError(
            "intensity.base_url",
            got=f"an address with {f'the scheme {scheme}' if scheme else 'no scheme'}",
            expected="an https address",
            code="url.not_https",
        )
    return host, is_here


def _body(response: http.client.HTTPResponse, host: str, timeout_s: float) -> bytes:
    """Return the body of an answer within the limits of time and size."""
    body, ends_s = b"", time.monotonic() + timeout_s
    while chunk := response.read1(2**16):
        body += chunk
        if len(body) > MOST_BYTES:
            raise _unfit(f"The answer of {host} has more than {MOST_BYTES:,} bytes.", "intensity.too_large")
        if time.monotonic() > ends_s:
            raise TimeoutError
    return body


def _unanswered(host: str, error: Exception, timeout_s: float) -> DataMissingError:
    reason = getattr(error, "reason", error)  # The cause of a URLError.
    reason = reason if isinstance(reason, Exception) else error
    if isinstance(reason, TimeoutError):
        return forecast_error(f"{host} did not answer within {timeout_s:g} s.", "intensity.timeout")
    return forecast_error(f"The request to {host} failed with {type(reason).__name__}.", "intensity.unreachable")


def _parsed(body: bytes, host: str) -> object:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise _unfit(f"The answer of {host} is not JSON.", "intensity.not_json") from None


def _no_number(_: str) -> None:
    raise ValueError


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


def _unfit(problem: str, code: str = "intensity.format_differs") -> FormatError:
    return FormatError("intensity", problem=problem, hint=HINT, code=code)


LITTLE_S = 1e-3  # Tolerance for equal times, in seconds.


class IntensitySource(Protocol):
    """A source of carbon intensity forecasts."""

    @property
    def name(self) -> str:
        """Name of the source in reports."""

    def forecast(self, now_s: float) -> Intensity:
        """Return a forecast without gaps that includes `now_s`. It may begin earlier.

        Args:
            now_s: seconds since 1970.

        Raises:
            TrimtabError: no forecast is available; the message contains no secrets.
        """


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
        try:
            text = read_bytes(Path(self.path), "a CSV file in UTF-8", limit=CSV_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise FormatError(
                "carbon",
                problem=f"The carbon intensity file {self.path} is not UTF-8 text.",
                hint="Save it as a CSV file in UTF-8.",
                code="file.not_text",
            ) from None
        except FormatError as error:
            if error.code == "file.unreadable":
                raise forecast_error(
                    f"The carbon intensity file cannot be read: {error}", "intensity.unreadable"
                ) from None
            raise
        found = of_csv(text, self.kind)
        period_s = min(after[0] - before[0] for before, after in itertools.pairwise(found.steps))
        return known_around(now_s, self.kind, found.steps, period_s)


def named(given: str, kind: str | None) -> ConstantIntensity | CsvIntensity:
    """Return the source named by a constant in g/kWh or the path of a CSV file; `ValueGivenError` without a kind."""
    if kind is None:
        raise ValueGivenError(
            "carbon.kind",
            problem=f"The carbon intensity {given} has no kind.",
            hint=f"Pass the kind {' or '.join(KINDS)}, as in --carbon-kind average.",
            code="carbon.kind_missing",
        )
    try:
        return ConstantIntensity(float(given), kind)
    except ValueError:
        return CsvIntensity(given, kind)


def forecast_or_reason(source: IntensitySource, now_s: float | None = None) -> tuple[Intensity | None, str]:
    """Return a forecast and "", or None and the reason; never raises.

    Args:
        now_s: seconds since 1970; None for the current time.
    """
    try:
        return source.forecast(time.time() if now_s is None else now_s), ""
    except TrimtabError as error:
        why = error.problem or str(error)
    except Exception as error:  # A user-defined source; its error text may contain a token.
        why = f"The source raised {type(error).__name__}."
    return None, f"no carbon intensity forecast from {_name(source)}. {why}"


def known_around(now_s: float, kind: str, steps: Iterable[tuple[float, float | None]], period_s: float) -> Intensity:
    """Return the part of a forecast without gaps that includes `now_s`.

    Args:
        now_s: seconds since 1970.
        steps: (seconds since 1970, grams per kWh or None if missing), in order.
        period_s: length of a step in seconds.

    Raises:
        DataMissingError: the forecast does not include `now_s`.
        ValueGivenError: a step is invalid, or steps are out of order.
    """
    found = [(begin_s, per_kwh) for begin_s, per_kwh in steps if per_kwh is not None]
    if not found:
        raise forecast_error("The forecast is empty.", "intensity.empty")
    whole = Intensity(kind, tuple(found), found[-1][0] + period_s)  # Validates all steps before they are selected.
    holes = [at for at, (a, b) in enumerate(itertools.pairwise(found), 1) if b[0] - a[0] > period_s + LITTLE_S]
    for begin, end in itertools.pairwise([0, *holes, len(found)]):
        part = found[begin:end]
        if part[0][0] <= now_s < part[-1][0] + period_s:
            return Intensity(kind, tuple(part), whole.until_s if end == len(found) else part[-1][0] + period_s)
    known = f"{format_moment(found[0][0])} to {format_moment(whole.until_s)}"
    raise forecast_error(f"The forecast, from {known}, does not cover {format_moment(now_s)}.", "intensity.not_current")


def _name(source: IntensitySource) -> str:
    try:
        return str(source.name)
    except Exception:
        return type(source).__name__


G_PER_KWH_OF_LB_PER_MWH = 453.59237 / 1000  # A pound is 453.59237 g by definition.
MOST_G = 1e6  # Upper bound for plausible values; the worst fuels emit a few thousand g/kWh.


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
        answer = json_of(f"{self.base_url}/intensity/{now}/fw48h", {}, self.timeout_s)
        steps, periods_s = [], []
        for row in _rows(answer, "data"):
            begin_s = _time(row, "from")
            periods_s.append(_time(row, "to") - begin_s)
            steps.append((begin_s, _number(_inner(row, "intensity"), "forecast")))
        period_s = min(periods_s, default=0.0)
        if periods_s and not 0 < period_s == max(periods_s):
            raise _unfit("The periods of the forecast have different lengths.")
        return known_around(now_s, self.kind, steps, period_s)


@dataclass(frozen=True)
class ElectricityMaps:
    """Average intensity of a zone of Electricity Maps, for accounts that include forecasts.

    Args:
        zone: name of the zone, such as "DE".
        base_url: address of the service.
        timeout_s: time limit of a request in seconds.
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
        if _text(_mapping(answer), "zone") != self.zone:
            raise _unfit(f"The answer is not for the zone {self.zone}.")
        rows = _rows(answer, "forecast")
        steps = [(_time(row, "datetime"), _number(row, "carbonIntensity")) for row in rows]
        return known_around(now_s, self.kind, steps, _period_s(steps))


@dataclass(frozen=True)
class WattTime:
    """Marginal intensity (MOER) of a region of WattTime, in steps of five minutes.

    Values are pounds of CO2 per MWh: `g_per_kwh = lb_per_mwh x 453.59237 / 1000`.

    Args:
        region: name of the region, such as "CAISO_NORTH".
        horizon_hours: length of the forecast in hours, at most 72.
        base_url: address of the service.
        timeout_s: time limit of a request in seconds.
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
        user = f"{_secret('WATTTIME_USER')}:{_secret('WATTTIME_PASSWORD')}"
        basic = base64.b64encode(user.encode()).decode("ascii")
        login = json_of(f"{self.base_url}/login", {"Authorization": f"Basic {basic}"}, self.timeout_s)
        token = _text(_mapping(login), "token")
        asked = {"region": self.region, "signal_type": "co2_moer", "horizon_hours": self.horizon_hours}
        headers = {"Authorization": f"Bearer {token}"}
        answer = json_of(f"{self.base_url}/v3/forecast?{urlencode(asked)}", headers, self.timeout_s)
        meta = _inner(_mapping(answer), "meta")
        for name, expected in (("units", "lbs_co2_per_mwh"), ("signal_type", "co2_moer"), ("region", self.region)):
            if _text(meta, name) != expected:
                raise _unfit(f"The field meta.{name} of the answer is not {expected}.")
        steps = []
        for row in _rows(answer, "data"):
            pounds = _number(row, "value")
            steps.append((_time(row, "point_time"), None if pounds is None else pounds * G_PER_KWH_OF_LB_PER_MWH))
        return known_around(now_s, self.kind, steps, _period_s(steps))


def source_named(given: str, kind: str | None) -> IntensitySource:
    """Return the intensity source for a command line argument.

    Args:
        given: `great-britain`, `electricity-maps:ZONE`, `watttime:REGION`, a number in g/kWh, or the path of a CSV
            file.
        kind: "average" or "marginal"; None for services, which have a fixed kind.

    Raises:
        ValueGivenError: unknown source, or a kind that the service does not have.
    """
    name, _, place = given.partition(":")
    if given == "great-britain":
        return _of_kind(GreatBritain(), kind)
    if name == "electricity-maps" and place:
        return _of_kind(ElectricityMaps(place), kind)
    if name == "watttime" and place:
        return _of_kind(WattTime(place), kind)
    if not (_is_number(given) or Path(given).suffix or Path(given).exists()):
        raise ValueGivenError(
            "carbon",
            got=repr(given),
            expected="a CSV file, grams per kWh, great-britain, electricity-maps:ZONE or watttime:REGION",
            code="carbon.source_unknown",
        )
    return named(given, kind)


def _of_kind(service: GreatBritain | ElectricityMaps | WattTime, kind: str | None) -> IntensitySource:
    if kind not in (None, service.kind):
        raise ValueGivenError(
            "carbon.kind",
            problem=f"{service.name} forecasts {service.kind} intensity, not {kind}.",
            hint=f"Pass {service.kind}, or leave the kind out.",
            code="carbon.kind_differs",
        )
    return service


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _secret(name: str) -> str:
    found = os.environ.get(name, "").strip()
    if not found:
        raise forecast_error(f"The environment variable {name} is not set.", "token.missing")
    return found


def _period_s(steps: list[tuple[float, float | None]]) -> float:
    """Return the length of a step in seconds, from the smallest distance of two times."""
    between = [after[0] - before[0] for before, after in itertools.pairwise(steps)]
    if not between or not min(between) > 0:
        raise _unfit("The forecast has fewer than two times, or its times are out of order.")
    return min(between)


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _unfit(f"The answer contains a {type(value).__name__} in place of a JSON object.")
    return value


def _inner(row: Mapping[str, object], name: str) -> Mapping[str, object]:
    return _mapping(row.get(name))


def _rows(answer: object, name: str) -> list[Mapping[str, object]]:
    rows = _mapping(answer).get(name)
    if not isinstance(rows, list):
        raise _unfit(f"The answer has no list {name}.")
    return [_mapping(row) for row in rows]


def _text(row: Mapping[str, object], name: str) -> str:
    found = row.get(name)
    if not isinstance(found, str):
        raise _unfit(f"The answer has no text field {name}.")
    return found


def _time(row: Mapping[str, object], name: str) -> float:
    text = _text(row, name)
    try:
        return time_of(text)
    except ValueError:
        raise _unfit(f"The field {name} of the answer is not an ISO 8601 time with a UTC offset.") from None


def _number(row: Mapping[str, object], name: str) -> float | None:
    """Return a number; None for null. Raise `FormatError` if the field is missing or not a plausible number."""
    found = row.get(name, "")
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= MOST_G:
        raise _unfit(f"The field {name} of the answer is not a number from 0 to {MOST_G:g}.")
    return float(found)
