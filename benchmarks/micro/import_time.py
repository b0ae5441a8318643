"""Import time of trimtab on top of torch, in fresh interpreters.

`python -m benchmarks.micro.import_time [--quick] [--json]` prints `import_s` rows: `import trimtab` with torch already
imported, the first access to `trimtab.start` (which imports the modules that apply plans), and torch itself.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks import command

# An untimed run first reads the files into the page cache.
CHILD = """
import json, sys, time
laps = [time.perf_counter()]
import torch
laps.append(time.perf_counter())
import trimtab
laps.append(time.perf_counter())
trimtab.start
laps.append(time.perf_counter())
print(json.dumps([late - early for early, late in zip(laps, laps[1:])]))
"""
PARTS = ("torch", "trimtab", "front door")


def laps() -> list[float]:
    """Return the import seconds of each part in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure and print all parts."""
    options = command.parser(__doc__).parse_args()
    num = 5 if options.quick else 21
    laps()
    columns = zip(*(laps() for _ in range(num)), strict=True)
    rows = [row_of(part, seconds) for part, seconds in zip(PARTS, columns, strict=True)]
    command.show("import_time", rows, _line, as_json=options.json)


def row_of(part: str, seconds: tuple[float, ...]) -> dict[str, Any]:
    """Return the row of a part."""
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"metric": "import_s", "part": part, "median_s": median, "low_s": low, "high_s": high, "n": len(seconds)}


def _line(row: dict[str, Any]) -> str:
    quartiles = f"quartiles {row['low_s']:.4f} and {row['high_s']:.4f}"
    return f"{row['part']:<12} {row['median_s']:.4f} s ({quartiles}, n={row['n']})"


if __name__ == "__main__":
    main()
