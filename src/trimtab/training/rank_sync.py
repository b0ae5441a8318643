"""Metadata exchanged between ranks once per window, before the gradient reduction: term counts, end of data, stops.

A rank sends its metadata before its last backward and reads the answer in its step, so no rank waits longer than for
the reduction. A rank without data sends a message too. If another rank continues, the rank without data joins with
zero-weight micro-batches, so that no data are lost and all ranks end together.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.adaptive_batch.batch_size_decider import Note
from trimtab.core.errors import BatchError, LossError, RankError
from trimtab.core.stopping_rule import StopReason
from trimtab.losses import Count
from trimtab.training.accumulation import WindowWeights, or_one, power_of_two
from trimtab.training.batch import BY_CONTAINERS, BatchSplitting, checksum
from trimtab.training.hooks import Hook, Outcome
from trimtab.training.metadata_exchange import Gathered, MetadataExchange
from trimtab.training.window import AgreedWindow, Window

# Detection of slow ranks (stragglers).

_WINDOWS = 20  # Consecutive windows in which the same rank must be the slowest.
# Smallest ratio, and smallest difference in seconds, to the other ranks; smaller delays occur by chance.
_SHARE, _LEAST_S = 1.5, 0.002


class StragglerDetector:
    """Finds a rank that is the slowest in many consecutive windows; reports each rank once."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float, float]] = []
        self._named: set[int] = set()

    def add(self, seconds: Sequence[float]) -> tuple[int, float, float] | None:
        """Add a window's time in seconds up to the reduction, of each rank.

        Returns:
            A newly detected slow rank, its median time, and the median time of all ranks but the slow rank; or None.
        """
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        others = statistics.median(each for rank, each in enumerate(seconds) if rank != slowest)
        is_late = seconds[slowest] > max(_SHARE * others, others + _LEAST_S) and slowest not in self._named
        if not is_late or (self._seen and self._seen[0][0] != slowest):
            self._seen.clear()
        if is_late:
            self._seen.append((slowest, seconds[slowest], others))
        if len(self._seen) < _WINDOWS:
            return None
        self._named.add(slowest)
        _, own, their = zip(*self._seen, strict=True)
        return slowest, statistics.median(own), statistics.median(their)


_NOTHING, _MEAN, _SUM = 0.0, 1.0, 2.0  # Kinds of loss.
_ASKS = 3.0  # A request for the maximum of one value.
_REASONS = tuple(StopReason)


class _RankMessage(NamedTuple):
    """Message of a rank, of equal width for all kinds, because a rank does not know the other ranks' kinds.

    Attributes:
        kind: kind of loss or request.
        stepped: number of windows stepped so far.
        stop: stop reason as index into `_REASONS`, from 1; 0 for none.
        limit: samples per micro-batch that fit on this rank.
        took_s: seconds that this rank worked on the window.
        asked: the value whose maximum is requested.
        unknown: 1 if the number of samples is unknown.
        first_batch: checksum of the run's first batch, in its first window; else 0.
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


class RankSync(Hook):
    """Metadata exchange of a run with the other ranks. A run of one process has none.

    Args:
        in_step: True if every micro-batch has collectives (FSDP2), so that all ranks need equally many.
    """

    def __init__(self, exchange: MetadataExchange, note: Note, *, in_step: bool = False) -> None:
        self._exchange, self.in_step = exchange, in_step
        self.num_ranks = exchange.num_ranks
        self._answer: Callable[[], Gathered] | None = None
        self._agreed: AgreedWindow | None = None
        self._straggler, self._note = StragglerDetector(), note
        self._began = time.perf_counter()  # Start of this rank's own work on the window.
        self._first_batch: float | None = None  # Checksum of the first batch; 0 from the second window on.
        self._counted = 0  # Windows stepped by this rank.
        self._steps: int | None = None  # Micro-batches of the window, if equal on all ranks.
        self._absent: _RankMessage | None = None  # Message of a rank without data for the window it joins.
        self._asked: float | None = None  # Maximum received by a rank without data.
        self._on_device: Tensor | None = None
        self._kept_on: torch.device | None = None  # Device of counts that stay on the device.

    @property
    def has_told(self) -> bool:
        """True if other ranks have received, or will receive, this rank's part of the window."""
        return self._answer is not None or self._agreed is not None

    def drew(self, batch: Any) -> None:
        """Record a batch of this rank; the first batch of the run is compared between ranks."""
        if self._first_batch is None:
            self._first_batch = float(checksum(batch))

    def tell(self, window: Window, weights: WindowWeights, limit: int | None, stop: StopReason | None) -> None:
        """Send this rank's part of the window, once, without waiting.

        Args:
            limit: samples per micro-batch that fit; None without a limit.
            stop: reason to stop all ranks after the window, or None.
        """
        if self.has_told:
            return
        if self._absent is not None:
            self._sum_nothing()
            self._answer = self._exchange.ask(self._absent)
            return
        terms = weights.terms
        if isinstance(terms, Tensor) and stays_on_device(terms):
            self._on_device, self._kept_on, terms = self._exchange.sum(terms.double()), terms.device, 0.0
        self._exchange.recovered()
        self._answer = self._exchange.ask(
            _RankMessage(
                kind=_SUM if weights.is_sum else _MEAN,
                stepped=self._counted,
                rows=window.rows,
                num_batches=window.num_batches,
                terms=float(terms),
                stop=_code_of(stop),
                limit=math.inf if limit is None else limit,
                took_s=time.perf_counter() - self._began,
                unknown=float(window.samples is None),
                first_batch=self._first_batch or 0.0,
            )
        )

    def others_go_on(self, reason: StopReason | None) -> int:
        """Return the number of micro-batches in which this rank, without data, joins other ranks; 0 at the end.

        Args:
            reason: stop reason of this rank, adopted by all ranks after the window; None at the end of the data.
        """
        absent = _RankMessage(_NOTHING, self._counted, stop=_code_of(reason))
        if self.in_step:
            self._steps = int(self.most(0.0))
            self._absent = absent if self._steps else None  # Sent when the other ranks send their parts.
            return self._steps
        self._sum_nothing()
        while _ASKS in _kinds(said := _all(self._exchange.share(absent))):
            self._asked = max(each.asked for each in said)
        self._agreed = self._read(said)
        if not self._agreed.goes_on:
            self.window_dropped()
            return 0
        return 1

    def _sum_nothing(self) -> None:
        if self._kept_on is not None:
            self._on_device = self._exchange.sum(torch.zeros((), dtype=torch.float64, device=self._kept_on))

    def steps(self, own: int) -> int:
        """Return the number of micro-batches of a window, padded to the maximum over ranks if they have collectives."""
        if not self.in_step:
            return own
        if self._steps is None:
            self._steps = int(self.most(own))
        return self._steps

    def agreed(self) -> AgreedWindow:
        """Return the window summed over all ranks. Waits for the other ranks' parts.

        Raises:
            LossError: on every rank, if a mean loss on one rank meets a `Summed` on another.
        """
        if self._agreed is None:
            assert self._answer is not None
            self._agreed, self._answer = self._read(_all(self._answer())), None
        return self._agreed

    def _read(self, said: list[_RankMessage]) -> AgreedWindow:
        kinds = _kinds(said)
        _require_one_kind(kinds)
        _require_together([int(each.stepped) for each in said])
        rows, terms = int(sum(each.rows for each in said)), sum(each.terms for each in said)
        self._warn_of_same([each.first_batch for each in said])
        if _NOTHING not in kinds:
            self._warn_of_straggler(self._straggler.add([each.took_s for each in said]))
        code, limit = int(max(each.stop for each in said)), min(each.limit for each in said)
        return AgreedWindow(
            rows,
            terms if self._on_device is None else self._on_device,
            statistics.fmean(each.num_batches for each in said),
            goes_on=any(kind != _NOTHING for kind in kinds),
            reason=_REASONS[code - 1] if code else None,
            limit=None if math.isinf(limit) else int(limit),
            samples=None if any(each.unknown for each in said) else rows,
        )

    def _warn_of_same(self, checksums: list[float]) -> None:
        """Warn once if ranks train on the same samples."""
        same = [rank for rank, each in enumerate(checksums) if each and checksums.count(each) > 1]
        if same:
            ranks = ", ".join(map(str, same))
            self._note("same_samples", {"ranks": same})
            text = f"Ranks {ranks} train on the same samples. Use trimtab.shard(loader) or a DistributedSampler."
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _warn_of_straggler(self, slow: tuple[int, float, float] | None) -> None:
        """Warn about a slow rank that the other ranks wait for."""
        if slow is not None:
            rank, seconds, others_s = slow
            self._note("straggler", {"rank": rank, "window_s": seconds, "others_s": others_s})
            text = (
                f"Rank {rank} takes {seconds:.3g} s per step, and the other ranks, which take {others_s:.3g} s, wait. "
                f"Compare the data loading and the hardware of rank {rank}."
            )
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def most(self, value: float) -> float:
        """Return the maximum of a value over all ranks; `LossError` if another rank has a mean loss."""
        if self._asked is not None:
            return self._asked
        said = _all(self._exchange.share(_RankMessage(_ASKS, self._counted, asked=value)))
        _require_one_kind(_kinds(said))
        return max(each.asked for each in said)

    def failed(self, error: BaseException) -> None:
        """Report this rank's error to all ranks; raise `RankError` if an error of another rank caused the error."""
        reason = self._exchange.failed(error)
        if reason is not error:
            raise reason from error

    def window_ends(self, outcome: Outcome) -> None:
        self._counted += 1
        self._first_batch = 0.0
        self.window_dropped()

    def window_dropped(self) -> None:
        self._answer = self._agreed = self._on_device = None
        self._steps = self._absent = self._asked = None
        self._began = time.perf_counter()


def _code_of(reason: StopReason | None) -> float:
    return 0.0 if reason is None else 1.0 + _REASONS.index(reason)


def _all(gathered: Gathered) -> list[_RankMessage]:
    return [_RankMessage(*figures) for figures in gathered]


def _kinds(said: list[_RankMessage]) -> list[float]:
    return [each.kind for each in said]


def _require_one_kind(kinds: list[float]) -> None:
    """Raise `LossError` if ranks differ in the kind of loss. A request within a window implies a `Summed`."""
    sums = [rank for rank, kind in enumerate(kinds) if kind in (_SUM, _ASKS)]
    if _MEAN in kinds and sums:
        raise LossError(
            "loss",
            got=f"a mean on rank {kinds.index(_MEAN)} and trimtab.Summed on rank {sums[0]}",
            expected="the same kind of loss on every rank",
            hint="Return trimtab.Summed(loss_sum, count) on every rank, or a mean on every rank.",
            code="loss.kinds_differ_on_ranks",
        )


def _require_together(counted: list[int]) -> None:
    """Raise `RankError` if ranks have stepped different numbers of windows, and therefore have different weights."""
    if len(set(counted)) > 1:
        fewest = counted.index(min(counted))
        raise RankError(
            f"rank {fewest}",
            problem=f"Rank {fewest} made {counted[fewest]} optimizer steps, but rank {counted.index(max(counted))} "
            f"made {max(counted)}, so that their weights differ.",
            hint="Call run.discard() for the same windows on every rank.",
            code="ranks.windows_differ",
        )


def stays_on_device(terms: Tensor) -> bool:
    """Return True if a count stays on its device, because reading it would synchronise."""
    return terms.is_cuda


# Loss weights that make the mean over ranks equal to the full-batch gradient (math: section 2).


class RankWeights(WindowWeights):
    """`WindowWeights` for one of several ranks; `batch_size` is that of a full loader batch, equal on all ranks."""

    def __init__(self, peers: RankSync, batch_size: int) -> None:
        self._peers, self._batch_size = peers, batch_size
        self._planned = batch_size
        self._is_padding = False
        super().__init__()

    def open(self, rows: int, num_micro_batches: int, num_batches: int = 1) -> None:
        """Begin a window of `rows` samples; `num_batches` is the number of loader batches decided by all ranks."""
        super().open(rows, num_micro_batches, num_batches)
        self._planned = self._batch_size * num_batches
        self._divisor = self._first if self._kept is None else power_of_two(self._kept * self._planned)

    def _keep(self) -> None:
        """Do nothing: `close` computes the terms per sample from all ranks' counts."""

    def close(self) -> None:
        """End the window and compute the terms per sample from all ranks' counts."""
        agreed = self._peers.agreed()
        if self._is_sum and self._kept is None and agreed.rows:
            terms = float(agreed.terms)  # Synchronises, in the first window only.
            self._kept = terms / agreed.rows if 0 < terms < math.inf else None

    def weigh(self, loss: Tensor, count: Count | None, rows: int) -> Tensor:
        """Return the weighted loss of a micro-batch; zero for padding micro-batches without samples."""
        self._is_padding = rows == 0
        return super().weigh(loss, count, rows)

    @property
    def _divides_at_once(self) -> bool:
        return False

    def _first_divisor(self, terms: float) -> float:
        # A rank that repeats its window must not ask again, because other ranks would not answer.
        if self._first is None:
            self._first = power_of_two(self._peers.most(max(float(self._rows), terms)))
        return self._first

    def _weigh_mean(self, loss: Tensor, rows: int) -> Tensor:
        self._add(loss.detach() * (rows / max(self._rows, 1)))
        return loss if rows == self._planned else loss * (rows / self._planned)

    def _weigh_sum(self, loss: Tensor, count: Count) -> Tensor:
        assert self._divisor is not None
        if self._is_padding:
            return loss * 0.0
        self._add(loss.detach())
        self._count = self._count + count
        return loss * (1.0 / self._divisor)

    @property
    def correction(self) -> float | Tensor:
        """Factor still to be applied to the reduced gradient; 1.0 if every rank had the planned number of samples."""
        agreed, reference = self._peers.agreed(), float(self.divisor)
        terms = agreed.terms if self._is_sum else agreed.rows
        if isinstance(terms, Tensor):
            return self._peers.num_ranks * reference / or_one(terms)
        return self._peers.num_ranks * reference / terms if terms else 1.0

    @property
    def share(self) -> float | Tensor:
        """Weight of this rank's mean loss in the mean over ranks. Waits for the other ranks' metadata."""
        agreed = self._peers.agreed()
        own, of_all = (self._count, agreed.terms) if self._is_sum else (self._rows, agreed.rows)
        own = own.double() if isinstance(own, Tensor) else own
        return self._peers.num_ranks * own / or_one(of_all)

    @property
    def divisor(self) -> float | Tensor:
        """Divisor `n_ref` of the window."""
        return float(self._planned) if not self._is_sum or self._divisor is None else self._divisor

    @property
    def counted(self) -> Count | None:
        """Token count of all ranks; None if the loss is a mean."""
        return self._peers.agreed().terms if self._is_sum else None


# Uneven inputs: a rank without data joins other ranks' collectives with zero-weight micro-batches.


class UnevenInputs(Hook):
    """Keeps a micro-batch for padding, and asks other ranks whether they have more windows.

    The padding is the first usable micro-batch of an epoch, because a resumed run can draw it again.
    """

    def __init__(self, peers: RankSync, batching: BatchSplitting = BY_CONTAINERS) -> None:
        self._peers, self._batching = peers, batching
        self._kept: Any = None
        self._at_hand: Any = None
        self._has_good = self._is_of_pass = False
        self._wanted = 0

    @property
    def is_able(self) -> bool:
        """True if a padding micro-batch is available."""
        return self._kept is not None

    def begin_pass(self) -> None:
        """Begin an epoch; the previous padding is used until a window of this epoch has been applied."""
        self._is_of_pass = False

    def keep(self, batch: Any, rows: int, micro_batch: int) -> None:
        """Consider the first micro-batch of a batch as padding."""
        self._peers.drew(batch)
        self._at_hand, _ = next(self._batching.slices(batch, rows, micro_batch))
        if not self._has_good:
            self._kept = self._at_hand

    def window_ends(self, outcome: Outcome) -> None:
        self.trained(applied=outcome.applied)

    def trained(self, *, applied: bool) -> None:
        """End a window. Batches of skipped steps are not used as padding, because zero times NaN is NaN."""
        if applied and self._at_hand is not None and not self._is_of_pass:
            self._kept, self._has_good, self._is_of_pass = self._at_hand, True, True
        self._at_hand = None

    def goes_on(self, reason: StopReason | None) -> bool:
        """Return True if another rank has a window although this rank has none. Waits for all ranks.

        Args:
            reason: stop reason of this rank, adopted by all ranks after the window; None at the end of the data.
        """
        self._wanted = self._peers.others_go_on(reason)
        return bool(self._wanted)

    def window(self, run: Any, device: torch.device) -> Window:
        """Return a padding window; `BatchError` if this rank never had a batch."""
        if not self.is_able:
            raise BatchError(
                "loader",
                problem="The loader of this rank has no batch, but other ranks have batches.",
                got="no batch on this rank",
                hint="Give every rank at least one batch; trimtab.shard(loader) divides each batch among all ranks.",
                code="loader.empty_on_rank",
            )
        window = Window(run, (), (), (), device)
        window.pad(self._kept, self._wanted)
        return window
