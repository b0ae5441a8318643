"""State as two files: structure as JSON, tensors as safetensors; lossless, without pickle or executable content.

The files of a checkpoint are read during verification, so that bytes are read once and loaded exactly as verified.
safetensors memory-maps a file before its integrity is known, and an I/O error in a mapping kills the process. Therefore
this module parses the header itself, and reads each tensor from the verified descriptor into memory of its own.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from trimtab.checkpoint.atomic_directory import (
    CHANGED,
    TENSORS,
    THREADS,
    TREE,
    FileBuffer,
    Manifest,
    crc32_of_chunks,
    damaged_error,
    open_file,
    verify,
)
from trimtab.core.errors import DependencyError, FormatError, SaveError

Packed = Any  # JSON
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
# Dtypes known to every version of safetensors, by its names. Tensors of other dtypes are stored as bytes.
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_WRITTEN = frozenset(TYPES.values())
_LENGTH_BYTES = 8  # size of the header's length field in a safetensors file, little-endian
_LONGEST_HEAD = 2**24  # enough for a hundred thousand tensors
_INVALID = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, struct.error)


class Packer:
    """Packs states as JSON, and collects the tensors to write.

    Args:
        is_dry: True to check types only: no tensor data is read or copied, and the JSON is of no use.

    Attributes:
        tensors: Dense CPU tensors by name. Tensors with the same memory, shape and strides are stored once.
    """

    def __init__(self, *, is_dry: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._is_dry = is_dry
        self._named: dict[tuple[Any, ...], str] = {}
        self._written_from: set[int] = set()
        self._met: list[Tensor] = []  # references that keep addresses from being reused by other tensors

    def pack(self, value: Any, path: str = "state", depth: int = 0) -> Packed:
        """Return a value as JSON.

        Args:
            path: Location of `value`, for errors.

        Raises:
            FormatError: A type is unsupported, or the nesting exceeds `MAX_DEPTH`. The error names the location.
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in (int, float, str, bytes):
            return _scalar(value, path)
        if depth > MAX_DEPTH:
            raise FormatError(
                path,
                got=f"more than {MAX_DEPTH} levels",
                problem=f"{path:.60}... has more than {MAX_DEPTH} nested levels.",
                hint="Return a flatter structure that does not contain itself from state_dict().",
                code="state.too_deep",
            )
        if kind in _MAPPINGS:
            items = [[_key(k, path), self.pack(v, f"{path}[{k!r}]", depth + 1)] for k, v in value.items()]
            return {_MAPPINGS[kind]: [_factory_of(value, path), items] if kind is defaultdict else items}
        if kind in (list, tuple):
            return {kind.__name__: [self.pack(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(value)]}
        if kind in _TYPES:
            return {"tensor": self._tensor(value, path)}
        if isinstance(value, np.generic) or kind is np.ndarray:
            return {"array": self._array(value, path)}
        expected = "tensors, arrays, numbers, strings, bytes, None, and lists, tuples and dicts of these types"
        raise _unsupported(path, f"a {kind.__module__}.{kind.__qualname__}", expected)

    def _tensor(self, tensor: Tensor, path: str) -> Packed:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
            raise _not_stored(path, f"a {kind} tensor", "Return a dense tensor from", "tensor")
        if self._is_dry:
            return None
        tensor = tensor.detach().resolve_conj().resolve_neg()
        name = self._named.get(memory := _memory_of(tensor))
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

    def _array(self, array: Any, path: str) -> Packed:
        if array.dtype.char not in _ARRAYS or not array.dtype.isnative:
            dtype = f"a NumPy array of {array.dtype!r}"
            raise _not_stored(
                path, dtype, "Return an array of booleans, integers or floats in native order from", "array"
            )
        if self._is_dry:
            return None
        whole = np.array(array, order="C")  # a copy, because torch warns about read-only arrays
        packed = self._tensor(torch.from_numpy(whole.reshape(-1).view(np.uint8)), path)
        is_scalar = isinstance(array, np.generic)
        return {"bytes": packed, "shape": list(whole.shape), "type": array.dtype.name, "is_scalar": is_scalar}


def _scalar(value: Any, path: str) -> Packed:
    if isinstance(value, int):
        return value if -_WORD <= value < _WORD else {"int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _unsupported(path, f"{value!r:.40}", "a string that UTF-8 can encode") from None
    return value


def _key(key: Any, path: str) -> Packed:
    if type(key) not in (str, int):
        raise _unsupported(f"{path} key {key!r:.40}", f"a {type(key).__name__}", "a string or an integer")
    return _scalar(key, path)


def _factory_of(value: defaultdict[Any, Any], path: str) -> str:
    for name, factory in _FACTORIES.items():
        if factory is value.default_factory:
            return name
    expected = f"one of the factories {', '.join(filter(None, _FACTORIES))}"
    raise _unsupported(path, f"a defaultdict with the factory {value.default_factory!r:.60}", expected)


def _unsupported(path: str, got: str, expected: str) -> FormatError:
    hint = "Convert it to supported types in state_dict(), and back in load_state_dict()."
    return FormatError(path, got=got, expected=expected, hint=hint, code="state.unsupported_type")


def _not_stored(path: str, got: str, what_to_do: str, kind: str, reason: str = "") -> FormatError:
    return FormatError(
        path,
        got=got,
        problem=f"{path} is {got}, which checkpoints cannot store{reason}.",
        hint=f"{what_to_do} state_dict(), and convert it in load_state_dict().",
        code=f"state.unsupported_{kind}",
    )


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors with the same memory, shape, strides and dtype."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def snapshot(state: Any) -> Any:
    """Return a deep copy of a state with tensors on the CPU. Tensors with shared memory share a copy."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if (memory := _memory_of(value)) not in copies:
                copies[memory] = value.detach().to("cpu", copy=True)
            return copies[memory]
        return value.copy() if isinstance(value, np.ndarray | Counter) else value

    return tree_map(copy, state)


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
        return dense if dense.dtype in _WRITTEN else dense.reshape(-1).view(torch.uint8)
    except RuntimeError as error:
        dtype = f"a tensor of dtype {_name(tensor.dtype)}"
        raise _not_stored(path, dtype, "Return a tensor of a standard dtype from", "tensor", f" ({error})") from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def write_state(folder: Path, state: Mapping[str, Any], prefix: str = "") -> None:
    """Write a state as two files. Its tensors must not change during the call.

    Raises:
        FormatError: The state contains an unsupported value.
        SaveError, OSError: Writing failed.
        DependencyError: safetensors is not installed.
    """
    packer, library = Packer(), safetensors_library()
    text = json.dumps(packer.pack(state), allow_nan=False)
    tensors, tree = folder / f"{prefix}{TENSORS}", folder / f"{prefix}{TREE}"
    try:
        library.torch.save_file(packer.tensors, tensors)
    except (library.SafetensorError, OSError) as error:
        raise SaveError(
            str(tensors),
            got=str(error),
            problem=f"{tensors} could not be written ({error}).",
            hint="Free space on the disk and check that the folder is writable; earlier checkpoints are intact.",
        ) from None
    tree.write_text(text, encoding="utf-8")
    tensors.chmod(tree.stat().st_mode)  # safetensors sets owner-only permissions and ignores the umask


def safetensors_library() -> Any:
    """Return the module safetensors; `DependencyError` if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise DependencyError(
            "checkpoints",
            problem="Checkpoints need the package safetensors, which is not installed.",
            hint="Install it: pip install 'trimtab[checkpoint]'.",
        ) from None
    return safetensors


def digest_of(state: Any) -> str:
    """Return a SHA-256 of a state; equal digests mean bitwise equal files. `FormatError` for an unsupported value."""
    packer = Packer()
    found = hashlib.sha256(json.dumps(packer.pack(state), allow_nan=False).encode())
    for tensor in packer.tensors.values():
        found.update(_bytes_of(tensor))
    return found.hexdigest()


# Reading.


class StateFiles:
    """Contents of a rank's two state files, stored while the files are read for their checksums.

    Args:
        prefix: Prefix of the rank's file names.

    Attributes:
        manifest: Manifest of the verified folder; None if the folder was not verified.
        tree: Contents of the JSON file.
        tensors: Tensors by name, in file order; None if the tensor file is missing, invalid or too large.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self.manifest: Manifest | None = None
        self.tree = bytearray()
        self.tensors: dict[str, Tensor] | None = None
        self._head, self._read_head = b"", bytearray()

    @classmethod
    def verified(cls, folder: Path) -> StateFiles:
        """Verify a folder as `verify` does, and return the state files of rank 0."""
        files = cls()
        files.manifest = verify(folder, files._room)
        if files._head != files._read_head:
            raise damaged_error(folder, TENSORS, f"{folder / TENSORS} changed while it was read.", CHANGED)
        return files

    @classmethod
    def read(cls, folder: Path, prefix: str = "") -> StateFiles:
        """Read the files of a folder that another rank has verified; `OSError` if reading failed."""
        files = cls(prefix)
        with ThreadPoolExecutor(THREADS) as pool:
            for name in (f"{prefix}{TREE}", f"{prefix}{TENSORS}"):
                with open_file(folder / name) as (descriptor, size):
                    crc32_of_chunks(descriptor, size, pool, files._room(name, descriptor, size))
        return files

    def _room(self, name: str, descriptor: int, size: int) -> FileBuffer | None:
        if name == f"{self._prefix}{TREE}":
            self.tree = bytearray(size)
            return FileBuffer([memoryview(self.tree)])
        if name != f"{self._prefix}{TENSORS}" or (layout := _laid_out(descriptor, size)) is None:
            return None
        self._head, self.tensors = layout
        self._read_head = bytearray(len(self._head))
        return FileBuffer([memoryview(self._read_head), *map(_bytes_of, self.tensors.values())])


def _laid_out(descriptor: int, size: int) -> tuple[bytes, dict[str, Tensor]] | None:
    """Return the header of a tensor file of `size` bytes, and empty tensors in file order; None for an invalid file."""
    with contextlib.suppress(*_INVALID, OSError, MemoryError):
        length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
        if length > min(_LONGEST_HEAD, size):
            return None
        head = os.pread(descriptor, _LENGTH_BYTES + length, 0)
        said = json.loads(head[_LENGTH_BYTES:])
        said.pop("__metadata__", None)
        in_turn = dict(sorted(said.items(), key=lambda item: item[1]["data_offsets"]))
        end = 0
        for each in in_turn.values():
            end = _end_of(each, end)
        if len(head) == _LENGTH_BYTES + length and len(head) + end == size:  # checked before memory is allocated
            return head, {name: _without_values(each) for name, each in in_turn.items()}
    return None


def _end_of(said: Any, start: int) -> int:
    """Return the end offset of a tensor that must begin at `start`."""
    (begin, end), shape = said["data_offsets"], said["shape"]
    is_one = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not is_one or begin != start or end - begin != math.prod(shape) * TYPES[said["dtype"]].itemsize:
        raise ValueError("the offsets do not match the tensor's shape and dtype")
    return int(end)


def _without_values(said: Any) -> Tensor:
    return torch.empty(said["shape"], dtype=TYPES[said["dtype"]], device="cpu")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_state(folder: Path, prefix: str = "", files: StateFiles | None = None) -> Any:
    """Return a saved state with CPU tensors. Verify the folder first.

    Args:
        files: Contents of the files if they were read during verification.

    Raises:
        FormatError: The files are not a valid state.
    """
    path = folder / f"{prefix}{TREE}"
    try:
        files = files or StateFiles.read(folder, prefix)
        packed = json.loads(files.tree.decode())
        if files.tensors is None:
            path = folder / f"{prefix}{TENSORS}"
            raise ValueError("its header is invalid, or memory is too small for its tensors")
        unpacker = Unpacker(files.tensors)
        state = unpacker.unpack(packed)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            str(path),
            problem=f"{path} does not contain a readable checkpoint state ({error}).",
            hint="Resume from another checkpoint.",
            code="state.unreadable",
        ) from None
    unpacker.require_all_given()
    return state


class Unpacker:
    """Rebuilds packed states with the tensors of a file. Equal names return the same tensor object."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._given: dict[str, tuple[Packed, Tensor]] = {}
        self._readers: dict[str, Callable[[Packed, str], Any]] = {
            "map": self._map,
            "counter": lambda items, path: Counter(self._map(items, path)),
            "default": self._default,
            "list": self._list,
            "tuple": lambda items, path: tuple(self._list(items, path)),
            "int": lambda text, path: int(text, 16),
            "float": lambda text, path: struct.unpack(">d", bytes.fromhex(text))[0],
            "bytes": lambda text, path: base64.b64decode(text, validate=True),
            "tensor": self._tensor,
            "array": self._array,
        }

    def unpack(self, packed: Packed, path: str = "state") -> Any:
        """Return the value of a packed state; `FormatError` if `packed` is not one."""
        if packed is None or isinstance(packed, bool | str | int | float):
            return packed
        if not isinstance(packed, dict) or len(packed) != 1:
            raise _malformed(path, got=f"{packed!r:.60}", expected="a JSON object with one key")
        ((kind, inside),) = packed.items()
        if kind not in self._readers:
            raise _malformed(path, got=f"{kind!r:.60}", expected=f"one of {', '.join(self._readers)}")
        try:
            return self._readers[kind](inside, path)
        except (FormatError, RecursionError):
            raise
        except _INVALID as error:
            raise _malformed(path, got=f"{packed!r:.60}", expected=f"a packed {kind} ({error})") from None

    def require_all_given(self) -> None:
        """Raise `FormatError` if the file contains a tensor without a reference."""
        if unnamed := sorted(self._tensors.keys() - self._given.keys()):
            raise _malformed("state", got=f"a tensor {unnamed[0]!r} without a reference", expected="none")

    def _map(self, items: Packed, path: str) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for item in _as_list(items):
            name, value = _as_list(item)
            key = self.unpack(name, path)
            if type(key) not in (str, int) or key in found:
                raise ValueError(f"the key {key!r:.60} is no string or integer, or occurs twice")
            found[key] = self.unpack(value, f"{path}[{key!r}]")
        return found

    def _default(self, inside: Packed, path: str) -> defaultdict[Any, Any]:
        factory, items = _as_list(inside)
        return defaultdict(_FACTORIES[factory], self._map(items, path))

    def _list(self, items: Packed, path: str) -> list[Any]:
        return [self.unpack(each, f"{path}[{index}]") for index, each in enumerate(_as_list(items))]

    def _tensor(self, packed: Packed, path: str) -> Tensor:
        name, shape, dtype = packed["name"], packed["shape"], getattr(torch, str(packed["type"]), None)
        order = packed.get("order", list(range(len(shape))))
        are_sizes = all(type(size) is int and size >= 0 for size in shape)
        if not are_sizes or sorted(order) != list(range(len(shape))) or not isinstance(dtype, torch.dtype):
            raise ValueError("invalid shape, dtype or order")
        if name in self._given:
            before, tensor = self._given[name]
            if before != packed:
                raise ValueError(f"expected {before!r:.80}, as at the tensor's first use")
            return tensor
        tensor, laid_out = self._tensors[name], [shape[d] for d in order]
        is_bytes = dtype not in _WRITTEN
        if is_bytes and tensor.dtype is torch.uint8 and tensor.numel() == math.prod(shape) * dtype.itemsize:
            tensor = tensor.view(dtype).reshape(laid_out)
        if tensor.dtype is not dtype or list(tensor.shape) != laid_out:
            raise ValueError(f"the tensor file contains {_name(tensor.dtype)}, {list(tensor.shape)}")
        tensor = tensor.permute([order.index(d) for d in range(len(order))])
        self._given[name] = (packed, tensor)
        return tensor

    def _array(self, packed: Packed, path: str) -> Any:
        found = self._tensor(packed["bytes"], path).numpy().view(_NAMED[packed["type"]])
        array = found.reshape(packed["shape"])
        return array[()] if packed["is_scalar"] else array


def _as_list(items: Packed) -> list[Packed]:
    if not isinstance(items, list):
        raise TypeError("not a list")
    return items


def _malformed(path: str, got: str, expected: str) -> FormatError:
    return FormatError(
        path,
        got=got,
        expected=expected,
        problem=f"The checkpoint's contents are invalid at {path}: got {got}, expected {expected}.",
        hint="Resume from another checkpoint.",
        code="state.malformed",
    )
