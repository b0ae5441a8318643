"""Comparison of named tensors within the rounding error of their computation.

The rounding error is measured, not estimated from a constant: a computation is repeated with inputs perturbed in
their last bit, and the change of every result is the scale of its rounding error. Parameters with a true gradient of
zero (a bias before a normalisation, the key bias of attention) contain nothing but such errors, which a constant
relative tolerance would report as a difference.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trimtab.state.object_snapshots import host_copy

Named = Mapping[str, Tensor]
Norms = dict[str, float]
_PART = 2**20  # Largest number of elements whose signs are drawn at a time.


@dataclass(frozen=True)
class Difference:
    """The tensor with the largest difference relative to its tolerance.

    `ratio` is relative to the tolerance (above 1, it exceeds rounding), `relative` to the norm of the expected tensor.
    """

    name: str
    ratio: float
    relative: float

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference."""
        return self.ratio <= 1


def norms(tensors: Named) -> Norms:
    """Return the 2-norm of every tensor in double precision, with a single transfer from the device."""
    return _numbers({name: _norm(each) for name, each in tensors.items()})


def finite_norms(tensors: Named) -> Norms:
    """Return the 2-norm of the finite values of every tensor: a mask may contain infinities."""
    # A generator, so that a single copy exists at a time.
    finite = (torch.nan_to_num(_dense(each), 0.0, 0.0, 0.0) for each in tensors.values())
    return _numbers({name: _norm(each) for name, each in zip(tensors, finite, strict=True)})


def distances(left: Named, right: Named, factor: float = 1.0) -> Norms:
    """Return the 2-norm of `left - right / factor` by name; infinite for a missing tensor or another shape.

    Equal infinities, and NaN at the same place, do not count as a difference.
    """
    same = [name for name, each in left.items() if name in right and each.shape == right[name].shape]
    found = _numbers({name: _norm(_difference(left[name], right[name], factor)) for name in same})
    return {name: found.get(name, math.inf) for name in left}


def _norm(tensor: Tensor) -> Tensor:
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(_dense(tensor), dtype=wide)
    return norm.abs()


def _numbers(found: Mapping[str, Tensor]) -> Norms:
    if not found:
        return {}
    device = next(iter(found.values())).device
    return dict(zip(found, torch.stack([each.to(device) for each in found.values()]).tolist(), strict=True))


def _difference(left: Tensor, right: Tensor, factor: float) -> Tensor:
    device = left.device if left.is_cuda else right.device
    left, right = _exact(left.detach()).to(device), _exact(right.detach()).to(device)
    if factor != 1.0:
        right = right / factor
    found = left - right
    if bool(found.isfinite().all()):
        return found
    return found.masked_fill((left == right) | (left.isnan() & right.isnan()), 0.0)


def total(sizes: Norms) -> float:
    """Return the 2-norm of all tensors together."""
    return math.sqrt(sum(size * size for size in sizes.values()))


def largest_difference(apart: Norms, allowed: Norms, sizes: Norms) -> Difference:
    """Return the tensor with the largest ratio of difference to tolerance."""
    found = Difference("", 0.0, 0.0)
    for name, error in apart.items():
        ratio = _ratio(error, allowed[name])
        if ratio > found.ratio or not found.name:
            found = Difference(name, ratio, _ratio(error, sizes[name]))
    return found


def _ratio(error: float, limit: float) -> float:
    if math.isnan(error):
        return math.inf
    if error == 0.0:
        return 0.0
    return error / limit if limit > 0 else math.inf


def low_precision(model: nn.Module) -> str:
    """Return the name of the first parameter dtype smaller than fp32, frozen and quantised parameters included.

    "" if there is none.
    """
    small = (p.dtype for p in model.parameters() if p.dtype.itemsize < torch.float32.itemsize)
    return str(next(small, "")).removeprefix("torch.")


@contextlib.contextmanager
def last_bits_moved(model: nn.Module, seed: int, epsilon: float = 0.0) -> Iterator[None]:
    """Perturb all parameters by about their last bit, randomly up or down, inside the context.

    `epsilon` is the relative size of the perturbation; 0 for the machine epsilon of every parameter's dtype.
    """
    held: list[tuple[Tensor, Tensor]] = []
    try:
        move_last_bits(model, seed, epsilon, lambda data: held.append((data, host_copy(data))))
        yield
    finally:
        with torch.no_grad():
            # In reverse: a parameter that overlaps an earlier one was copied after the earlier one's perturbation.
            for data, before in reversed(held):
                data.copy_(before)


def move_last_bits(
    model: nn.Module, seed: int, epsilon: float = 0.0, hold: Callable[[Tensor], None] | None = None
) -> None:
    """Perturb all parameters as `last_bits_moved` does; `hold` receives each parameter's data before."""
    generator = torch.Generator().manual_seed(seed)
    moved = set[tuple[object, ...]]()
    for parameter in model.parameters():
        if not parameter.is_floating_point() or parameter.layout is not torch.strided:
            continue
        data = parameter.data
        place = (data.device, data.data_ptr(), data.shape, data.stride())
        if place in moved and data.numel():  # Tied through `.data`: two perturbations could cancel.
            continue
        moved.add(place)
        if hold is not None:
            hold(data)
        size = max(epsilon, torch.finfo(data.dtype).eps)
        with torch.no_grad():
            for part in _parts(data):
                signs = torch.randint(0, 2, part.shape, generator=generator, dtype=torch.int8)
                part.mul_(1 + size * (2 * signs - 1).to(data.device, data.dtype))


def _parts(data: Tensor) -> Iterator[Tensor]:
    """Yield views of at most about `_PART` elements along the longest dimension."""
    if data.dim() == 0 or data.numel() <= _PART:
        yield data
        return
    dimension = max(range(data.dim()), key=lambda each: data.shape[each])
    length = data.shape[dimension]
    step = max(1, _PART * length // data.numel())
    for first in range(0, length, step):
        yield data.narrow(dimension, first, min(step, length - first))


def _exact(tensor: Tensor) -> Tensor:
    """Return a dense tensor in at least fp32: in half precision, the difference itself would be rounded."""
    dense = _dense(tensor)
    return dense.float() if dense.is_floating_point() and dense.itemsize < torch.float32.itemsize else dense


def _dense(tensor: Tensor) -> Tensor:
    """Return a strided floating-point tensor for taking a norm; integers and booleans become doubles."""
    found = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return found if found.is_floating_point() or found.is_complex() else found.double()
