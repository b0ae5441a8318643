"""A state as JSON and named tensors, bit for bit, and back: no pickle, nothing that could run.

Containers and what JSON does not know are objects of one key that says what they are; mappings keep the types and the
order of their keys.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import FormatError

Packed = Any  # JSON
_KEYS = (str, int, float, bool, type(None))
# Types of which a file holds numbers; of any other it holds bytes.
_WRITTEN = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}


class Packer:
    """Packs states; `tensors` are those that were met, the same memory once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._named: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, path: str = "state") -> Packed:
        """Return a value as JSON.

        Raises:
            FormatError: something in it is no number, text, tensor, list, tuple or mapping; names where.
        """
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": float(value).hex()}
        if isinstance(value, Tensor):
            return self._packed(value, path)
        if isinstance(value, Mapping):
            return {"map": [[self._key(key, path), self.pack(each, f"{path}[{key!r}]")] for key, each in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.pack(each, f"{path}[{index}]") for index, each in enumerate(value)]}
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        raise FormatError(
            path,
            given=f"a {type(value).__name__}",
            expected="tensors, numbers, texts, bytes, None, and lists, tuples and mappings of them",
        )

    def _key(self, key: Any, path: str) -> Packed:
        if type(key) not in _KEYS:
            raise FormatError(f"{path} key {key!r:.40}", given=f"a {type(key).__name__}", expected="a text or a number")
        return self.pack(key, path)

    def _packed(self, tensor: Tensor, path: str) -> Packed:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise FormatError(path, given=f"a tensor that is {tensor.layout}", expected="one that holds its values")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        where = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        name = self._named.get(where) if tensor.numel() else None
        if name is None:
            name = self._named[where] = str(len(self.tensors))
            is_written = tensor.dtype in _WRITTEN
            self.tensors[name] = tensor if is_written else tensor.contiguous().reshape(-1).view(torch.uint8)
        return {"tensor": name, "shape": list(tensor.shape), "type": _type_name(tensor.dtype)}


def unpack(packed: Packed, tensors: Mapping[str, Tensor], path: str = "state") -> Any:
    """Return what was packed.

    Raises:
        FormatError: no packed state, or tensors that are others.
    """
    if not isinstance(packed, dict):
        if packed is None or isinstance(packed, bool | str | int | float):
            return packed
        raise FormatError(path, given=f"a {type(packed).__name__}", expected="a packed value")
    kind = next(iter(packed), "")
    if kind == "tensor":
        return _tensor(packed, tensors, path)
    if len(packed) != 1 or kind not in _UNPACKED:
        raise FormatError(path, given=f"{sorted(packed)[:4]}", expected=f"one of {', '.join(_UNPACKED)} or tensor")
    try:
        return _UNPACKED[kind](packed[kind], tensors, path)
    except (TypeError, ValueError, OverflowError, binascii.Error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(path, given=f"{packed!r:.60}", expected=f"a packed {kind} ({error})") from None


def _map(items: Any, tensors: Mapping[str, Tensor], path: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in items:
        name = unpack(key, tensors, path)
        found[name] = unpack(value, tensors, f"{path}[{name!r}]")
    return found


def _list(items: Any, tensors: Mapping[str, Tensor], path: str) -> list[Any]:
    if not isinstance(items, list):
        raise FormatError(path, given=f"a {type(items).__name__}", expected="a list")
    return [unpack(each, tensors, f"{path}[{index}]") for index, each in enumerate(items)]


_UNPACKED: dict[str, Any] = {
    "map": _map,
    "list": _list,
    "tuple": lambda items, tensors, path: tuple(_list(items, tensors, path)),
    "float": lambda text, tensors, path: float.fromhex(text),
    "bytes": lambda text, tensors, path: base64.b64decode(text, validate=True),
}


def _tensor(packed: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> Tensor:
    name = packed["tensor"]
    if name not in tensors:
        raise FormatError(path, given=f"no tensor {name!r}", expected="one of the file's")
    tensor, shape = tensors[name], packed.get("shape")
    dtype = getattr(torch, str(packed.get("type")), None)
    if isinstance(dtype, torch.dtype) and dtype not in _WRITTEN:
        whole = tensor.dtype is torch.uint8 and isinstance(shape, list)
        if whole and tensor.numel() == math.prod(shape) * dtype.itemsize:
            tensor = tensor.view(dtype).reshape(shape)
    if shape != list(tensor.shape) or dtype is not tensor.dtype:
        given = f"a tensor of {_type_name(tensor.dtype)}, {list(tensor.shape)}"
        raise FormatError(path, given=given, expected=f"{packed.get('type')}, {shape}")
    return tensor


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
