"""JSON from a public web service: https only, with time and size limits, and no secrets in error messages."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trimtab.core.errors import DataMissingError, FormatError, ValueGivenError

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
        url: address, https except for this machine.
        headers: request headers.
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


def _unfit(problem: str, code: str) -> FormatError:
    return FormatError("intensity", problem=problem, hint=HINT, code=code)
