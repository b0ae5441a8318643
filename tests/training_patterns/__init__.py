"""Training scripts as public code bases and tutorials write them, each small; `PATTERNS` holds all of them by name."""

from training_patterns import (
    adversarial,
    batch_containers,
    layers,
    optimization,
    random_draws,
    reinforcement,
    representations,
    sequences,
    supervised,
)
from training_patterns.script import PATTERNS, PLANS, Pattern, Script

__all__ = [
    "PATTERNS",
    "PLANS",
    "Pattern",
    "Script",
    "adversarial",
    "batch_containers",
    "layers",
    "optimization",
    "random_draws",
    "reinforcement",
    "representations",
    "sequences",
    "supervised",
]
