"""Inspection of user gradient hooks, and refusal of settings that would change the gradients passed to hooks.

A hook may clamp, log, accumulate or step. Under a loss scale a hook receives scaled gradients, and in a split batch the
gradients of each micro-batch. Hooks of torch, of trimtab and of other wrappers are part of running a model and are
ignored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from trimtab.core.choice import is_recorded
from trimtab.core.errors import ModelError, OptimizerError
from trimtab.plans.plan import Plan
from trimtab.settings import IN_STEP
from trimtab.state.object_snapshots import reachable_instances
from trimtab.techniques.compiled_call import is_compiled
from trimtab.training.nonfinite import BEFORE_THE_STEP
from trimtab.training.window import Window

_WRAPPERS = "trimtab", "deepspeed"  # Packages whose hooks are part of running a model.
# Modules of torch whose hooks run a model. A hook from elsewhere in torch was registered by the user.
_OF_TORCH = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "torch.utils.module_tracker",
    "torch._dynamo",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch.autograd.profiler",
    "torch.profiler",
)
_REGISTERING = "torch.autograd.graph", "torch.utils.hooks"  # Modules of functions that call the hook passed to them.
_CLOSURE_DEPTH = 3  # Depth of wrappers around a user's function.
_BY_PARAMETER = ("_backward_hooks", "tensor hook"), ("_post_accumulate_grad_hooks", "post-accumulate-grad hook")
_BY_MODULE = ("_backward_hooks", "backward hook"), ("_backward_pre_hooks", "backward pre-hook")
_EVERY_MODULE = ("_global_backward_hooks", "backward hook"), ("_global_backward_pre_hooks", "backward pre-hook")


@dataclass(frozen=True)
class GradientHook:
    """A user-registered hook that runs in the backward pass.

    Attributes:
        kind: "tensor hook", "post-accumulate-grad hook", "backward hook" or "backward pre-hook".
        owner: name of the parameter or module; "" for the model itself.
        function: qualified name of the hook.
        optimizers: optimizers that the hook refers to, and may step.
    """

    kind: str
    owner: str
    function: str
    optimizers: tuple[Optimizer, ...] = ()

    def __str__(self) -> str:
        return f"a {self.kind} on {self.owner or 'the model'} ({self.function})"


def gradient_hooks(model: nn.Module) -> tuple[GradientHook, ...]:
    """Return the user-registered hooks that run in the backward pass of a model.

    Hooks on activations and on autograd nodes are registered by a forward and cannot be found by inspection.
    """
    found: list[GradientHook] = []
    for name, parameter in model.named_parameters():
        for attribute, kind in _BY_PARAMETER:
            hooks = user_hooks_of(getattr(parameter, attribute, None))
            found += [describe_hook(hook, kind, name, vars(parameter).values()) for hook in hooks]
        if in_backward := vars(parameter).get("_in_backward_optimizers"):
            function = "torch.distributed.optim._apply_optimizer_in_backward"
            found.append(GradientHook("post-accumulate-grad hook", name, function, tuple(in_backward)))
    for name, module in model.named_modules():
        for attribute, kind in _BY_MODULE:
            found += [describe_hook(hook, kind, name) for hook in user_hooks_of(getattr(module, attribute, None))]
    for attribute, kind in _EVERY_MODULE:
        hooks = user_hooks_of(getattr(nn.modules.module, attribute, None))
        found += [describe_hook(hook, kind, "every module") for hook in hooks]
    return tuple(found)


def stepped_in_backward(hooks: Iterable[GradientHook]) -> tuple[Optimizer, ...]:
    """Return the optimizers that hooks may step in the backward pass."""
    found = itertools.chain.from_iterable(hook.optimizers for hook in hooks)
    return tuple({id(optimizer): optimizer for optimizer in found}.values())


def in_words(hooks: tuple[GradientHook, ...]) -> str:
    """Return a description of the first hook, and the number of further hooks."""
    more = f" and {len(hooks) - 1} more" if len(hooks) > 1 else ""
    return f"{hooks[0]}{more}"


def bitwise_reason(hooks: tuple[GradientHook, ...]) -> str:
    """Return the reason for trying only settings that keep gradients bitwise equal, or ""."""
    if not hooks:
        return ""
    return f"not tried, because gradient hooks would receive different gradients: the model has {in_words(hooks)}"


def require_compatible(
    hooks: tuple[GradientHook, ...],
    plan: Plan,
    *,
    clip_norm: float | None = None,
    nonfinite: str | None = None,
    out_of_memory: str | None = None,
) -> None:
    """Raise if a plan or an option would change the gradients passed to hooks, or steps taken by hooks.

    Args:
        hooks: result of `gradient_hooks`.
        clip_norm, nonfinite, out_of_memory: arguments of `trimtab.start`.

    Raises:
        ModelError: hooks would receive scaled or split gradients, or would not run.
        OptimizerError: hooks step optimizers in the backward, to which an option of the plan or the run cannot apply.
    """
    if not hooks:
        return
    given = in_words(hooks)
    if plan.precision.value == "fp16" and plan.reference.precision != "fp16":
        raise ModelError(
            "plan.precision",
            problem=f"With precision fp16, gradient hooks receive gradients multiplied by the loss scale, and the "
            f"model has {given}.",
            got="fp16",
            hint="Use a plan with bf16, tf32 or fp32, or remove the hooks and change gradients between run.unscale() "
            'and run.step(). If your loop scales the loss too, plan with reference=trimtab.Reference("fp16").',
            code="hooks.gradient_scaled",
        )
    if split := _split(plan, out_of_memory):
        raise ModelError(
            split,
            problem=f"If a batch is split, gradient hooks receive the gradients of parts, and the model has {given}.",
            hint="Train the whole batch in one micro-batch on one rank, or remove the hooks and change gradients "
            "between run.unscale() and run.step().",
            code="hooks.gradient_split",
        )
    on_modules = tuple(hook for hook in hooks if not hook.kind.startswith(("tensor", "post")))
    if is_recorded(plan.compiled.value) or (plan.compiled.value and on_modules):
        raise ModelError(
            "plan.compiled",
            problem=f"With compiled={plan.compiled.value!r}, gradient hooks do not run in every step, and the model "
            f"has {given}.",
            got=repr(plan.compiled.value),
            hint="Use a plan with compiled=False, or remove the hooks.",
            code="hooks.not_run",
        )
    if stepped := stepped_in_backward(hooks):
        _require_unchanged_steps(stepped, given, plan, clip_norm, nonfinite)


def _split(plan: Plan, out_of_memory: str | None) -> str:
    """Return the name of the argument that splits the batch, or ""."""
    if plan.splits:
        return "plan.micro_batch"
    if plan.batch_rule is not None and not plan.batch_rule.only_measures:
        return "plan.batch_rule"
    if plan.zero_stage.value is not None:
        return "plan.zero_stage"
    return "out_of_memory" if out_of_memory == "split" else ""


def _require_unchanged_steps(
    stepped: tuple[Optimizer, ...], given: str, plan: Plan, clip_norm: float | None, nonfinite: str | None
) -> None:
    """Raise `OptimizerError` for settings that act between backward and step, since hooks step before."""
    changes = {
        "clip_norm": clip_norm is not None,
        "nonfinite": nonfinite in BEFORE_THE_STEP,
    }
    changes |= {setting.field: getattr(plan, name).value != setting.default for name, setting in IN_STEP.items()}
    if named := [name for name, is_set in changes.items() if is_set]:
        raise steps_in_backward(named[0], stepped, given)


def steps_in_backward(field: str, stepped: tuple[Optimizer, ...], given: str) -> OptimizerError:
    """Return the error for a setting or measurement that cannot apply to steps in the backward pass."""
    kinds = ", ".join(sorted({type(optimizer).__name__ for optimizer in stepped}))
    return OptimizerError(
        field,
        problem=f"Gradient hooks may step {len(stepped)} optimizers ({kinds}) within the backward, before {field} "
        f"applies: {given}.",
        hint="Call optimizer.step() after the backward instead of in a hook, or start a plan that changes nothing: "
        "trimtab.Plan.fixed(batch_size).",
        code="optimizer.steps_in_backward",
    )


def require_saved(model: nn.Module, optimizer: Optimizer, saved: Iterable[Any]) -> None:
    """Raise `OptimizerError` if hooks step optimizers that are not among the `saved` objects of the checkpoints."""
    known = {id(each) for each in (optimizer, *saved)}
    stepped = [each for each in stepped_in_backward(gradient_hooks(model)) if id(each) not in known]
    if stepped:
        raise OptimizerError(
            "checkpoints",
            problem=f"Gradient hooks may step {len(stepped)} optimizers whose state the checkpoints do not contain.",
            hint='Pass these optimizers by name: Checkpoints(..., also={"first": optimizer, ...}).',
            code="optimizer.steps_in_backward",
        )


def require_plannable(hooks: tuple[GradientHook, ...]) -> None:
    """Raise `OptimizerError` if the backward pass may step, because a trial would train the model."""
    if stepped := stepped_in_backward(hooks):
        raise steps_in_backward("optimizer", stepped, in_words(hooks))


def describe_hook(hook: Any, kind: str, owner: str, attributes: Iterable[Any] = ()) -> GradientHook:
    """Return the description of a hook; attributes of its owner are searched for optimizers."""
    optimizers = tuple(reachable_instances((hook, *attributes), Optimizer))
    return GradientHook(kind, owner, _name(hook), optimizers)


def user_hooks_of(hooks: Mapping[int, Any] | None) -> Iterator[Any]:
    """Yield the user-registered hooks, without hooks of wrappers such as DDP."""
    return filter(is_users, () if hooks is None else list(hooks.values()))


def is_users(hook: Any) -> bool:
    """Return True for a hook registered by the user, False for hooks of wrappers such as DDP.

    A wrapper's hook that calls a user's function counts as the user's.
    """
    modules = [_module(function) for function in _functions(hook)]
    if modules[0].partition(".")[0] in _WRAPPERS:
        return False
    called = [module for module in modules if module not in _REGISTERING]
    return not called or not all(map(_is_wrappers, called))


def _is_wrappers(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in _OF_TORCH)


def _functions(hook: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a hook and the functions and callable objects in its closure."""
    if isinstance(hook, functools.partial):
        yield from _functions(hook.func, depth)
        inner: Iterable[Any] = (*hook.args, *hook.keywords.values())
    else:
        function = getattr(hook, "__func__", hook)
        yield hook
        inner = (cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_bound(cell))
    if depth < _CLOSURE_DEPTH:
        takes_modules = _module(hook) in _REGISTERING
        for each in inner:
            if _is_called(each, takes_modules=takes_modules):
                yield from _functions(each, depth + 1)


def _is_called(value: Any, *, takes_modules: bool) -> bool:
    """Return True if a hook may call a value of its closure. Modules are mostly state, except in a registered hook."""
    if not callable(value) or isinstance(value, type | Node):
        return False
    return takes_modules or not isinstance(value, nn.Module)


def _is_bound(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # A name that is not bound yet.
        return False


def _module(function: Callable[..., Any]) -> str:
    """Return the module in which a function, or the class of a callable object, is defined."""
    if isinstance(function, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return str(function.__module__ or "")
    return type(function).__module__


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


# Checks of a run's gradient hooks: at the start, before the first step, and in the first forward.

_ON_TENSORS = {
    Tensor.register_hook: "tensor hook",
    Tensor.register_post_accumulate_grad_hook: "post-accumulate-grad hook",
}


class ForwardHookCollector(TorchFunctionMode):
    """Collects the hooks that a user registers on tensors while the mode is active, in `found`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[GradientHook] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the hook if `func` registers a hook, then call `func`."""
        if (kind := _ON_TENSORS.get(func)) is not None:
            hook = args[1] if len(args) > 1 else (kwargs or {}).get("hook")
            if is_users(hook):
                self.found.append(describe_hook(hook, kind, "a tensor created in the forward"))
        return func(*args, **(kwargs or {}))


class HookChecks:
    """Gradient hooks of a run, checked at the start, before the first step and in the first forward.

    Errors are those of `require_compatible`.

    Attributes:
        found: all hooks.
        is_done: True if no further forward has to be watched. Compiled models are never watched, because an active mode
            would cause a recompilation.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        clip_norm: float | None = None,
        nonfinite: str | None = None,
        out_of_memory: str | None = None,
    ) -> None:
        self._model, self.is_done = model, is_compiled(model) or bool(plan.compiled.value)
        self._of_forward: tuple[GradientHook, ...] = ()
        self._options = {"clip_norm": clip_norm, "nonfinite": nonfinite, "out_of_memory": out_of_memory}
        self.found = self._inspected(plan)

    @contextlib.contextmanager
    def first_forward(self, plan: Plan) -> Iterator[None]:
        """Check hooks registered by the first forward."""
        self.is_done = True
        with ForwardHookCollector() as watch:
            yield
        if watch.found:
            self._of_forward = tuple(watch.found)
            self.found = self._inspected(plan)

    def _inspected(self, plan: Plan) -> tuple[GradientHook, ...]:
        found = gradient_hooks(self._model) + self._of_forward
        require_compatible(found, plan, **self._options)  # type: ignore[arg-type]
        return found

    def begin(self, plan: Plan) -> None:
        """Check the model's hooks again before the first step."""
        self.found = self._inspected(plan)

    def require_mean(self, window: Window | None) -> None:
        """Raise `ModelError` for a `Summed` loss over several micro-batches, because the model has hooks."""
        if window is not None and window.num_micro_batches > 1:
            raise ModelError(
                "run.backward",
                problem=f"The model has gradient hooks ({in_words(self.found)}), which would receive gradients that "
                "are not divided by the number of terms of trimtab.Summed, because a step has several micro-batches.",
                hint="Return a mean loss, train one batch per step in one micro-batch, or remove the hooks.",
                code="hooks.gradient_scaled",
            )
