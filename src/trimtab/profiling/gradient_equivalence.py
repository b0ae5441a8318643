"""The splitting check: do micro-batches compute the gradient of the whole batch? (math: section 2)

The check runs without autocast and in training mode on the user's model and batch. The gradient of the whole batch is
compared, parameter by parameter, with the gradient of an unequal split, weighted as in a run. Weights in half precision
are not converted; their rounding error is measured (`_WholeBatch`). Only dropout is disabled, because
a split draws different masks from the same distribution; if the gradient is still random, the check fails as
unproved. Before the comparison, `LoopState` finds all state that a forward and a loss change. State that a second
forward changes again (batch statistics, queues, momentum teachers, counters, generators of Python and NumPy) would
change once per micro-batch, so such a batch is not split.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.choice import SplitCheck
from trimtab.core.errors import BatchError, LossError
from trimtab.losses import require_unscaled
from trimtab.profiling.measurement_notes import describe
from trimtab.profiling.random_masks import (
    VARIANTS,
    MaskDraw,
    ModuleMasks,
    UnmatchedMasks,
    counted_draws,
    dropout_off,
    other_draws,
    shared_draws,
)
from trimtab.profiling.rounding_tolerance import (
    Difference,
    Norms,
    distances,
    largest_difference,
    last_bits_moved,
    low_precision,
    move_last_bits,
    norms,
    total,
)
from trimtab.profiling.training_loop import TrainingLoop, in_mode, own_loss
from trimtab.state.loop_state import TORCH_GENERATORS, ChangeKind, LoopState, StateChange
from trimtab.techniques.compiled_call import noting_calls
from trimtab.techniques.mixed_precision import dtype_of
from trimtab.training.accumulation import WindowWeights
from trimtab.training.batch import BY_CONTAINERS, UNKNOWN, BatchSplitting, map_leaves, samples_at
from trimtab.training.out_of_memory import is_out_of_memory
from trimtab.training.sample_count import read_sample_count
from trimtab.training.split_conditions import normalises_by_batch

_MOST_SCALED = 0.1
TOLERANCE = 1e-4
# Multiple of the change caused by perturbing the weights in their last bit that counts as rounding; and the largest
# fraction of the whole gradient that rounding may explain for a parameter whose own gradient is near zero.
_TIMES_ROUNDING, _MOST_ROUNDING = 30.0, 1e-5
_SMALLEST = 1e-9  # Fraction of the whole gradient; smaller differences are ignored.
_STATISTIC = re.compile(r"\.(running_mean|running_var|num_batches_tracked)\b")
# Codes of checks that compared gradients.
_DIFFERS = ("split.gradient_differs", "split.token_mean", "split.loss_is_sum")
# Factors of the loss whose rounding errors differ in half precision, because none is a power of two.
_FACTORS = (0.7, 0.9, 0.55)
# Multiple of the rounding error of half precision that counts as rounding (whole batch and split both have one), and
# its cap as a fraction of the gradient.
_TIMES_HALF, _MOST_HALF = 2.0, 0.3
# The cap does not apply to a gradient that is only rounding: below this multiple of its rounding error, and below this
# fraction of the whole gradient.
_MANY_TIMES, _NEAR_ZERO = 30.0, 1e-3
_SUM_WEIGHT = 0.02  # Relative deviation from 1 of the weights that indicate a sum over samples.
_MOVED = 0.01  # Relative perturbation of the weights for detecting changes of state.
_OTHER_WEIGHT = 1e-3  # Relative deviation of a piece's weight from its fraction of the samples.
_REPEATED = 2e-6  # Relative difference of a repeated gradient; atomic additions on a GPU cause no more.
_COUNTED = 4  # Largest number of samples for counting random draws.
_OTHER_ROWS = 4  # A second batch has at most this many samples, or a quarter of the batch.
Gradients = dict[str, Tensor]


def require_own_forward(subject: TrainingLoop, precision: str) -> None:
    """Compute the loss of the batch once, with gradients and in the loop's precision, and check the model's forward.

    Raises:
        LossError: the loss function raised, its result is not a loss, it did not call the model itself, the model runs
            under the loop's own autocast, or the loss is multiplied by a `GradScaler`'s scale.
    """
    casts = set[torch.dtype | None]()
    _look(subject, precision, casts)
    if not casts:
        raise LossError(
            "loss_fn",
            got="a loss without a call of model(...)",
            expected="a loss function that calls model(...)",
            problem="loss_fn did not call model(...), so settings of a plan would have no effect on the loss.",
            hint="Call the model that is passed to loss_fn, not a copy, a submodule or another method of it. To use "
            "another method, pass a module whose forward calls that method.",
            code="loss.model_not_called",
        )
    own = casts - {None, dtype_of(precision)}
    if dtype_of(precision) is not None:  # The loop's own autocast to the same dtype is visible only without the plan's.
        in_fp32 = set[torch.dtype | None]()
        with contextlib.suppress(Exception):  # A loop that runs in half precision only is accepted.
            _look(subject, "fp32", in_fp32)
        own |= in_fp32 - {None}
    if own:
        name = str(own.pop()).removeprefix("torch.")
        raise LossError(
            "loss_fn",
            got=f"a forward under autocast to {name}",
            expected="a forward without autocast",
            problem=f"loss_fn runs the model under its own autocast to {name}, which overrides every precision that a "
            "plan can choose.",
            hint="Remove autocast and GradScaler from the loop, and pass its precision to trimtab.plan: "
            'reference=trimtab.Reference("bf16") or trimtab.Reference("fp16").',
            code="loss.own_autocast",
        )


def _look(subject: TrainingLoop, precision: str, casts: set[torch.dtype | None]) -> None:
    """Compute the loss and add the autocast dtype of the model's forwards to `casts`; None without autocast."""
    device = subject.device.type

    def note() -> None:
        casts.add(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None)

    end = noting_calls(subject.model, note)
    try:
        loss, _ = subject.loss(precision=precision)
        require_unscaled(loss)
    finally:
        end()


def other_values(batch: Any, samples: int, wanted: int, batching: BatchSplitting = BY_CONTAINERS) -> Any | None:
    """Return a batch of `wanted` samples in another order and with changed values; None if indexing fails.

    Floating-point values are scaled down by individual factors of up to a tenth, which preserves signs and the range
    [0, 1]. Masks of 0 and 1, and integers (labels, token ids, lengths), are unchanged.
    """
    if read_sample_count(batch).samples != samples:
        return None  # Only the user's functions know the samples.
    generator = torch.Generator().manual_seed(samples)
    order = torch.randperm(samples, generator=generator).tolist()
    indices = list(itertools.islice(itertools.cycle(order), wanted))

    def scaled(tensor: Tensor) -> Tensor:
        if (
            not isinstance(tensor, Tensor)
            or not tensor.is_floating_point()
            or tensor.layout is not torch.strided
            or bool(((tensor == 0) | (tensor == 1)).all())  # A mask.
        ):
            return tensor
        factor = 1 - _MOST_SCALED * torch.rand(tensor.shape, generator=generator)
        return (tensor.detach() * factor.to(tensor.device)).to(tensor.dtype).requires_grad_(tensor.requires_grad)

    try:
        other = map_leaves(samples_at(batch, indices), scaled)
        reading = batching.read(other)
    except (BatchError, RuntimeError, TypeError, IndexError):
        return None
    return other if reading.samples == wanted and reading.is_splittable else None


def check_splitting(subject: TrainingLoop, precision: str = "fp32", start: LoopState | None = None) -> SplitCheck:
    """Return the verdict on splitting the batch into micro-batches; state is restored.

    The longest batch and an example batch are both checked, because a mean over tokens splits exactly if no sample is
    padded. If the whole batch does not fit in memory, the check uses the largest number of leading samples that fits.
    The loop runs once in its own `precision`. Gradients are compared without autocast, in the dtypes of the weights.

    Raises:
        LossError: the loss function raised, or the result is not a loss.
    """
    with start or LoopState(subject.trained, subject.optimizer, loss_fn=own_loss(subject.loss_fn)) as state:
        check = _check_of_batch(subject, precision, state)
        if subject.example is None or not check.splittable:
            return check
        other = _check_of_batch(replace(subject, batch=subject.example, example=None), precision, state)
        return check if other.splittable else replace(other, reason=f"{other.reason} (found on the example batch)")


def _check_of_batch(subject: TrainingLoop, precision: str, start: LoopState) -> SplitCheck:
    rows = subject.rows
    while True:
        part = subject.first(rows)
        try:
            refusal = _state_refusal(part, precision, start)
            if part.unknown:  # Comes before any other reason.
                refusal = _refused(UNKNOWN, f"the number of samples of the batch is unknown: {part.unknown}")
            check = refusal or _check(part, start)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        else:
            fewer = f"; checked on the first {rows} of {subject.rows} samples, because more do not fit in memory"
            return check if part is subject else replace(check, reason=check.reason + fewer)
        rows //= 2  # Outside of the handler, because the exception keeps the failed attempt's tensors alive.
        try:
            subject.first(1)
        except BatchError:
            rows = 0
        if rows < 2:
            reason = "the splitting check ran out of memory, and the batch cannot be reduced further"
            return _refused("split.out_of_memory", reason)


def _refused(code: str, reason: str, difference: float | None = None) -> SplitCheck:
    return SplitCheck(False, reason, difference, code=code)


def _check(subject: TrainingLoop, start: LoopState) -> SplitCheck:
    if subject.rows < 2:
        return _refused("split.one_sample", "the batch has one sample")
    try:
        pieces = list(_unequal_split(subject))
    except BatchError as error:
        return _refused("split.not_sliceable", f"the batch cannot be split: {error.reason}")
    with start:
        shared = _shared_masks(subject)
    if shared:
        reason = f"samples share the random numbers drawn by {shared}, and micro-batches would draw different ones"
        return _refused("split.random", reason)
    with start:
        agreement = _proof(subject, pieces)
        if isinstance(agreement, SplitCheck):
            return agreement
        if shared is None:
            reason = "the random numbers drawn in a forward could not be counted, and samples may share some of them"
            return _refused("split.random", reason)
        samples = min(subject.rows, max(_OTHER_ROWS, subject.rows // 4))
        other: TrainingLoop | None = None
        if subject.second is not None:
            other = replace(subject, batch=subject.second, example=None).first(samples)
        elif (values := other_values(subject.batch, subject.rows, samples, subject.batching)) is not None:
            other = replace(subject, batch=values, example=None)
        if other is not None:
            second = _proof(other, list(_unequal_split(other)))
            if isinstance(second, SplitCheck) and second.code in _DIFFERS:
                return replace(second, reason=f"{second.reason} (found on a second batch with other values)")
    return agreement.check()


def _watched(subject: TrainingLoop) -> LoopState:
    """Return a snapshot of the current state for finding changes, with checksums of tensors that the caller copied."""
    state = subject.optimizer.state.values()
    held = {id(tensor) for each in state for tensor in each.values() if isinstance(tensor, Tensor)}
    return LoopState(
        subject.trained,
        subject.optimizer,
        loss_fn=own_loss(subject.loss_fn),
        of_forwards=True,
        held_elsewhere=held,
    )


def _state_refusal(subject: TrainingLoop, precision: str, start: LoopState) -> SplitCheck | None:
    """Return a failed check if a second forward would change state again, or would change the result of the first.

    Weights are perturbed slightly, so that a teacher equal to its student is seen to follow it. A value that every
    forward overwrites with the same content (such as the last attention map, kept for inspection) is accepted.
    """
    model = subject.trained
    with start:
        move_last_bits(model, seed=0, epsilon=_MOVED)
        state = _watched(subject)
        require_own_forward(subject, precision)
        changed = _counted(state.changes())
    if not model.training:  # The model was passed in evaluation mode; find the changes of training mode.
        with start, _as_it_trains(model):
            move_last_bits(model, seed=0, epsilon=_MOVED)
            state = _watched(subject)
            # A failure in training mode is reported by the comparison of gradients.
            with contextlib.suppress(Exception):
                subject.loss()
            changed += _counted(state.changes())
    if not changed:
        return None
    if refusal := _batch_statistics(model, changed):
        return refusal
    repeats = _changes_again(subject, start)
    if repeats == []:
        return None
    paths = [change.path for change in repeats or changed]
    named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    return _refused(
        "split.state_changes",
        f"each forward changes {named}, and micro-batches would change this state several times per step. If the "
        "state is only a log, return (loss, {name: value}) from the loss function and log the value outside",
    )


def _changes_again(subject: TrainingLoop, start: LoopState) -> list[StateChange] | None:
    """Return the state that a second forward changes again; None if the forward fails or gives another gradient."""
    whole = [(subject.batch, subject.rows)]
    masks = ModuleMasks(subject.trained, subject.rows)
    with start, _as_it_trains(subject.trained), dropout_off(subject.trained):
        move_last_bits(subject.trained, seed=0, epsilon=_MOVED)
        try:
            before, between = _gradient(subject, whole, masks), _watched(subject)
            after = _gradient(subject, whole, masks)
        except Exception as error:
            _pass_on_memory(error)
            return None
        again = _counted(between.changes())
        is_same = _difference(before, after).relative <= _REPEATED
        return again if again or is_same else None


def _counted(changes: Sequence[StateChange]) -> list[StateChange]:
    """Return the changes that prevent a split.

    Gradients are the result. torch's generators draw masks sample by sample from the same distribution; the comparison
    of gradients decides if a draw couples samples.
    """
    ignored = (ChangeKind.GRADIENT, ChangeKind.BATCH)
    return [c for c in changes if c.kind not in ignored and c.path not in TORCH_GENERATORS]


def _batch_statistics(model: nn.Module, changed: Sequence[StateChange]) -> SplitCheck | None:
    owners = {name: module for name, module in model.named_modules() if normalises_by_batch(module)}
    moved = {c.path.rpartition(".")[0].removeprefix("model.").removeprefix("model") for c in changed}
    kinds = sorted({type(module).__name__ for name, module in owners.items() if name in moved})
    if kinds:
        reason = f"{', '.join(kinds)} normalises over the batch, and micro-batches would have other batch statistics"
        return _refused("split.batch_statistics", reason)
    others = [change.path for change in changed if _STATISTIC.search(change.path)]
    if len(others) < len(changed):
        return None
    return _refused(
        "split.batch_statistics",
        f"the loss function runs a network that normalises over the batch and updates {others[0]}, and micro-batches "
        "would have other batch statistics. Run that network outside of the loss function, and pass its output in the "
        "batch",
    )


def _shared_masks(subject: TrainingLoop) -> str | None:
    """Return the places of random numbers that several samples share and the gradient depends on, or "".

    None if the forward fails. The elements drawn for some samples, and for the same samples twice, are counted: a
    mask of a weight has the same number in both cases.
    """
    for few, many, times in _samples_and_more(subject):
        try:
            with _as_it_trains(subject.trained):
                counts = Counter[MaskDraw](), Counter[MaskDraw]()
                for batch, count in zip((few, many), counts, strict=True):
                    with counted_draws(count):
                        subject.loss(batch)
                shared = shared_draws(*counts, times)
                if not shared or not _matter(subject, many, shared):
                    return ""
                return ", ".join(dict.fromkeys(draw.text(subject.trained) for draw in shared[:3]))
        # A made-up batch or a part may fail; the comparison of gradients reports the latter.
        except Exception as error:
            _pass_on_memory(error)
    return None


def _samples_and_more(subject: TrainingLoop) -> Iterator[tuple[Any, Any, float | None]]:
    """Yield pairs of batches and the ratio of their sample counts, or None if samples have different sizes."""
    samples = max(1, min(_COUNTED, subject.rows // 2))
    if read_sample_count(subject.batch).samples == subject.rows:
        with contextlib.suppress(BatchError, RuntimeError, TypeError, IndexError):
            first = list(range(samples))
            yield samples_at(subject.batch, first), samples_at(subject.batch, first * 2), 2.0
    part, _ = next(_unequal_split(subject))
    yield part, subject.batch, None


def _matter(subject: TrainingLoop, batch: Any, draws: Sequence[MaskDraw]) -> bool:
    """Return True if the gradient depends on some draws; a drawn number may be unused."""
    before: Gradients | None = None
    for variant in range(VARIANTS):
        with other_draws(draws, variant):
            found = _gradient(subject, [(batch, 1)], ModuleMasks(nn.Module(), 1))
        if before is not None and not _difference(before, found).relative <= _REPEATED:
            return True
        before = found
    return False


def _unequal_split(subject: TrainingLoop) -> Iterator[tuple[Any, int]]:
    """Yield pieces of about 5/8, 2/8 and 1/8 of the samples."""
    rows = subject.rows
    ends = sorted({max(1, round(rows * 0.625)), max(1, round(rows * 0.875)), rows})
    for start, stop in itertools.pairwise((0, *ends)):
        yield subject.batching.part(subject.batch, start, stop, rows), stop - start


def _proof(subject: TrainingLoop, pieces: Sequence[tuple[Any, int]]) -> SplitCheck | _Agreement:
    """Return the largest difference of a gradient if it is only rounding, or a failed check."""
    model = subject.trained
    masks = ModuleMasks(model, subject.rows)
    with _as_it_trains(model), dropout_off(model):
        try:
            whole = _WholeBatch(subject, masks)
        except Exception as error:
            _pass_on_memory(error)
            reason = f"the forward and backward failed in training mode with dropout disabled ({describe(error)})"
            return _refused("split.whole_fails", reason)
        if not 0 < total(whole.sizes) < float("inf"):
            reason = "the gradient of the whole batch is zero, NaN or infinite, so gradients cannot be compared"
            return _refused("split.no_gradient", reason)
        try:
            found = whole.difference(pieces)
        except UnmatchedMasks as error:
            return _refused("split.random", str(error))
        except Exception as error:  # The user's model may reject a part of its batch with any exception.
            _pass_on_memory(error)
            reason = f"the forward and backward of a part of the batch failed ({describe(error)})"
            return _refused("split.part_fails", reason)
        if found.is_rounding:
            return _Agreement(found, whole.low_precision if whole.has_measured_rounding else "")
        repeat = whole.difference(whole.pieces)
        if not repeat.is_rounding:
            reason = f"the gradient of {repeat.name} differs between two equal forwards, although dropout is disabled"
            return _refused("split.random", reason)
        return _cause(whole, pieces, found)


@dataclass(frozen=True)
class _Agreement:
    """Largest difference of a gradient, explained by rounding.

    Args:
        found: the difference, relative to its tolerance.
        low_precision: dtype whose measured rounding error explains the difference; "" if it is within `TOLERANCE`.
    """

    found: Difference
    low_precision: str

    def check(self) -> SplitCheck:
        found = self.found
        if not self.low_precision:
            # Relative to the gradient; relative to its rounding error for a gradient of zero that is all rounding.
            size = found.ratio * TOLERANCE
            reason = f"an unequal split changes no parameter's gradient by more than {size:.1e} (limit {TOLERANCE:g})"
            return SplitCheck(True, reason, size, code="split.proved")
        reason = (
            f"with weights in {self.low_precision}, an unequal split changes gradients by no more than rounding: "
            f"{found.name} by {found.relative:.1e} (relative), which is {found.ratio:.2g} of its tolerance"
        )
        return SplitCheck(True, reason, found.relative, found.relative / found.ratio, code="split.proved")


class _WholeBatch:
    """Gradient of the whole batch, for comparison with that of a split.

    The tolerance is a constant fraction of every gradient, plus a multiple of its rounding error if rounding could
    explain the difference. The rounding error of a model in fp32 is measured by perturbing the weights in their last
    bit. In half precision this perturbation (0.8% of a bf16 weight) changes gradients more than rounding does. There,
    the gradient is computed again from a loss that is multiplied by a constant, and divided by this constant: without
    rounding, both gradients would be equal, also if the loss couples samples.
    """

    def __init__(self, subject: TrainingLoop, masks: ModuleMasks) -> None:
        self.subject, self.masks = subject, masks
        self.pieces = [(subject.batch, subject.rows)]
        self.gradient = _gradient(subject, self.pieces, masks)
        self.sizes = norms(self.gradient)
        self.low_precision = low_precision(subject.trained)
        self._allowed = {name: TOLERANCE * size + _SMALLEST * total(self.sizes) for name, size in self.sizes.items()}
        self._rounding = dict.fromkeys(self.sizes, 0.0)

    def difference(self, pieces: Sequence[tuple[Any, int]]) -> Difference:
        """Return the parameter whose gradient differs most in a split, relative to its tolerance."""
        other = _gradient(self.subject, pieces, self.masks)
        apart, everything = distances(self.gradient, other), total(self.sizes)
        found = self._largest(apart)
        if self.low_precision:
            for factor in _FACTORS:
                if found.is_rounding:
                    break
                self._measure_rounding(self.gradient, self.pieces, factor)
                self._measure_rounding(other, pieces, factor)
                found = self._largest(apart)
            return found
        # A gradient near zero has a tolerance near zero, which rounding alone can exceed; such a difference is still
        # tiny relative to the gradient of all parameters.
        exceeding = [error for name, error in apart.items() if error > self._allowed[name]]
        if found.is_rounding or any(error > 2 * _MOST_ROUNDING * everything for error in exceeding):
            return found
        with last_bits_moved(self.subject.trained, seed=0):
            self._record(distances(self.gradient, _gradient(self.subject, self.pieces, self.masks)))
        return self._largest(apart)

    @property
    def has_measured_rounding(self) -> bool:
        """True if a difference exceeded the constant part of its tolerance."""
        return any(self._rounding.values())

    def _measure_rounding(self, known: Gradients, pieces: Sequence[tuple[Any, int]], factor: float) -> None:
        """Measure the rounding error of a gradient in half precision."""
        self._record(distances(known, _gradient(self.subject, pieces, self.masks, factor=factor), factor))

    def _record(self, rounding: Norms) -> None:
        self._rounding = {name: max(size, rounding[name]) for name, size in self._rounding.items()}

    def _largest(self, apart: Norms) -> Difference:
        allowed = {name: limit + self.explained(name) for name, limit in self._allowed.items()}
        return largest_difference(apart, allowed, self.sizes)

    def explained(self, name: str) -> float:
        """Return the largest distance between two gradients of a parameter that measured rounding explains."""
        rounding, size, everything = self._rounding[name], self.sizes[name], total(self.sizes)
        if not self.low_precision:
            return min(_TIMES_ROUNDING * rounding, _MOST_ROUNDING * everything)
        is_rounding = size < _MANY_TIMES * rounding and size < _NEAR_ZERO * everything
        return _TIMES_HALF * rounding if is_rounding else min(_TIMES_HALF * rounding, _MOST_HALF * size)


def _cause(whole: _WholeBatch, pieces: Sequence[tuple[Any, int]], found: Difference) -> SplitCheck:
    """Return the reason for a different gradient, with a remedy if there is one.

    If the whole gradient is a weighted sum of the pieces' gradients, only the weights were wrong: weights of 1
    indicate a sum over samples, other weights a mean over unequal numbers of terms.
    """
    text = f"splitting the batch unequally changes the gradient of {found.name} by {found.relative:.2g} (relative)"
    subject, masks = whole.subject, whole.masks
    starts = itertools.accumulate((rows for _, rows in pieces), initial=0)
    parts = [_gradient(subject, [piece], masks, first) for piece, first in zip(pieces, starts, strict=False)]
    weights = _weights_that_fit(whole, parts)
    nominal = [rows / subject.rows for _, rows in pieces]
    if weights is not None and any(abs(w - n) > _OTHER_WEIGHT * n for w, n in zip(weights, nominal, strict=True)):
        remedy = "Return trimtab.Summed(loss_sum, count) from the loss function to allow splitting"
        if all(abs(weight - 1) < _SUM_WEIGHT for weight in weights):
            reason = f"{text}, because the loss is a sum over samples. {remedy}"
            return _refused("split.loss_is_sum", reason, found.relative)
        why = "because the loss is a mean over terms (such as tokens) and samples have different numbers of terms"
        return _refused("split.token_mean", f"{text}, {why}. {remedy}", found.relative)
    reason = f"{text}, because the loss or the model couples samples"
    if whole.low_precision:  # torch's CPU kernels sum some gradients over all samples in bf16 (docs/LOG.md).
        reason += f", or because an operator sums over samples in {whole.low_precision}"
    return _refused("split.gradient_differs", reason, found.relative)


def _weights_that_fit(batch: _WholeBatch, parts: Sequence[Gradients]) -> list[float] | None:
    """Return positive weights with which the pieces' gradients sum to the whole gradient, or None."""
    whole, sizes = batch.gradient, batch.sizes

    def products(left: Gradients, right: Gradients) -> float:
        pairs = ((left[name].double().flatten(), right[name].double().flatten()) for name in whole)
        return float(sum(torch.dot(a, b) for a, b in pairs))

    gram = torch.tensor([[products(a, b) for b in parts] for a in parts], dtype=torch.float64)
    target = torch.tensor([products(a, whole) for a in parts], dtype=torch.float64)
    weights = [float(weight) for weight in torch.linalg.lstsq(gram, target.unsqueeze(1)).solution.flatten()]
    if not all(0 < weight < float("inf") for weight in weights):
        return None
    fitted = {
        name: torch.as_tensor(sum(w * part[name] for w, part in zip(weights, parts, strict=True))) for name in whole
    }
    apart, everything = distances(whole, fitted), total(sizes)
    limits = {name: TOLERANCE * (size + 0.01 * everything) + batch.explained(name) for name, size in sizes.items()}
    return weights if all(apart[name] <= limits[name] for name in apart) else None


def _difference(left: Gradients, right: Gradients) -> Difference:
    sizes = norms(left)
    return largest_difference(
        distances(left, right), {n: size + _SMALLEST * total(sizes) for n, size in sizes.items()}, sizes
    )


def _pass_on_memory(error: Exception) -> None:
    if is_out_of_memory(error):
        raise error


def _gradient(
    subject: TrainingLoop, pieces: Sequence[tuple[Any, int]], masks: ModuleMasks, first: int = 0, factor: float = 1.0
) -> Gradients:
    """Return the gradients of a window of pieces, whose losses are multiplied by `factor`."""
    parameters = {name: p for name, p in subject.trained.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        parameter.grad = None
    weights = WindowWeights()
    weights.open(sum(rows for _, rows in pieces), len(pieces))
    for piece, rows in pieces:
        with masks.of(first, rows):
            loss, count = subject.loss(piece)
            weighted = weights.weigh(loss, count, rows)
            (weighted if factor == 1.0 else weighted * factor).backward()
        first += rows
    correction, found = weights.correction, Gradients()
    for name, parameter in parameters.items():
        gradient, parameter.grad = parameter.grad, None  # Moved, not copied: only a single set of gradients is held.
        if gradient is None:
            found[name] = torch.zeros_like(parameter)
        else:
            found[name] = gradient if isinstance(correction, float) and correction == 1 else gradient * correction
    return found


def _as_it_trains(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Put a model in evaluation mode into training mode inside the context."""
    return contextlib.nullcontext() if model.training else in_mode(model, training=True)
