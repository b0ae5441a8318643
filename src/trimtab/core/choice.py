"""Choices of a plan, their numerical effects, proofs and costs.

Numerical effects: *bitwise* keeps results equal bit by bit; *rounding* changes rounding only; *training* changes the
training.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """Sentence with a stable code: a figure that planning left out, advice on the loop, or a reason.

    Args:
        code: stable identifier of the sentence, such as "flops.not_counted", for programs and tests.
        text: the sentence.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


# Execution modes of a model, in addition to eager (False) and compiled as a whole (True).
CUDA_GRAPHS, COMPILED_GRAPHS, COMPILED_BLOCKS = "cuda_graphs", "compiled_cuda_graphs", "compiled_blocks"
GRAPHS = (CUDA_GRAPHS, COMPILED_GRAPHS)
Compiled = bool | str


def is_recorded(value: object) -> bool:
    """Return True if kernels are captured and replayed as CUDA graphs."""
    return value in GRAPHS


def is_by_compiler(value: object) -> bool:
    """Return True if `torch.compile` compiles the model or its blocks."""
    return value is True or value in (COMPILED_GRAPHS, COMPILED_BLOCKS)


def in_words(value: Compiled) -> str:
    """Return the mode as text for a list of settings; "" for eager."""
    if value == COMPILED_BLOCKS:
        return "blocks compiled"
    words = ["compiled"] * is_by_compiler(value) + ["with CUDA graphs"] * is_recorded(value)
    return ", ".join(words)


Scalar = bool | int | float | str | None


class Effect(enum.StrEnum):
    """Numerical effect of a change."""

    BITWISE = "bitwise"
    ROUNDING = "rounding"
    TRAINING = "training"


@dataclass(frozen=True)
class Rejected:
    """Alternative value of a setting that planning rejected.

    Args:
        value: the rejected value.
        reason: sentence with the figures that led to the rejection.
        code: stable identifier of the reason, such as "trial.slower"; "" if unknown.
    """

    value: Scalar
    reason: str
    code: str = ""


@dataclass(frozen=True)
class Choice:
    """Chosen value of a setting.

    Args:
        value: chosen value.
        reason: sentence with the figures that led to the choice.
        effect: numerical effect of the change.
        changed: True if the value differs from the reference loop's.
        rejected: rejected alternatives.
        code: stable identifier of the reason, such as "trial.faster"; "" if unknown.
    """

    value: Scalar
    reason: str
    effect: Effect = Effect.BITWISE
    changed: bool = False
    rejected: tuple[Rejected, ...] = ()
    code: str = ""


@dataclass(frozen=True)
class SplitCheck:
    """Outcome of the splitting check: gradient of the whole batch compared with an unequal split (math: section 2).

    Args:
        splittable: True if micro-batches smaller than the batch compute the same gradient.
        reason: explanation of the verdict.
        relative_difference: largest ||g_split - g_whole|| / ||g_whole|| of a parameter; None if not computed.
        tolerance: limit for a parameter whose gradient is not near zero.
        code: stable identifier of the verdict, such as "split.proved" or "split.batch_statistics".
    """

    splittable: bool
    reason: str
    relative_difference: float | None = None
    tolerance: float = 1e-4
    code: str = ""


@dataclass(frozen=True)
class Proof:
    """Outcome of the plan's proof: two optimizer steps of the unchanged loop and of the plan, from the same state.

    Args:
        holds: True if every gradient, parameter and buffer agrees to rounding.
        reason: sentence that names the compared quantities, or the difference.
        code: stable identifier, such as "proof.holds", "proof.differs" or "proof.failed".
        settings: names of the settings that were applied in the proof.
        precisions: precisions of the comparison.
        tensors: number of parameters and buffers compared.
        worst: largest difference, in units of its tolerance; None if nothing was compared.
    """

    holds: bool
    reason: str
    code: str
    settings: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    tensors: int = 0
    worst: float | None = None


@dataclass(frozen=True)
class Remedy:
    """Value of another setting that makes a refused value acceptable, such as modules in fp32 for bf16.

    Args:
        reason: sentence with the measured figures; "" if the value of the other setting is the loop's own.
    """

    setting: str
    value: Scalar
    reason: str = ""


@dataclass(frozen=True)
class RefusedByProof:
    """A setting that a proof refused for this loop.

    Args:
        value: refused value; for a micro-batch, every size below the batch size is refused.
        reason: description of the difference, with the name of the parameter or buffer.
        code: `Proof.code` of the proof.
        remedy: the value is refused only without this value of another setting; None: always.
    """

    setting: str
    value: Scalar
    reason: str
    code: str = "proof.differs"
    remedy: Remedy | None = None

    def is_remedied(self, candidate: object) -> bool:
        """Return True if a candidate has the remedy."""
        return self.remedy is not None and getattr(candidate, self.remedy.setting) == self.remedy.value


@dataclass(frozen=True)
class MeasuredCost:
    """Cost of a loop per optimizer step.

    Args:
        step_s: median seconds.
        peak_bytes: peak memory; None if not measured.
        between_s: expected range of predicted seconds, from the deviation of trial blocks from their predictions and
            at least as wide as the 90th percentile of prediction errors; None if nothing was run.
        energy_j: joules, as counted by the plan's meter, or None.
    """

    step_s: float
    peak_bytes: int | None = None
    between_s: tuple[float, float] | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class FrontPoint:
    """A point of the Pareto front in time and memory, and in energy if it is weighted.

    Args:
        settings: description of the settings.
        step_s: predicted seconds.
        peak_bytes: measured peak, or predicted if not measured.
        refusal: reason for excluding the settings from the choice, or "".
        energy_j: predicted joules, if known.
        code: stable identifier of the refusal, such as "budget.memory", or "".
    """

    settings: str
    step_s: float
    peak_bytes: int
    refusal: str = ""
    energy_j: float | None = None
    code: str = ""
