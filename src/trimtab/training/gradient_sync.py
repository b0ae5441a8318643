"""One complete gradient all-reduce per window with `DistributedDataParallel` (DDP), on every rank.

DDP reduces in the last micro-batch's backward, once every parameter has received a gradient there. A layer that this
micro-batch did not use would leave its bucket, and all later buckets, unreduced. Such parameters are therefore marked
as ready after the backward, with the gradient of earlier micro-batches or with zeros.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.core.errors import ModelError, OptimizerError, RankError
from trimtab.plans.plan import Plan
from trimtab.training.accumulation import drop_gradients
from trimtab.training.metadata_exchange import Figures, Gathered, MetadataExchange

UNREDUCED = "ranks.gradient_unreduced"
_BITS = 52  # Bits per value: a float64 holds integers up to 2**53 exactly.
# DDP reports the parameters without gradient only in the text of an error.
_WAITS_FOR = re.compile(r"did not receive grad for rank \d+:([\d ,]+)")
_NAMED = 5  # Largest number of parameters in a message.


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` that a model is or wraps (as a compiled model does); None without DDP."""
    return next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), None)


class GradientSync:
    """Makes DDP reduce once per window, independent of the layers used by each micro-batch; does nothing without DDP.

    `begin` is called before each forward, since DDP decides there whether the backward will reduce.
    """

    def __init__(self, model: nn.Module, exchange: MetadataExchange) -> None:
        self._model, self._exchange = data_parallel(model), exchange
        self._skipping = contextlib.ExitStack()
        self._has_begun = self._is_settled = self._is_last = False
        self._sent: int | None = None
        if self._model is not None:
            self._reduced = _reduced_parameters(self._model)
            self._sparse = _sparse_indices(self._model, self._reduced)
            known = {p for _, p in self._reduced} | _left_to_the_user(self._model)
            self._outside = [(name, p) for name, p in model.named_parameters() if p not in known]

    def require_all(self, optimizer: torch.optim.Optimizer, *, of_user: bool) -> None:
        """Raise `OptimizerError` if the optimizer trains a parameter that DDP does not reduce.

        Args:
            of_user: True if the user made the DDP and may reduce other parameters by hand; warns instead of raising.
        """
        if self._model is None or self._exchange.num_ranks == 1:
            return
        known = {p for _, p in self._reduced} | _left_to_the_user(self._model)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        left = [p for p in trained if p not in known]
        if not left:
            return
        names = {p: name for name, p in self._outside}
        called = listed([names.get(p, f"a parameter of shape {tuple(p.shape)}") for p in left])
        problem = f"The optimizer trains parameters whose gradients DistributedDataParallel does not reduce: {called}."
        hint = "Put these parameters into the wrapped model, and set requires_grad before the model is wrapped."
        error = OptimizerError("optimizer", problem=problem, got=called, hint=hint, code=UNREDUCED)
        if not of_user:
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=4)
        self._outside = [(name, p) for name, p in self._outside if p not in set(left)]

    def require_no_static_graph(self, plan: Plan) -> None:
        """Raise `ModelError` for gradient accumulation with `static_graph=True`, whose first backward has to reduce."""
        if self._model is not None and self._model.static_graph and (plan.num_micro_batches > 1 or plan.batch_rule):
            raise ModelError(
                "model",
                problem="DistributedDataParallel with static_graph=True does not support gradient accumulation, but "
                "the plan has several micro-batches per step.",
                hint="Wrap the model without static_graph=True, or use a plan with one micro-batch per step.",
                code="ranks.static_graph",
            )

    def begin(self, *, last: bool) -> None:
        """Prepare a micro-batch: the gradient is reduced in the last micro-batch only."""
        if self._model is None:
            return
        self._has_begun, self._is_last = True, last
        self._skipping.close()
        if not last:
            self._skipping.enter_context(self._model.no_sync())
        else:
            self._sent = _num_collectives(self._model)

    def complete(self) -> None:
        """After the last backward of a window, mark parameters without gradient as ready, so that DDP reduces.

        A parameter unused on all ranks keeps the gradient None, and the optimizer skips the parameter as in a plain
        loop. Ranks that used all layers do not wait for other ranks here. `RankError` if gradients are not reduced.
        """
        if self._model is None or not self._is_last:
            return
        self._is_last = False
        self._require_none_outside()
        missing = self._missing()
        unused = [i for i in missing if self._parameter(i).grad is None]
        answer = self._tell(unused)
        if not missing:
            return
        if self._model.static_graph:  # A static graph accepts no parameters that the first backward did not use.
            raise self._unreduced([self._name(i) for i in missing])
        self._hand_over(missing)
        if left := self._missing():
            raise self._unreduced([self._name(i) for i in left])
        if unused:
            by_all = set.intersection(*(unpack_indices(each) for each in answer()))
            for index in by_all.intersection(unused):
                self._parameter(index).grad = None

    def end(self) -> None:
        """Reset after a window was dropped."""
        self._skipping.close()

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """After the first window, have DDP rebuild the buckets on every rank at the same point.

        DDP would otherwise rebuild in the next forward, never entered by ranks without data.
        """
        if self._model is None or self._is_settled or not self._has_begun:
            return
        self._is_settled = True
        drop_gradients(optimizer)  # Gradients are views of the old buckets.
        self._model.reducer._rebuild_buckets()

    def _missing(self) -> list[int]:
        """Return the indices of the parameters without gradient that DDP waits for; empty if DDP has reduced."""
        assert self._model is not None
        try:
            self._model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            found = _WAITS_FOR.search(str(error))
            indices = [] if found is None else [int(each) for each in re.findall(r"\d+", found.group(1))]
            if not indices:
                raise self._unreduced(["unknown parameters"]) from error
            return indices
        if self._sent is None or _num_collectives(self._model) != self._sent:
            return []
        # No collective since the last forward: the backward reached no parameter, and the reducer has not begun.
        self._sent = None
        if self._model.static_graph:
            return list(range(len(self._reduced)))
        with contextlib.suppress(RuntimeError):  # Raises because the first parameter has already been marked as unused.
            self._call_reducer([0])
        return self._missing()

    def _hand_over(self, indices: Sequence[int]) -> None:
        """Mark parameters as ready; DDP then reduces the completed buckets."""
        for index in indices:
            parameter = self._parameter(index)
            if parameter.grad is None and index in self._sparse:
                parameter.grad = _sparse_zero(parameter)
        self._call_reducer(indices)

    def _call_reducer(self, indices: Sequence[int]) -> None:
        """Call DDP's own parameter hook within a backward pass, because the reducer queues its final callback there."""
        assert self._model is not None
        reducer = self._model.reducer

        def mark(gradient: Tensor) -> None:
            for index in indices:
                reducer._autograd_hook(index)  # type: ignore[attr-defined]

        root = torch.zeros((), device=self._parameter(0).device, requires_grad=True)
        root.register_hook(mark)
        root.backward()

    def _tell(self, unused: Sequence[int]) -> Callable[[], Gathered]:
        """Send the indices of parameters without gradient on this rank."""
        return self._exchange.ask(pack_indices(unused, len(self._reduced)))

    def _require_none_outside(self) -> None:
        """Raise `RankError` for a gradient unknown to DDP, of a parameter unfrozen after wrapping."""
        found = [name for name, parameter in self._outside if parameter.grad is not None]
        if found and self._exchange.num_ranks > 1:
            raise self._unreduced(found)

    def _unreduced(self, names: Sequence[str]) -> RankError:
        problem = f"DistributedDataParallel did not reduce the gradients of {listed(names)} in this step."
        hint = (
            "Use these parameters in every micro-batch, or wrap the model with find_unused_parameters=True and without "
            "static_graph; set requires_grad before the model is wrapped."
        )
        return RankError("model", problem=problem, got=listed(names), hint=hint, code=UNREDUCED)

    def _parameter(self, index: int) -> nn.Parameter:
        return self._reduced[index][1]

    def _name(self, index: int) -> str:
        return self._reduced[index][0]


def _left_to_the_user(model: DistributedDataParallel) -> set[nn.Parameter]:
    """Return parameters that the user excluded from DDP."""
    ignored = model.parameters_to_ignore
    return {p for name, p in model.module.named_parameters() if name in ignored}


def _reduced_parameters(model: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Return names and parameters in the order of DDP's reducer.

    The reducer holds the parameters that required gradients when the model was wrapped, which may have changed since.
    """
    try:
        held = {id(each) for bucket in model.reducer._get_zeros_like_grad_buckets() for each in bucket.parameters()}
    except RuntimeError:  # Buckets of sparse gradients have no memory to inspect.
        held = {id(each) for each in model.module.parameters() if each.requires_grad} - set(
            map(id, _left_to_the_user(model))
        )
    return [(name, p) for name, p in model.module.named_parameters() if id(p) in held]


def _sparse_indices(model: DistributedDataParallel, reduced: Sequence[tuple[str, nn.Parameter]]) -> set[int]:
    """Return the indices of parameters for which DDP expects a sparse gradient."""
    layers = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    weights = {layer.weight for layer in layers}
    return {index for index, (_, parameter) in enumerate(reduced) if parameter in weights}


def _sparse_zero(weight: nn.Parameter) -> Tensor:
    """Return a sparse zero gradient with one row; gloo aborts the process for a gradient without rows."""
    where = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
    return torch.sparse_coo_tensor(where, torch.zeros_like(weight[:1]), weight.shape)


def _num_collectives(model: DistributedDataParallel) -> int | None:
    """Return the number of collectives started on DDP's process group; None if the backend does not count."""
    try:
        backend = model.process_group._get_backend(next(model.module.parameters()).device)
        return int(backend._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return None


def pack_indices(indices: Sequence[int], number: int) -> Figures:
    """Return a bit mask of `indices` below `number`, packed into floats."""
    masks = [0] * -(-number // _BITS)
    for index in indices:
        masks[index // _BITS] |= 1 << index % _BITS
    return masks


def unpack_indices(figures: Figures) -> set[int]:
    """Return the indices of a packed bit mask."""
    return {
        place * _BITS + bit for place, figure in enumerate(figures) for bit in range(_BITS) if int(figure) >> bit & 1
    }


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
