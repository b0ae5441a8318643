"""Strict JSON for frozen dataclasses, driven by their type hints.

Nested dataclasses become objects, tuples become lists, and enums become their values. A non-finite float is written
as the string "inf", "-inf" or "nan". It is read back as a float if the field's type is float, and stays a string if
the field's type is `Any`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import functools
import json
import math
import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote_from_bytes, unquote_to_bytes

from trimtab.core.errors import FormatError
from trimtab.core.files import JSON_BYTES, read_bytes, read_text, write_over

# C0 without tab and newline, DEL, C1, and characters that reorder the text around them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control_characters(text: str) -> str:
    """Return text with control characters written as escapes, because a terminal would interpret them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), to_encodable(text))


def to_encodable(text: str) -> str:
    """Return text that UTF-8 can encode; undecodable bytes of a file name become `\\udcff`."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def quoted(path: Path) -> str:
    """Return a path of any bytes as ASCII text; `unquoted` reverses the encoding."""
    return quote_from_bytes(os.fsencode(path))


def unquoted(text: str) -> Path:
    """Return the path encoded by `quoted`."""
    return Path(os.fsdecode(unquote_to_bytes(text)))


T = TypeVar("T")
# Errors of creating or replacing a file that do not concern the target itself: a folder that is not writable, or a
# target that is a mount point.
_NO_OTHER = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)
_LARGEST_INT = 2**1000  # Larger integers have no float.
_DEEPEST = 64  # Nesting levels of a value of type Any.
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_jsonable(value: Any) -> Any:
    """Return a structure of dict, list, str, int, float, bool and None that `json` can write."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {to_encodable(str(k)): to_jsonable(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_jsonable(v) for v in value]
    if isinstance(value, str):
        return to_encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return a dataclass as JSON text."""
    return json.dumps(to_jsonable(value), indent=indent, allow_nan=False, ensure_ascii=False)


def from_json(cls: type[T], text: str) -> T:
    """Return a `cls` from JSON text; raises `FormatError` with the path of the invalid value."""
    try:
        data = parse(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            cls.__name__, got=f"invalid JSON ({error})", expected="a JSON object", code="json.invalid"
        ) from None
    try:
        return from_jsonable(cls, data)
    except RecursionError:  # Shallow enough for the parser, too deep for the recursive decoder.
        given, expected = "JSON that is nested too deeply", f"an object of {cls.__name__}"
        raise FormatError(cls.__name__, got=given, expected=expected, code="json.value") from None


def parse(text: str) -> Any:
    """Return the value of JSON text without NaN and Infinity; `ValueError`, or `RecursionError` for deep nesting."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file atomically, or raise `OSError`: after a power failure it holds the old or the new text."""
    write_over(Path(path), to_encodable(text).encode())


def write_result(path: Path, text: str) -> None:
    """Write a command's result: a file atomically; a pipe or the process's own output as a stream.

    If the file cannot be replaced, it is overwritten in place. Raises `OSError` with the old content restored.
    """
    own = _own_output(path)
    if own is not None:
        with open(own, "w", encoding="utf-8", closefd=False) as stream:
            stream.write(to_encodable(text))
    elif is_stream(path):
        path.write_text(to_encodable(text), encoding="utf-8")
    else:
        _written_over(path.resolve(), text)  # A symbolic link is kept; its target is replaced.


def _written_over(path: Path, text: str) -> None:
    """Write a file atomically, or overwrite it in place if it exists and cannot be replaced."""
    try:
        write_whole(path, text)
    except OSError as error:
        if error.errno not in _NO_OTHER or not path.is_file():
            raise
        held = read_bytes(path, "a result to replace", limit=JSON_BYTES)
        try:
            path.write_bytes(to_encodable(text).encode())
        except OSError:
            path.write_bytes(held)
            raise


def is_stream(path: Path) -> bool:
    """Return True if writes to a path append to earlier output: a pipe, a device, or this process's own output."""
    return _own_output(path) is not None or (path.exists() and not path.is_file())


def _own_output(path: Path) -> int | None:
    """Return 1 or 2 if a path leads to the process's stdout or stderr, as /dev/stdout does; else None."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):  # The stream is closed, or the path does not exist.
            if os.path.samestat(os.fstat(stream), path.stat()):
                return stream
    return None


def read_json(cls: type[T], path: str | Path) -> T:
    """Return a `cls` from a JSON file of at most `files.JSON_BYTES`; `FormatError` if it is none."""
    return from_json(cls, read_text(path, f"a readable {cls.__name__} JSON file"))


def from_jsonable(cls: type[T], data: Any) -> T:
    """Return a `cls` from the output of `to_jsonable`; unknown or missing keys and wrong types raise `FormatError`."""
    return typing.cast(T, _decode(cls, data, cls.__name__))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _wrong(path: str, data: Any, expected: str) -> FormatError:
    return FormatError(path, got=_shown(data), expected=expected, code="json.value")


def _shown(data: Any) -> str:
    """Return the beginning of a value as text; for a huge integer, which Python does not convert, its type."""
    try:
        return f"{data!r:.80}"
    except (ValueError, RecursionError):
        return f"a {type(data).__name__} too large to show"


def _decode(hint: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(hint), data, path)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), data, path)
    if origin in (dict, Mapping):
        return _decode_mapping(typing.get_args(hint), data, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(hint, data, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _decode_enum(hint, data, path)
    return _decode_scalar(hint, data, path)


def _decode_dataclass(cls: type, data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise _wrong(path, data, f"an object of {cls.__name__}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    known = fields["schema"].default if "schema" in fields else dataclasses.MISSING
    # First, because unknown keys are the consequence of a different schema.
    if known is not dataclasses.MISSING and data.get("schema", known) != known:
        raise FormatError(f"{path.lower()}.schema", got=_shown(data["schema"]), expected=str(known), code="json.schema")
    if unknown := sorted(map(str, data.keys() - fields.keys())):
        expected = "one of " + ", ".join(fields)
        raise FormatError(f"{path}.{unknown[0]:.80}", got="an unknown key", expected=expected, code="json.key")
    required = [n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in data]:
        raise FormatError(
            f"{path}.{missing[0]}", got="nothing", problem=f"The key {path}.{missing[0]} is missing.", code="json.key"
        )
    hints = _hints(cls)
    return cls(**{name: _decode(hints[name], data[name], f"{path}.{name}") for name in fields if name in data})


def _decode_union(options: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in options:
        return None
    # Most specific type first, so that True stays a bool, 3 an int, and "inf" a str if a str is allowed.
    order = [bool, int, str, float]
    ranked = sorted((o for o in options if o is not type(None)), key=lambda o: order.index(o) if o in order else 9)
    for option in ranked:
        try:
            return _decode(option, data, path)
        except FormatError:
            if len(ranked) == 1:
                raise
    raise _wrong(path, data, " or ".join(getattr(o, "__name__", str(o)) for o in ranked))


def _decode_tuple(args: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list | tuple):
        raise _wrong(path, data, "a list")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], v, f"{path}[{i}]") for i, v in enumerate(data))
    if len(data) != len(args):
        raise _wrong(path, data, f"a list of {len(args)} values")
    return tuple(_decode(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True)))


def _decode_mapping(args: tuple[Any, ...], data: Any, path: str) -> dict[str, Any]:
    if not isinstance(data, Mapping) or not all(isinstance(k, str) and _is_text(k) for k in data):
        raise _wrong(path, data, "an object")
    return {k: _decode(args[1], v, f"{path}.{k}") for k, v in data.items()}


def _decode_enum(cls: type[enum.Enum], data: Any, path: str) -> enum.Enum:
    try:
        return cls(data)
    except (ValueError, TypeError):  # A list raises TypeError.
        raise _wrong(path, data, "one of " + ", ".join(str(m.value) for m in cls)) from None


def _decode_scalar(hint: Any, data: Any, path: str) -> Any:
    if hint is Any:
        _check_any(data, path)
        return data
    if hint is float:
        if isinstance(data, str) and data in _NON_FINITE:
            return _NON_FINITE[data]
        if isinstance(data, int | float) and not isinstance(data, bool) and _is_plain(data):
            return float(data)
    elif hint is int and isinstance(data, bool):
        pass
    elif isinstance(hint, type) and isinstance(data, hint) and _is_plain(data):
        return data
    raise _wrong(path, data, getattr(hint, "__name__", str(hint)))


def _is_plain(data: Any) -> bool:
    """Return True if a scalar is a finite number of at most 2**1000, encodable text, a bool or None."""
    if isinstance(data, int):
        return abs(data) <= _LARGEST_INT
    if isinstance(data, float):
        return math.isfinite(data)  # 1e400 is parsed as infinity, which `to_jsonable` writes as a string.
    return not isinstance(data, str) or _is_text(data)


def _is_text(data: str) -> bool:
    """Return True if a string can be encoded in UTF-8; a lone surrogate cannot."""
    try:
        data.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_any(data: Any, path: str, depth: int = 0) -> None:
    """Raise `FormatError` if a value of type Any cannot be written again or is nested too deeply."""
    if depth > _DEEPEST:
        raise FormatError(path, got="deeper nesting", expected=f"at most {_DEEPEST} levels", code="json.value")
    if isinstance(data, Mapping):
        for name, value in data.items():
            if not isinstance(name, str) or not _is_text(name):
                raise _wrong(path, name, "a key that can be encoded in UTF-8")
            _check_any(value, path, depth + 1)
    elif isinstance(data, list | tuple):
        for value in data:
            _check_any(value, path, depth + 1)
    elif not _is_plain(data):
        raise _wrong(path, data, "text that can be encoded in UTF-8, or a finite number of at most 2**1000")
