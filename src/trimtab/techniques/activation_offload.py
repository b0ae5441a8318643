"""Offload of saved activations: the first blocks keep their saved tensors in pinned host memory until backward.

A storage is copied to the host when autograd saves the first tensor of it, and its device memory is released at the end
of the next block's forward, once the compute stream waits for the copy. In the backward, the storages of a block are
copied back while the next block (in forward order) computes. Copies run on a side stream (`techniques.host_transfers`),
and the host waits for none of them. Complete storages are copied, so all restored tensors have their strides, and the
kernels of the backward compute bitwise the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.measure.blocks import find_blocks
from trimtab.techniques.activation_checkpointing import keeps_activations
from trimtab.techniques.compiled_call import is_compiled
from trimtab.techniques.host_transfers import BufferPool, CudaTransfers
from trimtab.techniques.replaced_classes import is_replaced, replace_forwards

LEAST_BYTES = 2**16  # Smaller storages stay on the device: a copy takes longer to start than to run.
_MOST_UNUSED = 8  # Multiple of a tensor's bytes; a larger storage is mostly another's, such as a data set's.


def require_cuda(device: torch.device) -> None:
    """Raise `ValueGivenError` if a model is not on a CUDA device."""
    if device.type != "cuda":
        raise ValueGivenError(
            "plan.offload",
            got=f"blocks to offload for a model on the device {device.type!r}",
            expected="a model on a CUDA device",
            hint="Move the model to the GPU before trimtab.start, or use a plan with offload=None.",
            code="offload.no_cuda",
        )


def require_offload(model: nn.Module, num_blocks: int, names: Sequence[str] = ()) -> None:
    """Raise `ModelError` if the saved tensors of the model's first blocks cannot be moved."""
    if isinstance(model, torch.jit.ScriptModule) or is_compiled(model):
        raise _refused("The plan offloads activations, but the model is compiled.", "offload.compiled")
    if any(hasattr(each, "placements") for each in model.parameters()):
        raise _refused("The plan offloads activations, but the loop shards the model's weights.", "offload.sharded")
    blocks = _blocks_of(model, names)
    if num_blocks >= len(blocks):
        raise ModelError(
            "plan.offload",
            got=f"{num_blocks} for a {type(model).__name__} with {len(blocks)} blocks",
            expected="fewer blocks than the model has, because backward needs the last block's tensors at once",
            hint=f"Use a plan with offload={len(blocks) - 1}." if len(blocks) > 1 else "Use a plan with offload=None.",
            code="offload.blocks",
        )
    if any(is_replaced(each) or "forward" in vars(each) for each in blocks[: num_blocks + 1]):
        raise _refused("The forward of a block that the plan offloads was replaced.", "offload.forward_replaced")


def _refused(problem: str, code: str) -> ModelError:
    return ModelError("plan.offload", problem=problem, hint="Use a plan with offload=None.", code=code)


def _blocks_of(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    return list(dict.fromkeys(map(model.get_submodule, names or find_blocks(model))))


def use_offload(
    model: nn.Module,
    num_blocks: int,
    transfers: CudaTransfers | None = None,
    least_bytes: int = LEAST_BYTES,
    names: Sequence[str] = (),
) -> Callable[[], None]:
    """Keep the saved tensors of a model's first blocks in pinned host memory; return a function that undoes this.

    Args:
        transfers: copies between device and host; None: of the model's CUDA device.
        least_bytes: size of the smallest storage that is moved.
        names: names of all blocks, in forward order; (): the blocks found in the module tree.

    Raises:
        ModelError: the model has too few blocks, or its blocks cannot be changed; nothing has changed.
    """
    require_offload(model, num_blocks, names)
    transfers = CudaTransfers(next(model.parameters()).device) if transfers is None else transfers
    offload = _Offload(model, transfers, least_bytes)
    blocks = _blocks_of(model, names)[: num_blocks + 1]
    # The block after the offloaded blocks releases the device memory of the last of them, and fetches it again.
    calls = [_Block(offload, is_first=i == 0, is_offloaded=i < num_blocks) for i in range(len(blocks))]
    return replace_forwards(blocks, calls)


class _Block:
    """New forward of a block."""

    def __init__(self, offload: _Offload, *, is_first: bool, is_offloaded: bool) -> None:
        self._offload, self._is_first, self._is_offloaded = offload, is_first, is_offloaded

    def run(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        if keeps_activations():
            return forward(*args, **kwargs)
        if self._is_first:
            self._offload.begin()
        call = _Call(self._offload)
        if self._is_offloaded:
            with saved_tensors_hooks(call.pack, _unpack):
                result = forward(*args, **kwargs)
        else:
            result = forward(*args, **kwargs)
        self._offload.end(call, result)
        return result


class _Offload:
    """Storages moved by the blocks of a model."""

    def __init__(self, model: nn.Module, transfers: CudaTransfers, least_bytes: int) -> None:
        self._model, self._transfers, self._least_bytes = model, transfers, least_bytes
        self._pool = BufferPool(transfers)
        self._last: _Call | None = None
        self._resident: set[int] = set()  # Storages of parameters and buffers.
        # A weak reference to a storage keeps its address from being used again, so the key is unique.
        self._moved: dict[int, tuple[StorageWeakRef, weakref.ref[_MovedStorage]]] = {}

    def begin(self) -> None:
        """Begin a forward of the model: its first block has no preceding block."""
        self._last = None
        kept = (*self._model.parameters(), *self._model.buffers())
        self._resident = {each.untyped_storage()._cdata for each in kept if _is_plain(each)}
        # Drop entries whose device storage was freed, or whose host copy no graph needs.
        self._moved = {key: pair for key, pair in self._moved.items() if pair[1]() and not pair[0].expired()}

    def end(self, call: _Call, result: Any) -> None:
        """End a block's forward: release the storages of the block before, and fetch them with this one's gradient."""
        before, self._last = self._last, call
        if before is None:
            return
        before.release()
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: before.fetch())
                break

    def move(self, tensor: Tensor) -> _MovedStorage | None:
        """Return the moved storage of a tensor, moving it if necessary; None if the tensor stays on the device."""
        if not _is_plain(tensor) or tensor.device != self._transfers.device:
            return None
        storage = tensor.untyped_storage()
        num_bytes, key = storage.nbytes(), storage._cdata
        if num_bytes < self._least_bytes or key in self._resident:
            return None
        if key in self._moved and (known := self._moved[key][1]()) and known.version == tensor._version:
            return known
        if num_bytes > _MOST_UNUSED * tensor.nbytes:
            return None
        moved = _MovedStorage(tensor, self._transfers, self._pool)
        self._moved[key] = StorageWeakRef(storage), weakref.ref(moved)
        return moved


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is a strided view of bytes."""
    is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


class _Call:
    """A forward of a block. The tensors that autograd saves own the moved storages; the call refers to them weakly."""

    def __init__(self, offload: _Offload) -> None:
        self._offload = offload
        self._moved: dict[int, weakref.ref[_MovedStorage]] = {}

    def pack(self, tensor: Tensor) -> _View | _KeptTensor:
        """Return the object to save for a tensor."""
        moved = self._offload.move(tensor)
        if moved is None:
            return _KeptTensor(tensor, tensor._version)
        self._moved[id(moved)] = weakref.ref(moved)
        return _View(moved, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def release(self) -> None:
        """Release the device memory of the call's storages."""
        for moved in filter(None, (each() for each in self._moved.values())):
            moved.release()

    def fetch(self) -> None:
        """Begin to copy the call's storages back, in the order in which backward needs them."""
        for moved in filter(None, (each() for each in reversed(self._moved.values()))):
            moved.fetch()


class _MovedStorage:
    """A storage that is copied to the host, released, and copied back.

    Attributes:
        version: version of the saved tensor.
    """

    def __init__(self, tensor: Tensor, transfers: CudaTransfers, pool: BufferPool) -> None:
        self.version = tensor._version
        self._transfers, self._pool = transfers, pool
        self._source: Tensor | None = tensor
        self._bytes: Tensor | None = _view(tensor.untyped_storage(), torch.uint8)
        self._num_bytes = self._bytes.numel()
        self._is_changed = False
        self._host = pool.take(self._num_bytes)
        self._event: Any = transfers.to_host(self._bytes, self._host)

    def release(self) -> None:
        """Release the device memory to the kernels that follow the copy to the host."""
        if self._source is not None:
            self._wait()
            self._is_changed = self._source._version != self.version
            self._source = self._bytes = None

    def fetch(self) -> None:
        """Begin to copy the storage back, if it is not on the device."""
        if self._bytes is None:
            self._bytes, self._event = self._transfers.to_device(self._host, self._num_bytes)

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device, for kernels of the compute stream.

        Raises:
            ModelError: the storage was changed in place before its copy was complete.
        """
        if self._source is not None:
            self._is_changed = self._source._version != self.version
        if self._is_changed:
            raise _changed()
        if self._source is None:
            self.fetch()
            self._wait()
        assert self._bytes is not None
        return self._bytes.untyped_storage()

    def _wait(self) -> None:
        if self._event is not None:
            self._transfers.wait(self._event)
            self._event = None

    def __del__(self) -> None:
        if not hasattr(self, "_event"):
            return  # The first copy could not begin.
        if self._event is not None and self._bytes is not None:
            # A graph without a backward; the thread that frees it may have another current stream.
            self._transfers.hold(self._bytes)
        self._pool.give_back(self._host)


class _View(NamedTuple):
    """A saved tensor as a view of a moved storage."""

    moved: _MovedStorage
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        return _view(self.moved.storage(), self.dtype, *self[2:])


class _KeptTensor(NamedTuple):
    """A saved tensor that stays on the device. Autograd does not compare versions under hooks."""

    kept: Tensor
    version: int

    def tensor(self) -> Tensor:
        if self.kept._version != self.version:
            raise _changed()
        return self.kept


def _unpack(saved: _View | _KeptTensor) -> Tensor:
    return saved.tensor()


def _changed() -> ModelError:
    return ModelError(
        "plan.offload",
        problem="A tensor that backward needs was changed in place after the forward of an offloaded block saved it.",
        hint="Use out-of-place operations on it (x + y, not x += y), or use a plan with offload=None.",
        code="offload.changed_in_place",
    )


def _view(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int = 0,
    size: tuple[int, ...] | None = None,
    stride: tuple[int, ...] = (1,),
) -> Tensor:
    """Return a tensor that is a view of a storage; by default of all bytes."""
    size = (storage.nbytes(),) if size is None else size
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
