"""In-place compilation of a model's calls or of its blocks by torch.compile, and capture as CUDA graphs."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from trimtab.core.choice import COMPILED_BLOCKS, Compiled, is_by_compiler, is_recorded
from trimtab.core.errors import ValueGivenError
from trimtab.measure.blocks import find_blocks
from trimtab.techniques.cuda_graphs import GraphReplayer


def is_compiled(model: nn.Module) -> bool:
    """Return True if the model or a submodule is compiled already."""
    return any(hasattr(each, "_orig_mod") or each._compiled_call_impl is not None for each in model.modules())


def check_available(compiled: Compiled, device: torch.device) -> None:
    """Raise `ValueGivenError` if a plan uses CUDA graphs and the device is not a CUDA device."""
    if is_recorded(compiled) and device.type != "cuda":
        raise ValueGivenError(
            "plan.compiled",
            got=f"CUDA graphs (compiled={compiled!r}) for a model on the device {device.type!r}",
            expected="a model on a CUDA device",
            hint="Move the model to the GPU before trimtab.start, or use a plan with compiled=False.",
            code="compiled.no_cuda",
        )


def require_as_written(compiled: Compiled, model: nn.Module) -> None:
    """Raise `ValueGivenError` if a plan compiles a model that the user has compiled already."""
    if compiled and is_compiled(model):
        raise ValueGivenError(
            "plan.compiled",
            problem=f"The plan compiles the model (compiled={compiled!r}), but the model or one of its submodules is "
            "compiled already.",
            hint="Remove torch.compile from the loop, or use a plan with compiled=False. To resume a checkpoint with "
            'that plan, pass Checkpoints(accepts=("plan",)).',
            code="compiled.twice",
        )


def require_blocks(compiled: Compiled, model: nn.Module) -> None:
    """Raise `ValueGivenError` if a plan compiles the blocks of a model without repeated blocks."""
    if compiled == COMPILED_BLOCKS and not repeated_blocks(model):
        raise ValueGivenError(
            "plan.compiled",
            got=f"{compiled!r} for a {type(model).__name__} without repeated blocks",
            expected="a model with several equal blocks, such as the layers of a transformer",
            hint="Use a plan with compiled=True or compiled=False.",
            code="compiled.no_blocks",
        )


_Shapes = tuple[tuple[str, torch.Size], ...]


def repeated_blocks(model: nn.Module) -> dict[tuple[type[nn.Module], _Shapes], list[nn.Module]]:
    """Return the blocks of a model by class and parameter shapes; {} if no kind repeats.

    Kinds with a single block belong to the result too, for example the first blocks of the stages of a ResNet.
    """
    groups: dict[tuple[type[nn.Module], _Shapes], list[nn.Module]] = {}
    for name in find_blocks(model):
        block = model.get_submodule(name)
        if shapes := tuple((key, parameter.shape) for key, parameter in block.named_parameters()):
            groups.setdefault((type(block), shapes), []).append(block)
    return groups if any(len(group) > 1 for group in groups.values()) else {}


def noting_calls(model: nn.Module, note: Callable[[], None]) -> Callable[[], None]:
    """Call `note` before each forward of a model; return a function that ends this.

    In a model compiled in place, hooks are part of the compiled code, and hooks added later are not called, so its call
    is wrapped. The call is also wrapped if a model rejects hooks, as a scripted model does.
    """
    called: Any = model._compiled_call_impl
    before = called
    if called is None:
        try:
            return model.register_forward_pre_hook(lambda *_: note()).remove
        except Exception:  # Raised by torch or by the model's own class.
            called = model._call_impl

    def noted(*args: Any, **kwargs: Any) -> Any:
        note()
        return called(*args, **kwargs)

    model._compiled_call_impl = noted

    def end() -> None:
        model._compiled_call_impl = before

    return end


# Most versions of a compiled block, for example for other shapes of the input; further ones run in eager mode.
_MOST_VERSIONS = 16
_OPTIONS: dict[str, Any] = {"options": {"fallback_random": True}}  # Dropout masks as without compilation.


# The compiled function of each kind of block, kept because a plan's trials and its run compile the same blocks.
_compiled: weakref.WeakKeyDictionary[type[nn.Module], dict[_Shapes, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def _call_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a block; compiled once for all blocks of a group, since the block is an argument."""
    return block._call_impl(*args, **kwargs)


class CompiledBlocks:
    """The calls of a model's repeated blocks, each kind compiled once, at its first call.

    A cache of keys and values that a Transformers model fills during training would differ in every block, so it is
    turned off meanwhile, as Transformers itself does for activation checkpointing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._calls: dict[nn.Module, Callable[..., Any]] = {}
        for (kind, shapes), group in repeated_blocks(model).items():
            known = _compiled.setdefault(kind, {})
            compiled = known.setdefault(shapes, torch.compile(_call_block, **_OPTIONS, **_own_cache()))
            for block in group:
                self._calls[block] = _calling(compiled, block)
        self._configs = [config for config in _configs(model.modules()) if getattr(config, "use_cache", None) is True]
        self.turn(on=True)

    def turn(self, *, on: bool) -> None:
        """Run the blocks compiled, or in eager mode."""
        for block, call in self._calls.items():
            block._compiled_call_impl = call if on else None
        for config in self._configs:
            config.use_cache = not on

    def undo(self) -> None:
        """Restore the blocks' original calls."""
        self.turn(on=False)
        for block in self._calls:
            vars(block).pop("_compiled_call_impl", None)


def _own_cache() -> dict[str, Any]:
    """Return options that keep the compiled versions of one group apart from those of others, where torch has them."""
    known = inspect.signature(torch.compile).parameters
    options = {"recompile_limit": _MOST_VERSIONS, "isolate_recompiles": True}
    return options if options.keys() <= known.keys() else {}


def _calling(compiled: Callable[..., Any], block: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: compiled(block, args, kwargs)


def _configs(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the distinct configurations of a Transformers model."""
    yield from {id(each.config): each.config for each in modules if hasattr(each, "config")}.values()


class CompiledCall:
    """A model's call, compiled at its first call, captured as a CUDA graph at a later call, or both.

    Random numbers are the same as without compilation, so dropout masks are unchanged. A copy of the model is not
    compiled. `saw` is called before each forward, outside of the compiled code, since a new hook would cause a
    recompilation.

    Attributes:
        shapes: shapes of input tensors since the last `take_shapes`; None if shapes are not collected.
        recorder: captures and replays CUDA graphs; None without graphs.
    """

    def __init__(self, model: nn.Module, saw: Callable[[], None], compiled: Compiled = True) -> None:
        called: Any = model._call_impl
        self._blocks = CompiledBlocks(model) if compiled == COMPILED_BLOCKS else None
        if is_by_compiler(compiled) and self._blocks is None:
            model.compile(**_OPTIONS)
            called = model._compiled_call_impl
        self.recorder = GraphReplayer(model, called) if is_recorded(compiled) else None
        self._model, self._called, self._saw = model, self.recorder or called, saw
        self._is_on = True
        self.shapes: list[torch.Size] | None = None
        model._compiled_call_impl = self

    @property
    def is_on(self) -> bool:
        """True if calls use the compiled code; False runs the original forward."""
        return self._is_on

    @is_on.setter
    def is_on(self, value: bool) -> None:
        if value != self._is_on and self._blocks is not None:
            self._blocks.turn(on=value)
        self._is_on = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        self._saw()
        if self.shapes is not None:
            self.shapes += [each.shape for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        return self._called(*args, **kwargs) if self.is_on else self._model._call_impl(*args, **kwargs)

    def take_shapes(self) -> tuple[torch.Size, ...]:
        """Return the input shapes collected since the last call, and clear them."""
        shapes, self.shapes = tuple(self.shapes or ()), []
        return shapes

    def undo(self) -> None:
        """Restore the model's original call."""
        vars(self._model).pop("_compiled_call_impl", None)
        if self._blocks is not None:
            self._blocks.undo()
        if self.recorder is not None:
            self.recorder.forget()
