"""The plan's proof: two optimizer steps of the unchanged loop and of the plan, from the same state, are compared.

The unchanged loop is written out here and shares no code with a run. The plan is applied as in `trimtab.start`, with
all settings: split, recomputation, loss head, memory format, fused step, compiler. The gradients of the first step
are compared, and every parameter, buffer and tensor of optimizer state after the second step, whose batch has other
values.

The comparison is made in fp32, within a tolerance of rounding (`rounding_tolerance`), and then in the planned
precision, within a tolerance derived from the unchanged loop with weights perturbed in their last bit. Both loops use
the same random numbers if the plan neither splits, compiles nor changes the memory format (masks are drawn in memory
order); otherwise dropout is disabled in both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.choice import Proof, RefusedByProof, Remedy, Scalar, SplitCheck
from trimtab.measure.fake_tensors import run_compiled_eagerly
from trimtab.planner.plan_choice import chosen_candidate
from trimtab.plans.profile import Candidate, Profile, ProvedCandidate
from trimtab.profiling.gradient_equivalence import other_values
from trimtab.profiling.measurement_notes import Notes, describe
from trimtab.profiling.precision_error import (
    INACCURATE,
    MOST_ERROR,
    GradientError,
    SufficientModules,
    sufficient_modules,
)
from trimtab.profiling.random_masks import drawing_modules, dropout_off
from trimtab.profiling.rounding_tolerance import (
    Difference,
    Norms,
    distances,
    finite_norms,
    largest_difference,
    last_bits_moved,
    low_precision,
    norms,
    total,
)
from trimtab.profiling.training_loop import TrainingLoop, own_loss
from trimtab.settings import SEARCHED
from trimtab.settings.fp32_modules import holds_plain_head, named_modules
from trimtab.settings.precision import HALF
from trimtab.state.loop_state import LoopState
from trimtab.state.object_snapshots import host_copy
from trimtab.techniques.activation_checkpointing import wrapped_models
from trimtab.techniques.fp32_forward import run_in_fp32
from trimtab.techniques.mixed_precision import tf32
from trimtab.techniques.optimizer_in_backward import gradients_seen
from trimtab.training.accumulation import or_one
from trimtab.training.out_of_memory import is_out_of_memory
from trimtab.training.run import Run

_COARSENESS = {"fp32": 0, "tf32": 1, "bf16": 2, "fp16": 2}  # A coarser precision is compared with the loop's own.
_LAST_BIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-10}
_ERROR = "proof.error"
_NON_FINITE = "proof.nonfinite"
_MOST_SCALES = 20  # A loss scale of 65536 is halved until no gradient overflows.
_PLAIN_SCALE = 2.0**12
_QUICK_S = 0.1  # Seconds; a shorter step is proved on the whole batch.
_SMALLEST = 1e-9  # Fraction of the whole gradient.
# Multiple of its rounding error, and fraction of the whole gradient: a smaller gradient is only rounding.
_MANY_TIMES, _NEAR_ZERO = 30.0, 1e-3
_TINY_RATE, _MOVING_RATE = 1e-6, 1e-3
_MOST_ROUNDING = 0.9  # Fraction of the distance moved.
# An activation near a kink (a ReLU at 0) may change sides by rounding, and with it a part of a gradient. A small
# difference, in multiples of its tolerance, is therefore compared again from nearby weights: an error of the plan
# differs from all of them, a chance event does not.
_OTHER_STARTS, _SMALL_ERROR = 6, 1_000.0
_STATE_OF = " of "  # Joins the names of a tensor of optimizer state and of its parameter.
# Receives "gradients" of the first step and then "state" after the second, each by the name of a tensor.
_See = Callable[[str, Mapping[str, Tensor]], None]
_Loop = Callable[[_See], None]
_Copies = dict[str, dict[str, Tensor]]
_Apart = dict[str, Norms]


@dataclass(frozen=True)
class Tolerance:
    """Largest accepted difference between two loops.

    Args:
        relative: fraction of a gradient's norm.
        moved: fraction of the distance that two steps move a tensor.
        times: multiple of the change caused by perturbing the weights in their last bit.
        most: cap on this multiple, as a fraction of the distance moved, for gradients clearly above rounding.
    """

    relative: float
    moved: float
    times: float
    most: float


_FP32 = Tolerance(relative=1e-4, moved=1e-3, times=30.0, most=0.3)
_REDUCED = Tolerance(relative=0.02, moved=0.05, times=4.0, most=0.9)


def prove(
    subject: TrainingLoop,
    candidate: Candidate,
    reference: Candidate,
    step_s: float | None = None,
    start: LoopState | None = None,
) -> Proof:
    """Compare the training of a candidate with the unchanged loop; state is restored.

    Extra memory: a copy of gradients, parameters, buffers and optimizer state on the host, and a second copy without
    `start`. A long step (`step_s`, seconds) is proved on fewer samples.
    """
    changed = _changed(candidate, reference)
    samples, is_smaller = _samples(subject.rows, candidate, step_s), False
    state = start or LoopState(subject.trained, subject.optimizer, loss_fn=own_loss(subject.loss_fn))
    while True:
        try:
            own = _scaled(reference, subject.rows, samples)
            tried = _scaled(candidate, subject.rows, samples)
            try:
                proof = _prove(_first(subject, samples), tried, own, changed, state)
            finally:
                state.restore()
            if proof.code != INACCURATE or samples >= subject.rows or is_smaller:
                return proof
            samples = subject.rows  # Few samples may have a gradient near zero.
            continue
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            is_smaller = True
        samples //= 2  # Outside of the handler, because the exception keeps the failed attempt's tensors alive.
        if samples < 2:
            reason = "the comparison ran out of memory, even with a batch of two samples"
            return Proof(False, reason, "proof.out_of_memory", changed)


def refuted_settings(
    subject: TrainingLoop,
    candidate: Candidate,
    reference: Candidate,
    step_s: float | None = None,
    start: LoopState | None = None,
) -> tuple[str, ...]:
    """Return the settings that caused a proof to fail.

    If the proof holds without a setting, that setting is the cause. Otherwise the causes are all settings that fail
    alone, or all changed settings if none does.
    """
    # Modules in fp32 are tried with their precision only, and have the blame: without them it is already refused.
    has_modules = candidate.fp32_modules is not None
    changed = tuple(name for name in _changed(candidate, reference) if name != "precision" or not has_modules)

    def holds(tried: Candidate) -> bool:
        return prove(subject, tried, reference, step_s, start).holds

    def values(name: str, source: Candidate) -> dict[str, Scalar]:
        names = ("precision", name) if name == "fp32_modules" else (name,)
        return {each: getattr(source, each) for each in names}

    if len(changed) > 1:
        for name in changed:
            if holds(candidate.having(**values(name, reference))):
                return (name,)
        alone = [name for name in changed if not holds(reference.having(**values(name, candidate)))]
        return tuple(alone) or changed
    return changed


def _changed(candidate: Candidate, reference: Candidate) -> tuple[str, ...]:
    """Return the settings that differ, those that a failed proof is most likely due to first."""
    return tuple(sorted(candidate.differences(reference), key=lambda name: SEARCHED[name].blamed_last))


def with_proof(
    subject: TrainingLoop,
    profile: Profile,
    progress: Callable[[str], None],
    start: LoopState,
    notes: Notes | None = None,
) -> tuple[Profile, bool]:
    """Prove the candidate that a profile's plan would choose; state is restored.

    Args:
        notes: receives the reason if no modules in fp32 make a refused half precision accurate.

    Returns:
        The profile with the result, and True if the search is over. After a failed proof, the settings that caused it
        are refused in the profile, and the search continues without them. A half precision is refused without the
        modules in fp32 that make it accurate, if there are any.
    """
    candidate = chosen_candidate(profile, profile.objective, profile.budget)
    if candidate is None or profile.proof_of(candidate) is not None:
        return profile, True
    progress(f"proving the plan: {candidate.describe()}")
    reference, step_s = profile.reference_candidate, sum(profile.phases_s.values())
    try:
        proof = prove(subject, candidate, reference, step_s, start)
    except Exception as error:  # Treated like a failed proof.
        reason = f"the comparison itself failed ({describe(error)})"
        proof = Proof(False, reason, _ERROR, _changed(candidate, reference))
    profile = replace(profile, proofs=(*profile.proofs, ProvedCandidate(candidate, proof)))
    if proof.code == "proof.out_of_memory" or (candidate == reference and proof.code in ("proof.differs", _NON_FINITE)):
        text = f"The plan could not be proved equivalent to your loop: {proof.reason}."
        hint = "Compare its losses with those of your loop before you rely on it."
        warnings.warn(f"{text} {hint}", RuntimeWarning, stacklevel=2)
    if proof.holds or candidate == reference or proof.code == "proof.out_of_memory":
        return profile, True
    causes: tuple[str, ...] = proof.settings
    if proof.code == INACCURATE:
        causes = ("precision",) if candidate.fp32_modules is None else ("fp32_modules",)
    if proof.code not in (_ERROR, INACCURATE):
        with contextlib.suppress(Exception):  # If the search for the cause fails, every setting is unproved.
            # A loop that is NaN without any setting cannot prove any; the cause is not searched for.
            if proof.code != _NON_FINITE or prove(subject, reference, reference, step_s, start).code != _NON_FINITE:
                causes = refuted_settings(subject, candidate, reference, step_s, start)
    refused = [
        RefusedByProof(
            name,
            None if name == "micro_batch" else getattr(candidate, name),
            f"not proved equivalent: {proof.reason}",
            proof.code,
        )
        for name in causes
    ]
    is_half = candidate.precision in HALF and candidate.fp32_modules is None
    if is_half and "precision" in causes and proof.code in (INACCURATE, _NON_FINITE):
        what = f"the modules that make {candidate.precision} inaccurate were not measured"
        measure = functools.partial(_sufficient_modules, subject, candidate, reference, step_s, start)
        found = (notes or Notes()).attempt("precision.not_measured", what, measure, None)
        if found is not None:
            refused = _with_remedy(refused, found, subject.model)
            if notes is not None and not found.modules:
                notes.record("precision.fp32_modules", found.text)
    if "micro_batch" in causes:
        profile = replace(profile, check=SplitCheck(False, proof.reason, code="split.plan_differs"))
    return replace(profile, refused_by_proof=(*profile.refused_by_proof, *refused)), False


def _with_remedy(refused: Sequence[RefusedByProof], found: SufficientModules, model: nn.Module) -> list[RefusedByProof]:
    """Return refusals with the modules in fp32 as the remedy of the precision, and their own conflicts."""
    if not found.modules:
        return list(refused)
    remedy = Remedy("fp32_modules", found.names, found.text)
    remedied = [replace(each, remedy=remedy) if each.setting == "precision" else each for each in refused]
    if holds_plain_head(model, found.modules.values()):
        reason = "the loss head with deferred logits cannot run in fp32"
        without = Remedy("loss_chunk", None)
        remedied.append(RefusedByProof(remedy.setting, remedy.value, reason, "fp32_modules.loss_chunk", without))
    return remedied


def _samples(rows: int, candidate: Candidate, step_s: float | None) -> int:
    """Return the number of samples for a proof: a quarter of the batch if a step takes long.

    A compiled model is proved on the whole batch, because other shapes would be compiled again.
    """
    if candidate.compiled or step_s is None or step_s < _QUICK_S:
        return rows
    return min(rows, max(4, math.ceil(rows / 4)))


def _first(subject: TrainingLoop, samples: int) -> TrainingLoop:
    """Return a training loop on the first samples of its batch."""
    return subject if samples >= subject.rows else replace(subject.first(samples), example=None)


def _scaled(candidate: Candidate, rows: int, samples: int) -> Candidate:
    """Return a candidate for fewer samples that are split and chunked in the same proportions as the batch."""
    if samples == rows:
        return candidate
    micro, chunk = samples, candidate.loss_chunk
    if candidate.micro_batch < rows:
        # The last micro-batch is smaller if and only if the plan's last one is.
        is_uneven, wanted = rows % candidate.micro_batch != 0, candidate.micro_batch * samples / rows
        alike = [size for size in range(1, samples) if (samples % size != 0) == is_uneven]
        micro = min(alike, key=lambda size: abs(size - wanted), default=max(1, int(wanted)))
    return candidate.having(micro_batch=micro, loss_chunk=chunk and max(1, chunk * samples // rows))


def _prove(
    subject: TrainingLoop, candidate: Candidate, reference: Candidate, changed: tuple[str, ...], start: LoopState
) -> Proof:
    found: list[tuple[Difference, int]] = []
    precisions: list[str] = []
    second = subject.second
    if second is None:
        second = other_values(subject.batch, subject.rows, subject.rows, subject.batching)
    batches = subject.batch, subject.batch if second is None else second
    drawing = set[nn.Module]()
    with contextlib.suppress(Exception):  # The unchanged loop fails too, and that error is reported.
        drawing = drawing_modules(subject.trained, subject.loss)
    for precision, tried, pieces, drops in _comparisons(subject, candidate, reference.micro_batch):
        steps = _TwoSteps(subject, start, batches, precision, tried, pieces, drops, drawing)
        proof = _compared(steps, changed)
        unusable = isinstance(proof, Proof) and proof.code in ("proof.baseline_failed", _NON_FINITE)
        if unusable and subject.second is None and batches[1] is not subject.batch:
            start.restore()  # The user's loss may reject made-up values, or be infinite for them.
            batches = (subject.batch, subject.batch)
            steps = replace(steps, batches=batches)
            proof = _compared(steps, changed)
        for seed in range(2, 2 + _OTHER_STARTS):  # Seed 1 perturbs weights to measure rounding.
            if not (isinstance(proof, Proof) and proof.code == "proof.differs" and (proof.worst or 0) < _SMALL_ERROR):
                break
            start.restore()
            again = _compared(replace(steps, start_seed=seed), changed)
            proof = proof if isinstance(again, Proof) else again
        if isinstance(proof, Proof):
            if proof.code == "proof.baseline_failed" and precision != candidate.precision:
                continue  # A loop that fails in fp32 is proved in its own precision only.
            return proof
        found.append(proof)
        precisions.append(precision)
    if not found:
        return Proof(False, "your loop failed in every precision of the comparison", "proof.baseline_failed", changed)
    if _COARSENESS[candidate.precision] > _COARSENESS[reference.precision]:
        error = _CoarseGradient(steps, reference.precision).error()
        if not error.is_rounding:
            reason = error.text(candidate.precision, reference.precision)
            return Proof(False, reason, INACCURATE, changed, worst=error.ratio)
    largest = max((difference for difference, _ in found), key=lambda each: each.ratio)
    tensors = found[0][1]
    names = tuple(dict.fromkeys(precisions))
    reason = (
        f"two optimizer steps of your loop and of the plan, in {' and in '.join(names)}, agree to rounding in the "
        f"gradients and in {tensors} tensors of state; the largest difference is {largest.ratio:.2g} of its tolerance"
    )
    return Proof(True, reason, "proof.holds", changed, names, tensors, largest.ratio)


def _comparisons(
    subject: TrainingLoop, candidate: Candidate, own_pieces: int
) -> Iterator[tuple[str, Candidate, int, bool]]:
    """Yield (precision, candidate, micro-batch size of the unchanged loop, True if dropout stays on in both).

    In fp32, then in the planned precision. A model compiled in another precision is not compiled for fp32 too. A plan
    that splits or recomputes is also compared with dropout on, against an unchanged loop with the same split: both must
    draw the same masks.
    """
    own, pieces = (min(size, subject.rows) for size in (own_pieces, candidate.micro_batch))

    def may_drop(tried: Candidate) -> bool:
        return pieces == own and not tried.compiled and tried.memory_layout == "keep"

    in_fp32 = candidate.having(precision="fp32", fp32_modules=None)
    if candidate.precision != "fp32":
        in_fp32 = in_fp32.having(compiled=False)
    yield "fp32", in_fp32, own, may_drop(in_fp32)
    if (pieces != own or in_fp32.recompute is not None) and not may_drop(in_fp32):
        yield "fp32", in_fp32.having(compiled=False, memory_layout="keep"), pieces, True
    if candidate.precision != "fp32":
        yield candidate.precision, candidate, own, may_drop(candidate)


@dataclass(frozen=True)
class _TwoSteps:
    """Two optimizer steps of the unchanged loop or of the plan, always from the same state.

    Args:
        pieces: micro-batch size of the unchanged loop.
        drops: True if dropout stays on in both.
        drawing: modules with their own random numbers.
        start_seed: seed of a perturbation of the starting weights in their last bit; 0 for none.
    """

    subject: TrainingLoop
    start: LoopState
    batches: Sequence[Any]
    precision: str
    candidate: Candidate
    pieces: int
    drops: bool
    drawing: Collection[nn.Module]
    start_seed: int = 0

    def plain(self, see: _See) -> None:
        """Train the unchanged loop, with the plan's modules in fp32."""
        names = self.candidate.fp32_modules
        self.plain_with([] if names is None else list(named_modules(self.subject.model, names).values()), see)

    def plain_with(self, modules: Sequence[nn.Module], see: _See) -> None:
        """Train the unchanged loop with some modules in fp32."""
        _, undo = run_in_fp32(modules, self.subject.device.type)
        try:
            _plain_steps(self.subject, self.batches, self.precision, self.pieces, see)
        finally:
            undo()

    def planned(self, see: _See) -> None:
        _planned_steps(self.subject, self.candidate, self.batches, see)

    def copies(self, loop: _Loop) -> _Copies:
        found: _Copies = {}

        def see(kind: str, tensors: Mapping[str, Tensor]) -> None:
            found[kind] = {name: host_copy(each) for name, each in tensors.items()}

        self._run(loop, see, moves=False)
        return found

    def apart(self, others: _Copies, loop: _Loop, *, moves: bool = False) -> _Apart:
        """Return the distances of a loop's results from copies, without copying; `moves` perturbs the weights."""
        found: _Apart = {}

        def see(kind: str, tensors: Mapping[str, Tensor]) -> None:
            found[kind] = distances(others[kind], tensors)

        self._run(loop, see, moves=moves)
        return found

    def _run(self, loop: _Loop, see: _See, *, moves: bool) -> None:
        self.start.restore()
        model = self.subject.trained
        with contextlib.ExitStack() as stack:
            stack.enter_context(_subject_with_rate(self.subject))
            if not self.drops:
                stack.enter_context(dropout_off(model, self.drawing))
            if self.start_seed:
                stack.enter_context(last_bits_moved(model, seed=self.start_seed))
            if moves:
                stack.enter_context(last_bits_moved(model, seed=1, epsilon=_LAST_BIT.get(self.precision, 0.0)))
            loop(see)


def _compared(steps: _TwoSteps, changed: tuple[str, ...]) -> tuple[Difference, int] | Proof:
    """Return the largest difference and the number of compared tensors, or a failed proof."""
    precision = steps.precision
    try:
        expected = steps.copies(steps.plain)
    except Exception as error:
        return _failed("proof.baseline_failed", "your loop", error, changed)
    steps.start.restore()
    is_reduced = precision != "fp32" or low_precision(steps.subject.trained)
    judge = _Judge(_REDUCED if is_reduced else _FP32, _state(steps.subject), expected)
    if name := judge.non_finite():
        reason = f"two optimizer steps of your loop in {precision} make {name} NaN or infinite"
        return Proof(False, reason, _NON_FINITE, changed)
    try:
        apart = steps.apart(expected, steps.planned)
    except Exception as error:
        return _failed("proof.failed", "the plan", error, changed)
    difference = judge.largest(apart)
    if not difference.is_rounding:
        if name := judge.not_reproducible(steps.apart(expected, steps.plain)):
            reason = f"two runs of your loop from the same state differ in the gradient of {name}"
            return Proof(False, reason, "proof.not_reproducible", changed)
        # The rounding errors of both loops, as long as they may explain more.
        judge.learn(steps.apart(expected, steps.plain, moves=True))
        difference = judge.largest(apart)
    if not difference.is_rounding:
        expected.clear()  # Avoids holding two copies at a time.
        judge.learn(steps.apart(steps.copies(steps.planned), steps.planned, moves=True))
        difference = judge.largest(apart)
    if difference.is_rounding:
        return difference, judge.num_tensors
    reason = (
        f"{difference.name} differs from that of your loop in {precision} by {difference.relative:.2g} (relative), "
        f"which is {difference.ratio:.2g} times the tolerance"
    )
    return Proof(False, reason, "proof.differs", changed, worst=difference.ratio)


class _CoarseGradient:
    """Gradient of the unchanged loop in a coarser precision, compared with the gradient in the loop's own precision."""

    def __init__(self, steps: _TwoSteps, precision: str) -> None:
        self._steps = replace(steps, batches=steps.batches[:1], drops=False, start_seed=0)
        self._precision = precision
        self._expected = self._steps.copies(self._own)
        self._size = total(norms(self._expected["gradients"]))

    def _own(self, see: _See) -> None:
        _plain_steps(self._steps.subject, self._steps.batches, self._precision, self._steps.pieces, see)

    def _relative(self, loop: _Loop, *, moves: bool = False) -> float:
        found = total(self._steps.apart(self._expected, loop, moves=moves)["gradients"])
        if not math.isfinite(found):
            return math.inf
        return found / self._size if self._size else 0.0  # A loop without a gradient has nothing to compare.

    def error(self) -> GradientError:
        """Return the error, and the effect of rounding the weights if the error is large."""
        relative = self._relative(self._steps.plain)
        return GradientError(relative, self._relative(self._own, moves=True) if relative > MOST_ERROR else 0.0)

    def relative_with(self, modules: Sequence[nn.Module]) -> float:
        """Return the error with some modules in fp32, as a fraction of the gradient's norm; infinite if the loop fails.

        A loop may not accept results in fp32: an assignment to a part of a tensor needs equal types.
        """
        try:
            return self._relative(functools.partial(self._steps.plain_with, modules))
        except Exception:
            return math.inf


def _sufficient_modules(
    subject: TrainingLoop, candidate: Candidate, reference: Candidate, step_s: float | None, start: LoopState
) -> SufficientModules:
    """Return modules that make the gradient accurate in a refused half precision; state is restored.

    Compiled code runs in eager mode, since every set of modules would be compiled again, up to torch's limit.
    """
    smaller = _first(subject, _samples(subject.rows, candidate, step_s))
    pieces = min(_scaled(reference, subject.rows, smaller.rows).micro_batch, smaller.rows)
    drawing = drawing_modules(smaller.trained, smaller.loss)
    steps = _TwoSteps(smaller, start, (smaller.batch,), candidate.precision, candidate, pieces, False, drawing)
    innermost = list(wrapped_models(smaller.model))[-1]  # Its names are also valid without the wrapper.
    try:
        with run_compiled_eagerly():
            gradient = _CoarseGradient(steps, reference.precision)
            return sufficient_modules(innermost, candidate.precision, gradient.error(), gradient.relative_with)
    finally:
        start.restore()


def _failed(code: str, who: str, error: Exception, changed: tuple[str, ...]) -> Proof:
    if is_out_of_memory(error):
        raise error
    return Proof(False, f"{who} failed ({describe(error)})", code, changed)


class _Judge:
    """Compares the results of two loops, with a tolerance for every tensor.

    Args:
        before: state that both loops start from.
        expected: results of the unchanged loop; only norms are kept.
    """

    def __init__(self, tolerance: Tolerance, before: Mapping[str, Tensor], expected: _Copies) -> None:
        self._tolerance, after = tolerance, expected["state"]
        self._sizes, self.num_tensors = norms(expected["gradients"]), len(after)
        known = {name: each for name, each in before.items() if name in after}
        self._before = finite_norms(known)
        # Optimizer state created in the first step moved from zero.
        self._moved = finite_norms(after) | distances(known, after)
        floats = {name: each for name, each in after.items() if each.is_floating_point() or each.is_complex()}
        self._epsilons = {name: torch.finfo(each.dtype).eps for name, each in floats.items()}
        self._rounding = {kind: dict.fromkeys(tensors, 0.0) for kind, tensors in expected.items()}

    def non_finite(self) -> str:
        """Return a gradient or once finite parameter that the unchanged loop made NaN or infinite, or ""."""
        names = (f"the gradient of {name}" for name, size in self._sizes.items() if not math.isfinite(size))
        parameters = (name for name in self._sizes if not math.isfinite(self._moved.get(name, 0.0)))
        return next(itertools.chain(names, parameters), "")

    def not_reproducible(self, again: _Apart) -> str:
        """Return a parameter whose gradient differs by more than rounding in a second unchanged loop, or ""."""
        least = 1e-5 * total(self._sizes)
        found = largest_difference(
            again["gradients"], {name: 1e-4 * size + least for name, size in self._sizes.items()}, self._sizes
        )
        return "" if found.is_rounding else found.name

    def learn(self, rounding: _Apart) -> None:
        """Record a loop's rounding errors: distances between its results with and without perturbed weights."""
        for kind, known in self._rounding.items():
            known.update({name: max(rounding[kind].get(name, 0.0), size) for name, size in known.items()})

    def largest(self, apart: _Apart) -> Difference:
        gradients = largest_difference(apart["gradients"], self._allowed_of_gradients(), self._sizes)
        after = largest_difference(apart["state"], self._allowed_of_state(), self._moved)
        return max(replace(gradients, name=f"the gradient of {gradients.name}"), after, key=lambda each: each.ratio)

    def _allowed_of_gradients(self) -> Norms:
        least, allowed = _SMALLEST * total(self._sizes), self._tolerance.relative
        return {
            name: allowed * size + least + self._explained(self._rounding["gradients"][name], size, name)
            for name, size in self._sizes.items()
        }

    def _allowed_of_state(self) -> Norms:
        allowed: Norms = {}
        for name, moved in self._moved.items():
            rounding = 4 * self._epsilons.get(name, 0.0) * self._before.get(name, 0.0)
            # Less than the whole distance moved, or a tensor that never moves would pass.
            rounding = min(rounding, _MOST_ROUNDING * moved)
            explained = self._explained(self._rounding["state"][name], moved, name.rpartition(_STATE_OF)[2])
            allowed[name] = self._tolerance.moved * moved + max(rounding, explained)
        return allowed

    def _explained(self, rounding: float, size: float, parameter: str) -> float:
        """Return the part of a tensor's difference that rounding explains.

        This is a multiple of the tensor's rounding error, capped at a fraction of its size. The cap does not apply if
        the parameter's gradient is only rounding, because optimizers such as Adam step by its sign regardless of its
        size.
        """
        explained, gradient = self._tolerance.times * rounding, self._sizes.get(parameter)
        if gradient is not None:
            is_rounding = gradient < _MANY_TIMES * self._rounding["gradients"][parameter]
            if is_rounding and gradient < _NEAR_ZERO * total(self._sizes):
                return explained
        return min(explained, self._tolerance.most * size)


def _plain_steps(subject: TrainingLoop, batches: Sequence[Any], precision: str, pieces: int, see: _See) -> None:
    release = tf32.hold() if precision == "tf32" else None
    try:
        _take_plain_steps(subject, batches, precision, pieces, see)
    finally:
        if release is not None:
            release()


def _take_plain_steps(subject: TrainingLoop, batches: Sequence[Any], precision: str, pieces: int, see: _See) -> None:
    optimizer, device = subject.optimizer, subject.device
    # Another scale than a run's initial one: a non-linear backward would compute other gradients with it.
    scaler = torch.amp.GradScaler(device.type, init_scale=_PLAIN_SCALE, enabled=precision == "fp16")
    for index, batch in enumerate(batches):
        held = {name: buffer.clone() for name, buffer in subject.trained.named_buffers()} if precision == "fp16" else {}
        for _ in range(_MOST_SCALES):
            _accumulate(subject, batch, precision, pieces, scaler)
            scaler.unscale_(optimizer)
            if index == 0:  # Gradients of the last attempt, which did not overflow.
                see("gradients", _gradients(subject))
            if subject.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for _, p in _trained(subject)], subject.clip_norm)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= scale:
                break
            for name, buffer in subject.trained.named_buffers():  # A run also restores the buffers of a skipped step.
                buffer.copy_(held[name])
    see("state", _state(subject))


def _accumulate(subject: TrainingLoop, batch: Any, precision: str, pieces: int, scaler: torch.amp.GradScaler) -> None:
    for _, parameter in _trained(subject):
        parameter.grad = None
    rows = subject.rows
    count: Any = None
    for piece, size in subject.batching.slices(batch, rows, pieces):
        loss, terms = subject.loss(piece, precision)
        if terms is None:
            scaler.scale(loss * (size / rows)).backward()
        elif pieces >= rows:
            scaler.scale(loss / or_one(terms)).backward()
        else:
            scaler.scale(loss).backward()
            count = terms if count is None else count + terms
    if count is not None:
        for _, parameter in _trained(subject):
            if parameter.grad is not None:
                parameter.grad /= or_one(count)


def _planned_steps(subject: TrainingLoop, candidate: Candidate, batches: Sequence[Any], see: _See) -> None:
    first, second = batches
    with subject.start(candidate) as run:
        for _ in range(_MOST_SCALES):
            if candidate.step_in_backward:
                see("gradients", _gradients_of_updates(subject, run, first))
                break
            run.accumulate(run.window(first), subject.loss_fn)
            run.unscale()
            see("gradients", _gradients(subject))
            if run.step():
                break
        steps = run.applied_steps
        for _ in range(_MOST_SCALES):
            subject.step(run, second)
            if run.applied_steps > steps:
                break
    see("state", _state(subject))


def _gradients_of_updates(subject: TrainingLoop, run: Run, batch: Any) -> dict[str, Tensor]:
    """Take a step with updates within the backward pass, and return copies of the gradients before their updates."""
    seen: dict[Tensor, Tensor] = {}

    def see(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen[parameter] = parameter.grad.clone()

    with gradients_seen(subject.optimizer, see):
        subject.step(run, batch)
    # A parameter that was not updated within the backward pass still has its gradient, or has none.
    return _gradients(subject) | {name: seen[p] for name, p in _trained(subject) if p in seen}


def _trained(subject: TrainingLoop) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in subject.trained.named_parameters() if p.requires_grad]


def _gradients(subject: TrainingLoop) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in _trained(subject)}


def _state(subject: TrainingLoop) -> dict[str, Tensor]:
    """Return parameters, buffers and tensors of optimizer state by name, without step counters."""
    model, optimizer = subject.trained, subject.optimizer
    found: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    found |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                found[f"{key}{_STATE_OF}{name}"] = value.detach()
    return found


@contextlib.contextmanager
def _subject_with_rate(subject: TrainingLoop) -> Iterator[None]:
    """Raise learning rates too small to move weights (first step of a warm-up) inside the context."""
    before = []
    for group in subject.optimizer.param_groups:
        rate: Any = group.get("lr")
        is_rate = isinstance(rate, float | int) or (isinstance(rate, Tensor) and rate.numel() == 1)
        if is_rate and float(rate) < _TINY_RATE:
            before.append((group, rate))
            group["lr"] = torch.full_like(rate, _MOVING_RATE) if isinstance(rate, Tensor) else _MOVING_RATE
    try:
        yield
    finally:
        for group, rate in before:
            group["lr"] = rate
