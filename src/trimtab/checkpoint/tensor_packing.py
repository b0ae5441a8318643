"""Lossless packing of tensors and arrays: JSON with shape and dtype, and the values in a separate tensor file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.checkpoint.state_json import Packed, as_mapping_type, malformed_error, pack
from trimtab.checkpoint.tensor_files import WRITTEN
from trimtab.core.errors import FormatError

_TYPES = (Tensor, torch.nn.Parameter)
_ARRAYS = "?bhilqBHILQefd"  # dtype codes of booleans, integers and floats in native byte order
# Closed list, as a file could name other dtypes.
_NAMED = {name: np.dtype(name) for name in (np.dtype(code).name for code in _ARRAYS)}


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
        """Return a tensor or array as JSON with a name from `tensors`, or None for any other value.

        Raises:
            FormatError: The tensor has no dense values, or the array's dtype is not numeric.
        """
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
