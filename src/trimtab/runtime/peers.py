"""What ranks say to each other of a window, once, right before they reduce its gradient: its terms, and who goes on.

A rank says it before its last backward and reads the answer in its step, so that nobody waits for it who would not wait
for the reduction. A rank whose data are at their end says so in place of a window: where others go on it joins them in
micro-batches that weigh nothing, so that no data are lost, and all end together.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.core.errors import LossError
from trimtab.core.stop import StopReason
from trimtab.decide.batch_decider import Note
from trimtab.runtime.accumulation import Count
from trimtab.runtime.exchange import Exchange, Gathered
from trimtab.runtime.straggler import Late, Straggler

_NOTHING, _MEAN, _SUM = 0.0, 1.0, 2.0  # kinds of loss
_REASONS = tuple(StopReason)


@dataclass(frozen=True)
class Agreed:
    """A window over all ranks.

    Args:
        rows, terms: of all. num_batches: of the loader, the mean over ranks. goes_on: whether any rank has data.
        reason: why a rank stops after it. limit: the fewest rows of a micro-batch that fit on a rank.
    """

    rows: int
    terms: Count
    num_batches: float
    goes_on: bool = True
    reason: StopReason | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Share:
    """What a rank has of a window.

    Args:
        terms: what its loss averages over; `is_sum`: the loss counts them. limit: rows of a micro-batch that fits.
    """

    rows: int
    num_batches: int
    terms: Count
    is_sum: bool
    limit: int | None = None


class Peers:
    """The ranks of a run.

    Args:
        note: called with an event's name and figures. in_step: whether every micro-batch is a collective (FSDP2): all
            ranks then have as many.
    """

    def __init__(self, exchange: Exchange, note: Note, *, in_step: bool = False) -> None:
        self._exchange, self.in_step = exchange, in_step and exchange.num_ranks > 1
        self.num_ranks = exchange.num_ranks
        self._answer: Callable[[], Gathered] | None = None
        self._agreed: Agreed | None = None
        self._straggler, self._note = Straggler(), note
        self._began = time.perf_counter()  # this rank's part of a window, which no other waits for
        self._steps: int | None = None  # micro-batches of the window, where all ranks have as many
        self._on_device: Tensor | None = None
        self._kept_on: torch.device | None = None  # where counts are, if they are not read

    @property
    def has_told(self) -> bool:
        """Whether the others know of this rank's part in the window, and count on it."""
        return self._answer is not None or self._agreed is not None

    @property
    def count_on_this(self) -> bool:
        """Whether others reduce the window's gradient with this rank's: it cannot begin anew."""
        return self.num_ranks > 1 and self.has_told

    def tell(self, share: Share) -> None:
        """Say what this rank has of the window, once; does not wait."""
        if self.has_told:
            return
        if self.num_ranks == 1:
            self._agreed = Agreed(share.rows, share.terms, share.num_batches)
            return
        terms = share.terms
        if isinstance(terms, Tensor) and stays_on_device(terms):
            self._on_device, self._kept_on, terms = self._exchange.sum(terms.double()), terms.device, 0.0
        kind = _SUM if share.is_sum else _MEAN
        took_s = time.perf_counter() - self._began
        figures = (share.rows, share.num_batches, float(terms), kind, 0.0, share.limit or math.inf, took_s)
        self._exchange.recovered()
        self._answer = self._exchange.ask(figures)

    def others_go_on(self, reason: StopReason | None) -> int:
        """Return in how many micro-batches this rank joins the others, that has no data: 0 where all are at an end.

        Args:
            reason: why it stops, as all then do after this window.
        """
        self._steps = int(self.most(0.0)) if self.in_step else None
        if self._steps == 0:
            return 0
        if self._kept_on is not None:
            self._on_device = self._exchange.sum(torch.zeros((), dtype=torch.float64, device=self._kept_on))
        code = 0.0 if reason is None else 1.0 + _REASONS.index(reason)
        self._answer = self._exchange.ask([0.0, 0.0, 0.0, _NOTHING, code, math.inf, 0.0])
        if self._steps is not None:
            return self._steps
        if not self.agreed().goes_on:
            self.over()
            return 0
        return 1

    def steps(self, own: int) -> int:
        """Return how many micro-batches a window has on every rank, where each of them is a collective."""
        if not self.in_step:
            return own
        if self._steps is None:
            self._steps = int(self.most(own))
        return self._steps

    def agreed(self) -> Agreed:
        """Return the window over all ranks; waits for those that have not told theirs.

        Raises:
            LossError: on every rank, where one has a mean and another (loss_sum, count).
        """
        if self._agreed is None:
            assert self._answer is not None
            self._agreed, self._answer = self._read(self._answer()), None
        return self._agreed

    def _read(self, said: Gathered) -> Agreed:
        kinds = [each[3] for each in said]
        if _MEAN in kinds and _SUM in kinds:
            given = f"a mean on rank {kinds.index(_MEAN)} and (loss_sum, count) on rank {kinds.index(_SUM)}"
            raise LossError("loss", given=given, expected="the same kind on every rank")
        rows, terms = int(sum(each[0] for each in said)), sum(each[2] for each in said)
        if _NOTHING not in kinds:
            self._say(self._straggler.add([each[6] for each in said]))
        code, limit = int(max(each[4] for each in said)), min(each[5] for each in said)
        return Agreed(
            rows,
            terms if self._on_device is None else self._on_device,
            statistics.fmean(each[1] for each in said),
            goes_on=any(kind != _NOTHING for kind in kinds),
            reason=_REASONS[code - 1] if code else None,
            limit=None if math.isinf(limit) else int(limit),
        )

    def _say(self, late: Late | None) -> None:
        """Name the rank that the others wait for."""
        if late is not None:
            self._note("straggler", {"rank": late.rank, "window_s": late.seconds, "others_s": late.others_s})
            text = (
                f"rank {late.rank} takes {late.seconds:.3g} s a window and the others {late.others_s:.3g} s, and wait"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def most(self, value: float) -> float:
        """Return the highest of a figure of every rank; waits for all of them."""
        return value if self.num_ranks == 1 else max(each[0] for each in self._exchange.share([value]))

    def failed(self, error: BaseException) -> None:
        """Tell the others what ends this rank.

        Raises:
            RankError: it is another's end that does.
        """
        reason = self._exchange.failed(error)
        if reason is not error:
            raise reason from error

    def over(self) -> None:
        """The window is."""
        self._answer = self._agreed = self._on_device = self._steps = None
        self._began = time.perf_counter()


def stays_on_device(terms: Tensor) -> bool:
    """Return whether a count is not read: its device would have to be waited for."""
    return terms.is_cuda
