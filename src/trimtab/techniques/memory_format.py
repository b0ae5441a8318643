"""Memory format of parameters, gradients and optimizer state.

A fused optimizer on the CPU traverses parameter, gradient and state in memory order. State with strides unlike its
parameter's gives wrong weights without an error, so every change of memory format, here or in loading a state, ends
with `align_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import ModelError, OptimizerError
from trimtab.state.object_snapshots import shares_samples

_FEW_CHANNELS = 16


def use_channels_last(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Convert 4-dimensional parameters and buffers to channels_last, in place; return an undo function.

    Until the undo, `optimizer.state_dict()` returns state with the original strides, because a checkpoint outlives the
    run.
    """
    if hazard := channels_last_hazard(model):
        raise ModelError(
            "plan.memory_layout",
            problem=f"The memory format channels_last is unsafe for this model: {hazard}.",
            hint='Use a plan with memory_layout="keep".',
            code="memory_layout.unsafe",
        )
    changed = [
        (tensor, tensor.stride()) for tensor in _tensors(model) if tensor.dim() == 4 and not shares_samples(tensor)
    ]
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
    except BaseException:  # Out of memory, or Ctrl-C, after some weights were converted.
        undo()
        raise
    return undo


def channels_last_hazard(model: nn.Module) -> str:
    """Return the reason why channels_last is unsafe for a model on this device, or "".

    On the CPU, oneDNN's backward pass of a strided 1x1 convolution over a few channels writes out of bounds (seen with
    torch 2.13 for 2 to 6 input channels on AVX2), which causes wrong gradients or a crash.
    """
    for name, module in model.named_modules():
        few = isinstance(module, nn.Conv2d) and 1 < module.in_channels < _FEW_CHANNELS and module.kernel_size == (1, 1)
        if few and max(module.stride) > 1 and module.weight.device.type == "cpu":
            return (
                f"on the CPU, oneDNN computes wrong gradients for {name}, a strided 1x1 convolution with "
                f"{module.in_channels} input channels"
            )
    return ""


def is_channels_last(model: nn.Module) -> bool:
    """Return True if all convolution weights are in channels_last already."""
    weights = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2:].numel() > 1]
    return bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def align_state(optimizer: torch.optim.Optimizer) -> None:
    """Give state tensors with a parameter's shape the strides of that parameter; values are kept."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            same_shape = isinstance(value, Tensor) and value.shape == parameter.shape
            if same_shape and value.stride() != parameter.stride():
                state[name] = _with_strides(value, parameter.stride())


def align_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give gradients of a fused step the strides of their parameters; `OptimizerError` if a gradient is sparse."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            grad = parameter.grad
            if grad is not None and grad.layout is not torch.strided:
                raise sparse_gradient()
            if grad is not None and grad.stride() != parameter.stride() and not _lie_alike(parameter, grad):
                _align_grad(parameter)


def sparse_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the first trained embedding with sparse gradients; "" if there is none."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and id(module.weight) in stepped:
            return name or "model"
    return ""


def sparse_gradient(of: str = "") -> OptimizerError:
    """Return the error for a sparse gradient in a fused step."""
    return OptimizerError(
        "plan.fused_optimizer",
        got=f"a sparse gradient of {of}" if of else "a sparse gradient",
        expected="dense gradients, because torch's fused optimizers do not support sparse gradients",
        hint="Use a plan with fused_optimizer=False, or an embedding with sparse=False.",
        code="optimizer.sparse_gradient",
    )


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have equal strides in all dimensions of size above 1."""
    return all(a == b for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True) if size > 1)


def _restride(optimizer: torch.optim.Optimizer, saved: dict[str, Any], strides: dict[int, tuple[int, ...]]) -> None:
    """Give 4-dimensional tensors of a new `state_dict()` the original strides of their parameters."""
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
