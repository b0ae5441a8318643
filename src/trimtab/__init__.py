"""trimtab: plan, apply and prove the compute settings of a PyTorch training loop.

plan = trimtab.plan(model, optimizer, loss_fn, loader, memory="8GiB")
run = trimtab.start(model, optimizer, plan)
for window in run.windows(loader):
    loss = run.train_step(window, loss_fn)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trimtab import errors
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
    from trimtab.experiments.compare import ablate, compare, race
    from trimtab.experiments.comparison import Comparison
    from trimtab.experiments.loops import Loop
    from trimtab.experiments.phases import phases
    from trimtab.experiments.subject import RunOptions
    from trimtab.experiments.time_to_target import QualityMetric
    from trimtab.losses import Summed
    from trimtab.training.run import Run
    from trimtab.training.split_conditions import UnprovedSplitWarning

__version__ = "0.1.0"
__all__ = [
    "BatchRule",
    "Budget",
    "Checkpoints",
    "Choice",
    "Comparison",
    "Effect",
    "Header",
    "Loop",
    "Metering",
    "Objective",
    "Plan",
    "QualityMetric",
    "RecordWriter",
    "Reference",
    "Run",
    "RunOptions",
    "RunRecord",
    "Stop",
    "StopReason",
    "Summed",
    "UnprovedSplitWarning",
    "ablate",
    "compare",
    "errors",
    "phases",
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
    "Comparison": "trimtab.experiments.comparison",
    "QualityMetric": "trimtab.experiments.time_to_target",
    "Run": "trimtab.training.run",
    "RunOptions": "trimtab.experiments.subject",
    "Summed": "trimtab.losses",
    "UnprovedSplitWarning": "trimtab.training.split_conditions",
    "ablate": "trimtab.experiments.compare",
    "compare": "trimtab.experiments.compare",
    "phases": "trimtab.experiments.phases",
    "process_group": "trimtab.distributed.process_group",
    "race": "trimtab.experiments.compare",
    "shard": "trimtab.distributed.sharded_loader",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
