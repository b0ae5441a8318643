"""The user's optimizer: validation against the model, and switching to the fused step and back."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trimtab.core.errors import ModelError, OptimizerError, ValueGivenError
from trimtab.state.reachable_objects import modules_of
from trimtab.techniques.memory_format import align_state
from trimtab.techniques.optimizer_self_test import fused_difference

# Exact classes, since a subclass may override the step that is switched.
_FUSED_CLASSES = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def with_auxiliary_modules(model: nn.Module, modules: Iterable[nn.Module] = ()) -> nn.Module:
    """Return the model, or a container of the model and the auxiliary modules trained with it."""
    others = nn.ModuleList(modules)
    if not others:
        return model
    container = nn.ModuleDict({"model": model, "auxiliary": others})
    container.training = model.training
    return container


def modules_beside(model: nn.Module, modules: Any) -> tuple[nn.Module, ...]:
    """Return the modules of `modules=[...]` that are not part of the model; `ValueGivenError` if not modules."""
    if not isinstance(model, nn.Module):
        return ()  # `check_ownership` raises the error for this.
    found = modules if isinstance(modules, Iterable) and not isinstance(modules, nn.Module) else None
    listed = None if found is None else list(found)
    if listed is None or not all(isinstance(module, nn.Module) for module in listed):
        raise ValueGivenError(
            "modules",
            got=f"{modules!r:.80}",
            expected="a list of torch.nn.Module objects, such as modules=[criterion]",
            code="modules.not_modules",
        )
    own = {id(module) for module in model.modules()}
    return tuple({id(module): module for module in listed if id(module) not in own}.values())


def require_alone(modules: tuple[nn.Module, ...], *, is_alone: bool) -> None:
    """Raise `ModelError` for auxiliary modules with several ranks, because their gradients would not be reduced."""
    if modules and not is_alone:
        raise ModelError(
            "modules",
            problem=f"modules= contains a {type(modules[0]).__name__}, but with several ranks only the gradients of "
            "the model are reduced.",
            hint="Make it a submodule of the model, and compute the loss in the model's forward.",
            code="modules.several_ranks",
        )


def check_ownership(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    modules: tuple[nn.Module, ...] = (),
    loss_fn: Callable[..., Any] | None = None,
) -> None:
    """Check that every optimizer parameter belongs to the model or to an auxiliary module.

    Args:
        modules: modules trained with the model, such as a criterion with parameters.
        loss_fn: the loss, if known, to find the owner of other parameters for the error message.

    Raises:
        ModelError: `model` is not a module, has no trainable parameter, or uses several devices.
        OptimizerError: `optimizer` is not an optimizer, needs a closure, or has other parameters.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model",
            got=_kind(model),
            expected="a torch.nn.Module",
            hint="Pass the model, then its optimizer.",
            code="model.not_module",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        name, held = type(optimizer).__name__, getattr(optimizer, "__dict__", {}).values()
        inner = next((type(each).__name__ for each in held if isinstance(each, torch.optim.Optimizer)), "")
        hint = f"Make {name} a subclass of torch.optim.Optimizer with the param_groups and state of its {inner}."
        raise OptimizerError(
            "optimizer",
            got=_kind(optimizer),
            expected="a torch.optim.Optimizer",
            hint=hint if inner else "Pass an instance, such as torch.optim.AdamW(model.parameters()).",
            code="optimizer.not_torch",
        )
    if any(_needs_closure(vars(cls).get("step")) for cls in type(optimizer).__mro__):
        raise OptimizerError(
            "optimizer",
            problem=f"{type(optimizer).__name__}.step() needs a closure, but a run computes the loss once per step and "
            "passes no closure.",
            got=type(optimizer).__name__,
            hint="Use an optimizer that needs only param.grad, or train with your own loop (docs/own_loop.md).",
            code="optimizer.needs_closure",
        )
    trained = with_auxiliary_modules(model, modules)
    if not any(p.requires_grad for p in trained.parameters()):
        raise ModelError(
            "model",
            got=f"a {type(model).__name__} without trainable parameters",
            expected="at least one parameter with requires_grad=True",
            hint="Call requires_grad_() on the parameters to train.",
            code="model.nothing_to_train",
        )
    devices = {p.device for p in trained.parameters()}
    if len(devices) > 1:
        raise ModelError(
            "model",
            got="parameters on " + ", ".join(sorted(map(str, devices))),
            expected="all parameters on one device",
            hint="Move the model, and modules passed as modules=, to one device.",
            code="model.several_devices",
        )
    owned = {id(p) for p in trained.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    if foreign:
        raise _foreign(foreign, loss_fn)
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise OptimizerError(
            "optimizer",
            got="only frozen parameters",
            expected="at least one parameter with requires_grad=True",
            hint="Unfreeze parameters, or pass trainable parameters to the optimizer.",
            code="optimizer.nothing_to_train",
        )


def _needs_closure(step: Any) -> bool:
    """Return True if a step function needs its argument `closure`, by its signature or by its source.

    By its source, if the closure is asserted, missing closures raise, or the closure is called without a test. Many SAM
    versions have an optional closure in the signature only.
    """
    step = inspect.unwrap(step) if callable(step) else None
    parameter = None if step is None else inspect.signature(step).parameters.get("closure")
    if parameter is None or parameter.default is inspect.Parameter.empty or step.__module__.startswith("torch."):
        return parameter is not None and parameter.default is inspect.Parameter.empty
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(step)))))
    except (OSError, TypeError, SyntaxError):  # The source is not available.
        return False
    tested = [node for node in nodes if isinstance(node, ast.Assert | ast.If | ast.IfExp) and _names(node.test)]
    if any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise))
        for node in tested
    ):
        return True
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return not tested and any(isinstance(func, ast.Name) and func.id == "closure" for func in calls)


def _names(test: ast.expr) -> bool:
    """Return True if an expression refers to the closure."""
    return any(isinstance(node, ast.Name) and node.id == "closure" for node in ast.walk(test))


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _foreign(foreign: list[Tensor], loss_fn: Callable[..., Any] | None) -> OptimizerError:
    """Return the error for parameters outside of model and modules, with a hint that depends on their owner."""
    wanted = {id(p) for p in foreign}
    reached = () if loss_fn is None else modules_of(loss_fn)
    owners = [m for m in reached if any(id(p) in wanted for p in m.parameters())]
    networks = "To train two networks{}, start one run per network, each with its own optimizer (docs/own_loop.md)."
    if owners:
        names = ", ".join(sorted({type(owner).__name__ for owner in owners}))
        hint = f"The loss function uses parameters of {names}. Pass modules=[criterion] to train these parameters too."
    elif loss_fn is None:
        hint = "Pass modules=[criterion] if the criterion has parameters. Otherwise create the optimizer after the "
        hint += "last change of the model: optimizer = AdamW(model.parameters(), ...). " + networks.format("")
    else:
        hint = "Create the optimizer after the last change of the model: optimizer = AdamW(model.parameters(), ...). "
        hint += networks.format(" (a GAN)")
    shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3]) + (", ..." if len(foreign) > 3 else "")
    return OptimizerError(
        "optimizer",
        problem=f"The optimizer has {len(foreign)} parameters that the model does not have, with shapes {shapes}.",
        got=f"{len(foreign)} parameters of shapes {shapes}",
        hint=hint,
        code="optimizer.foreign_parameters",
    )


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if every group uses the fused step already."""
    return all(group.get("fused") is True for group in optimizer.param_groups)


def supports_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `use_fused` can switch this optimizer.

    False if the fused step would differ from the plain step: SGD with dampening, whose first step per parameter is
    special, and parameters with gaps in memory, which the fused CPU kernels ignore.
    """
    groups = optimizer.param_groups
    return (
        type(optimizer) in _FUSED_CLASSES
        and not has_own_step(optimizer)
        and not any(group.get("differentiable") or group.get("capturable") for group in groups)
        and not any(group.get("momentum") and group.get("dampening") for group in groups)
        and all(p.is_floating_point() and not p.is_sparse for group in groups for p in group["params"])
        and all(is_dense(p) for group in groups for p in group["params"])
        and all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    )


def is_dense(parameter: Tensor) -> bool:
    """Return True if a parameter's memory has no gaps, in any order of dimensions."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.numel() == 0 or extent == parameter.numel()


def begin_momenta(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give parameters that receive their first gradient late a zero momentum.

    torch's fused SGD requires momentum buffers for all parameters or for none.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return  # All momentum buffers exist: return quickly in ordinary steps.
    for group in optimizer.param_groups:
        begins = group["momentum"] and group["fused"]  # A group added during the run may use the plain step.
        held = [p for p in group["params"] if p.grad is not None] if begins else []
        lacking = [p for p in held if optimizer.state.get(p, {}).get("momentum_buffer") is None]
        for p in lacking if len(lacking) < len(held) else ():
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the user replaced `optimizer.step`. Wrappers of torch's schedulers do not count."""
    step = vars(optimizer).get("step")
    while step is not None and getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


def first_post_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a step post-hook before the user's, which then see the gradients that a pre-hook has hidden."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks  # An OrderedDict.
    hooks.move_to_end(handle.id, last=False)
    return handle


def refuse_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any], reason: str, *, code: str) -> None:
    """Raise `OptimizerError` if the arguments of a step, as a pre-hook receives them, contain a closure."""
    if kwargs.get("closure", next(iter(args[1:]), None)) is None:  # The first argument is the optimizer.
        return
    raise OptimizerError(
        "optimizer.step",
        got="a closure",
        expected=f"no closure, because {reason}",
        hint="Call the closure first, and then optimizer.step() without it.",
        code=code,
    )


def require_fused(optimizer: torch.optim.Optimizer) -> None:
    """Raise `OptimizerError` if an optimizer has no fused step that can be switched on, or its fused step differs.

    The fused step is compared with the plain step on copies of parameters.
    """
    if not supports_fused(optimizer):
        raise OptimizerError(
            "plan.fused_optimizer",
            got=type(optimizer).__name__,
            expected="an optimizer with a fused step: " + ", ".join(cls.__name__ for cls in _FUSED_CLASSES) + ", "
            "without dampening and with dense floating-point parameters",
            hint="Use a plan with fused_optimizer=False.",
            code="optimizer.not_fusible",
        )
    if difference := fused_difference(optimizer):
        raise OptimizerError(
            "plan.fused_optimizer",
            problem=f"The fused step of {type(optimizer).__name__} differs from its default step by more than "
            f"rounding: {difference}.",
            hint="Use a plan with fused_optimizer=False, or keep these parameters in fp32.",
            code="optimizer.fused_differs",
        )


def use_fused(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Switch to the fused step and keep the state; return a function that switches back."""
    before = [(group.get("fused"), group.get("foreach")) for group in optimizer.param_groups]

    def switch(optimizer: torch.optim.Optimizer) -> None:
        align_state(optimizer)
        for group, _ in zip(optimizer.param_groups, before, strict=False):  # Groups added later are left unchanged.
            group["fused"], group["foreach"] = True, False
            _move_steps(optimizer, group, on_device=True)

    # A loaded state has its own flags; a saved state must not contain the plan's flags, as it outlives the run.
    loading = optimizer.register_load_state_dict_post_hook(switch)
    saving = optimizer.register_state_dict_post_hook(lambda optimizer, saved: _save_flags(saved, before))
    hooks = [loading, saving]
    if isinstance(optimizer, torch.optim.SGD) and any(group["momentum"] for group in optimizer.param_groups):
        hooks.append(optimizer.register_step_pre_hook(begin_momenta))

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for group, (fused, foreach) in zip(optimizer.param_groups, before, strict=False):
            group["fused"], group["foreach"] = fused, foreach
            _move_steps(optimizer, group, on_device=fused is True)

    try:
        switch(optimizer)
    except BaseException:  # Out of memory, or Ctrl-C, after some of the state was moved.
        undo()
        raise
    return undo


def make_state(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Allocate the state of the first step as zeros, so that the step itself allocates none.

    Does nothing for unknown optimizers, and for SGD with dampening, whose first step does not start from zeros.

    Returns:
        A function that removes the state of parameters that have not been stepped.
    """
    made: list[Tensor] = []
    if type(optimizer) not in _FUSED_CLASSES:
        return lambda: None

    def undo() -> None:
        for parameter in made:
            values = optimizer.state.get(parameter, {}).values()
            if not any(bool(value.any()) for value in values if isinstance(value, Tensor)):
                optimizer.state.pop(parameter, None)

    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = _zero_state(type(optimizer), group, parameter) if _lacks_state(optimizer, parameter) else {}
                if state:
                    made.append(parameter)
                    optimizer.state[parameter] = state
    except BaseException:
        undo()
        raise
    return undo


def _lacks_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    is_real = parameter.device.type in ("cpu", "cuda") and not parameter.is_sparse
    return is_real and parameter.requires_grad and not optimizer.state.get(parameter)


def _zero_state(cls: type, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if cls is torch.optim.SGD:
        return {"momentum_buffer": zeros()} if group["momentum"] != 0 and group["dampening"] == 0 else {}
    on_device = group.get("fused") is True or group.get("capturable") is True
    step = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
    state = {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}
    return state | ({"max_exp_avg_sq": zeros()} if group["amsgrad"] else {})


def _save_flags(saved: dict[str, Any], flags: list[tuple[bool | None, bool | None]]) -> None:
    """Restore the user's flags, and host step counters, in a new `state_dict()`."""
    for group, (fused, foreach) in zip(saved["param_groups"], flags, strict=False):
        group["fused"], group["foreach"] = fused, foreach
        for index in group["params"] if fused is not True else ():
            state = saved["state"].get(index, {})
            if isinstance(state.get("step"), Tensor):
                saved["state"][index] = state | {"step": state["step"].cpu()}


def _move_steps(optimizer: torch.optim.Optimizer, group: dict[str, Any], *, on_device: bool) -> None:
    # The fused kernel reads step counters on the parameter's device, the foreach kernel on the host.
    for parameter in group["params"]:
        step = optimizer.state.get(parameter, {}).get("step")
        if isinstance(step, Tensor):
            device = parameter.device if on_device else torch.device("cpu")
            optimizer.state[parameter]["step"] = step.to(device, torch.float32)
