"""Window time on two ranks by gradient communication: torch's DDP and trimtab's replicas.

`python -m benchmarks.micro.sending [--quick] [--json] [--rounds 24] [--cases resnet/local resnet/400 gpt/local
gpt/2000]` prints, for each task of scaling_tasks.py and each link, the seconds per window of each loop (median over
blocks), and the ratio to DDP without broadcast of buffers, paired within rounds:

- `ddp`: DDP with its defaults; `no_buffers`: without broadcast of buffers; `control`: `no_buffers` repeated;
- `fp32`, `bf16`: a plan that changes only the dtype of the gradient reduction;
- `fp32_gloo`, `bf16_gloo`: the same, with the per-window exchange over gloo collectives, as between machines.

Ranks have one thread each. The slow link is that of scaling.py.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.micro.scaling import has_slow_link, run_ranks
from trimtab.planner.statistics import ratio_interval

HERE = Path(__file__).parent
TASKS = {"resnet": ("RESNET", 40), "gpt": ("GPT", 10)}  # task, and windows per block
CASES = ("resnet/local", "resnet/400", "gpt/local", "gpt/2000")
ARMS = ("ddp", "no_buffers", "control", "fp32_gloo", "fp32", "bf16_gloo", "bf16")


def measured(cases: list[str], rounds: int, arms: list[str]) -> Iterator[dict[str, Any]]:
    """Run the cases and yield their rows."""
    for case in cases:
        name, link = case.split("/")
        if link != "local" and not has_slow_link():
            yield {"metric": "not measured", "link": link, "why": "it takes root, unshare, ip and tc"}
            continue
        task, windows = TASKS[name]
        mbit = 0 if link == "local" else int(link)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            program = [str(HERE / "sending_ranks.py"), str(out), task, str(rounds), str(windows), *arms]
            run_ranks("slow" if mbit else "local", mbit, 2, program)
            found: list[dict[str, float]] = json.loads(out.read_text(encoding="utf-8"))
        for arm in arms:
            row = {"metric": "window_ratio", "task": name, "link": link, "arm": arm, "n": len(found)}
            row["window_s"] = statistics.median(each[arm] for each in found)
            pairs = [each[arm] / each["no_buffers"] for each in found]
            ratio = ratio_interval(pairs)
            yield row | {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "pairs": pairs}


def _line(row: dict[str, Any]) -> str:
    if row["metric"] == "not measured":
        return f"not measured: {row['link']} {row['why']}"
    ratio = f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    return f"{row['task']:<6} {row['link']:<5} {row['arm']:<10} {1000 * row['window_s']:7.2f} ms  {ratio}"


def main() -> None:
    """Print the rows."""
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=None, help="24, or 4 when quick")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="task/link, links in Mbit/s or local")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    options = parser.parse_args()
    rows = []
    for row in measured(options.cases, options.rounds or (4 if options.quick else 24), options.arms):
        rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    command.show("sending", rows, _line, as_json=options.json)


if __name__ == "__main__":
    main()
