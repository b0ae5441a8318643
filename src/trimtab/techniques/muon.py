"""Muon for the hidden matrices of a model, combined with the user's AdamW object, groups and learning rates.

Muon steps along the orthogonalised momentum of a matrix (Jordan et al. 2024). Scaled by 0.2 sqrt(max(rows, columns)), a
step has the size of an AdamW step, so learning rate and weight decay of a group apply to both (Liu et al. 2025,
arXiv:2502.16982, section 2.2). torch.optim.Muon computes the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.errors import FormatError, ModelError, OptimizerError
from trimtab.core.stateful import Load, Stateful, require_keys
from trimtab.measure.blocks import find_blocks
from trimtab.measure.gradient_norms import is_flat_sharded, is_sharded
from trimtab.techniques.optimizer_self_test import muon_difference
from trimtab.techniques.optimizers import first_post_hook, refuse_closure

MOMENTUM = "momentum_buffer"  # Torch's key for the momentum.
_SCALE = "match_rms_adamw"
# Modules whose two-dimensional weights are not used in matrix products.
_TABLES = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm)
_UNCHANGED = 'Leave "optimizer" out of adapt, or use a plan with optimizer="user".'


def hidden_matrices(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters that Muon would step, in the optimizer's order: the matrices of the model's blocks.

    These are trained two-dimensional weights except embeddings and norms. Parameters shared with modules outside of the
    blocks, such as a tied head, stay with AdamW.

    Raises:
        OptimizerError: the optimizer is not torch's own AdamW, or uses an option that Muon lacks.
        ModelError: the model is sharded, or its blocks have no matrix.
    """
    if type(optimizer) is not torch.optim.AdamW:
        given, expected = type(optimizer).__name__, "torch.optim.AdamW, with which Muon is combined"
        raise OptimizerError("optimizer", got=given, expected=expected, hint=_UNCHANGED, code="muon.not_adamw")
    for name in ("maximize", "differentiable", "capturable"):
        if any(group.get(name) for group in optimizer.param_groups):
            expected = f"{name}=False, because torch's Muon does not support the option"
            raise OptimizerError(
                "optimizer", got=f"{name}=True", expected=expected, hint=_UNCHANGED, code="muon.option"
            )
    if is_sharded(model) or is_flat_sharded(model):
        expected = "unsharded parameters, because Muon needs whole matrices"
        raise ModelError("model", got="sharded parameters", expected=expected, hint=_UNCHANGED, code="muon.sharded")
    inside = {id(parameter) for parameter in _of_blocks(model)}
    found = [p for group in optimizer.param_groups for p in group["params"] if id(p) in inside]
    if not found:
        raise ModelError(
            "model",
            got="a model whose blocks have no trained two-dimensional weights",
            expected="blocks (members of a ModuleList, or siblings of one class) with two-dimensional weights",
            hint=_UNCHANGED,
            code="muon.no_matrices",
        )
    return found


def _of_blocks(model: nn.Module) -> Iterator[nn.Parameter]:
    modules = dict(model.named_modules())
    blocks = [name for name in find_blocks(model) if next(modules[name].children(), None) is not None]
    within = {n for n in modules if any(n == block or n.startswith(f"{block}.") for block in blocks)}
    outside = {id(p) for n, m in modules.items() if n not in within for p in m.parameters(recurse=False)}
    for name in within:
        for parameter in () if isinstance(modules[name], _TABLES) else modules[name].parameters(recurse=False):
            if parameter.ndim == 2 and parameter.requires_grad and id(parameter) not in outside:
                yield parameter


def use_muon(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Have Muon step the hidden matrices in each step of the optimizer; return a function that ends this.

    The momentum is kept in the optimizer's state, but is left out of `optimizer.state_dict()`, which stays loadable
    into AdamW; AdamW then starts new moments for these matrices. The state of the run contains the momentum. Once Muon
    has stepped, AdamW's former moments of these matrices are lost. Errors as of `hidden_matrices`.
    """
    matrices = hidden_matrices(model, optimizer)
    require_muon(matrices)
    return _MuonHooks(matrices, optimizer).end


def require_muon(matrices: Iterable[nn.Parameter]) -> None:
    """Raise `OptimizerError` if torch's Muon step is inaccurate for the matrices' dtype and device."""
    if difference := muon_difference(matrices):
        raise OptimizerError(
            "plan.optimizer",
            problem=f"A step of torch.optim.Muon on this device differs from the same step in float64: {difference}.",
            hint=_UNCHANGED,
            code="optimizer.muon_differs",
        )


class _MuonHooks:
    """Muon steps attached to an AdamW optimizer by hooks."""

    def __init__(self, matrices: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._matrices, self._optimizer = matrices, optimizer
        inside = {id(p) for p in matrices}
        by_group = [[p for p in group["params"] if id(p) in inside] for group in optimizer.param_groups]
        self._places = [index for index, found in enumerate(by_group) if found]
        self._muon = torch.optim.Muon([{"params": by_group[index]} for index in self._places], adjust_lr_fn=_SCALE)
        # The step without torch's wrapper, which calls the hooks of `register_optimizer_step_pre_hook` once more.
        step: Any = torch.optim.Muon.step
        self._take_step: Callable[[torch.optim.Optimizer], object] = step.__wrapped__
        self._hidden: list[Tensor | None] = []
        self._before: dict[Tensor, Any] = {p: optimizer.state.pop(p) for p in matrices if p in optimizer.state}
        self._hooks: list[Any] = []
        try:
            for p in matrices:
                self._put(p, torch.zeros_like(p, memory_format=torch.preserve_format))
        except BaseException:  # Out of memory, or Ctrl-C, after some moments were removed.
            self.end()
            raise
        self._hooks = [
            optimizer.register_step_pre_hook(self._step),
            first_post_hook(optimizer, self._show),
            optimizer.register_state_dict_post_hook(self._leave_out),
            optimizer.register_load_state_dict_pre_hook(self._keep),
            optimizer.register_load_state_dict_post_hook(self._put_back),
        ]

    def _put(self, parameter: nn.Parameter, momentum: Tensor) -> None:
        self._optimizer.state[parameter] = {MOMENTUM: momentum}

    def _step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Step the matrices by Muon and hide their gradients from AdamW.

        Muon steps first: if AdamW raises and is stepped again, the matrices are not stepped twice.

        Raises:
            OptimizerError: the step has a closure; nothing has changed.
        """
        refuse_closure(args, kwargs, "matrices are stepped before it would run", code="muon.closure")
        for index, group in zip(self._places, self._muon.param_groups, strict=True):
            theirs = optimizer.param_groups[index]
            group["lr"], group["weight_decay"] = theirs["lr"], theirs["weight_decay"]
        self._muon.state = optimizer.state
        # GradScaler passes the overflow flag to fused optimizers, which check it themselves.
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is None or not bool(overflow):
            self._take_step(self._muon)
            self._before.clear()
        self._hidden = [p.grad for p in self._matrices]
        for p in self._matrices:
            p.grad = None

    def _show(self, *_: Any) -> None:
        for p, grad in zip(self._matrices, self._hidden, strict=True):
            p.grad = grad
        self._hidden = []

    def _leave_out(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        inside = {id(p) for p in self._matrices}
        order = [p for group in optimizer.param_groups for p in group["params"]]
        for index in [index for index in saved["state"] if id(order[index]) in inside]:
            del saved["state"][index]

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._kept = [optimizer.state[p][MOMENTUM] for p in self._matrices]

    def _put_back(self, *_: Any) -> None:
        for p, momentum in zip(self._matrices, self._kept, strict=True):
            self._put(p, momentum)
        self._before.clear()
        self._kept = []

    def end(self) -> None:
        """Return the matrices to AdamW, with AdamW's moments if Muon never stepped."""
        for hook in self._hooks:
            hook.remove()
        for p in self._matrices:
            self._optimizer.state.pop(p, None)
        self._optimizer.state.update(self._before)


class Momentum(Stateful):
    """Momentum of Muon in a run's state, in the order of the optimizer's parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._buffers = [optimizer.state[p][MOMENTUM] for p in hidden_matrices(model, optimizer)]

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {MOMENTUM: [buffer.clone() for buffer in self._buffers]}

    def loading(self, state: Mapping[str, Any]) -> Load:
        require_keys("state.muon", state, (MOMENTUM,))
        given = state[MOMENTUM]
        tensors = list(given) if isinstance(given, list | tuple) else []
        shapes = [tuple(t.shape) if isinstance(t, Tensor) else None for t in tensors]
        expected = [tuple(buffer.shape) for buffer in self._buffers]
        if shapes != expected:
            count = f"{len(shapes)} tensors with {sum(math.prod(shape or ()) for shape in shapes):,} elements"
            wanted = f"{len(expected)} tensors with {sum(map(math.prod, expected)):,} elements, in the shapes of this "
            hint = "Resume with the model of the checkpointed run."
            raise FormatError("state.muon", got=count, expected=wanted + "model's matrices", hint=hint)

        def load() -> None:
            for buffer, tensor in zip(self._buffers, tensors, strict=True):
                buffer.copy_(tensor)

        return load
