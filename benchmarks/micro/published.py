"""Predictions for GPUs that are not in this machine, compared with published step times.

`python -m benchmarks.micro.published [--quick] [--json]` prints `published` rows: the steps of `published_cases.py`,
traced as for a plan for another device. `predicted_s` follows from the device's data sheet; memory is compared if a
peak was published. No step is executed. Every row names its source.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import command
from benchmarks.micro.published_cases import CASES, SOURCES, Published
from trimtab.core.hardware import absent_device
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.planner.cost_model import step_seconds
from trimtab.plans.profile import Candidate
from trimtab.profiling.candidate_traces import trace_elsewhere

QUICK = 6


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager that sets the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def row_of(case: Published) -> dict[str, Any]:
    """Predict a published step and return its row."""
    with FakeTensors(), default_dtype(torch.bfloat16 if case.cast else torch.float32):
        model, batch = case.make().train(), case.batch()
        optimizer = case.optimizer(model)
    traced_as = {"tf32": "fp32", "fp16": "bf16"}.get(case.precision, case.precision)
    candidate = Candidate(case.rows, precision="fp32" if case.cast else traced_as, fused_optimizer=case.fused)
    (traced,) = trace_elsewhere(model, optimizer, case.loss_fn, batch, [candidate])
    device = absent_device(case.device)
    assert traced.work is not None
    told_s = step_seconds(traced.work, device, case.precision, case.rows, 1)
    assert told_s is not None
    row = {"metric": "published", "source": SOURCES[case.source], "device": case.device, "model": case.name}
    row |= {"samples": case.rows, "precision": case.precision, "published_s": case.step_s, "predicted_s": told_s}
    row |= {"time_error": told_s / case.step_s - 1, "published_bytes": case.reserved_bytes}
    predicted_bytes = traced.whole.peak_bytes(case.rows)
    return row | {
        "predicted_bytes": predicted_bytes,
        "error": predicted_bytes / case.reserved_bytes - 1 if case.reserved_bytes else None,
    }


def main() -> None:
    """Predict every step and print the errors."""
    options = command.parser(__doc__).parse_args()
    rows = []
    for case in CASES[:QUICK] if options.quick else CASES:
        rows.append(row_of(case))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    errors = [abs(row["time_error"]) for row in rows]
    print(f"seconds: median {statistics.median(errors):.0%} off, worst {max(errors):.0%}", file=sys.stderr)
    command.show("published", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    about = f"{row['device']:<10} {row['model']:<26} {row['precision']:<5} {row['samples']:>4}"
    held = "" if row["error"] is None else f"; {row['published_bytes'] / 2**30:.1f} GiB, predicted {row['error']:+.1%}"
    return f"{about} {1000 * row['published_s']:>6.0f} ms, predicted {row['time_error']:+.1%}{held}"


if __name__ == "__main__":
    main()
