"""Consistency checks between ranks at the start of a job: plans, loops, weights and data."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from trimtab.core.errors import UsageError, ValueGivenError
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.process_group import has_peers
from trimtab.measure.gradient_norms import is_sharded
from trimtab.training.gradient_sync import data_parallel
from trimtab.training.metadata_exchange import MetadataExchange

DIFFER = "ranks.differ"
KIND = "the optimizer's class"
_WIDEST = 60  # characters of a value in a message
_MOST_FIELDS = 8  # in a message
_LARGE, _SPREAD = 2**28, 1024  # Larger tensors (bytes) are compared by this number of rows.
# Integer type by element size: values are compared bit by bit.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_alike(
    field: str,
    own: Mapping[str, Any],
    exchange: MetadataExchange,
    *,
    expected: str,
    hint: str,
    error: type[UsageError] = ValueGivenError,
) -> None:
    """Raise if values differ between ranks; a collective.

    Raises:
        UsageError: of class `error`, on every rank: the differing values and their ranks.
    """
    if exchange.num_ranks == 1:
        return
    texts = {name: text_of(value) for name, value in own.items()}
    sent = "\0".join(part.replace("\0", "") for pair in texts.items() for part in pair)
    received = [text.split("\0") if text else [] for text in exchange.texts(sent)]
    each = [dict(zip(pairs[::2], pairs[1::2], strict=True)) for pairs in received]
    names = list(dict.fromkeys(name for found in each for name in found))
    unlike = [name for name in names if len({found.get(name) for found in each}) > 1]
    if unlike:
        # A different optimizer class implies different options.
        unlike = [name for name in unlike if name == KIND] or unlike
        more = f" and {len(unlike) - _MOST_FIELDS} more" if len(unlike) > _MOST_FIELDS else ""
        listed = ", ".join(unlike[:_MOST_FIELDS]) + more
        texts_of_first = [found.get(unlike[0], "absent") for found in each]
        given = f"differences in {listed}; {differing_texts(unlike[0], texts_of_first)}"
        raise error(field, got=given, expected=expected, hint=hint, code=DIFFER)


def require_same_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, exchange: MetadataExchange, *, spreads: bool
) -> None:
    """Raise if the model or optimizer differs between ranks; a collective.

    Args:
        spreads: the run broadcasts rank 0's weights; otherwise the weights must already be equal.

    Raises:
        ValueGivenError: on every rank: the differing values and their ranks.
    """
    if exchange.num_ranks == 1:
        return
    is_whole = not is_sharded(model)
    own = optimizer_facts(optimizer) | model_facts(model)
    if is_whole:
        state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
        own["checksums of the optimizer state"] = digest(state)
    if is_whole and not spreads and data_parallel(model) is not None:
        own["checksums of the parameters"] = digest(model.parameters())
    require_alike(
        "model and optimizer",
        own,
        exchange,
        expected="the same model, optimizer and options on every rank",
        hint="Build the model and the optimizer with the same settings on every rank, call torch.manual_seed with the "
        "same number, and load the same checkpoint.",
    )


def require_same_over_job(field: str, own: Mapping[str, Any], hint: str) -> None:
    """Raise `ValueGivenError` on every rank if values differ in this job, before any run has started; a collective."""
    if not has_peers():
        return
    exchange = RankExchange(None)
    try:
        require_alike(field, own, exchange, expected="the same on every rank", hint=hint)
    finally:
        exchange.close()


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's class, and the options and parameter shapes of its groups."""
    found: dict[str, Any] = {KIND: type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
        found |= {f"{name} of group {number}": value for name, value in options.items() if _is_plain(value)}
        found[f"parameters of group {number}"] = [tuple(each.shape) for each in group["params"]]
    return found


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return names, shapes and dtypes of a model's parameters and buffers, and `requires_grad` of its parameters."""
    parameters = {name: (tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: (tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()}
    return {"model": type(model).__name__, "parameters": parameters, "buffers": buffers}


def dataset_facts(dataset: Any) -> dict[str, Any]:
    """Return the properties of a dataset that must agree between ranks: length, and values if stored in tensors."""
    found: dict[str, Any] = {}
    if hasattr(dataset, "__len__"):
        found["number of samples"] = len(dataset)
    if isinstance(dataset, Subset):
        found["indices"] = list(dataset.indices)
        dataset = dataset.dataset
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else [dataset]
    if all(isinstance(each, Tensor) for each in tensors):
        # Of a large tensor, which may be memory-mapped from a file, evenly spaced rows.
        large = [each.dim() > 0 and each.numel() * each.element_size() > _LARGE for each in tensors]
        few = (
            each[:: -(-len(each) // _SPREAD)] if is_large else each
            for each, is_large in zip(tensors, large, strict=True)
        )
        found["checksums of the values"] = digest(few)
    return found


def digest(tensors: Iterable[Tensor]) -> list[int]:
    """Return a checksum per tensor, equal for equal values. Synchronises with the device once."""
    sums = [_sum_of_bits(each.detach()) for each in tensors]
    at = {each.device for each in sums}
    if len(at) > 1:
        return [int(each) for each in sums]
    found: list[int] = torch.stack(sums).tolist() if sums else []
    return found


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return a position-weighted sum of a tensor's bits, read as integers."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or hasattr(tensor, "full_tensor"):
        return torch.zeros((), dtype=torch.int64)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    kind = _INTEGERS[tensor.element_size()]
    bits = tensor.contiguous().reshape(-1).view(kind)
    total = bits.sum(dtype=torch.int64)
    return total + 31 * bits[::7].sum(dtype=torch.int64) + 1009 * bits[::11].sum(dtype=torch.int64)


def _is_plain(value: Any) -> bool:
    """Return True if a value's text is the same in every process."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | Tensor)


def text_of(value: Any) -> str:
    """Return a value as text; a long text is shortened, with a checksum of the whole."""
    whole = repr(_numbers(value))
    return whole if len(whole) <= _WIDEST else f"{whole[:_WIDEST]}... (checksum {zlib.crc32(whole.encode()):08x})"


def _numbers(value: Any) -> Any:
    """Return a value with tensors replaced by numbers, because a learning rate may be a tensor."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else digest([value])
    if isinstance(value, tuple | list):
        return type(value)(map(_numbers, value)) if type(value) in (tuple, list) else value
    return value


def differing_texts(name: str, texts: Sequence[str]) -> str:
    """Return the texts different from the most frequent text, with their ranks, in words."""
    usual = Counter(texts).most_common(1)[0][0]
    odd = "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(texts) if text != usual)
    return f"{name} is {odd}, but {usual} on rank {texts.index(usual)}"
