"""Position of a run in its data: completed epochs, and batches drawn in the current epoch.

Loaders with `state_dict` and `load_state_dict`, such as torchdata's StatefulDataLoader, resume from their own state.
For all other loaders the epoch starts again from the saved random generator states and the batches trained on before
are drawn and dropped, so that order and randomness equal those of an uninterrupted run.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trimtab.core import validation
from trimtab.core.errors import FormatError, LoopError, ValueGivenError
from trimtab.core.stateful import Load, Stateful, checked_state, require_keys
from trimtab.state.data_state import draw_and_restore_loader, generators_of, has_lasting_workers, is_stateful
from trimtab.state.random_state import generator_states, loading_generators, loading_random_state, random_state
from trimtab.training.batch import EmptyBatch, holds_nan, iterate

_RANDOM = ("random", "generators")


class DataPosition(Stateful):
    """Position in the data drawn by `run.windows`, with the random generator states at that position.

    Args:
        is_kept: True if the run saves checkpoints; False skips recording generator states.

    Attributes:
        accepted: called with a description if the data's length changed; None raises an error instead.
        is_to_stay: True if the run ends and the current epoch will be resumed.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self.accepted: Callable[[str], None] | None = None
        self._over = self._drawn = 0
        self._is_open = self._is_left = False  # An epoch was started and is not over; the loop has left the epoch.
        self.is_to_stay = self._is_over = False  # The run ends and the epoch will be resumed; the run is closed.
        # Exception being handled as the epoch began, to distinguish later exceptions.
        self._handled: BaseException | None = None
        self._is_drawn = False  # All batches were drawn, though the last window may not be over.
        self._loader: Any = None
        # Generator states at the start of the epoch or stream; None between epochs.
        self._begun: Mapping[str, Any] | None = None
        self._saved: Mapping[str, Any] | None = None  # Loaded state that the next epoch continues from.
        self._first: Any = None  # First usable batch drawn again after a resume.

    @property
    def passes(self) -> int:
        """Number of completed epochs, including epochs left early by the loop."""
        return self._over + (self._is_left and not self.is_to_stay)

    @property
    def number(self) -> int:
        """Number of the current epoch, to pass to `left`."""
        return self._over

    @property
    def num_drawn_before(self) -> int:
        """Batches of the next epoch drawn before the checkpoint was saved; 0 at the start of an epoch."""
        return self._drawn if self._saved is not None and self._begun is not None else 0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return an iterator over an epoch's batches, or after loading a state over the rest of the interrupted epoch.

        An epoch that the loop left early is completed at once, before any batch is drawn, since a checkpoint may be
        saved in between. `FormatError` on the first draw if the loader differs from the saved run's loader.
        """
        if self._saved is None:
            if self._is_open:
                self.over()
            if innermost_loader(loader) is not innermost_loader(self._loader):
                self._forget()
            self._loader = loader  # Set at once, because a checkpoint may be saved before the first draw.
        self._handled = sys.exception()
        if not self._is_kept and self._saved is None:
            # Without a Python frame per batch; the loader starts with the first draw.
            return itertools.chain.from_iterable(map(self._begun_epoch, (loader,)))
        return self._batches(loader)

    def _begun_epoch(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._is_open = True
        return iterate("loader", loader)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._loader, self._is_open = loader, True
        if saved is not None:
            self._compare(saved["length"], _lengths_of(loader))
            own = _epoch_of(loader)
            if None not in (own, saved["epoch"]) and (saved["begun"] is not None or own == 0):
                # Between two epochs, the loop may have called `set_epoch` already.
                innermost_loader(loader).set_epoch(saved["epoch"])
        if saved is not None and saved["begun"] is not None:
            batches = self._continued(loader, saved)
        else:
            if saved is not None:
                loading_generators(generators_of(loader), saved["here"]["generators"], "state.data.here.generators")()
            if self._begun is None:
                self._drawn, self._begun = 0, _random_of(loader) if self._is_kept else {}
            batches = iterate("loader", loader)
        for batch in batches:
            self._drawn += 1
            yield batch
        self._is_drawn = True

    def _compare(self, then: Mapping[str, int], now: Mapping[str, int]) -> None:
        apart = [name for name in then if name in now and then[name] != now[name]]
        if apart and self.accepted is not None:
            self.accepted(f"{_in_words(then, apart)} -> {_in_words(now, apart)}")
        elif apart:
            raise FormatError(
                "resume: data",
                got=f"a loader with {_in_words(now, apart)}",
                expected=f"{_in_words(then, apart)}, as in the checkpointed run",
                hint='Pass the same loader, or accept the change with Checkpoints(..., accepts=("data",)).',
                code="resume.data_differs",
            )

    def over(self) -> None:
        """Complete the epoch, after its last window. Batches left in a stream belong to the next epoch."""
        self._over, self._is_open, self._is_left, self._handled = self._over + 1, False, False, None
        if self._is_drawn or not _is_stream(self._loader):
            self._forget()

    def left(self, number: int) -> None:
        """Record that the loop left epoch `number`, and so completed the epoch unless an exception ended the loop."""
        self._is_left = self._is_open and number == self._over

    def stays(self) -> None:
        """Record that the run ends here and the epoch will be resumed, even if the loop leaves it."""
        self.is_to_stay = True

    def let_go(self) -> None:
        """Drop all references to the loader; in a reference cycle with the run, its workers would be waited for."""
        self._is_over = True
        self._loader = self._first = self._handled = None

    def _forget(self) -> None:
        self._drawn, self._begun, self._is_drawn = 0, None, False

    def _continued(self, loader: Any, saved: Mapping[str, Any]) -> Iterator[Any]:
        begin, here = (_loading(loader, saved[name], f"state.data.{name}") for name in ("begun", "here"))
        batches: Iterator[Any]
        if saved["is_drawn"]:
            batches = iter(())
        elif saved["loader"] is not None:
            if not is_stateful(loader):
                raise FormatError(
                    "loader",
                    problem=f"The checkpoint contains the loader's state, but a {type(loader).__name__} has no "
                    "load_state_dict.",
                    hint="Pass the same kind of loader as in the checkpointed run.",
                    code="resume.loader_kind",
                )
            loader.load_state_dict(saved["loader"])
            batches = iterate("loader", loader)
        else:
            begin()
            batches = iterate("loader", loader)
            again = 0
            for batch in itertools.islice(batches, self._drawn):
                again += 1
                if self._first is None and _is_fit(batch):
                    self._first = batch
            if again < self._drawn:
                raise FormatError(
                    "loader",
                    problem=f"The loader ended after {again} batches, but the checkpointed run had trained on "
                    f"{self._drawn} batches of this epoch.",
                    hint="Pass the same loader and data as in the checkpointed run.",
                    code="resume.data_short",
                )
        here()
        return batches

    def taken_first(self) -> Any:
        """Return the first usable batch among the batches drawn again, once; None if there is none."""
        first, self._first = self._first, None
        return first

    def drawn_anew(self) -> Any:
        """Return the first usable batch of an epoch that was drawn to its end; None if there is none.

        Loader and random generators are restored afterwards.
        """
        loader, begun = self._loader, self._begun
        if not (self._is_drawn and self._drawn and begun):
            return None
        back = _loading(loader, _random_of(loader), "here")
        try:
            with draw_and_restore_loader(loader) as lent:
                _loading(loader, begun, "state.data.begun")()
                return next((batch for batch in iterate("loader", lent) if _is_fit(batch)), None)
        finally:
            back()

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, batches drawn, generator states at the start of the epoch and now, and the loader's state."""
        if self._is_over:
            raise LoopError(
                "run.position.state_dict",
                problem="The data position is unknown, because the run is closed.",
                hint="Call state_dict() before run.close().",
                code="run.closed",
            )
        if not self._is_kept:
            raise ValueGivenError(
                "run",
                problem="The data position is unknown, because the run saves no checkpoints.",
                hint="Pass checkpoints=Checkpoints(folder) to trimtab.start.",
                code="checkpoints.not_configured",
            )
        if self._saved is not None:  # Nothing was drawn since the state was loaded.
            return {**self._saved, "here": {**self._saved["here"], "random": random_state()}}
        # A checkpoint saved while an exception is handled resumes the epoch. GeneratorExit only closes the generator.
        error = sys.exception()
        is_failing = error not in (None, self._handled) and not isinstance(error, GeneratorExit)
        is_left = self._is_left and not self.is_to_stay and not is_failing
        is_over = is_left and not _is_stream(self._loader)
        under_way = self._begun is not None and not is_over
        return {
            "passes": self._over + is_left,
            "drawn": 0 if is_over else self._drawn,
            "is_drawn": self._is_drawn and not is_over,
            "length": _lengths_of(self._loader),
            "begun": self._begun if under_way else None,
            "here": _random_of(self._loader),
            "loader": self._loader.state_dict() if under_way and is_stateful(self._loader) else None,
            "epoch": _epoch_of(self._loader),
        }

    def loading(self, state: Any) -> Load:
        """Return a function that restores a `state_dict()`. The loader itself is checked on the first draw."""
        where, others = "state.data", ("is_drawn", "length", "begun", "here", "loader", "epoch")
        found = checked_state(where, state, integers=("passes", "drawn"), others=others)
        if state["epoch"] is not None:
            validation.integer(f"{where}.epoch", state["epoch"], low=0)
        if not isinstance(state["length"], Mapping):
            raise FormatError(f"{where}.length", got=repr(state["length"]), expected="a mapping from names to integers")
        for name, number in state["length"].items():
            validation.integer(f"{where}.length.{name}", number, low=0)
        for name in ("begun", "here"):
            if name == "here" or state[name] is not None:
                require_keys(f"{where}.{name}", state[name], _RANDOM)
        here = loading_random_state(state["here"]["random"], f"{where}.here.random")

        def load() -> None:
            self._over, self._drawn, self._is_drawn = found["passes"], found["drawn"], bool(state["is_drawn"])
            self._begun, self._saved = state["begun"], state
            self._is_open, self._is_left = self._begun is not None, False
            here()

        return load


def _is_fit(batch: Any) -> bool:
    """Return True if a batch can serve as padding: it has samples and no NaN, which would cause a skipped step."""
    return not isinstance(batch, EmptyBatch) and not holds_nan(batch)


def _is_stream(loader: Any) -> bool:
    """Return True for a stream: an iterator without length, whose next epoch draws the batches left by the previous."""
    inner = innermost_loader(loader)
    return isinstance(inner, Iterator) and length_of(inner) is None


def innermost_loader(loader: Any) -> Any:
    """Return the innermost loader of wrappers that hold a loader as `wrapped`."""
    seen = set[int]()
    while id(loader) not in seen and getattr(loader, "wrapped", None) is not None:
        seen.add(id(loader))
        loader = loader.wrapped
    return loader


def require_state_kept(loader: Any) -> None:
    """Raise `ValueGivenError` for persistent workers, whose random states continue between epochs.

    New workers after a resume would have different random states and another sample order. Loaders with
    `load_state_dict` restore their own states.
    """
    if has_lasting_workers(innermost_loader(loader)) and not is_stateful(loader):
        raise ValueGivenError(
            "loader",
            problem="A DataLoader with persistent_workers=True cannot be resumed exactly, because its workers keep "
            "random states from epoch to epoch.",
            got="persistent_workers=True",
            hint="Pass persistent_workers=False, or a loader with state_dict and load_state_dict.",
            code="loader.persistent_workers",
        )


def length_of(loader: Any) -> int | None:
    """Return the number of batches in an epoch; None if the loader has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # A generator, or an iterable without a length.
        return None


def _lengths_of(loader: Any) -> dict[str, int]:
    """Return the number of batches and of samples in the data set, as far as they are known."""
    sized = {"batches": loader, "rows": getattr(innermost_loader(loader), "dataset", None)}
    return {name: number for name, each in sized.items() if (number := length_of(each)) is not None}


def _epoch_of(loader: Any) -> int | None:
    """Return the epoch number that an Accelerate loader shuffles by; None for other loaders."""
    inner = innermost_loader(loader)
    number = getattr(inner, "iteration", None) if callable(getattr(inner, "set_epoch", None)) else None
    return number if isinstance(number, int) else None


def _in_words(length: Mapping[str, int], names: Sequence[str]) -> str:
    return " of ".join(f"{length[name]} {name}" for name in names)


def _random_of(loader: Any) -> dict[str, Any]:
    return {"random": random_state(), "generators": generator_states(generators_of(loader))}


def _loading(loader: Any, state: Mapping[str, Any], where: str) -> Load:
    random = loading_random_state(state["random"], f"{where}.random")
    generators = loading_generators(generators_of(loader), state["generators"], f"{where}.generators")

    def load() -> None:
        random()
        generators()

    return load
