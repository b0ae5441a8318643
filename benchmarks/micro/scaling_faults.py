"""Time from killing or stopping a rank to the end of `trimtab train --ranks 2`."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT
from benchmarks.micro.scaling_tasks import GPT
from trimtab.core.plan import Plan
from trimtab.core.serialization import to_json

KINDS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def faults(tries: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yield a row per kind of fault, injected into rank 1 of two.

    Args:
        tries: Number of tries per kind, "SIGKILL" or "SIGSTOP".
    """
    for kind, times in tries.items():
        ends = [_end_of(KINDS[kind]) for _ in range(times)]
        yield {
            "metric": "rank_fault",
            "kind": kind,
            "tried": times,
            "named": sum(is_named for _, is_named in ends),
            "median_s": statistics.median(seconds for seconds, _ in ends),
            "longest_s": max(seconds for seconds, _ in ends),
        }


def _end_of(fault: signal.Signals) -> tuple[float, bool]:
    """Return the seconds from the fault to the end of the command, and True if the error named the rank."""
    with tempfile.TemporaryDirectory() as folder:
        plan, record = Path(folder) / "plan.json", Path(folder) / "run.jsonl"
        plan.write_text(to_json(Plan.fixed(-(-GPT.batch_size // 2), num_ranks=2, zero_stage=0)), encoding="utf-8")
        asked = ["train", "benchmarks.micro.scaling_tasks:GPT", "--ranks", "2", "--steps", "1000000"]
        program = [
            sys.executable,
            "-c",
            "from trimtab.cli import main; main()",
            *asked,
            "--plan",
            str(plan),
            "--record",
            str(record),
        ]
        given = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        job = subprocess.Popen(
            program, cwd=ROOT, env=given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while not record.exists() or record.read_text(encoding="utf-8").count("\n") < 20:
            if job.poll() is not None:
                raise RuntimeError(f"it ended before it was harmed: {job.communicate()[1][-500:]}")
            time.sleep(0.2)
        begin = time.perf_counter()
        os.kill(_rank_of(job.pid, 1), fault)
        _, said = job.communicate()
        return time.perf_counter() - begin, "rank 1" in said


def _rank_of(parent: int, rank: int) -> int:
    """Return the process id of a rank among the children of a launcher."""
    for each in Path("/proc").glob("[0-9]*"):
        try:
            is_child = f"\nPPid:\t{parent}\n" in (each / "status").read_text(encoding="utf-8")
            if is_child and f"\0RANK={rank}\0" in "\0" + (each / "environ").read_text(encoding="utf-8"):
                return int(each.name)
        except OSError:  # the process has ended
            continue
    raise RuntimeError(f"no rank {rank} among the processes of {parent}")
