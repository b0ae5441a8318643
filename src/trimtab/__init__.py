"""trimtab: plan, apply and prove the compute settings of a PyTorch training loop.

plan = trimtab.plan(model, optimizer, loss_fn, loader, memory="8GiB")
run = trimtab.start(model, optimizer, plan)
for window in run.windows(loader):
    loss = run.train_step(window, loss_fn)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trimtab.core import errors
from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import Choice, Effect
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.record import Header, RecordWriter, RunRecord, read_record
from trimtab.core.stopping_rule import Stop, StopReason
from trimtab.plans.plan import Plan

if TYPE_CHECKING:
    from trimtab.api import Metering, plan, profile, start
    from trimtab.checkpoint.config import Checkpoints
    from trimtab.distributed.process_group import process_group
    from trimtab.distributed.sharded_loader import shard
    from trimtab.experiments.loop_comparison import ablate, compare, race
    from trimtab.experiments.loop_result import LoopComparison
    from trimtab.experiments.loops import Loop
    from trimtab.losses import Summed
    from trimtab.training.run import Run
    from trimtab.training.split_conditions import UnprovedSplitWarning

__version__ = "0.1.0"
__all__ = [
    "BatchRule",
    "Budget",
    "Checkpoints",
    "Choice",
    "Effect",
    "Header",
    "Loop",
    "LoopComparison",
    "Metering",
    "Objective",
    "Plan",
    "RecordWriter",
    "Reference",
    "Run",
    "RunRecord",
    "Stop",
    "StopReason",
    "Summed",
    "UnprovedSplitWarning",
    "ablate",
    "compare",
    "errors",
    "plan",
    "process_group",
    "profile",
    "race",
    "read_record",
    "shard",
    "start",
]

# Loaded on first use, so that plans and records can be read without importing torch.
_LAZY = dict.fromkeys(("Metering", "plan", "profile", "start"), "trimtab.api") | {
    "Checkpoints": "trimtab.checkpoint.config",
    "Loop": "trimtab.experiments.loops",
    "LoopComparison": "trimtab.experiments.loop_result",
    "Run": "trimtab.training.run",
    "Summed": "trimtab.losses",
    "UnprovedSplitWarning": "trimtab.training.split_conditions",
    "ablate": "trimtab.experiments.loop_comparison",
    "compare": "trimtab.experiments.loop_comparison",
    "process_group": "trimtab.distributed.process_group",
    "race": "trimtab.experiments.loop_comparison",
    "shard": "trimtab.distributed.sharded_loader",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
