"""Carbon intensity forecasts of public web services, over https.

Expected answers, all in JSON with ISO 8601 times:

    Great Britain (NESO): average, no credentials
        GET /intensity/{now}/fw48h             data[]: from, to, intensity.forecast in g/kWh
    Electricity Maps: average, requires ELECTRICITYMAPS_TOKEN
        GET /v3/carbon-intensity/forecast      zone, forecast[]: datetime, carbonIntensity in g/kWh
    WattTime: marginal, requires WATTTIME_USER and WATTTIME_PASSWORD
        GET /login                             token
        GET /v3/forecast                       meta: units, signal_type, region; data[]: point_time, value in lb/MWh

The formats are from public documents and were not tried with the live services; tests use a local server. Answers in
another format are refused. A null value is a missing hour.
"""

from __future__ import annotations

import base64
import datetime
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from trimtab.core.carbon import Intensity
from trimtab.core.datetimes import time_of
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.integrations.carbon_intensity import IntensitySource, known_around, named
from trimtab.integrations.http_json import HINT, TIMEOUT_S, forecast_error, json_of

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
        return known_around(now_s, self.kind, _known(steps), period_s)


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
        """Name of the source in reports."""
        return f"Electricity Maps, zone {self.zone}"

    def forecast(self, now_s: float) -> Intensity:
        """Return the forecast from the current hour on."""
        url = f"{self.base_url}/v3/carbon-intensity/forecast?{urlencode({'zone': self.zone})}"
        answer = json_of(url, {"auth-token": _secret("ELECTRICITYMAPS_TOKEN")}, self.timeout_s)
        if _text(_mapping(answer), "zone") != self.zone:
            raise _unfit(f"The answer is not for the zone {self.zone}.")
        rows = _rows(answer, "forecast")
        steps = [(_time(row, "datetime"), _number(row, "carbonIntensity")) for row in rows]
        return known_around(now_s, self.kind, _known(steps), _period_s(steps))


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
        """Name of the source in reports."""
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
        return known_around(now_s, self.kind, _known(steps), _period_s(steps))


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


def _known(steps: list[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(begin_s, per_kwh) for begin_s, per_kwh in steps if per_kwh is not None]


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


def _unfit(problem: str) -> FormatError:
    return FormatError("intensity", problem=problem, hint=HINT, code="intensity.format_differs")
