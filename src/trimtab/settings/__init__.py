"""Settings of a plan: a file per setting, or per family of dependent settings."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.core.choice import Choice
from trimtab.settings.allocator import Allocator
from trimtab.settings.base import Setting
from trimtab.settings.batch_policy import BatchPolicy
from trimtab.settings.clip_norm import ClipNorm
from trimtab.settings.compiled import CompiledModel
from trimtab.settings.dropout import Dropout
from trimtab.settings.float8 import Float8
from trimtab.settings.fp32_modules import Fp32Modules
from trimtab.settings.fused_optimizer import FusedOptimizer
from trimtab.settings.loss_chunk import LossChunk
from trimtab.settings.memory_layout import MemoryLayout
from trimtab.settings.micro_batch import MicroBatch
from trimtab.settings.offload import Offload
from trimtab.settings.optimizer import OptimizerKind
from trimtab.settings.optimizer_state import OptimizerState
from trimtab.settings.precision import Precision
from trimtab.settings.recompute import Recompute
from trimtab.settings.schedule import LearningRateScale, Schedule, WarmupFraction
from trimtab.settings.sharding import SHARDING
from trimtab.settings.step_in_backward import StepInBackward
from trimtab.settings.weight_decay import WeightDecay

# All settings, in the order in which a plan lists and a run applies them.
SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        MicroBatch(),
        Precision(),
        MemoryLayout(),
        Allocator(),
        FusedOptimizer(),
        StepInBackward(),
        Fp32Modules(),
        Float8(),
        LossChunk(),
        Recompute(),
        Offload(),
        CompiledModel(),
        *SHARDING,
        Dropout(),
        WeightDecay(),
        OptimizerKind(),
        OptimizerState(),
        Schedule(),
        WarmupFraction(),
        LearningRateScale(),
        BatchPolicy(),
        ClipNorm(),
    )
}
# Settings that planning tries in trials: the fields of `Candidate`.
SEARCHED: Mapping[str, Setting] = {name: each for name, each in SETTINGS.items() if each.is_searched}
# The cost of searched settings is measured relative to a mode: a precision with a memory format.
MODES = ("precision", "memory_layout")
NOT_MODES = tuple(name for name in SEARCHED if name not in MODES)
# Settings that hardly change the peak memory of a step.
SAME_PEAK = ("allocator", "fused_optimizer")
# Settings whose peak memory is predicted from traces and blocks of candidates without them.
FROM_TRACES = ("step_in_backward",)
# Searched settings with their own rules in the search; every other searched setting has a phase named after it.
SPECIAL = ("micro_batch", *MODES, *SAME_PEAK, "loss_chunk", "recompute", "offload", "compiled")
OWN_PHASE = tuple(name for name in SEARCHED if name not in SPECIAL)
# Settings that act between the backward pass and the optimizer step.
IN_STEP: Mapping[str, Setting] = {name: each for name, each in SETTINGS.items() if each.acts_in_step}


def unchanged(name: str) -> Choice:
    """Return the choice of a plan that keeps the user's value of a setting."""
    return SETTINGS[name].unchanged()
