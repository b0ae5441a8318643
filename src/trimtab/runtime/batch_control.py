"""k while training: what measured windows say, what a rule makes of it, and the learning rate that follows.

A window may be measured (noise and times); its figures are read a window later, shared between ranks in the next, and
decided upon then: always from figures that are the same on every rank. Windows that are not measured cost little.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trimtab.core.plan import Plan
from trimtab.core.state_parts import Load, Part, loading_parts
from trimtab.decide.accumulation import Noise
from trimtab.decide.batch_decider import BatchDecider, Note
from trimtab.decide.probing import Probing
from trimtab.runtime import compiled
from trimtab.runtime.batch_doors import check_rule, require_alike
from trimtab.runtime.exchange import Exchange
from trimtab.runtime.fixed_batch import FixedBatch
from trimtab.runtime.keeping import Decided, Keeper, NotKept
from trimtab.runtime.measured import NUM_SECONDS, Measured, Nothing
from trimtab.runtime.schedule import RateFollower, normalises
from trimtab.runtime.splitting import keeps_maths
from trimtab.runtime.window import Window
from trimtab.runtime.window_watch import WindowWatch


def control_of(
    plan: Plan, model: nn.Module, optimizer: Optimizer, exchange: Exchange, note: Note, keeper: Keeper | None = None
) -> BatchControl | FixedBatch:
    """Return what controls the batch of a run; arguments as of `BatchControl`."""
    if plan.batch_rule is None:
        return FixedBatch()
    return BatchControl(plan, model, optimizer, exchange, note, keeper or NotKept())


@dataclass(frozen=True)
class _Role:
    """What a window is for besides training.

    Args:
        is_probe: of more batches than decided, or cut, to show more. owes: all ranks put figures in it, whatever they
            have. is_used: the account notes it as measured. asked: batches it was to be of, to find noise that few do
            not show; 0 where it was not. num_micro_batches: as many on every rank where each is a collective.
    """

    is_probe: bool = False
    asked: int = 0
    owes: bool = False
    is_used: bool = False
    num_micro_batches: int = 0


_TRAINS, _NOBODY = _Role(), FixedBatch()  # of a window that nobody measures: its role, and who is told of it


@dataclass(frozen=True)
class _Next:
    """What the next window is to be.

    Args:
        is_due: measured, if it shows anything. is_probe: made to show more. num_batches: of the loader.
    """

    is_due: bool
    is_probe: bool
    num_batches: int


class BatchControl(Part):
    """The batch of a run whose plan freed it.

    Args:
        plan: has a batch rule. note: called with an event's name and figures. keeper: keeps what windows are made by.

    Raises:
        ValueGivenError: a model under FSDP1; a batch to be cut that cannot be; a plan that is not the one of the other
            ranks.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer, exchange: Exchange, note: Note, keeper: Keeper
    ) -> None:
        assert plan.batch_rule is not None
        self._keeper = keeper
        self._rule, self._exchange, self._note = plan.batch_rule, exchange, note
        may_split = keeps_maths(plan, model)
        is_compiled = bool(plan.compiled.value) or compiled.is_compiled(model)
        self._cuts = self._rule.policy == "throughput_per_memory"
        self._measures = not self._cuts  # which is given all it needs
        self._follower = RateFollower.for_optimizer(self._rule.learning_rate, optimizer)
        # Which all ranks reach, before one of them may refuse.
        divides = normalises(optimizer)
        facts = {"splitting the batch": may_split, "compiling": is_compiled, "the optimizer's kind": divides}
        require_alike(exchange, facts)
        check_rule(plan, may_split=may_split)
        self._decider = BatchDecider(
            self._rule,
            plan.num_micro_batches,
            plan.batch_rows / plan.num_micro_batches,
            exchange.num_ranks,
            note,
            normalises=self._follower.rule == "sqrt" and divides,
        )
        self._account = self._decider.account
        self._watch = WindowWatch(model, optimizer, exchange.num_ranks)
        self._probing = Probing(
            self._rule,
            plan.num_micro_batches,
            self._account,
            self._decider.times,
            may_split=may_split and not is_compiled,  # half a batch would be compiled anew
            shows_one=self._watch.seen_apart > 1 or not self._measures,
        )
        self._measured: Measured | Nothing | None = None
        self._deciding_s, self._is_under_way = 0.0, False
        self._role = _TRAINS  # of the open window, or the last one
        self._next: _Next | None = None  # looked at once a window
        self._tell(watched=False)
        self._is_cut = self._retries_probe = False

    # What a window is made of.

    @property
    def k(self) -> int:
        """Micro-batches per window and rank; by "throughput_per_memory" those that a loader batch is cut into."""
        return self._decider.k

    @property
    def noise(self) -> Noise | None:
        """What the windows so far say."""
        return self._decider.noise

    @property
    def num_batches(self) -> int:
        """Loader batches of the next window: as decided, or more where those do not show what is needed."""
        return self._look_ahead().num_batches

    def _look_ahead(self) -> _Next:
        if self._next is None and (before := self._keeper.decided_before(self._account.windows)) is not None:
            self._decider.repeat(before.k)
            is_probe = before.is_cut or before.num_batches > self._decider.num_batches
            self._next = _Next(self._measures and self._account.is_due(), is_probe, before.num_batches)
        if self._next is None:
            k, noise, decided = self.k, self.noise, self._decider.num_batches
            is_probe = self._probing.is_due(k, noise)
            is_due = self._measures and (is_probe or self._account.is_due())
            self._next = _Next(is_due, is_probe, self._probing.batches(decided, k, noise) if is_probe else decided)
        return self._next

    def micro_batch_of(self, rows: int, planned: int, num_batches: int) -> int:
        """Return rows per micro-batch: a window of one is split in two where that shows the noise."""
        if self._cuts:
            return -(-rows // self.k)
        self._retries_probe = False  # a window is made: the one that ran out of memory was given up, or is over
        is_one = num_batches * -(-rows // planned) == 1
        before = self._keeper.decided_before(self._account.windows)
        is_cut = self._probing.splits(self.k, self.noise) if before is None else before.is_cut
        self._is_cut = is_one and rows > 1 and is_cut
        return -(-rows // 2) if self._is_cut else planned

    def rate_factor(self, num_batches: float) -> float:
        """Return the factor on the learning rate for a window of so many loader batches."""
        return self._follower.factor(num_batches, self._decider.num_batches)

    # What happens in it.

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Take the time of what runs inside: the next window's batches are drawn."""
        return self._watch.drawing() if self._look_ahead().is_due else contextlib.nullcontext()

    def opened(self, window: Window) -> None:
        """A window begins. One with micro-batches that count as no rows shows nothing."""
        num_batches, num_micro_batches = window.num_batches, window.num_micro_batches
        ahead = self._look_ahead()
        if self._keeper.keeps:
            self._keeper.decided(self._account.windows, Decided(ahead.num_batches, self.k, is_cut=self._is_cut))
        watched = False
        if ahead.is_due or self._retries_probe:
            watched = self._measures and not window.num_padding
            watched = watched and num_micro_batches * self._watch.seen_apart > 1
            self._role = self._role_of(num_batches, num_micro_batches, watched=watched)
        else:
            self._role = _TRAINS
        self._tell(watched=watched)
        self._watch.opened(watched=watched)

    def _role_of(self, num_batches: int, num_micro_batches: int, *, watched: bool) -> _Role:
        ahead = self._look_ahead()
        is_larger = num_batches > self._decider.num_batches or (self._is_cut and num_micro_batches > 1)
        # Ranks put figures in the same windows: what is due is known to all, how many batches a rank has left is not.
        owes = self._exchange.num_ranks > 1 and ahead.is_due
        return _Role(
            is_probe=self._retries_probe or (is_larger and ahead.is_probe),
            asked=ahead.num_batches if self._probing.explores(self.k, self.noise) else 0,
            owes=owes,
            is_used=owes or (watched and self._exchange.num_ranks == 1),
            num_micro_batches=num_micro_batches,
        )

    def _tell(self, *, watched: bool) -> None:
        """Have the window's micro-batches told to who watches it; as of a fixed batch where nobody does."""
        told = self._watch if watched else _NOBODY
        self.begun, self.stepping = told.begun, told.stepping
        self.backward_begins, self.backward_done = told.backward_begins, told.backward_done

    def stepped(self, num_batches: int, agreed: float, *, applied: bool) -> None:
        """The window is over; void, it says nothing. What an earlier one said has arrived.

        Args:
            agreed: its loader batches, the mean over ranks.
        """
        start = time.perf_counter()
        measured = self._told(num_batches, applied=applied)
        if applied:
            self._follower.applied(agreed, self._decider.num_batches)
        self._next = None
        if measured is None and self._role is _TRAINS and not self._is_under_way:
            self._retries_probe = False
            self._account.pass_window()
        else:
            self._took(measured, num_batches, start)

    def _took(self, measured: Measured | Nothing | None, num_batches: int, start: float) -> None:
        """A window is over that was measured, or in which what an earlier one said arrives."""
        waiting = time.perf_counter()
        shared = self._exchange.take()
        if self._measured is not None:
            self._measured.wait()
        waited_s = time.perf_counter() - waiting  # for ranks and device, which are at work meanwhile: it costs nothing
        if shared is not None:
            self._absorb(shared)
        is_put = self._measured is not None
        if self._measured is not None:
            self._exchange.put(self._measured.figures(self._deciding_s))
            self._deciding_s = 0.0
        self._measured, self._retries_probe = measured, False
        self._is_under_way = is_put or measured is not None
        if self._role.asked:
            self._probing.explored(self._role.asked, self._decider.num_batches)
            if num_batches > self._decider.num_batches:
                figures = {"batches": num_batches, "decided": self._decider.num_batches}
                self._note("explored", figures | {"reason": "to find the noise, which windows as decided do not show"})
        if self._role.is_used:  # noted once the window is over: one that is given up is due again, on all ranks
            self._account.use()
        self.dropped()
        self._account.pass_window()
        self._deciding_s += time.perf_counter() - start - waited_s

    def _told(self, num_batches: int, *, applied: bool) -> Measured | Nothing | None:
        """Return what a window puts on its way to all ranks, if it does."""
        told = None
        if applied:
            decided, first = self._decider.num_batches, self._probing.timed - 2
            told = self._watch.stepped(num_batches, decided, is_probe=self._role.is_probe, first=first)
        return self._watch.nothing(self._role.num_micro_batches) if told is None and self._role.owes else told

    def dropped(self) -> None:
        """The window was given up, or is over."""
        self._watch.drop()
        self._tell(watched=False)

    def ran_out(self) -> bool:
        """Memory ran out in the window, which is run again; returns whether it was made larger, to show more.

        Where the user's has one micro-batch none is made for long: gradients do not fit beside a forward, as they would
        have to if k rose, and k stays.
        """
        was_probe, self._next = self._role.is_probe, None
        if was_probe and self._probing.fits:
            self._probing.ran_out()
        if was_probe and self.k == 1:
            self._decider.hold("memory ran out beside another micro-batch's gradients")
        self._retries_probe = was_probe
        return was_probe

    # What it is taken for.

    def _absorb(self, shared: list[list[float]]) -> None:
        """Take the figures of all ranks in, and decide."""
        self._decider.absorb(self._watch.noise_of(shared), [figures[-NUM_SECONDS:] for figures in shared])
        if self.k > 1 or self._probing.fits:
            self._decider.decide()
            self._probing.told(self._decider.standing)
        self._decider.review()

    def close(self) -> dict[str, Any] | None:
        """Share nothing more; return what measuring took, as a share of the windows' time, and what it could bring."""
        self._exchange.close()
        self._watch.close()
        return self._decider.summary()

    # What a resumed run needs.

    def state_dict(self) -> dict[str, Any]:
        """Return what is decided and known, when there may be larger windows, and the rate that follows.

        Figures on their way are not in it.
        """
        return {name: part.state_dict() for name, part in self._parts().items()}

    def loading(self, state: Mapping[str, Any]) -> Load:
        """Return what continues from `state_dict()`; raises `FormatError` or `ValueGivenError` where it is none."""
        load_parts = loading_parts(self._parts(), state, where="state.batch")

        def load() -> None:
            load_parts()
            self._next = None
            self._probing.told(self._decider.standing)

        return load

    def _parts(self) -> dict[str, Any]:
        return {"decided": self._decider, "probing": self._probing, "rate": self._follower}
