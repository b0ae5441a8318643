"""Float8 matrix products of large linear layers, by torchao (Micikevicius et al. 2022, arXiv:2209.05433).

Input, weight and output gradient of a layer are scaled and cast to float8 before the products of forward and backward.
Weights, gradients and optimizer state keep the precision of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core import validation
from trimtab.core.choice import Effect, Scalar
from trimtab.core.errors import ModelError
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    from torch import nn

    from trimtab.plans.plan import Plan


class Float8(Setting):
    """Smallest size of the linear layers with float8 matrix products."""

    name = "float8"
    title = "float8 products"
    default = None
    effect = Effect.TRAINING
    summary = "Least input and output features of the `nn.Linear` layers with float8 products (torchao, CUDA)."
    values = "a whole number of features, or None"
    examples = (16,)

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None:
            validation.integer(self.field, value)

    def label(self, value: Scalar) -> str:
        return "" if value is None else f"float8 from {value} features"

    def value_text(self, value: Scalar) -> str:
        return "off" if value is None else f"from {value} features"

    def phrase(self, value: Scalar) -> str:
        return "products in the plan's precision" if value is None else f"float8 products from {value} features"

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        from trimtab.settings.fp32_modules import named_modules

        layers, names = require_layers(loop.model, int(value or 0)), loop.plan.fp32_modules.value
        for name, module in ({} if names is None else named_modules(loop.model, str(names))).items():
            if not set(layers.values()).isdisjoint(module.modules()):
                raise ModelError(
                    "plan.float8",
                    problem=f"plan.fp32_modules names the module {name}, which holds layers with float8 products.",
                    hint=f"Remove {name} from fp32_modules, or raise float8 above the size of its layers.",
                    code="float8.fp32_modules",
                )

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.float8_products import use_float8

        return use_float8(list(require_layers(loop.model, int(value or 0)).values()))


def require_layers(model: nn.Module, least: int) -> dict[str, nn.Linear]:
    """Return the layers with float8 products by name, or raise an error if they cannot run in float8."""
    from trimtab.settings.loss_chunk import plain_head
    from trimtab.techniques.float8_products import large_layers, require_float8

    layers = large_layers(model, least, plain_head(model))
    require_float8(next(model.parameters()).device, layers, least)
    return layers
