"""Results of a loss function: a mean or a `Summed` loss, optionally with auxiliary values."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import numbers
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import LossError

Count = Tensor | int | float
_LARGEST = sys.float_info.max
_LAST_OPERATIONS = 4  # A loss may be divided by the number of batches after it was scaled, so a few nodes are searched.
_MODELS = ("model", "net", "network", "module")  # Names of a model as an argument.
_EXPECTED = "a scalar mean or trimtab.Summed(loss_sum, count), alone or in a pair (loss, auxiliary)"


@dataclass(frozen=True)
class Summed:
    """A loss as a sum and its number of terms; the ratio is the mean that is trained.

    Return it from a loss function if samples have unequal numbers of terms: tokens without padding, pixels under a
    mask, class weights. Gradients of split or accumulated batches then equal the gradients of the mean over all
    terms.

    Args:
        loss_sum: scalar tensor, the sum over terms.
        count: number of terms, or the sum of their weights, at least 0. A single-element tensor on the model's device
            avoids a synchronisation.
    """

    loss_sum: Tensor
    count: Count


class LossResult(NamedTuple):
    """Parts of a loss function's result.

    Args:
        loss: scalar tensor; a sum if `count` is set, else a mean.
        count: number of terms of the sum, or None for a mean.
        auxiliary: second member of a returned pair, or None. It has no effect on training.
    """

    loss: Any
    count: Any = None
    auxiliary: Any = None


def parts_of(result: Any, *, is_auxiliary: bool = False) -> LossResult:
    """Return the parts of a loss function's result without validating the loss itself.

    Args:
        result: as in `as_loss`.
        is_auxiliary: True if the loss function returned auxiliary values before. A single-element tensor, from a last
            batch with a single sample, is then accepted as auxiliary values.

    Raises:
        LossError: a pair with a number as its second member (code "loss.pair_ambiguous").
    """
    auxiliary = None
    if isinstance(result, tuple) and len(result) == 2:
        result, auxiliary = result
        if not is_auxiliary and _is_number(auxiliary):
            raise _ambiguous(auxiliary)
    if isinstance(result, Summed):
        return LossResult(result.loss_sum, result.count, auxiliary)
    return LossResult(result, None, auxiliary)


def as_loss(result: Any, *, is_auxiliary: bool = False) -> LossResult:
    """Return the validated parts of a loss function's result.

    Args:
        result: a scalar mean or `Summed`; or a pair `(loss, auxiliary)`, with a mapping, an object or a tensor of
            several elements as auxiliary value.
        is_auxiliary: as in `parts_of`.

    Returns:
        Loss (0-dimensional tensor), count (on the loss's device if a tensor) or None, auxiliary value or None.

    Raises:
        LossError: an invalid result, or a loss without a gradient.
    """
    loss, count, auxiliary = parts_of(result, is_auxiliary=is_auxiliary)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise _bad_loss(_description(loss), _remedy(loss))
    if loss.is_complex():
        raise _bad_loss("a complex loss", "Return the real part or the absolute value of the loss.")
    if not loss.requires_grad:
        raise _bad_loss(
            "a loss that does not depend on any trainable parameter",
            "Compute the loss from the output of run.model, without detach(), item() or torch.no_grad().",
        )
    scalar = loss if loss.dim() == 0 else loss.reshape(())  # a reshape of a scalar would add a node to the graph
    return LossResult(scalar, None if count is None else _beside(loss, checked_count(count)), auxiliary)


def require_loss_function(loss_fn: Any) -> None:
    """Check that a loss function can be called as `loss_fn(model, batch)`, as far as its signature shows.

    Raises:
        LossError: an object that cannot be called, a criterion such as `nn.CrossEntropyLoss()`, a function with another
            number of arguments, or one with the model as second argument.
    """
    if not callable(loss_fn):
        raise _no_loss_function(
            f"a {type(loss_fn).__name__}", "Pass the function itself, without calling it.", "loss_fn.not_callable"
        )
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    if any(getattr(each, "__module__", "").startswith("torch.nn.") for each in (loss_fn, type(loss_fn))):
        hint = "Write a function that computes the criterion from model(inputs) and the targets of the batch."
        raise _no_loss_function(f"the criterion {name}", hint, "loss_fn.is_criterion")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # A built-in function may have no signature.
        return
    try:
        names = [*signature.bind(None, None).arguments]
    except TypeError:
        hint = "Take two arguments, and unpack the batch in the function: `inputs, targets = batch`."
        raise _no_loss_function(f"{name}{signature}", hint, "loss_fn.arguments") from None
    if len(names) == 2 and names[1] in _MODELS and names[0] not in _MODELS:
        raise _no_loss_function(f"{name}{signature}", "Take the model first, then the batch.", "loss_fn.order")


def _no_loss_function(given: str, hint: str, code: str) -> LossError:
    return LossError("loss_fn", got=given, expected="a function loss_fn(model, batch)", hint=hint, code=code)


def require_unscaled(loss: Tensor) -> None:
    """Raise if a loss was multiplied by a `GradScaler`'s scale, by which the gradients would be too large.

    The scaler is searched for among all objects of the process, so call this function once per run.

    Raises:
        LossError: `scaler.scale(loss)` was returned.
    """
    factors = {each.untyped_storage().data_ptr() for each in _last_factors(loss)}
    if not factors:
        return
    scalers = (each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler))
    scales = (getattr(each, "_scale", None) for each in scalers)  # one that is not enabled has none
    if any(scale is not None and scale.untyped_storage().data_ptr() in factors for scale in scales):
        raise LossError(
            "loss_fn",
            got="a loss multiplied by the scale of a GradScaler",
            expected="the unscaled loss",
            hint="Remove the GradScaler from the loop, because a plan with precision fp16 scales the loss and unscales "
            'the gradients. If your own loop used a GradScaler, plan with reference=trimtab.Reference("fp16").',
            code="loss.scaled",
        )


def _last_factors(loss: Tensor) -> list[Tensor]:
    """Return the scalar factors of the last few multiplications in a loss's autograd graph."""
    found, node = [], loss.grad_fn
    for _ in range(_LAST_OPERATIONS):
        if node is None:
            break
        factor = getattr(node, "_saved_other", None) if type(node).__name__ == "MulBackward0" else None
        if isinstance(factor, Tensor) and not factor.dim() and not factor.requires_grad:
            found.append(factor)
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return found


def divisor_of_mean(loss: Tensor) -> float | None:
    """Return the number by which a mean was divided in a loss's last operation; None if there is none."""
    node = loss.grad_fn
    divisor = getattr(node, "_saved_other", None) if type(node).__name__ == "DivBackward0" else None
    if node is None or not isinstance(divisor, Tensor) or divisor.dim() or divisor.requires_grad:
        return None
    if divisor.device.type != "cpu":  # Reading its value would synchronise.
        return None
    mean = node.next_functions[0][0]
    is_mean = type(mean).__name__.startswith("MeanBackward") or getattr(mean, "_saved_reduction", None) == 1
    return float(divisor) if is_mean else None


def mean_of(result: Any) -> Tensor:
    """Return the mean loss of a loss function's result, as an unplanned loop trains it."""
    loss, count, _ = parts_of(result)
    mean: Tensor = loss if count is None else loss / count
    return mean


def detach_auxiliary(value: Any) -> Any:
    """Return an auxiliary value with the tensors in its mappings, lists, tuples and dataclasses detached."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        items = {key: detach_auxiliary(item) for key, item in value.items()}
        return items if type(value) is dict else _with_items(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(detach_auxiliary, value))
    if type(value) in (list, tuple):
        return type(value)(map(detach_auxiliary, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(found, name, detach_auxiliary(item))
        return found
    return value


def _with_items(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the original's class, such as a model output, with new values."""
    try:
        found = copy.copy(original)
        for key, item in items.items():
            found[key] = item  # type: ignore[index]
    except TypeError:  # an immutable mapping
        return items
    return found


def checked_count(count: Any) -> Count:
    """Return a valid number of terms; the value of a device tensor is not read.

    Raises:
        LossError: neither a finite number of terms >= 0 nor a single-element tensor.
    """
    if isinstance(count, Tensor):
        is_number = not count.is_complex() and count.dtype is not torch.bool
        if count.numel() == 1 and is_number and not count.requires_grad:
            return count.detach().reshape(())
        given = f"a tensor of shape {tuple(count.shape)} and dtype {str(count.dtype).removeprefix('torch.')}"
        given += " with requires_grad=True" if count.requires_grad else ""
    elif isinstance(count, int | float | np.integer | np.floating) and not isinstance(count, bool):
        if 0 <= count <= _LARGEST:
            return count.item() if isinstance(count, np.generic) else count
        given = f"{count!r:.80}"
    else:
        given = f"{count!r:.80}"
    raise LossError(
        "loss count",
        got=given,
        expected="a finite number >= 0, or a real tensor of one element without gradient",
        hint="Pass the number of terms that were added up, such as the number of tokens, as the count of "
        "trimtab.Summed.",
        code="loss.count_invalid",
    )


def _beside(loss: Tensor, count: Count) -> Count:
    """Return a count on the loss's device, where the gradients are rescaled without a synchronisation."""
    return count.to(loss.device, non_blocking=loss.is_cuda) if isinstance(count, Tensor) else count


def _is_number(value: Any) -> bool:
    """Return True if a value could be the number of terms, a metric or a weight."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Number | np.bool_) or (isinstance(value, np.ndarray) and value.size == 1)


def _ambiguous(value: Any) -> LossError:
    return LossError(
        "loss",
        problem=f"The second element of the pair that the loss function returned is a number ({_description(value)}), "
        "which could be a count or a metric.",
        got=_description(value),
        hint="Return trimtab.Summed(loss_sum, count) if the number counts terms. Return a dict, such as "
        '(loss, {"accuracy": accuracy}), if it is a metric: run.auxiliary contains the dict.',
        code="loss.pair_ambiguous",
    )


def _description(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} elements"
    return f"a {type(value).__name__}"


def _remedy(loss: Any) -> str:
    if isinstance(loss, tuple | list):
        return "Return a tuple (loss, {...}) with all other values in one dict."
    if isinstance(loss, Mapping):
        return 'Return the loss alone, or (values.pop("loss"), values) with all other values in a dict.'
    return "Return loss.mean() or trimtab.Summed(loss.sum(), count); of a model output object, return its .loss."


def _bad_loss(given: str, hint: str) -> LossError:
    return LossError("loss", got=given, expected=_EXPECTED, hint=hint, code="loss.invalid")
