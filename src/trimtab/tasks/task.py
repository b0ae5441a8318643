"""Definition of a training task: model, optimizer, loss, data, metric and budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import ASSUMED_REFERENCE, Reference
from trimtab.core.units import METRIC_UNITS
from trimtab.losses import Summed

# Counter-based random numbers per sample, independent of batch, micro-batch and rank.

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BITS = 1 << 64
_Int64 = TypeVar("_Int64", int, Tensor)


class SampleDraws:
    """Random numbers per sample of a batch. Every call returns the next number of each sample.

    Args:
        seed: Seed of the run.
        epoch: Epoch, from 0.
        rows: Indices of the samples in the dataset, (B,) int64.
    """

    def __init__(self, seed: int, epoch: int, rows: Tensor) -> None:
        start = _mixed(_signed(_mixed(_signed(seed * _GOLDEN)) + (epoch + 1) * _MULTIPLIERS[0]))
        self._keys = _mixed((rows + 1) * _signed(_GOLDEN) + start)
        self._drawn = 0

    def integers(self, high: int) -> Tensor:
        """Return uniform integers (B,) int64 from 0 to `high` - 1.

        Args:
            high: Exclusive upper bound, at most 2^31. Probabilities deviate from 1/high by less than 2^-31.
        """
        self._drawn += 1
        return _shifted(_mixed(self._keys + _signed(self._drawn * _GOLDEN)), 32) * high >> 32

    def chance(self, share: float) -> Tensor:
        """Return (B,) bool, True with probability `share` (to within 2^-31)."""
        return self.integers(1 << 31) < share * (1 << 31)


def _mixed(values: _Int64) -> _Int64:
    """Apply the finaliser of SplitMix64 elementwise."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        values = (values ^ _shifted(values, shift)) * _signed(multiplier)
        values = (
            _signed(values) if isinstance(values, int) else values
        )  # int64 tensors wrap on overflow; Python ints do not
    return values ^ _shifted(values, 31)


def _shifted(values: _Int64, bits: int) -> _Int64:
    """Shift right logically. The `>>` operator alone is an arithmetic shift, which extends the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Wrap a Python int to a signed 64-bit value."""
    value %= _BITS
    return value - _BITS if value >= _BITS >> 1 else value


DECAYS = ("linear", "cosine")
# Fields of `Task` with hand-tuned recipes: P2 (`strong`) and P3 (`muon`).
RECIPES = ("strong", "muon")
# Names of arms of a comparison, which a task's baselines cannot have.
RESERVED = ("baseline", "plan", "strict", *RECIPES)
Batch = Any
Baseline = Callable[["Task", Any], Any]  # Takes and returns a `trimtab.Loop`.
LossFn = Callable[[nn.Module, Batch], Tensor | Summed | tuple[Tensor | Summed, Any]]


@dataclass(frozen=True)
class DataSource:
    """Origin of data: name, opened file (without its folder), and sha256 of the content."""

    name: str
    origin: str
    sha256: str


@dataclass(frozen=True)
class Metric:
    """Validation metric. `evaluate(model, batches)` restores the model's training mode.

    Args:
        name: Name in reports.
        higher_is_better: True for metrics such as accuracy, False for metrics such as perplexity.
        evaluate: `evaluate(model, batches)` returns the value on the validation batches.
        unit: Unit of differences. "share": values from 0 to 1, differences in points. "percent": values from 0 to 100,
            differences in points. "relative": other values, differences in percent of the baseline. Default: "share" if
            higher is better.
    """

    name: str
    higher_is_better: bool
    evaluate: Callable[[nn.Module, Sequence[Batch]], float]
    unit: str = ""

    def __post_init__(self) -> None:
        if not self.unit:
            object.__setattr__(self, "unit", "share" if self.higher_is_better else "relative")
        validation.one_of("metric.unit", self.unit, METRIC_UNITS)

    def figure(self, value: object) -> float:
        """Convert a result of `evaluate` (a number or a tensor of a single element) to a float.

        Raises:
            ValueGivenError: `value` is not a number.
        """
        return validation.float_value(f"metric {self.name}", value)

    def check(self, found: object) -> float:
        """Convert a result of `evaluate` to a float and validate it for the unit.

        Raises:
            ValueGivenError: `found` is not a number, or exceeds 1 with the unit "share".
        """
        value = self.figure(found)
        if self.unit == "share" and 1 + 1e-9 < value < math.inf:
            raise ValueGivenError(
                f"metric {self.name}",
                got=f"{value:g}",
                expected="a share from 0 to 1",
                hint='Declare Metric(..., unit="percent"), or "relative" where it has no upper end.',
            )
        return value


@dataclass(frozen=True)
class TaskData:
    """Training samples and validation batches.

    Args:
        columns: Tensors with equal first dimension (samples), on a single device.
        held_out: Fixed validation batches, equal for every arm.
        source: Origin of the data.
        augment: Optional `(batch, draws) -> batch`. All random numbers come from `draws`, so that a sample is augmented
            in the same way in any batch and on any rank.
    """

    columns: tuple[Tensor, ...]
    held_out: tuple[Batch, ...]
    source: DataSource
    augment: Callable[[tuple[Tensor, ...], SampleDraws], tuple[Tensor, ...]] | None = None

    def __post_init__(self) -> None:
        rows = {len(column) for column in self.columns}
        if len(rows) != 1 or rows == {0}:
            raise ValueGivenError("columns", got=f"lengths {sorted(rows)}", expected="tensors of one length above zero")
        if not self.held_out:
            raise ValueGivenError("held_out", got="no batches", expected="at least one batch to evaluate on")

    @property
    def num_samples(self) -> int:
        """Number of training samples."""
        return len(self.columns[0])

    def batches(self, seed: int, batch_size: int, *, begin: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Yield shuffled batches endlessly, on the device of the columns.

        Every epoch has a new permutation and drops the incomplete last batch. Order and random draws depend only on the
        seed and are equal on every device; floats returned by `augment` may differ by rounding.

        Args:
            seed: Seed of the run.
            batch_size: Samples per batch.
            begin: Index of the first batch to yield. Earlier batches are skipped without being built.
        """
        validation.integer("batch_size", batch_size, high=self.num_samples)
        first_epoch, first = divmod(begin, self.num_samples // batch_size)
        generator = torch.Generator().manual_seed(seed)
        for epoch in itertools.count():
            order = torch.randperm(self.num_samples, generator=generator)
            if epoch < first_epoch:
                continue
            order = order.to(self.columns[0].device)
            skipped = first * batch_size if epoch == first_epoch else 0
            for start in range(skipped, self.num_samples - batch_size + 1, batch_size):
                rows = order[start : start + batch_size]
                batch = tuple(column[rows] for column in self.columns)
                yield self.augment(batch, SampleDraws(seed, epoch, rows)) if self.augment else batch


@dataclass(frozen=True)
class StrongRecipe:
    """Hand-tuned recipe for the same model (P2; with Muon, P3).

    Args:
        make_optimizer: Returns the optimizer, with the peak learning rate of each group.
        precision: "fp32", "tf32", "bf16" or "fp16".
        channels_last: True for the channels-last memory format.
        budget_samples: Length of the schedule in samples.
        warmup_fraction: Fraction of the schedule for linear warm-up, before the decay to 1%.
        clip_norm: Limit on the gradient norm; None for no clipping.
        decay: "linear" or "cosine".
        make_model: Model of the same shape with other regularisation; None for the task's model.
        loss_fn: Training loss, if it differs from the task's; None for the task's loss.
        rates: Origin of the learning rates if they were not swept for this task; listed in the notes of a comparison.
    """

    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    precision: str
    channels_last: bool
    budget_samples: int
    warmup_fraction: float = 0.1
    clip_norm: float | None = None
    decay: str = "linear"
    make_model: Callable[[], nn.Module] | None = None
    loss_fn: LossFn | None = None
    rates: str = ""

    def __post_init__(self) -> None:
        validation.one_of("recipe.decay", self.decay, DECAYS)


@dataclass(frozen=True)
class Task:
    """A training task: model, optimizer, loss, data, metric and budget.

    Args:
        name: Name in reports and folders.
        description: Model and data in a few words, for reports.
        make_model: Returns a new model. The caller seeds torch first.
        make_optimizer: Returns a new optimizer for a model.
        loss_fn: `loss_fn(model, batch)`; returns a mean over samples or `Summed`, alone or with auxiliary values.
        load_data: Reads the data; called once.
        metric: Validation metric.
        targets: Values of the metric, easiest first.
        batch_size: Samples per optimizer step.
        terms: Name of the terms that throughput counts, such as tokens.
        terms_per_sample: Terms per sample if the loss is a mean; a loss that returns a count overrides this.
        budget_samples: Samples that the baseline trains on.
        eval_every_samples: Samples between evaluations, equal in all arms.
        adapted_samples: Samples for tuned plans; None for `budget_samples`.
        planned_samples: Samples of the planned run, which limits planning time; None for `budget_samples`.
        strong: Hand-tuned recipe (P2).
        muon: Hand-tuned recipe with Muon (P3).
        baselines: Further loops to compare with, by name. `baseline(task, loop)` gets the task and its unchanged
            `trimtab.Loop` for a seed, and returns the loop to run.
        reference: Settings of the user's loop.
        step: The user's own step function `step(model, optimizer, batch)`, used as the baseline.
        example: `example(rows)` returns a batch with the training shapes, for planning without data; None to read data.
    """

    name: str
    description: str
    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss_fn: LossFn
    load_data: Callable[[], TaskData]
    metric: Metric
    targets: tuple[float, ...]
    batch_size: int
    budget_samples: int
    eval_every_samples: int
    terms: str = "samples"
    terms_per_sample: int = 1
    adapted_samples: int | None = None
    planned_samples: int | None = None
    strong: StrongRecipe | None = None
    muon: StrongRecipe | None = None
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    reference: Reference = ASSUMED_REFERENCE
    step: Callable[[nn.Module, torch.optim.Optimizer, Batch], Any] | None = None
    example: Callable[[int], Batch] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "budget_samples", "eval_every_samples", "terms_per_sample"):
            validation.integer(f"task.{name}", getattr(self, name))
        for name in ("adapted_samples", "planned_samples"):
            if getattr(self, name) is not None:
                validation.integer(f"task.{name}", getattr(self, name))
        for name in ("make_model", "make_optimizer", "loss_fn", "load_data"):
            if not callable(getattr(self, name)):
                raise ValueGivenError(f"task.{name}", got=repr(getattr(self, name)), expected="a function")
        kinds = {"metric": Metric, "reference": Reference} | dict.fromkeys(RECIPES, StrongRecipe)
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (kind is StrongRecipe and value is None):
                raise ValueGivenError(f"task.{name}", got=repr(value), expected=f"a {kind.__name__}")
        self._check_baselines()
        self._check_targets()

    @property
    def planned_steps(self) -> int:
        """Optimizer steps of the run that a plan is made for."""
        return -(-(self.planned_samples or self.budget_samples) // self.batch_size)

    @property
    def recipes(self) -> Mapping[str, StrongRecipe]:
        """Hand-tuned recipes of the task by field name."""
        return {name: recipe for name in RECIPES if (recipe := getattr(self, name)) is not None}

    def shortened(self, *, batch_size: int | None = None, judged_batches: int | None = None) -> Task:
        """Return a smaller copy of the task, for smoke tests.

        Args:
            batch_size: Samples per step; None to keep the task's.
            judged_batches: Number of validation batches, from the first; None for all.

        Raises:
            ValueGivenError: An argument is not a positive integer.
        """
        load_data = self.load_data
        if judged_batches is not None:
            few = validation.integer("judged", judged_batches)

            def load_data() -> TaskData:
                data = self.load_data()
                return replace(data, held_out=data.held_out[:few])

        rows = self.batch_size if batch_size is None else validation.integer("rows", batch_size)
        return replace(self, batch_size=rows, load_data=load_data)

    def _check_baselines(self) -> None:
        for name, make in self.baselines.items():
            if name in RESERVED or not name.isidentifier():
                raise ValueGivenError("task.baselines", got=repr(name), expected=f"a name other than {RESERVED}")
            if not callable(make):
                raise ValueGivenError(f"task.baselines[{name!r}]", got=repr(make), expected="a function")

    def _check_targets(self) -> None:
        targets = tuple(validation.number("task.targets", target) for target in self.targets)
        if list(targets) != sorted(set(targets), reverse=not self.metric.higher_is_better):
            order = "rising" if self.metric.higher_is_better else "falling"
            raise ValueGivenError("task.targets", got=f"{targets}", expected=f"{order} values, the easiest first")
