"""Random numbers drawn in a forward: dropout that is disabled, masks shared between samples, and replay of masks.

Dropout may be disabled in the splitting check because micro-batches draw masks from the same distribution. This
requires a separate mask for every sample. A mask of a weight, or a single number for the whole batch, is drawn again
in every micro-batch, and the step averages over several masks.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from trimtab.measure.fake_tensors import EagerDispatchMode
from trimtab.settings.dropout import dropout_modules

# Name parts of third-party layers that may draw their own masks (DropPath, DropBlock).
_OWN_DROP_NAMES = ("drop", "stochasticdepth")
_IGNORED = ("aten::_cudnn_init_dropout_state",)  # Drawn once per process, with a fixed size.
_FAR = 3.0  # Standard deviations.
# Warning about global hooks, which are trimtab's own.
_OF_GLOBAL_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
VARIANTS = 5  # Variants of drawn numbers: the two extremes, and three seeds.


@contextlib.contextmanager
def dropout_off(model: nn.Module, drawing: Collection[nn.Module] = ()) -> Iterator[None]:
    """Disable dropout inside the context.

    Probabilities of torch's modules are set to 0. Functional dropout, attention dropout, dropout between recurrent
    layers and randomized ReLU are intercepted at torch's functions, so modules stay in training mode.

    Args:
        drawing: modules from `own_droppers` that draw random numbers: layers with their own masks go into evaluation
            mode, and probabilities are set to 0.
    """
    own = own_droppers(model)
    modes = [module for module in drawing if _is_drop_layer(module) and module.training]
    found = [(module, name) for module, name in dropout_modules(model) if module not in own or module in drawing]
    probabilities = [(module, name, getattr(module, name)) for module, name in found]
    for module in modes:
        module.training = False
    for module, name, _ in probabilities:
        setattr(module, name, 0.0)
    try:
        with _DropoutOff():
            yield
    finally:
        for module, name, probability in probabilities:
            setattr(module, name, probability)
        for module in modes:
            module.training = True


def own_droppers(model: nn.Module) -> set[nn.Module]:
    """Return modules outside torch with a telling class name, such as `DropPath`, or a dropout probability."""
    named = {module for module in model.modules() if _is_drop_layer(module)}
    return named | {module for module, _ in dropout_modules(model) if not _is_of_torch(module)}


def _is_drop_layer(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return not _is_of_torch(module) and not any(module.children()) and any(part in name for part in _OWN_DROP_NAMES)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


class _DropoutOff(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _REPLACEMENTS.get(func, func)
        if replacement is func:
            return func(*args, **(kwargs or {}))
        return replacement(func, list(args), dict(kwargs or {}))


_Function = Callable[..., Any]


def _input(func: _Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["input"]


def _input_and_mask(func: _Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value = _input(func, args, kwargs)
    return value, torch.ones_like(value, dtype=torch.bool)


def _without_attention_dropout(func: _Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    place = 4  # scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)
    if len(args) > place:
        args[place] = 0.0
    else:
        kwargs["dropout_p"] = 0.0
    return func(*args, **kwargs)


def _not_training(func: _Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.arguments["training"] = False  # In these functions, `training` only controls random numbers.
    return func(*bound.args, **bound.kwargs)


def _without_layer_dropout(func: _Function, args: list[Any], kwargs: dict[str, Any]) -> Any:
    # The only float argument of a recurrent kernel; its position differs between padded and packed inputs.
    return func(*(0.0 if isinstance(arg, float) else arg for arg in args), **kwargs)


_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_),
    *(torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
)
_REPLACEMENTS: dict[_Function, _Function] = {
    **dict.fromkeys(_DROPOUTS, _input),
    torch.native_dropout: _input_and_mask,
    F.scaled_dot_product_attention: _without_attention_dropout,
    **dict.fromkeys((F.multi_head_attention_forward, F.rrelu), _not_training),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _without_layer_dropout),
}


@dataclass(frozen=True)
class MaskDraw:
    """A place that draws random numbers: the innermost running module (None in the loss) and the operator's name."""

    module: nn.Module | None
    operator: str

    def text(self, model: nn.Module) -> str:
        """Return the place as text."""
        name = next((name for name, each in model.named_modules() if each is self.module), "")
        where = f"{name} ({type(self.module).__name__})" if self.module is not None else "the loss function"
        return f"{self.operator.removeprefix('aten::').partition('.')[0]} in {where}"


class UnmatchedMasks(RuntimeError):
    """A part of a batch draws other random numbers than the whole batch does for the same samples."""


class _Seeded(EagerDispatchMode):
    """Dispatch mode that passes operators with random results to a callback, below autograd.

    Args:
        drawn: called with the place, the result, a function that draws again, and the operator's arguments; returns
            the result to use.

    Attributes:
        running: modules with a running forward, innermost last.
    """

    def __init__(self, drawn: Callable[[MaskDraw, Any, Callable[[], Any], Any, Any], Any]) -> None:
        super().__init__()
        self._drawn = drawn
        self.running: list[nn.Module] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or func.name() in _IGNORED:
            return func(*args, **kwargs)
        before = _generators()
        result = func(*args, **kwargs)
        # The operator drew nothing, such as attention without dropout.
        if all(map(torch.equal, before, _generators())):
            return result
        draw = MaskDraw(self.running[-1] if self.running else None, func.name())
        return self._drawn(draw, result, lambda: func(*args, **kwargs), args, kwargs)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Intercept operators of this thread inside the context; compiled models run eagerly meanwhile."""

        def leave(module: nn.Module, *_: Any) -> None:
            while self.running and self.running.pop() is not module:
                pass

        enter = register_module_forward_pre_hook(lambda module, _: self.running.append(module))
        handles = enter, register_module_forward_hook(leave, always_call=True)
        try:
            with warnings.catch_warnings(), self:
                warnings.filterwarnings("ignore", message=_OF_GLOBAL_HOOKS)
                yield
        finally:
            for handle in handles:
                handle.remove()


def _generators() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _first(result: Any) -> Tensor | None:
    found = result[0] if isinstance(result, tuple | list) and result else result
    return found if isinstance(found, Tensor) else None


# Masks that samples share --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted_draws(elements: Counter[MaskDraw]) -> Iterator[None]:
    """Add the number of drawn elements to a counter, by place."""

    def drawn(draw: MaskDraw, result: Any, *_: Any) -> Any:
        first = _first(result)
        elements[draw] += 0 if first is None else first.numel()
        return result

    with _Seeded(drawn).on():
        yield


def shared_draws(few: Mapping[MaskDraw, int], many: Mapping[MaskDraw, int], times: float | None) -> list[MaskDraw]:
    """Return the draws with a number of elements that is not proportional to the number of samples.

    Args:
        few, many: elements drawn for some samples, and for more samples including these.
        times: ratio of the sample counts; None if samples have different sizes, in which case more samples must draw
            more elements.
    """
    counts = {draw: (few.get(draw, 0), many.get(draw, 0)) for draw in (*few, *many)}
    return [draw for draw, (some, more) in counts.items() if (more <= some if times is None else more != times * some)]


@contextlib.contextmanager
def other_draws(draws: Collection[MaskDraw], variant: int) -> Iterator[None]:
    """Replace the results of some draws inside the context; all others use a fixed seed.

    Args:
        variant: 0 and 1 select the smallest and largest values, if known, so that a comparison with any probability
            changes. Other numbers are seeds.
    """

    def drawn(draw: MaskDraw, result: Any, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        first = _first(result)
        if draw not in draws or first is None:
            return result
        extremes = _extremes(draw.operator, args, kwargs, first) if variant < 2 else None
        if extremes is not None:
            first.fill_(extremes[variant])
            return result
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices):
            torch.manual_seed(variant + 1)
            return call()

    torch.manual_seed(0)
    with _Seeded(drawn).on():
        yield


def _extremes(operator: str, args: Any, kwargs: Any, result: Tensor) -> tuple[float, float] | None:
    """Return the smallest and largest value that an operator draws; None if unknown."""
    name, _, overload = operator.removeprefix("aten::").partition(".")
    name = name.rstrip("_")
    below_one = 1 - torch.finfo(result.dtype).eps if result.is_floating_point() else 1.0
    if name == "bernoulli":
        return 0.0, 1.0
    if name == "uniform":
        start = args[1] if len(args) > 1 else kwargs.get("from", 0.0)
        end = args[2] if len(args) > 2 else kwargs.get("to", 1.0)
        return float(start), float(start + (end - start) * below_one)
    if name in ("rand", "rand_like"):
        return 0.0, below_one
    if name in ("randn", "randn_like", "normal") and result.is_floating_point():
        return -_FAR, _FAR
    if name == "randint":
        return (args[0], args[1] - 1) if overload.startswith("low") else (0, args[0] - 1)
    return None


# Modules that draw masks of their own -------------------------------------------------------------------------------


class ModuleMasks:
    """Masks that modules outside torch draw for a batch: recorded in the first use, and sliced for parts."""

    def __init__(self, model: nn.Module, samples: int) -> None:
        self._model, self._samples = model, samples
        self._own = own_droppers(model)
        self._recorded: dict[nn.Module, list[Tensor]] | None = None

    @contextlib.contextmanager
    def of(self, first: int, samples: int) -> Iterator[None]:
        """Use the recorded masks of a range of samples inside the context; `UnmatchedMasks` for a shared mask."""
        if not self._own:
            yield
            return
        recorded, is_first, counts = self._recorded or {}, self._recorded is None, Counter[nn.Module]()

        def drawn(draw: MaskDraw, result: Any, *_: Any) -> Any:
            module = draw.module
            if module is None or module not in self._own:
                return result
            if not isinstance(result, Tensor):
                raise UnmatchedMasks(f"the random numbers drawn by {draw.text(self._model)} cannot be replayed")
            known, number = recorded.setdefault(module, []), counts[module]
            counts[module] += 1
            if is_first:
                known.append(result.detach().clone())
                return result
            mask = self._part(known[number], result, first, samples) if number < len(known) else None
            if mask is None:
                raise UnmatchedMasks(f"{draw.text(self._model)} draws a mask that several samples share")
            return result.copy_(mask)

        with _Seeded(drawn).on():
            yield
        self._recorded = recorded

    def _part(self, whole: Tensor, like: Tensor, first: int, samples: int) -> Tensor | None:
        """Return the slice of a mask for these samples; None if the shapes do not match."""
        if whole.shape == like.shape:
            return whole
        if whole.dim() != like.dim():
            return None
        differ = [i for i in range(whole.dim()) if whole.shape[i] != like.shape[i]]
        size = whole.shape[differ[0]]
        if len(differ) > 1 or size % self._samples or like.shape[differ[0]] != size // self._samples * samples:
            return None
        length = size // self._samples
        return whole.narrow(differ[0], first * length, samples * length)


def drawing_modules(model: nn.Module, forward: Callable[[], Any]) -> set[nn.Module]:
    """Return the modules outside torch that may drop values and draw random numbers in a forward."""
    own, found = own_droppers(model), set[nn.Module]()

    def drawn(draw: MaskDraw, result: Any, *_: Any) -> Any:
        found.update(own.intersection(seeded.running))
        return result

    seeded = _Seeded(drawn)
    if own:
        with seeded.on():
            forward()
    return found
