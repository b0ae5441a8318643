"""Comparison between ranks of the parameters that a window's backward passes reach (FSDP2 and DeepSpeed).

FSDP2 and DeepSpeed reduce the gradients that a rank has, in order of arrival. If ranks use different layers, gradients
are added to the wrong parameters when sizes match, and ranks wait forever when sizes differ. Hooks record reached
parameters on the host, without synchronising, and ranks compare the result once per window.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from trimtab.core.errors import RankError
from trimtab.measure.gradient_norms import is_sharded_itself
from trimtab.training.gradient_sync import UNREDUCED, listed, pack_indices, unpack_indices
from trimtab.training.metadata_exchange import MetadataExchange

# In the first windows, ranks also compare before each collective, so that different layers raise instead of hanging.
_CHECKED_WINDOWS = 3
_BACKWARD = -1
_IN_FSDP = "Have every rank run the same blocks in every micro-batch, or use zero_stage=0 (DistributedDataParallel)."
UNLIKE = "Some ranks used these parameters in this step and other ranks did not"
_IN_DEEPSPEED = "Use every trainable parameter in every step on every rank, or use zero_stage=0."


class ReachedParameters:
    """The parameters, of names equal on every rank, that a window's backward passes reached."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.in_window, self.in_micro_batch = set[int](), set[int]()
        self._handles: list[Any] = []
        self._leaves: list[Tensor | None] = [None] * len(names)

    def watch(self, index: int, leaf: Tensor) -> None:
        """Record each accumulation of a gradient into parameter number `index`."""
        self._leaves[index], note = leaf, self.in_micro_batch.add

        def reached(_: Tensor) -> None:
            note(index)

        self._handles.append(leaf.register_post_accumulate_grad_hook(reached))

    def end_micro_batch(self) -> None:
        """Add the parameters reached in a micro-batch, after its backward."""
        self.in_window |= self.in_micro_batch
        self.in_micro_batch.clear()

    def reset(self) -> None:
        """Reset for a new window."""
        self.in_window.clear()
        self.in_micro_batch.clear()

    def unreached(self) -> list[int]:
        """Return the indices of parameters that no backward of the window reached."""
        return [index for index in range(len(self.names)) if index not in self.in_window]

    def require_alike(
        self, loss: Tensor, exchange: MetadataExchange, hint: str, groups: Sequence[int] | None = None
    ) -> None:
        """Raise `RankError` on every rank, before a backward, unless it will reach the same parameters on all ranks.

        Args:
            loss: the loss to call backward on; its autograd graph is walked.
            groups: group number of each parameter; parameters with equal numbers are interchangeable.
        """
        ahead = _leaves(loss)
        groups = range(len(self.names)) if groups is None else groups
        reached = {group for group, leaf in zip(groups, self._leaves, strict=True) if id(leaf) in ahead}
        unreached = [index for index, group in enumerate(groups) if group not in reached]
        each = [unpack_indices(figures) for figures in exchange.share(pack_indices(unreached, len(self.names)))]
        if unlike := each[0].union(*each) - each[0].intersection(*each):
            raise self.error(sorted(unlike), UNLIKE, hint)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def error(self, indices: Sequence[int], found: str, hint: str) -> RankError:
        """Return an error that names the given parameters; `found` is a sentence about "these parameters"."""
        names = listed([self.names[index] for index in indices])
        return RankError("model", problem=f"{found}: {names}.", got=names, hint=hint, code=UNREDUCED)


def _leaves(loss: Tensor) -> set[int]:
    """Return the ids of the leaf tensors that a backward of a loss reaches."""
    found, seen, queue = set[int](), set[Any](), deque([loss.grad_fn])
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        queue.extend(following for following, _ in node.next_functions)
    return found


class AllParametersCheck:
    """Check that every window reaches every trainable parameter, since DeepSpeed reduces and steps all of them."""

    def __init__(self, model: nn.Module, exchange: MetadataExchange) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._exchange, self._reached = exchange, ReachedParameters([name for name, _ in trained])
        for index, (_, parameter) in enumerate(trained):
            self._reached.watch(index, parameter)
        self._windows = 0

    def begin_backward(self, loss: Tensor) -> None:
        """In the first windows, raise `RankError` on every rank unless the backward reaches equal parameters on all."""
        if self._windows < _CHECKED_WINDOWS:
            self._reached.require_alike(loss, self._exchange, _IN_DEEPSPEED)

    def end_backward(self, *, last: bool) -> None:
        """After a window, raise `RankError` on every rank if a parameter has no gradient on some rank."""
        self._reached.end_micro_batch()
        if not last:
            return
        unreached = self._reached.unreached()
        self._reached.reset()
        self._windows += 1
        each = [
            unpack_indices(figures)
            for figures in self._exchange.share(pack_indices(unreached, len(self._reached.names)))
        ]
        if any(each):
            rank = next(rank for rank, indices in enumerate(each) if indices)
            found = f"No micro-batch of the step used these parameters on rank {rank}"
            raise self._reached.error(sorted(each[rank]), found, _IN_DEEPSPEED)

    def reset(self) -> None:
        self._reached.reset()

    def close(self) -> None:
        self._reached.close()


class ShardedParameterUse:
    """The parameters reached in a window of a model under FSDP2.

    If a rank ran a block without using one of the block's parameters, zeros are reduced with the other ranks'
    gradients. A parameter unused on all ranks gets no gradient, and the optimizer skips the parameter. Ranks that run
    different blocks raise an error before the step. torch before 2.13 cannot reduce zeros; ranks then raise an error if
    they used different parameters.

    Attributes:
        is_needed: False without FSDP2 modules, with an unknown version of FSDP2, or in a single process.
    """

    def __init__(self, model: nn.Module, exchange: MetadataExchange) -> None:
        self._exchange = exchange
        self._modules: list[Any] = [module for module in model.modules() if is_sharded_itself(module)]
        self._groups = _groups_of(self._modules) if exchange.num_ranks > 1 else []
        self.is_needed = bool(self._groups)
        held = [(number, each) for number, group in enumerate(self._groups) for each in group.fsdp_params]
        names = {p: name for name, p in model.named_parameters()}
        self._held = [(number, each) for number, each in held if each.sharded_param.requires_grad]
        self._reached = ReachedParameters([names.get(each.sharded_param, "a parameter") for _, each in self._held])
        self._unwatched = list(range(len(self._held)))
        self._blocks: list[list[int]] = []
        self._is_last = self._in_forward = False
        self._windows, self._hooks = 0, list[Any]()
        if self._groups and not _is_compiled(model):
            places = {module: name for name, module in model.named_modules()}
            self._names = [places[module] or type(module).__name__ for module in self._modules]
            for place, module in enumerate(self._modules):
                self._hooks.append(module.register_forward_pre_hook(self._entering(place), prepend=True))
        self._fills = [group for group in self._groups if hasattr(group, "reduce_scatter_unused_params")]
        self._before = [group.reduce_scatter_unused_params for group in self._fills]
        for group in self._fills:
            group.reduce_scatter_unused_params = True

    def begin(self, *, last: bool) -> None:
        """Prepare a micro-batch."""
        self._is_last, self._in_forward = last, True

    def _entering(self, place: int) -> Callable[..., None]:
        return lambda *_: self._require_same(place)

    def _require_same(self, place: int) -> None:
        """In the first windows, raise `RankError` on every rank unless all ranks are about to run the same block.

        Args:
            place: index of the block that this rank enters, or `_BACKWARD`.
        """
        if not (self._in_forward and self._hooks):
            return
        places = [int(figures[0]) for figures in self._exchange.share([place])]
        if len(set(places)) > 1:
            self._in_forward = False
            where = [
                f"{'the backward' if each == _BACKWARD else self._names[each]} on rank {r}"
                for r, each in enumerate(places)
            ]
            found = "Ranks run different blocks at the same time, but FSDP2 gathers each block from all ranks"
            places_of_ranks = ", ".join(where)
            raise RankError(
                "model", problem=f"{found}: {places_of_ranks}.", got=places_of_ranks, hint=_IN_FSDP, code=UNREDUCED
            )

    def begin_backward(self, loss: Tensor) -> None:
        """In the first windows, raise `RankError` on every rank unless the backward reaches equal parameters on all."""
        self._watch()
        if self._hooks:
            self._require_same(_BACKWARD)
            groups = [group for group, _ in self._held] if self._fills else None
            self._reached.require_alike(loss, self._exchange, _IN_FSDP, groups)
        self._in_forward = False

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward pass; after a window's last, raise `RankError` on every rank if gradients were not reduced."""
        self._watch()
        run()
        self._blocks.append(sorted({self._held[index][0] for index in self._reached.in_micro_batch}))
        self._reached.end_micro_batch()
        if self._is_last:
            self._compare()

    def _watch(self) -> None:
        """Watch the unsharded parameters, which FSDP2 creates in the first forward and keeps."""
        if not self._unwatched:
            return
        for index in self._unwatched:
            if (whole := getattr(self._held[index][1], "_unsharded_param", None)) is not None:
                self._reached.watch(index, whole)
        self._unwatched = [index for index in self._unwatched if not hasattr(self._held[index][1], "_unsharded_param")]

    def _compare(self) -> None:
        self._windows += 1
        if self._windows == _CHECKED_WINDOWS:
            self._end_checks()
        unreached, blocks = self._reached.unreached(), self._blocks
        self._reached.reset()
        self._blocks = []
        own = [zlib.crc32(repr(blocks).encode()), *pack_indices(unreached, len(self._held))]
        said = self._exchange.share(own)
        each = [unpack_indices(figures[1:]) for figures in said]
        by_none, by_some = set.intersection(*each), set.union(*each)
        if len({figures[0] for figures in said}) > 1 or (by_none != by_some and not self._fills):
            unlike = sorted(by_some - by_none) or unreached or list(range(len(self._held)))
            raise self._reached.error(unlike, UNLIKE, _IN_FSDP)
        left = [index for index, (_, held) in enumerate(self._held) if _is_left(held)]
        if left:
            found = "The last micro-batch of the step did not use these parameters, but an earlier micro-batch did"
            raise self._reached.error(left, found, _IN_FSDP)
        for index in by_none:
            self._held[index][1].sharded_param.grad = None

    def reset(self) -> None:
        """Reset after a window was dropped."""
        self._reached.reset()
        self._blocks, self._in_forward = [], False

    def _end_checks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def close(self) -> None:
        """Remove the hooks and restore FSDP2's treatment of parameters without gradient."""
        self._end_checks()
        self._reached.close()
        for group, before in zip(self._fills, self._before, strict=True):
            group.reduce_scatter_unused_params = before


def _groups_of(modules: Sequence[Any]) -> list[Any]:
    """Return FSDP2's parameter groups in an order equal on every rank; empty if torch's internals are unknown."""
    states = [module._get_fsdp_state() for module in modules if hasattr(module, "_get_fsdp_state")]
    found: list[Any] = []
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
        found += [group for group in groups if hasattr(group, "fsdp_params") and group not in found]
    return found


def _is_compiled(model: nn.Module) -> bool:
    return any(each._compiled_call_impl is not None or hasattr(each, "_orig_mod") for each in model.modules())


def _is_left(held: Any) -> bool:
    """Return True if a gradient of earlier micro-batches has not been reduced."""
    return getattr(held, "unsharded_accumulated_grad", None) is not None
