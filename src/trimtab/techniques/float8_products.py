"""Float8 matrix products in the forward and backward of linear layers, applied in place and reversible.

Only this module uses torchao (written for version 0.18). `convert_to_float8_training` replaces module objects, so it
receives a list of the layers instead of the model: torchao's layers share the Parameters, and the model's own layers
call them. Module objects, hooks and the keys of `state_dict()` stay the user's, and a copy of the model is a plain
model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import DependencyError, ModelError, ValueGivenError
from trimtab.techniques.replaced_classes import ReplacedClass, own_class, replace_classes

MULTIPLE = 16  # Features per row of a float8 operand, in torch's scaled products.
_CAPABILITY = (8, 9)  # CUDA compute capability of the first GPUs with float8 products.
_UNCHANGED = "Use a plan with float8=None."


@dataclass
class Float8Layer:
    """State of a layer with float8 products: torchao's layer on the same Parameters."""

    layer: nn.Module


class _InFloat8(ReplacedClass):
    """Mixin of a linear layer whose products run in float8 under autocast."""

    state_name = "_trimtab_float8"

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        # An empty input, as of an expert without tokens, has no largest element to scale by.
        if not torch.is_autocast_enabled(kind) or not x.numel():
            return super().forward(x)  # type: ignore[misc,no-any-return]
        own: Any = self
        layer: Any = self.__dict__[_InFloat8.state_name].layer
        if layer.weight is not own.weight or layer.bias is not own.bias:
            # A wrapper of the model, or the user, replaced the Parameters; `functional_call` by other tensors.
            layer._parameters.update(weight=own.weight, bias=own.bias)
        result: Tensor = layer(x.to(torch.get_autocast_dtype(kind)))
        return result


def large_layers(model: nn.Module, least: int, head: nn.Module | None) -> dict[str, nn.Linear]:
    """Return the trained linear layers with float8 products, by name.

    Both dimensions have `least` features or more and are multiples of 16. Layers whose weight is computed from other
    Parameters (pruning, weight normalization) are left out.

    Args:
        head: last layer of the model, which is left out, because its rounding enters the loss directly; or None.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or own_class(module) is not nn.Linear or module is head:
            continue
        sizes = module.in_features, module.out_features
        is_large = min(sizes) >= least and not any(size % MULTIPLE for size in sizes)
        weight = module._parameters.get("weight")
        if is_large and weight is not None and weight.requires_grad and "forward" not in vars(module):
            found[name] = module
    return found


def require_float8(device: torch.device, layers: Mapping[str, nn.Linear], least: int) -> None:
    """Raise an error if the products of a model's `large_layers` cannot run in float8.

    Raises:
        DependencyError: torchao is not installed.
        ValueGivenError: the GPU has no float8 products.
        ModelError: there are no large layers, or a layer has unsupported weights.
    """
    try:
        importlib.import_module("torchao.float8")
    except ImportError:
        problem = f"plan.float8={least} needs the package torchao, which is not installed."
        hint = "Run `pip install 'trimtab[torchao]'`, or use a plan with float8=None."
        raise DependencyError("plan.float8", problem=problem, hint=hint, code="float8.not_installed") from None
    if device.type != "cpu":  # On a CPU, float8 is emulated, for tests.
        require_capability(device)
    if not layers:
        problem = f"The model has no trained nn.Linear with {least} or more features in multiples of {MULTIPLE}, "
        problem += "except its last layer."
        raise ModelError("plan.float8", problem=problem, hint=_UNCHANGED, code="float8.no_layers")
    for name, layer in layers.items():
        if hasattr(layer.weight, "placements"):
            problem, code = "is sharded", "sharded"
        elif layer.weight.dtype != torch.float32:
            problem, code = f"is in {str(layer.weight.dtype).removeprefix('torch.')}", "not_fp32"
        elif isinstance(layer, _InFloat8):
            problem, code = "is in use by another run with float8 products", "in_use"
        else:
            continue
        text = f"The weight of the layer {name} {problem}, which plan.float8 does not support."
        raise ModelError("plan.float8", problem=text, hint=_UNCHANGED, code=f"float8.{code}")


def require_capability(device: torch.device) -> None:
    """Raise `ValueGivenError` for a device without float8 products."""
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.cuda else (0, 0)
    if found < _CAPABILITY:
        raise ValueGivenError(
            "plan.float8",
            got=f"a model on {device} with compute capability {found[0]}.{found[1]}",
            expected="a GPU with CUDA compute capability 8.9 or newer",
            hint=_UNCHANGED,
            code="float8.capability",
        )


def use_float8(layers: Sequence[nn.Linear]) -> Callable[[], None]:
    """Run the products of some layers in float8; return a function that restores the layers' classes."""
    float8 = importlib.import_module("torchao.float8")
    emulates = layers[0].weight.device.type == "cpu"
    # The products of the weight's gradient sum over tokens, whose number is any: the operands are padded.
    config = float8.Float8LinearConfig(emulate=emulates, pad_inner_dim=True)
    converted = float8.convert_to_float8_training(nn.ModuleList(layers), config=config)
    states = [Float8Layer(each) for each in converted]
    return replace_classes(layers, [_InFloat8] * len(layers), states)
