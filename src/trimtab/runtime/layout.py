"""Memory layout of parameters, with optimizer state that follows it.

A fused optimizer on CPU walks parameter, gradient and state in memory order: state whose strides differ from its
parameter's gives wrong weights without a word. So every change of layout, here or in a load, ends in `align_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import ModelError, OptimizerError
from trimtab.measure.held import shares_rows

_FEW_CHANNELS = 16


def use_channels_last(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Lay 4-dim parameters and buffers out as channels_last, in place; returns what restores every stride.

    Until then `optimizer.state_dict()` holds the strides that will stand again: a checkpoint outlives its run.
    """
    if hazard := channels_last_hazard(model):
        raise ModelError(
            "plan.memory_layout", given=f"channels_last, but {hazard}", expected="a safe layout", way_out='Use "keep".'
        )
    changed = [(tensor, tensor.stride()) for tensor in _tensors(model) if tensor.dim() == 4 and not shares_rows(tensor)]
    strides = {id(tensor): before for tensor, before in changed}
    saving = optimizer.register_state_dict_post_hook(lambda optimizer, saved: _restride(optimizer, saved, strides))

    def undo() -> None:
        saving.remove()
        for tensor, before in changed:
            tensor.data = _with_strides(tensor.data, before)
            _align_grad(tensor)
        align_state(optimizer)

    try:
        for tensor, _ in changed:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
            _align_grad(tensor)
        align_state(optimizer)
    except BaseException:  # out of memory, or Ctrl-C, with half of the weights laid out
        undo()
        raise
    return undo


def channels_last_hazard(model: nn.Module) -> str:
    """Return why channels_last is not safe for a model on this device, or "".

    oneDNN's backward pass of a strided 1x1 convolution over a few channels writes out of bounds on CPU (seen with
    torch 2.13 from 2 to 6 input channels on AVX2): wrong gradients, or a crash of the process.
    """
    for name, module in model.named_modules():
        few = isinstance(module, nn.Conv2d) and 1 < module.in_channels < _FEW_CHANNELS and module.kernel_size == (1, 1)
        if few and max(module.stride) > 1 and module.weight.device.type == "cpu":
            return f"{name} is a strided 1x1 convolution over {module.in_channels} channels, which oneDNN gets wrong"
    return ""


def is_channels_last(model: nn.Module) -> bool:
    """Return whether the convolution weights already lie channels_last."""
    weights = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2:].numel() > 1]
    return bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every state tensor of a parameter's shape that parameter's strides; values are kept."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            same_shape = isinstance(value, Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                state[name] = _with_strides(value, parameter.stride())


def align_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Lay out gradients as a fused step's parameters: autograd's are, those that a loop makes itself may not be.

    Raises:
        OptimizerError: a gradient is sparse.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            grad = parameter.grad
            if grad is not None and grad.layout is not torch.strided:
                raise sparse_gradient()
            if grad is not None and grad.stride() != parameter.stride() and not _lie_alike(parameter, grad):
                _align_grad(parameter)


def sparse_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the first embedding whose gradients are sparse and stepped; "" if there is none."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and id(module.weight) in stepped:
            return name or "model"
    return ""


def sparse_gradient(of: str = "") -> OptimizerError:
    """Return the error for a sparse gradient that a fused step would get."""
    return OptimizerError(
        "plan.fused_optimizer",
        given=f"a sparse gradient, of {of}" if of else "a sparse gradient",
        expected="dense gradients: torch's fused steps take no others",
        way_out="Plan with fused_optimizer=False.",
        code="optimizer.sparse_gradient",
    )


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether strides are the same wherever they matter."""
    return all(a == b for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1)


def _restride(optimizer: torch.optim.Optimizer, saved: dict[str, Any], strides: dict[int, tuple[int, ...]]) -> None:
    """Give the 4-dim state tensors of a fresh `state_dict()` the strides their parameter had."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in saved["state"].items():
        parameter = parameters[index] if isinstance(index, int) else None
        if parameter is None or id(parameter) not in strides:
            continue
        wanted = strides[id(parameter)]
        saved["state"][index] = {
            name: _with_strides(value, wanted)
            if isinstance(value, Tensor) and value.shape == parameter.shape
            else value
            for name, value in state.items()
        }


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _align_grad(tensor: Tensor) -> None:
    if tensor.grad is not None:
        tensor.grad = _with_strides(tensor.grad, tensor.stride())
