"""Number of samples of a batch, read from its containers.

A tensor or array holds a sample per index of the first dimension, a list of texts or numbers a sample per item. A list
or tuple of further kinds has two readings: rows (a sample per item) or columns (tensors with equal first dimensions). A
number of samples is accepted if every leaf agrees under some reading, and if a leaf, or two lists read as rows, confirm
the number. Otherwise the number is unknown, and the batch is not split.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

PLAIN: frozenset[type] = frozenset({str, bytes, bool, int, float, complex, type(None)})  # Types of most constants.
CONSTANTS: tuple[type, ...] = (*PLAIN, np.generic, enum.Enum, os.PathLike, torch.dtype, torch.device)
_LEAVES: tuple[type, ...] = (Tensor, np.ndarray, *CONSTANTS)
_CHANNELS, _IMAGE_DIMENSIONS = (1, 3, 4), 3
_MOST_LEAVES = 1000  # Largest number of leaves inspected to explain an unknown number.


class SampleCount(NamedTuple):
    """Number of samples of a batch.

    Args:
        samples: number of samples; None if unknown.
        is_splittable: True if the containers show which parts belong to which sample.
        reason: clause that explains why the number is unknown or the batch cannot be split; "" otherwise.
        code: code of the reason, such as "samples.ambiguous_list"; "" otherwise.
    """

    samples: int | None
    is_splittable: bool = False
    reason: str = ""
    code: str = ""


class _CountAgreement(NamedTuple):
    """Agreement of a part of a batch with a number of samples.

    Attributes:
        is_free: True if the part agrees with any number.
        is_ambiguous: True if there are two ways to split the part.
        firm: number of leaves that confirm the number.
        row_lists: number of lists read as one sample per item.
        weak: number of tensors in lists of similar items, which do not confirm the number.
        unsliceable: layouts of tensors that a split would have to slice and cannot.
    """

    fits: bool
    is_free: bool = False
    is_ambiguous: bool = False
    firm: int = 0
    row_lists: int = 0
    tensors: int = 0
    weak: int = 0
    unsliceable: frozenset[str] = frozenset()


_NO = _CountAgreement(False)
_FREE = _CountAgreement(True, is_free=True)
_FIRM = _CountAgreement(True, firm=1)
_TENSOR = _CountAgreement(True, firm=1, tensors=1)
_TEXTS = _CountAgreement(True)
_ROWS = _CountAgreement(True, row_lists=1)


def read_sample_count(batch: Any) -> SampleCount:
    """Return the number of samples of a batch, and whether the batch can be split."""
    if samples := quick_samples(batch):
        return SampleCount(samples, is_splittable=True)
    fits = {number: _fit(batch, number, is_root=True) for number in sorted(_candidates(batch))}
    confirmed = [number for number, fit in fits.items() if fit.fits and (fit.firm > 0 or fit.row_lists > 1)]
    rivals = [number for number, fit in fits.items() if fit.weak and number not in confirmed]
    if len(confirmed) != 1 or rivals:
        reason, code = _why_unknown(batch, confirmed + rivals if confirmed else [])
        return SampleCount(None, reason=reason, code=code)
    (samples,) = confirmed
    fit = fits[samples]
    if fit.is_ambiguous:
        reason = f"a list in the batch of {samples} samples could hold samples or columns"
        return SampleCount(samples, reason=reason, code="samples.ambiguous_list")
    if fit.unsliceable:
        reason = f"{' and '.join(sorted(fit.unsliceable))} tensors cannot be sliced"
        return SampleCount(samples, reason=reason, code="samples.unsliceable")
    return SampleCount(samples, is_splittable=True)


def quick_samples(batch: Any) -> int:
    """Return the number of samples of a tuple, list or mapping of dense tensors of equal length; else 0.

    Mappings in a mapping, and a single mapping in a tuple, may hold them; several in a sequence could be samples.
    """
    kind, most_mappings = type(batch), 0
    if kind is dict or isinstance(batch, Mapping):
        items, most_mappings = batch.values(), len(batch)
    elif kind is tuple or kind is list:
        items, most_mappings = batch, int(kind is tuple)
    else:
        return 0
    samples, is_images = 0, kind is list
    for each in items:
        if type(each) is Tensor:
            size = each.size(0) if each.dim() and each.layout is torch.strided and not each.is_nested else 0
        else:
            size = quick_samples(each) if most_mappings and isinstance(each, Mapping) else 0
            most_mappings -= 1
        if not size or (samples and size != samples):
            return 0
        samples, is_images = size, is_images and is_image(each)
    return 0 if is_images else samples


def is_leaf(value: Any) -> bool:
    """Return True for a tensor, an array, a constant, or a list or tuple of constants."""
    return isinstance(value, _LEAVES) or _is_constants(value)


def is_record(value: Any) -> bool:
    """Return True for a mapping, named tuple or dataclass: containers with named parts."""
    return isinstance(value, Mapping) or is_named_tuple(value) or is_dataclass(value)


def is_named_tuple(value: Any) -> bool:
    """Return True for a named tuple of independent parts."""
    return isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, PackedSequence)


def is_dataclass(value: Any) -> bool:
    """Return True for an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def is_sequence(value: Any) -> bool:
    """Return True for a list or tuple that is not a named tuple."""
    return (
        isinstance(value, list | tuple)
        and not isinstance(value, torch.Size | PackedSequence)
        and (not hasattr(value, "_fields"))
    )


def container_parts(value: Any) -> list[Any]:
    """Return the parts of a container."""
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, name) for name in set_fields(value)]
    return list(value)


def set_fields(value: Any) -> list[str]:
    """Return the names of a dataclass's fields that have a value. Fields with `init=False` may have none."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def leaf_samples(leaf: Any, samples: int | None = None) -> int | None:
    """Return the number of samples of a leaf; None for constants.

    In a batch of `samples` samples, a tuple with this number of texts holds one per sample, as made by
    `torch.utils.data.default_collate`.
    """
    if isinstance(leaf, Tensor | np.ndarray):
        return (leaf.size(0) if isinstance(leaf, Tensor) else leaf.shape[0]) if leaf.ndim else None
    if isinstance(leaf, list):
        return len(leaf) or None
    is_texts = isinstance(leaf, tuple) and len(leaf) == samples and all(isinstance(item, str | bytes) for item in leaf)
    return samples if is_texts else None


def is_list_of_rows(value: Any, samples: int) -> bool:
    """Return True if a list or tuple that is not a leaf holds one sample per item, in a batch of `samples` samples."""
    if len(value) != samples or not _are_of_one_kind(value):
        return False
    columns = _columns(value, samples)
    return columns.is_free or not columns.fits


def _is_constants(value: Any) -> bool:
    """Return True for a list or tuple of constants that are not tensors."""
    if type(value) is not list and (not isinstance(value, tuple) or is_named_tuple(value)):
        return False
    if value and type(value[0]) in PLAIN and PLAIN.issuperset(map(type, value)):
        return True
    return all(isinstance(item, CONSTANTS) for item in value)


def is_plain(value: Any) -> bool:
    """Return True for a list or tuple of plain constants, or of lists, tuples or dicts of plain constants.

    Takes no Python call per item, since a batch may hold thousands of texts.
    """
    kinds = set(map(type, value))
    if kinds <= PLAIN:
        return True
    if kinds == {dict}:
        return PLAIN.issuperset(map(type, itertools.chain.from_iterable(map(dict.values, value))))
    return kinds <= {list, tuple} and PLAIN.issuperset(map(type, itertools.chain.from_iterable(value)))


def _candidates(batch: Any) -> set[int]:
    """Return the numbers of samples to compare with a batch: lengths of lists, and the size of the first leaf."""
    found = set[int]()

    def is_decided(value: Any) -> bool:
        if is_leaf(value):
            size = leaf_samples(value)
            found.update(() if size is None else (size,))
            return size is not None
        if is_sequence(value):
            found.add(len(value))
            if _are_free(value, None):
                return False
        elif not is_record(value):
            return True  # Nothing agrees with an object of an unknown class.
        return any(map(is_decided, container_parts(value)))

    is_decided(batch)
    return found


def _fit(value: Any, samples: int, *, is_root: bool = False) -> _CountAgreement:
    """Return the agreement of a part of a batch with a number of samples."""
    kind = type(value)
    if kind is Tensor or isinstance(value, Tensor):
        return _fit_tensor(value, samples)
    if kind in PLAIN:
        return _FREE
    if kind is dict:
        return _combined(list(value.values()), samples)
    if is_leaf(value):
        found = leaf_samples(value, samples)
        if found is None:
            return _FREE
        if found != samples:
            return _NO
        return _TENSOR if isinstance(value, np.ndarray) else _TEXTS if isinstance(value, tuple) else _FIRM
    if is_record(value):
        return _combined(container_parts(value), samples)
    return _fit_sequence(value, samples, is_root=is_root) if is_sequence(value) else _NO


def _fit_tensor(value: Tensor, samples: int) -> _CountAgreement:
    if not value.ndim:
        return _FREE
    if value.size(0) != samples:
        return _NO
    if value.layout is torch.strided and not value.is_nested:
        return _TENSOR
    layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
    return _TENSOR._replace(unsliceable=frozenset([layout]))


def _fit_sequence(value: Sequence[Any], samples: int, *, is_root: bool) -> _CountAgreement:
    columns = _columns(value, samples)
    is_rows = len(value) == samples and not is_root and _are_of_one_kind(value)
    if not columns.fits or columns.is_free:
        if is_rows:
            return _ROWS
        # A list of dicts of another length belongs to no sample.
        is_unclear = columns.is_free and any(map(is_record, value)) and _are_of_one_kind(value)
        return columns._replace(is_ambiguous=is_unclear) if columns.fits else _NO
    if not _are_alike(value):
        return columns  # Dissimilar items are columns, such as inputs and targets.
    if is_rows:
        return columns._replace(is_ambiguous=True, firm=0, row_lists=columns.row_lists + 1)
    if is_root and isinstance(value, tuple) and len(value) > 1 and all(isinstance(item, list) for item in value):
        return columns  # For example source texts and target texts.
    is_columns = all(isinstance(item, Tensor | np.ndarray) for item in value)
    if is_columns and not (all(map(is_image, value)) and not (is_root and isinstance(value, tuple))):
        return columns
    # The sizes could be channels or lengths of single samples.
    return columns._replace(firm=0, weak=0 if is_columns else columns.weak + columns.tensors)


def _columns(value: Sequence[Any], samples: int) -> _CountAgreement:
    """Return the agreement of a list's items with a number of samples if read as columns."""
    return _FREE if _are_free(value, samples) else _combined(value, samples)


def _are_free(items: Sequence[Any], samples: int | None) -> bool:
    """Return True for dicts or tuples of constants that agree with any number of samples."""
    kinds = set(map(type, items))
    return (kinds == {dict} or (kinds == {tuple} and samples not in set(map(len, items)))) and is_plain(items)


def _combined(values: Sequence[Any], samples: int) -> _CountAgreement:
    """Return the joint agreement of all values with a number of samples. Tensors are checked first."""
    others: list[Any] = []
    tensors = 0
    is_free, is_ambiguous, unsliceable = True, False, frozenset[str]()
    for value in values:
        if type(value) is not Tensor:
            others.append(value)
        elif (fit := _fit_tensor(value, samples)) is _NO:
            return _NO
        elif fit is not _FREE:
            is_free, tensors, unsliceable = False, tensors + 1, unsliceable | fit.unsliceable
    firm, row_lists, weak = tensors, 0, 0
    for value in others:
        if (fit := _fit(value, samples)) is _FREE:
            continue
        if not fit.fits:
            return _NO
        is_free, is_ambiguous = is_free and fit.is_free, is_ambiguous or fit.is_ambiguous
        firm, row_lists = firm + fit.firm, row_lists + fit.row_lists
        tensors, weak = tensors + fit.tensors, weak + fit.weak
        unsliceable |= fit.unsliceable
    if is_free and not is_ambiguous:
        return _FREE
    return _CountAgreement(True, is_free, is_ambiguous, firm, row_lists, tensors, weak, unsliceable)


def _are_of_one_kind(items: Sequence[Any]) -> bool:
    """Return True if items could be samples: objects of one class, or tensors with equal numbers of dimensions."""
    kinds = set(map(type, items))
    if not any(issubclass(kind, Tensor | np.ndarray) for kind in kinds):
        return len(kinds) == 1
    return len({item.ndim if isinstance(item, Tensor | np.ndarray) else type(item) for item in items}) == 1


def _are_alike(items: Sequence[Any]) -> bool:
    """Return True if all items have the same signature. A quick comparison of the first two comes first."""
    return len(set(map(_signature, items[:2]))) == 1 and len(set(map(_signature, items))) == 1


def _signature(value: Any) -> Any:
    """Return the common structure of samples of one kind: containers, numbers of dimensions and types."""
    if isinstance(value, Tensor):
        return "array", value.ndim, value.dtype
    if isinstance(value, np.ndarray):
        return "array", value.ndim, str(value.dtype)
    if type(value) is dict:
        return tuple([(key, _signature(item)) for key, item in value.items()])
    if isinstance(value, Mapping):
        return type(value), tuple((key, _signature(item)) for key, item in value.items())
    if is_record(value) or is_sequence(value):
        return type(value), tuple(dict.fromkeys(map(_signature, container_parts(value))))
    return type(value)


def is_image(value: Any) -> bool:
    """Return True if a tensor could be a single image, whose first dimension would be channels."""
    if not isinstance(value, Tensor) or value.ndim != _IMAGE_DIMENSIONS or value.shape[0] not in _CHANNELS:
        return False
    return value.is_floating_point() or value.dtype is torch.uint8


def leaves(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of a batch; objects of unknown classes are leaves too."""
    if is_leaf(value) or not (is_record(value) or is_sequence(value)):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif is_dataclass(value):
        for name in set_fields(value):
            yield from leaves(getattr(value, name), f"{path}.{name}")
    else:
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")


def _why_unknown(batch: Any, confirmed: Sequence[int]) -> tuple[str, str]:
    """Return the reason why the number of samples is unknown, and its code."""
    if confirmed:
        numbers = " or ".join(map(str, confirmed))
        return f"the batch could have {numbers} samples", "samples.several_numbers"
    found = list(itertools.islice(leaves(batch), _MOST_LEAVES))
    unknown = {type(leaf).__name__ for _, leaf in found if not is_leaf(leaf)}
    if unknown:
        classes = ", ".join(sorted(unknown))
        return f"the batch has objects of unknown classes ({classes})", "samples.unknown_class"
    sizes = {path: size for path, leaf in found if (size := leaf_samples(leaf)) is not None}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{path}: {size}" for path, size in itertools.islice(sizes.items(), 6))
        return f"the first dimensions of the tensors differ ({shown})", "samples.sizes_differ"
    if sizes:
        return "the items of a list could be samples or columns, and no tensor decides", "samples.ambiguous_list"
    return "the batch has no tensor, array or list", "samples.none"
