"""Per-layer precision: modules with an fp32 forward in a plan with bf16 or fp16 (paper, section VI).

Modules are named as in `model.named_modules()`. Only the forward of a module is affected: functions reading the weights
directly (`nn.MultiheadAttention` and `out_proj`) run in the precision of the caller. After a proof has refused a half
precision, planning tries the precision with modules in fp32 for an accurate gradient (`profiling.precision_error`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from trimtab.core.choice import Effect, Note, Remedy, Scalar
from trimtab.core.errors import FormatError, ModelError
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    from torch import nn

    from trimtab.plans.plan import Plan
    from trimtab.plans.profile import Candidate, Profile

_NAMES = re.compile(r"[^\s,]+(\s*,\s*[^\s,]+)*")
_MOST_NAMED = 3  # Names in a label; the profile and the plan hold them all.


class Fp32Modules(Setting):
    """Modules with autocast disabled in the forward and half-precision arguments converted to fp32."""

    name = "fp32_modules"
    title = "modules in fp32"
    default = None
    effect = Effect.ROUNDING
    summary = "Modules whose forward runs in fp32, while the rest of the model runs under autocast to bf16 or fp16."
    values = "names of modules, separated by commas, or None"
    examples = ("head", "body.0,head")
    is_searched = True
    value_type = str | None

    def check(self, value: Scalar, plan: Plan) -> None:
        if value is not None and not (isinstance(value, str) and _NAMES.fullmatch(value)):
            raise FormatError(self.field, got=repr(value), expected=self.values)

    def refusal(self, profile: Profile) -> Note | None:
        if any(_remedies(profile, self.name)):
            return None
        return Note("fp32_modules.not_needed", "no half precision is known to need modules in fp32")

    def candidates(self, profile: Profile, best: Candidate) -> Sequence[Scalar]:
        return tuple(remedy.value for value, remedy in _remedies(profile, self.name) if value == best.precision)

    def label(self, value: Scalar) -> str:
        return "" if value is None else f"{_in_short(str(value))} in fp32"

    def value_text(self, value: Scalar) -> str:
        return "none" if value is None else str(value)

    def phrase(self, value: Scalar) -> str:
        return "all modules in one precision" if value is None else self.label(value)

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        require_fp32_modules(loop, str(value))

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.compiled_call import is_compiled
        from trimtab.techniques.fp32_forward import run_in_fp32

        named = named_modules(loop.model, str(value))
        uses, restore = run_in_fp32(list(named.values()), loop.device.type)
        stepped: list[bool] = []
        hook = loop.optimizer.register_step_post_hook(lambda *_: stepped.append(True) if not stepped else None)

        def undo() -> None:
            hook.remove()
            restore()
            unused = [name for name, use in zip(named, uses, strict=True) if not use.is_used]
            # Compiled code does not record its calls.
            if unused and stepped and not (loop.plan.compiled.value or is_compiled(loop.model)):
                warnings.warn(
                    f"plan.fp32_modules had no effect on {', '.join(unused)}, whose forward was not called under "
                    "autocast.",
                    UserWarning,
                    stacklevel=2,
                )

        return undo


def _remedies(profile: Profile, name: str) -> Iterable[tuple[Scalar, Remedy]]:
    """Yield the refused precisions with the modules in fp32 for an accurate gradient."""
    for each in profile.refused_by_proof:
        if each.setting == "precision" and each.remedy is not None and each.remedy.setting == name:
            yield each.value, each.remedy


def _in_short(names: str) -> str:
    """Return the names of modules, or the first name and the number of the others."""
    first, *others = (name.strip() for name in names.split(","))
    return f"{first} and {len(others)} other modules" if len(others) >= _MOST_NAMED else names


def prepare_copy(names: Scalar, device_type: str) -> Callable[[nn.Module], None]:
    """Return a function that applies the setting to a copy of a model, because copies are plain models."""

    def prepare(copy: nn.Module) -> None:
        from trimtab.techniques.fp32_forward import run_in_fp32

        if names is not None:
            run_in_fp32(list(named_modules(copy, str(names)).values()), device_type)

    return prepare


def named_modules(model: nn.Module, names: str) -> dict[str, nn.Module]:
    """Return the named modules of a model, or of its wrapped model, without duplicates.

    Raises:
        ModelError: a name is unknown.
    """
    import difflib

    from trimtab.techniques.activation_checkpointing import wrapped_models

    wanted = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for root in wrapped_models(model):
        known = dict(root.named_modules(remove_duplicate=False))
        if all(name in known for name in wanted):
            found = {id(known[name]): name for name in reversed(wanted)}
            return {name: known[name] for name in wanted if found[id(known[name])] == name}
    missing = next(name for name in wanted if name not in known)
    nearest = difflib.get_close_matches(missing, filter(None, known), n=1) or [name for name in known if name][:1]
    raise ModelError(
        "plan.fp32_modules",
        got=f"{missing!r}, which {type(model).__name__} does not have",
        expected="names in model.named_modules()",
        hint=f"Use another name, such as {nearest[0]!r}, or None." if nearest else "Use a plan with fp32_modules=None.",
        code="fp32_modules.unknown",
    )


def require_fp32_modules(loop: LiveLoop, names: str) -> None:
    """Raise `ModelError` if a named module does not exist or cannot run in fp32."""
    named = named_modules(loop.model, names)
    for name, module in named.items():
        if (found := fp32_obstacle(module)) is not None:
            problem, hint, code = found
            text = f"plan.fp32_modules names the module {name}, {problem}."
            raise ModelError("plan.fp32_modules", problem=text, hint=hint, code=f"fp32_modules.{code}")
    _refuse_deferred_head(loop, named)


def fp32_obstacle(module: nn.Module) -> tuple[str, str, str] | None:
    """Return the problem, the remedy and the code if a module cannot run in fp32."""
    import torch
    from torch import nn

    from trimtab.techniques.fp32_forward import InFp32

    without = "Leave it out, or use a plan with fp32_modules=None."
    if isinstance(module, InFp32):
        return "which another run uses", "Close the other run first.", "in_use"
    if isinstance(module, torch.jit.ScriptModule):
        return "which is a TorchScript module, whose forward cannot be replaced", without, "scripted"
    if "forward" in vars(module):
        return "whose forward was replaced on the instance", without, "forward_replaced"
    if type(module).forward is nn.Module.forward:
        return "a container without a forward", "Name the modules in it.", "no_forward"
    half = next((p.dtype for p in module.parameters() if p.is_floating_point() and p.itemsize < 4), None)
    if half is not None:
        hint = "Convert its weights to fp32 with module.float(), or use a plan with fp32_modules=None."
        return f"whose weights are in {str(half).removeprefix('torch.')}", hint, "half_weights"
    return None


def holds_plain_head(model: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Return True if some modules contain the last layer whose logits `loss_chunk` would defer."""
    from trimtab.settings.loss_chunk import plain_head

    head = plain_head(model)
    return head is not None and any(head is each for module in modules for each in module.modules())


def _refuse_deferred_head(loop: LiveLoop, named: dict[str, nn.Module]) -> None:
    """Raise `ModelError` for a plain head with chunks, because the loss computes the logits after the forward."""
    if loop.plan.loss_chunk.value is not None and holds_plain_head(loop.model, named.values()):
        raise ModelError(
            "plan.fp32_modules",
            problem="plan.fp32_modules names the model's last layer, whose logits plan.loss_chunk computes in the "
            "loss, in half precision.",
            hint="Use trimtab.nn.LossHead as the last layer, or a plan with loss_chunk=None.",
            code="fp32_modules.loss_chunk",
        )
