"""False gains: number of plans that change a loop that is already optimal.

`python -m benchmarks.micro.planted [--quick] [--json] [--precision fp32]` plans a multilayer perceptron with a fused
optimizer and a batch too small to split, n times from new weights, and counts the plans that change a setting. All
candidates are slower or refused. The probability that an equally fast candidate wins is a separate test
(`tests/unit/profiling/test_false_gains.py`). The upper bound is that of the exact 95% binomial interval. `--precision`
is the fastest precision of the machine, declared as the loop's own.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import nn

import trimtab
from benchmarks import command

PLANS, QUICK_PLANS = 30, 3
ROWS, WIDTH, CLASSES = 128, 768, 10


def plan_once(seed: int, precision: str) -> tuple[str, ...]:
    """Plan a new loop and return the changed settings."""
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    plan = trimtab.plan(model, optimizer, loss_fn, batch, reference=trimtab.Reference(precision))
    return plan.changes


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy for inputs (B, WIDTH) and labels (B,)."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def upper_bound(found: int, n: int, confidence: float = 0.975) -> float:
    """Return the largest probability for which `found` or fewer of n occur with probability 1 - confidence."""
    if found == n:
        return 1.0
    low, high = found / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        chance = math.fsum(math.comb(n, i) * middle**i * (1 - middle) ** (n - i) for i in range(found + 1))
        low, high = (middle, high) if chance > 1 - confidence else (low, middle)
    return high


def main() -> None:
    """Plan n times and print the number of changed plans."""
    parser = command.parser(__doc__)
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    n = QUICK_PLANS if options.quick else PLANS
    changes = []
    for seed in range(n):
        changes.append(plan_once(seed, options.precision))
        print(f"plan {seed + 1} of {n}: {', '.join(changes[-1]) or 'change nothing'}", file=sys.stderr)
    found = sum(map(bool, changes))
    row = {"metric": "false_gain_share", "share": found / n, "high": upper_bound(found, n), "n": n}
    row["changes"] = sorted({name for each in changes for name in each})
    command.show("planted", [row], _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    found = round(row["share"] * row["n"])
    return f"{found} of {row['n']} plans change something (95%: at most {100 * row['high']:.0f}%)"


if __name__ == "__main__":
    main()
