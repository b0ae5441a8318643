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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.core.errors import LossError, RankError
from trimtab.core.stop import StopReason
from trimtab.decide.batch_decider import Note
from trimtab.losses import Count
from trimtab.runtime.batches import checksum
from trimtab.runtime.exchange import Exchange, Gathered
from trimtab.runtime.straggler import Late, Straggler

_NOTHING, _MEAN, _SUM = 0.0, 1.0, 2.0  # kinds of loss
_ASKS = 3.0  # what is said is one figure, of which the highest is asked for
_REASONS = tuple(StopReason)


class _Said(NamedTuple):
    """What goes over the wire, of one width whatever it is about: a rank may not know what the others say.

    `asked`: the figure of which the highest is asked for. `stop`: of `_REASONS`, from 1. `stepped`: windows until now.
    `unknown`: 1 if the number of samples is.
    `first_batch`: a checksum of the run's first batch, in its window; else 0.
    """

    kind: float
    stepped: float
    rows: float = 0.0
    num_batches: float = 0.0
    terms: float = 0.0
    stop: float = 0.0
    limit: float = math.inf
    took_s: float = 0.0
    asked: float = 0.0
    unknown: float = 0.0
    first_batch: float = 0.0


@dataclass(frozen=True)
class Agreed:
    """A window over all ranks.

    Args:
        rows, terms: of all. num_batches: of the loader, the mean over ranks. goes_on: whether any rank has data.
        reason: why a rank stops after it. limit: the fewest rows of a micro-batch that fit on a rank.
        samples: of all ranks; None if a rank's are unknown, and `rows` are then units of weight.
    """

    rows: int
    terms: Count
    num_batches: float
    goes_on: bool = True
    reason: StopReason | None = None
    limit: int | None = None
    samples: int | None = None


@dataclass(frozen=True)
class Share:
    """What a rank has of a window.

    Args:
        terms: what its loss averages over; `is_sum`: the loss counts them. limit: rows of a micro-batch that fits.
        stop: why it asks all to stop after the window. samples: None if unknown.
    """

    rows: int
    num_batches: int
    terms: Count
    is_sum: bool
    limit: int | None = None
    stop: StopReason | None = None
    samples: int | None = None


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
        self._first_batch: float | None = None  # of the first batch; 0 from the second window on
        self._counted = 0  # windows that this rank has stepped
        self._steps: int | None = None  # micro-batches of the window, where all ranks have as many
        self._absent: _Said | None = None  # what a rank without data says of the window it joins
        self._asked: float | None = None  # the highest of a figure, of which a rank without data has none
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

    def drew(self, batch: Any) -> None:
        """Note a batch of this rank: the run's first is compared with those of the other ranks."""
        if self._first_batch is None and self.num_ranks > 1:
            self._first_batch = float(checksum(batch))

    def tell(self, share: Share) -> None:
        """Say what this rank has of the window, once; does not wait."""
        if self.has_told:
            return
        if self.num_ranks == 1:
            self._agreed = Agreed(share.rows, share.terms, share.num_batches, reason=share.stop, samples=share.samples)
            return
        if self._absent is not None:
            self._sum_nothing()
            self._answer = self._exchange.ask(self._absent)
            return
        terms = share.terms
        if isinstance(terms, Tensor) and stays_on_device(terms):
            self._on_device, self._kept_on, terms = self._exchange.sum(terms.double()), terms.device, 0.0
        kind = _SUM if share.is_sum else _MEAN
        took_s = time.perf_counter() - self._began
        said = _Said(
            kind, self._counted, share.rows, share.num_batches, float(terms), _code_of(share.stop), took_s=took_s
        )
        said = said._replace(unknown=float(share.samples is None))
        said = said._replace(first_batch=self._first_batch or 0.0)
        self._exchange.recovered()
        self._answer = self._exchange.ask(said if share.limit is None else said._replace(limit=share.limit))

    def others_go_on(self, reason: StopReason | None) -> int:
        """Return in how many micro-batches this rank joins the others, that has no data: 0 where all are at an end.

        Args:
            reason: why it stops, as all then do after this window.
        """
        absent = _Said(_NOTHING, self._counted, stop=_code_of(reason))
        if self.in_step:
            self._steps = int(self.most(0.0))
            self._absent = absent if self._steps else None  # told where the others tell theirs
            return self._steps
        self._sum_nothing()
        while _ASKS in _kinds(said := _all(self._exchange.share(absent))):
            self._asked = max(each.asked for each in said)
        self._agreed = self._read(said)
        if not self._agreed.goes_on:
            self.over()
            return 0
        return 1

    def _sum_nothing(self) -> None:
        if self._kept_on is not None:
            self._on_device = self._exchange.sum(torch.zeros((), dtype=torch.float64, device=self._kept_on))

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
            LossError: on every rank, where one has a mean and another `Summed`.
        """
        if self._agreed is None:
            assert self._answer is not None
            self._agreed, self._answer = self._read(_all(self._answer())), None
        return self._agreed

    def _read(self, said: list[_Said]) -> Agreed:
        kinds = _kinds(said)
        _require_one_kind(kinds)
        _require_together([int(each.stepped) for each in said])
        rows, terms = int(sum(each.rows for each in said)), sum(each.terms for each in said)
        self._warn_of_same([each.first_batch for each in said])
        if _NOTHING not in kinds:
            self._say(self._straggler.add([each.took_s for each in said]))
        code, limit = int(max(each.stop for each in said)), min(each.limit for each in said)
        return Agreed(
            rows,
            terms if self._on_device is None else self._on_device,
            statistics.fmean(each.num_batches for each in said),
            goes_on=any(kind != _NOTHING for kind in kinds),
            reason=_REASONS[code - 1] if code else None,
            limit=None if math.isinf(limit) else int(limit),
            samples=None if any(each.unknown for each in said) else rows,
        )

    def _warn_of_same(self, checksums: list[float]) -> None:
        """Warn once of ranks that train on the same samples."""
        same = [rank for rank, each in enumerate(checksums) if each and checksums.count(each) > 1]
        if same:
            ranks = ", ".join(map(str, same))
            self._note("same_samples", {"ranks": same})
            text = f"ranks {ranks} train on the same samples. Use trimtab.shard(loader), or a DistributedSampler."
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _say(self, late: Late | None) -> None:
        """Name the rank that the others wait for."""
        if late is not None:
            self._note("straggler", {"rank": late.rank, "window_s": late.seconds, "others_s": late.others_s})
            text = (
                f"rank {late.rank} takes {late.seconds:.3g} s a window and the others {late.others_s:.3g} s, and wait"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def most(self, value: float) -> float:
        """Return the highest of a figure of every rank; waits for all of them.

        Raises:
            LossError: as of `agreed`, where only ranks with `Summed` ask.
        """
        if self.num_ranks == 1:
            return value
        if self._asked is not None:
            return self._asked
        said = _all(self._exchange.share(_Said(_ASKS, self._counted, asked=value)))
        _require_one_kind(_kinds(said))
        return max(each.asked for each in said)

    def failed(self, error: BaseException) -> None:
        """Tell the others what ends this rank.

        Raises:
            RankError: it is another's end that does.
        """
        reason = self._exchange.failed(error)
        if reason is not error:
            raise reason from error

    def over(self, *, stepped: bool = False) -> None:
        """The window is: it was stepped, or given up."""
        self._counted += stepped
        self._first_batch = 0.0 if stepped else self._first_batch
        self._answer = self._agreed = self._on_device = None
        self._steps = self._absent = self._asked = None
        self._began = time.perf_counter()


def _code_of(reason: StopReason | None) -> float:
    return 0.0 if reason is None else 1.0 + _REASONS.index(reason)


def _all(gathered: Gathered) -> list[_Said]:
    return [_Said(*figures) for figures in gathered]


def _kinds(said: list[_Said]) -> list[float]:
    return [each.kind for each in said]


def _require_one_kind(kinds: list[float]) -> None:
    """Raise `LossError` where ranks differ. Who asks in the midst of a window has a sum."""
    sums = [rank for rank, kind in enumerate(kinds) if kind in (_SUM, _ASKS)]
    if _MEAN in kinds and sums:
        given = f"a mean on rank {kinds.index(_MEAN)} and Summed on rank {sums[0]}"
        raise LossError("loss", given=given, expected="the same kind on every rank")


def _require_together(counted: list[int]) -> None:
    """Raise `RankError` where one rank has stepped a window that another gave up: their weights differ."""
    if len(set(counted)) > 1:
        fewest = counted.index(min(counted))
        raise RankError(
            f"rank {fewest}",
            given=f"{counted[fewest]} windows stepped, and {max(counted)} on rank {counted.index(max(counted))}",
            expected="every rank to step the same windows",
            way_out="A window that others have reduced cannot be given up by one rank: have all of them discard it.",
            code="ranks.windows_differ",
        )


def stays_on_device(terms: Tensor) -> bool:
    """Return whether a count is not read: its device would have to be waited for."""
    return terms.is_cuda
