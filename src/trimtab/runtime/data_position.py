"""Where a run is in its data: passes over the loader that are over, and batches drawn of the one under way.

A loader that can be told where to go on is told (`state_dict` and `load_state_dict`, as torchdata's StatefulDataLoader
has them). Any other begins its pass as it did, from the random numbers of then, and the batches that were trained on
are drawn once more and dropped: what follows is in the order, and by the chance, of a run that was never cut off.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trimtab.core import checks
from trimtab.core.errors import FormatError, LoopError, ValueGivenError
from trimtab.core.state_parts import Load, Part, require_keys
from trimtab.measure.loader_state import borrowed, generators_of, has_lasting_workers, is_stateful
from trimtab.measure.random_state import generator_states, loading_generators, loading_random_state, random_state
from trimtab.runtime.batches import holds_nan, iterate
from trimtab.runtime.joining import NoRows

_RANDOM = ("random", "generators")


class DataPosition(Part):
    """A run's place in what `run.windows` draws from, and the random numbers there.

    Args:
        is_kept: whether it will be asked for; else what a pass began with is not looked at.

    Attributes:
        accepted: is told of data of another length, which a run may then be gone on with; None: they are refused.
    """

    def __init__(self, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self.accepted: Callable[[str], None] | None = None
        self._over = self._drawn = 0
        self._is_open = self._is_left = False  # a pass was drawn from and is not over; the loop will not go on with it
        self._stays = self._is_over = False  # the run is
        self._handled: BaseException | None = None  # as the pass began: an error that ends it is another
        self._is_drawn = False  # to the end, though the last window may not be over
        self._loader: Any = None
        self._begun: Mapping[str, Any] | None = None  # random numbers as the pass or stream began; None between two
        self._saved: Mapping[str, Any] | None = None  # what the next pass continues from
        self._first: Any = None  # batch with rows of a pass that was drawn once more

    @property
    def passes(self) -> int:
        """Passes over the loader that are over: one that the loop left early too, once it is known to be left."""
        return self._over + (self._is_left and not self._stays)

    @property
    def number(self) -> int:
        """Of the pass under way, which `left` is told."""
        return self._over

    @property
    def num_drawn_before(self) -> int:
        """Batches of the next epoch that were drawn before the run was saved; 0 if it begins at the start."""
        return self._drawn if self._saved is not None and self._begun is not None else 0

    @property
    def is_to_stay(self) -> bool:
        """Whether the run ends, so that what is left of the pass under way is of one that goes on from here."""
        return self._stays

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Return the batches of a pass, or after a load of what is left of the one that was under way.

        What another pass was left at is over at once, before any batch is drawn: a run may be saved in between.

        Raises:
            FormatError: when drawn from: the loader is another than was saved, or its pass ends before that place.
        """
        if self._saved is None:
            if self._is_open:
                self.over()
            if innermost(loader) is not innermost(self._loader):
                self._forget()
            self._loader = loader  # a run may be saved before anything is drawn from it
        self._handled = sys.exception()
        return self._batches(loader)

    def _batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        saved, self._saved = self._saved, None
        self._loader, self._is_open = loader, True
        if saved is not None:
            self._compare(saved["length"], _lengths_of(loader))
            own = _epoch_of(loader)
            if None not in (own, saved["epoch"]) and (saved["begun"] is not None or own == 0):
                innermost(loader).set_epoch(saved["epoch"])  # between two passes the loop may have told it by now
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
                given=_in_words(now, apart),
                expected=f"{_in_words(then, apart)}, as the run was saved with",
                way_out='Give the loader it was trained on, or accept the change: Checkpoints(..., accepts=("data",)).',
            )

    def over(self) -> None:
        """The pass is: its last window too. What a stream has left is of the next one."""
        self._over, self._is_open, self._is_left, self._handled = self._over + 1, False, False, None
        if self._is_drawn or not _is_stream(self._loader):
            self._forget()

    def left(self, number: int) -> None:
        """The loop will draw no more from the pass of that number: it is over, unless an error that is met ended it."""
        self._is_left = self._is_open and number == self._over

    def stays(self) -> None:
        """The run ends, to be gone on with from here: a pass that the loop leaves for that is not over."""
        self._stays = True

    def let_go(self) -> None:
        """Hold nothing of a loader any more: found in a cycle with the run, its workers would be waited for."""
        self._is_over = True
        self._loader = self._first = self._handled = None

    def _forget(self) -> None:
        self._drawn, self._begun, self._is_drawn = 0, None, False

    def _continued(self, loader: Any, saved: Mapping[str, Any]) -> Iterator[Any]:
        begin, here = (_loading(loader, saved[name], f"state.data.{name}") for name in ("begun", "here"))
        if saved["is_drawn"]:
            batches = iter(())
        elif saved["loader"] is not None:
            if not is_stateful(loader):
                given, expected = f"a {type(loader).__name__}", "one with load_state_dict, as the run was saved with"
                raise FormatError("loader", given=given, expected=expected)
            loader.load_state_dict(saved["loader"])
            batches = iterate("loader", loader)
        else:
            begin()
            batches = iterate("loader", loader)
            again = self._drawn_again(batches)
            if again < self._drawn:
                given = f"a pass of {again} batches, of which {self._drawn} were trained on"
                raise FormatError("loader", given=given, expected="the data that the run was saved with")
        here()
        return batches

    def _drawn_again(self, batches: Iterator[Any]) -> int:
        """Drop what was trained on, but for the first with rows; returns how many batches there were."""
        again = 0
        for batch in itertools.islice(batches, self._drawn):
            again += 1
            if self._first is None and _is_fit(batch):
                self._first = batch
        return again

    def taken_first(self) -> Any:
        """Return, once, the first batch with rows of those that were drawn once more; None where there is none."""
        first, self._first = self._first, None
        return first

    def drawn_anew(self) -> Any:
        """Return the first batch with rows of the pass under way, once that is drawn to its end; None without any.

        Loader and random numbers are afterwards as they were.
        """
        loader, begun = self._loader, self._begun
        if not (self._is_drawn and self._drawn and begun):
            return None
        back = _loading(loader, _random_of(loader), "here")
        try:
            with borrowed(loader) as lent:
                _loading(loader, begun, "state.data.begun")()
                return next((batch for batch in iterate("loader", lent) if _is_fit(batch)), None)
        finally:
            back()

    def state_dict(self) -> dict[str, Any]:
        """Return passes, batches of the one under way, random numbers as it began and as they are, and a loader's own.

        Raises:
            ValueGivenError: the position is not kept. LoopError: the run is over.
        """
        if self._is_over:
            raise LoopError("run.position.state_dict", given="a run that is closed", expected="one that is not")
        if not self._is_kept:
            raise ValueGivenError("run", given="no checkpoints", expected="start(..., checkpoints=...)")
        if self._saved is not None:  # nothing was drawn since it was loaded
            return {**self._saved, "here": {**self._saved["here"], "random": random_state()}}
        # Who saves as an error is handled means to go on with the pass; a generator is closed by one.
        error = sys.exception()
        is_failing = error not in (None, self._handled) and not isinstance(error, GeneratorExit)
        is_left = self._is_left and not self._stays and not is_failing
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
        """Return what continues from `state_dict()`; the loader itself is looked at once it is there."""
        where = "state.data"
        if isinstance(state, Mapping):
            state = dict(state) | {"epoch": state.get("epoch")}  # none of those that were saved before it was kept
        require_keys(where, state, ("passes", "drawn", "is_drawn", "length", "begun", "here", "loader", "epoch"))
        if state["epoch"] is not None:
            checks.integer(f"{where}.epoch", state["epoch"], low=0)
        passes, drawn = (checks.integer(f"{where}.{name}", state[name], low=0) for name in ("passes", "drawn"))
        if not isinstance(state["length"], Mapping):
            raise FormatError(f"{where}.length", given=repr(state["length"]), expected="numbers by their names")
        for name, number in state["length"].items():
            checks.integer(f"{where}.length.{name}", number, low=0)
        for name in ("begun", "here"):
            if name == "here" or state[name] is not None:
                require_keys(f"{where}.{name}", state[name], _RANDOM)
        here = loading_random_state(state["here"]["random"], f"{where}.here.random")

        def load() -> None:
            self._over, self._drawn, self._is_drawn = passes, drawn, bool(state["is_drawn"])
            self._begun, self._saved = state["begun"], state
            self._is_open, self._is_left = self._begun is not None, False
            here()

        return load


def _is_fit(batch: Any) -> bool:
    """Return whether a rank may join others with a batch: one that holds no number voided its window."""
    return not isinstance(batch, NoRows) and not holds_nan(batch)


def _is_stream(loader: Any) -> bool:
    """Return whether a loader is its own iterator: of one that was left early the next pass draws the rest.

    One that knows its length begins a pass anew, as what has no end to tell of does not.
    """
    inner = innermost(loader)
    return isinstance(inner, Iterator) and length_of(inner) is None


def innermost(loader: Any) -> Any:
    """Return the loader that others draw from, through those that hold one as `wrapped`."""
    seen = set[int]()
    while id(loader) not in seen and getattr(loader, "wrapped", None) is not None:
        seen.add(id(loader))
        loader = loader.wrapped
    return loader


def require_state_kept(loader: Any) -> None:
    """Raise `ValueGivenError` for a loader whose workers carry random numbers from one pass into the next.

    Those started anew would begin others, in another order of the rows. One with `load_state_dict()` sees to it itself.
    """
    if has_lasting_workers(innermost(loader)) and not is_stateful(loader):
        raise ValueGivenError(
            "loader",
            given="persistent_workers=True, in a run with checkpoints",
            expected="workers that begin with each pass, as those of a run that goes on do",
            way_out="DataLoader(..., persistent_workers=False), or a loader that has state_dict and load_state_dict.",
        )


def length_of(loader: Any) -> int | None:
    """Return the batches of a pass, where a loader tells them."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a generator, or an iterable that does not know
        return None


def _lengths_of(loader: Any) -> dict[str, int]:
    """Return the batches of a pass, and the rows of the data set, where they are told."""
    told = {"batches": loader, "rows": getattr(innermost(loader), "dataset", None)}
    return {name: number for name, each in told.items() if (number := length_of(each)) is not None}


def _epoch_of(loader: Any) -> int | None:
    """Return by which pass a loader that counts them itself orders its rows, as Accelerate's does; None of others."""
    inner = innermost(loader)
    number = getattr(inner, "iteration", None) if callable(getattr(inner, "set_epoch", None)) else None
    return number if isinstance(number, int) else None


def _in_words(length: Mapping[str, int], names: Sequence[str]) -> str:
    return " of ".join(f"{length[name]} {name}" for name in names)


def _random_of(loader: Any) -> dict[str, Any]:
    return {"random": random_state(), "generators": generator_states(generators_of(loader))}


def _loading(loader: Any, state: Mapping[str, Any], where: str) -> Load:
    parts = (
        loading_random_state(state["random"], f"{where}.random"),
        loading_generators(generators_of(loader), state["generators"], f"{where}.generators"),
    )

    def load() -> None:
        for part in parts:
            part()

    return load
