"""State as two files: structure as JSON, tensors as safetensors; lossless, without pickle or executable content."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.checkpoint.manifest import TENSORS, TREE, open_file
from trimtab.checkpoint.verified_read import WRITTEN, StateFiles, read_tensors, write_tensors
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
_TYPES = (Tensor, torch.nn.Parameter)
_ARRAYS = "?bhilqBHILQefd"  # dtype codes of booleans, integers and floats in native byte order
# Closed list, as a file could name other dtypes.
_NAMED = {name: np.dtype(name) for name in (np.dtype(code).name for code in _ARRAYS)}


def pack(value: Any, leaf: Leaf, path: str = "state", depth: int = 0) -> Packed:
    """Return a value as JSON.

    Args:
        leaf: Packs values that are not built-in Python types.
        path: Location of `value`, for errors.

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
    int: lambda value, path: value if -_WORD <= value < _WORD else {"int": hex(value)},
    float: lambda value, path: value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()},
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
    """Return the value of a packed state; `FormatError` if `packed` is not one."""
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


class Packer:
    """Packs tensors and arrays, and collects the tensors to write.

    Attributes:
        tensors: Dense CPU tensors by name. Tensors with the same memory, shape and strides are stored once.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._named: dict[tuple[Any, ...], str] = {}
        self._written_from: set[int] = set()
        self._met: list[Tensor] = []  # references that keep addresses from being reused by other tensors

    def leaf(self, value: Any, path: str) -> dict[str, Packed] | None:
        """Return a tensor or array as JSON with a name from `tensors`; else None; `FormatError` if not numeric."""
        if type(value) in _TYPES:
            return {"tensor": self._packed(value, path)}
        if isinstance(value, np.generic) or type(value) is np.ndarray:
            return {"array": self._packed_array(value, path)}
        return None

    def _packed(self, tensor: Tensor, path: str) -> Packed:
        _require_held(tensor, path)
        tensor = tensor.detach().resolve_conj().resolve_neg()
        name = self._named.get(memory := memory_of(tensor))
        if name is None:
            name = self._named[memory] = f"{len(self.tensors)} {path.removeprefix('state')}"
            self._met.append(tensor)
            self.tensors[name] = self._alone(_written(tensor, path))
        packed = {"name": name, "shape": list(tensor.shape), "type": _name(tensor.dtype)}
        order = _order(tensor)
        return packed if order == sorted(order) else packed | {"order": order}

    def _alone(self, dense: Tensor) -> Tensor:
        """Return the tensor, or a copy if another written tensor uses the storage: views may differ in shape."""
        at = dense.untyped_storage().data_ptr()
        if dense.nbytes and at in self._written_from:
            return dense.clone()
        self._written_from.add(at)
        return dense

    def _packed_array(self, array: Any, path: str) -> Packed:
        _require_numbers(array, path)
        whole = np.array(array, order="C")  # a copy, because torch warns about read-only arrays
        packed = self._packed(torch.from_numpy(whole.reshape(-1).view(np.uint8)), path)
        is_scalar = isinstance(array, np.generic)
        return {"bytes": packed, "shape": list(whole.shape), "type": array.dtype.name, "is_scalar": is_scalar}


def require_packable(state: Any) -> None:
    """Raise `FormatError` for values of unsupported types in a state. No tensor data is read or copied."""
    pack(state, _looked_at)


def _looked_at(value: Any, path: str) -> dict[str, Packed] | None:
    if type(value) in _TYPES:
        _require_held(value, path)
        return {"tensor": None}
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        _require_numbers(value, path)
        return {"array": None}
    return None


def _require_held(tensor: Tensor, path: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise FormatError(
            path,
            got=f"a {kind} tensor",
            expected="a dense tensor",
            problem=f"{path} is a {kind} tensor, which checkpoints cannot store.",
            hint="Return a dense tensor from state_dict(), and convert it in load_state_dict().",
            code="state.unsupported_tensor",
        )


def _require_numbers(array: Any, path: str) -> None:
    kind = array.dtype
    if kind.char not in _ARRAYS or not kind.isnative:
        raise FormatError(
            path,
            got=f"{kind!r}",
            problem=f"{path} is a NumPy array of {kind!r}, which checkpoints cannot store.",
            hint="Return an array of booleans, integers or floats in native byte order from state_dict().",
            code="state.unsupported_array",
        )


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors with the same memory, shape, strides and dtype."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def snapshot(state: Any) -> Any:
    """Return a deep copy of a state with tensors on the CPU. Tensors with shared memory share a copy."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if (memory := memory_of(value)) not in copies:
                copies[memory] = value.detach().to("cpu", copy=True)
            return copies[memory]
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, dict):
            return as_mapping_type(value, {key: copy(each) for key, each in value.items()})
        return type(value)(map(copy, value)) if type(value) in (list, tuple) else value

    return copy(state)


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions ordered by decreasing stride if the tensor is dense, else the original order."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], -tensor.shape[d], d))
    return order if tensor.permute(order).is_contiguous() else list(range(tensor.dim()))


def _written(tensor: Tensor, path: str) -> Tensor:
    """Return the tensor's values in memory order, in a storage of exactly this size."""
    dense = tensor.permute(_order(tensor)).cpu().contiguous()
    if dense.untyped_storage().nbytes() != dense.nbytes:
        dense = dense.clone()
    try:
        return dense if dense.dtype in WRITTEN else dense.reshape(-1).view(torch.uint8)
    except RuntimeError as error:
        raise FormatError(
            path,
            got=_name(tensor.dtype),
            problem=f"{path} is a tensor of dtype {_name(tensor.dtype)}, which checkpoints cannot store ({error}).",
            hint="Return a tensor of a standard dtype from state_dict(), and convert it in load_state_dict().",
            code="state.unsupported_tensor",
        ) from None


class Unpacker:
    """Rebuilds packed tensors from a tensor file. Equal names return the same tensor object."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._given: dict[str, tuple[Packed, Tensor]] = {}
        self.leaves = {"tensor": self._tensor, "array": self._array}

    def require_all_given(self, path: str = "state") -> None:
        """Raise `FormatError` if the file contains a tensor without a reference."""
        if unnamed := sorted(self._tensors.keys() - self._given.keys()):
            raise FormatError(
                path,
                got=unnamed[0],
                problem=f"The tensor file has a tensor {unnamed[0]!r} that the state does not use.",
                hint="Resume from another checkpoint.",
                code="state.malformed",
            )

    def _tensor(self, packed: Packed, path: str) -> Tensor:
        name, shape, dtype, order = _parts(packed, path)
        if name not in self._tensors:
            raise FormatError(
                path,
                got=f"the tensor name {name!r}",
                problem=f"{path} is the tensor {name!r}, which the tensor file does not contain.",
                hint="Resume from another checkpoint.",
                code="state.malformed",
            )
        if name in self._given:
            before, tensor = self._given[name]
            if before != packed:
                raise malformed_error(
                    path, got=f"{packed!r:.80}", expected=f"{before!r:.80}, as at the tensor's first use"
                )
            return tensor
        tensor, laid_out = self._tensors[name], [shape[d] for d in order]
        is_bytes = dtype not in WRITTEN
        if is_bytes and tensor.dtype is torch.uint8 and tensor.numel() == math.prod(shape) * dtype.itemsize:
            tensor = tensor.view(dtype).reshape(laid_out)
        if tensor.dtype is not dtype or list(tensor.shape) != laid_out:
            given = f"a tensor of {_name(tensor.dtype)}, {list(tensor.shape)}"
            raise malformed_error(path, got=given, expected=f"{_name(dtype)}, {laid_out}")
        tensor = tensor.permute([order.index(d) for d in range(len(order))])
        self._given[name] = (packed, tensor)
        return tensor

    def _array(self, packed: Packed, path: str) -> Any:
        found = self._tensor(packed["bytes"], path).numpy().view(_NAMED[packed["type"]])
        array = found.reshape(packed["shape"])
        return array[()] if packed["is_scalar"] else array


def _parts(packed: Packed, path: str) -> tuple[str, list[int], torch.dtype, list[int]]:
    """Return name, shape, dtype and dimension order of a packed tensor."""
    shape = packed["shape"]
    order = packed.get("order", list(range(len(shape))))
    dtype = getattr(torch, str(packed["type"]), None)
    are_sizes = all(type(size) is int and size >= 0 for size in shape)
    if not are_sizes or sorted(order) != list(range(len(shape))) or not isinstance(dtype, torch.dtype):
        raise malformed_error(path, got=f"{packed!r:.80}", expected="the shape, dtype and order of a tensor")
    return str(packed["name"]), shape, dtype, order


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_state(folder: Path, state: Mapping[str, Any], prefix: str = "") -> None:
    """Write a state as two files. Its tensors must not change during the call.

    Raises:
        FormatError: The state contains an unsupported value.
        SaveError, OSError: Writing failed.
        DependencyError: safetensors is not installed.
    """
    packer = Packer()
    packed = pack(state, packer.leaf)
    tensors, tree = folder / f"{prefix}{TENSORS}", folder / f"{prefix}{TREE}"
    write_tensors(tensors, packer.tensors)
    tree.write_text(json.dumps(packed, allow_nan=False), encoding="utf-8")
    tensors.chmod(tree.stat().st_mode)  # safetensors sets owner-only permissions and ignores the umask


def digest_of(state: Any) -> str:
    """Return a SHA-256 of a state; equal digests mean bitwise equal files. `FormatError` for an unsupported value."""
    packer = Packer()
    found = hashlib.sha256(json.dumps(pack(state, packer.leaf), allow_nan=False).encode())
    for tensor in packer.tensors.values():
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_state(folder: Path, prefix: str = "", *, taken: StateFiles | None = None) -> Any:
    """Return a saved state with CPU tensors. Verify the folder first.

    Args:
        taken: Contents of the files if they were read during verification.

    Raises:
        FormatError: The files are not a valid state.
        DependencyError: safetensors is not installed.
    """
    path = folder / f"{prefix}{TREE}"
    try:
        packed = json.loads((_bytes_of(path) if taken is None else taken.tree).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    unpacker = Unpacker(read_tensors(folder / f"{prefix}{TENSORS}") if taken is None else taken.tensors)
    try:
        state = unpack(packed, unpacker.leaves)
    except RecursionError:
        raise _unreadable(path, "too many nested levels") from None
    unpacker.require_all_given()
    return state


def _unreadable(path: Path, reason: str) -> FormatError:
    return FormatError(
        str(path),
        problem=f"{path} does not contain a readable checkpoint state ({reason}).",
        hint="Resume from another checkpoint.",
        code="state.unreadable",
    )


def _bytes_of(path: Path) -> bytes:
    with open(open_file(path)[0], "rb") as file:
        return file.read()
