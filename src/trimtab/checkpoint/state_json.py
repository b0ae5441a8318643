"""Lossless conversion of a state to JSON and back, without pickle and without executable content.

None, booleans, strings, finite floats and 64-bit integers are plain JSON. Any other value is an object with a single
key, the type's name. The caller packs tensors and arrays through `leaf`.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.core.errors import FormatError

Packed = Any  # JSON
# (value, path) -> object with one key, or None if the type is unsupported.
Leaf = Callable[[Any, str], Mapping[str, Packed] | None]
Read = Callable[[Packed, str], Any]  # (content under the key, path) -> value
MAX_DEPTH = 100  # limit for a structure that contains itself
_MAPPINGS: dict[type, str] = {dict: "map", OrderedDict: "map", Counter: "counter", defaultdict: "default"}
# Allowed default factories of a defaultdict. The list is closed, so that a file cannot name code to run.
_MADE: tuple[type, ...] = (bool, int, float, str, list, tuple, dict, set)
_FACTORIES: dict[str, type | None] = {"": None} | {each.__name__: each for each in _MADE}
_WORD = 2**63


def pack(value: Any, leaf: Leaf, path: str = "state", depth: int = 0) -> Packed:
    """Return a value as JSON.

    Args:
        value: State to pack.
        leaf: Packs values that are not built-in Python types.
        path: Location of `value`, for errors.
        depth: Current nesting level.

    Raises:
        FormatError: A type is unsupported, or the nesting exceeds `MAX_DEPTH`. The error names the location.
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind in _SCALARS:
        return _SCALARS[kind](value, path)
    if depth > MAX_DEPTH:
        raise FormatError(
            path,
            got=f"more than {MAX_DEPTH} levels",
            problem=f"{path:.60}... has more than {MAX_DEPTH} nested levels.",
            hint="Return a flatter structure that does not contain itself from state_dict().",
            code="state.too_deep",
        )
    if kind in _MAPPINGS:
        items = [[_key(k, path), pack(v, leaf, f"{path}[{k!r}]", depth + 1)] for k, v in value.items()]
        return {_MAPPINGS[kind]: [_factory_of(value, path), items] if kind is defaultdict else items}
    if kind in (list, tuple):
        return {kind.__name__: [pack(each, leaf, f"{path}[{i}]", depth + 1) for i, each in enumerate(value)]}
    if (packed := leaf(value, path)) is not None:
        return dict(packed)
    raise FormatError(
        path,
        got=f"a {kind.__module__}.{kind.__qualname__}",
        expected="tensors, arrays, numbers, strings, bytes, None, and lists, tuples and dicts of these types",
        hint="Convert it to these types in state_dict(), and back in load_state_dict().",
        code="state.unsupported_type",
    )


def as_mapping_type(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return `items` as the mapping type of `value`."""
    if isinstance(value, Counter):
        return Counter(items)
    return defaultdict(value.default_factory, items) if isinstance(value, defaultdict) else items


def _factory_of(value: defaultdict[Any, Any], path: str) -> str:
    for name, factory in _FACTORIES.items():
        if factory is value.default_factory:
            return name
    raise FormatError(
        path,
        got=f"a defaultdict with the factory {value.default_factory!r:.60}",
        expected=f"one of the factories {', '.join(filter(None, _FACTORIES))}",
        hint="Convert it with dict(...) in state_dict(), and back in load_state_dict().",
        code="state.unsupported_type",
    )


def _key(key: Any, path: str) -> Packed:
    if type(key) not in (str, int):
        raise FormatError(
            f"{path} key {key!r:.40}",
            got=f"a {type(key).__name__}",
            expected="a string or an integer",
            hint="Convert the key in state_dict(), and back in load_state_dict().",
            code="state.unsupported_type",
        )
    return _SCALARS[type(key)](key, path)


def _integer(value: int, path: str) -> Packed:
    return value if -_WORD <= value < _WORD else {"int": hex(value)}


def _float(value: float, path: str) -> Packed:
    return value if value - value == 0 else {"float": struct.pack(">d", value).hex()}


def _text(value: str, path: str) -> Packed:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FormatError(
            path,
            got=f"{value!r:.40}",
            expected="a string that UTF-8 can encode",
            hint="Return bytes from state_dict() instead.",
            code="state.unsupported_type",
        ) from None
    return value


_SCALARS: dict[type, Callable[[Any, str], Packed]] = {
    int: _integer,
    float: _float,
    str: _text,
    bytes: lambda value, path: {"bytes": base64.b64encode(value).decode()},
}


def malformed_error(path: str, got: str, expected: str) -> FormatError:
    """Return the error for an invalid packed state."""
    return FormatError(
        path,
        got=got,
        expected=expected,
        problem=f"The checkpoint's contents are invalid at {path}: got {got}, expected {expected}.",
        hint="Resume from another checkpoint.",
        code="state.malformed",
    )


def unpack(packed: Packed, leaves: Mapping[str, Read], path: str = "state") -> Any:
    """Return the value of a packed state.

    Args:
        packed: JSON from `pack`.
        leaves: Reader for each key produced by `leaf`.
        path: Location, for errors.

    Raises:
        FormatError: `packed` is not a packed state.
    """
    if packed is None or isinstance(packed, bool | str | int | float):
        return packed
    if not isinstance(packed, dict) or len(packed) != 1:
        raise malformed_error(path, got=f"{packed!r:.60}", expected="a JSON object with one key")
    (kind, inside), readers = next(iter(packed.items())), _READERS | dict(leaves)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](inside, leaves, path)
    if kind not in readers:
        raise malformed_error(path, got=f"{kind!r:.60}", expected=f"one of {', '.join([*_CONTAINERS, *readers])}")
    try:
        return readers[kind](inside, path)
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError, struct.error) as error:
        if isinstance(error, FormatError):
            raise
        raise malformed_error(path, got=f"{packed!r:.60}", expected=f"a packed {kind} ({error})") from None


def _map(items: Packed, leaves: Mapping[str, Read], path: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for item in _items(items, path):
        if not isinstance(item, list) or len(item) != 2:
            raise malformed_error(path, got=f"{item!r:.60}", expected="a key and a value")
        key = unpack(item[0], {}, f"{path} key")
        if type(key) not in (str, int) or key in found:
            raise malformed_error(path, got=f"the key {key!r:.60}", expected="different strings and integers as keys")
        found[key] = unpack(item[1], leaves, f"{path}[{key!r}]")
    return found


def _default(inside: Packed, leaves: Mapping[str, Read], path: str) -> defaultdict[Any, Any]:
    is_pair = isinstance(inside, list) and len(inside) == 2
    if not is_pair or not isinstance(inside[0], str) or inside[0] not in _FACTORIES:
        expected = "the name of a default factory, and a list of items"
        raise malformed_error(path, got=f"{inside!r:.60}", expected=expected)
    return defaultdict(_FACTORIES[inside[0]], _map(inside[1], leaves, path))


def _list(items: Packed, leaves: Mapping[str, Read], path: str) -> list[Any]:
    return [unpack(each, leaves, f"{path}[{index}]") for index, each in enumerate(_items(items, path))]


def _items(items: Packed, path: str) -> list[Packed]:
    if not isinstance(items, list):
        raise malformed_error(path, got=f"{items!r:.60}", expected="a list")
    return items


_CONTAINERS: dict[str, Callable[[Packed, Mapping[str, Read], str], Any]] = {
    "map": _map,
    "counter": lambda items, leaves, path: Counter(_map(items, leaves, path)),
    "default": _default,
    "list": _list,
    "tuple": lambda items, leaves, path: tuple(_list(items, leaves, path)),
}
_READERS: dict[str, Read] = {
    "int": lambda text, path: int(text, 16),
    "float": lambda text, path: struct.unpack(">d", bytes.fromhex(text))[0],
    "bytes": lambda text, path: base64.b64decode(text, validate=True),
}
