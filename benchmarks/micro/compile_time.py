"""Processor time of compilation: the start of the compiler, the whole model, and the model by block.

`python -m benchmarks.micro.compile_time [--quick] [--json] [--rounds N] [--case TEXT]` prints a `compile_time` row for
every model.
Every measurement runs in a process of its own with an empty cache: it first compiles and runs a trivial model with its
backward (the start of the compiler), then trains the model. Rounds alternate the order of both ways; Ctrl-C ends the
measurement after the completed rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.figure_words import medians, spread
from benchmarks.micro.settings_on_models import Loop, make_loop, processor_s
from trimtab.core.choice import COMPILED_BLOCKS, Compiled
from trimtab.plans.plan import Plan
from trimtab.techniques.compiled_call import start_compiler

ROUNDS, STEPS = 3, 4
NAMES = ("GPT-2, 12 layers", "Llama, 12 layers", "ViT, 12 layers")
WAYS: dict[str, Compiled] = {"whole": True, "blocks": COMPILED_BLOCKS}
# Results of compilation are not reused. Precompiled headers stay on, as they are for a user's first model.
_NO_CACHE = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
Row = dict[str, Any]


def main() -> None:
    """Measure all models in rounds."""
    options = _parser().parse_args()
    if options.measured is not None:
        print(json.dumps(measure(*options.measured)))
        return
    names = [name for name in NAMES if options.case in name]
    rows = _rows(names, 1 if options.quick else options.rounds)
    command.show("compile_time", rows, _line, as_json=options.json)


def _parser() -> Any:
    made = command.parser(__doc__)
    made.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds (default {ROUNDS})")
    made.add_argument("--case", default="", metavar="TEXT", help="only models whose name contains the text")
    made.add_argument("--measured", nargs=2, metavar=("MODEL", "WAY"), help="measure here, and print the figures")
    return made


def _rows(names: Sequence[str], rounds: int) -> list[Row]:
    found: dict[str, dict[str, list[Row]]] = {name: {way: [] for way in WAYS} for name in names}
    try:
        for number in range(rounds):
            for name in names:
                for way in list(WAYS)[:: 1 if number % 2 else -1]:
                    found[name][way].append(_in_process(name, way))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return [row for name in names if (row := _row(name, found[name])) is not None]


def _row(name: str, found: dict[str, list[Row]]) -> Row | None:
    n = min(map(len, found.values()))
    if not n:
        return None
    row: Row = {"metric": "compile_time", "model": name, "n": n}
    row["start_s"] = [each["start_s"] for measured in found.values() for each in measured[:n]]
    for way, measured in found.items():
        row |= {f"{way}_{key}": measured[0][key] for key in ("graphs", "graph_breaks")}
        row[f"{way}_s"] = [each["compile_s"] for each in measured[:n]]
    return row


def _in_process(name: str, way: str) -> Row:
    asked = [sys.executable, "-m", "benchmarks.micro.compile_time", "--measured", name, way]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | _NO_CACHE | {"TORCHINDUCTOR_CACHE_DIR": folder}
        made = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = dict(json.loads(made.stdout.splitlines()[-1]))
    print(name, way, found, file=sys.stderr, flush=True)
    return found


def measure(name: str, way: str) -> Row:
    """Return the processor seconds of the start of the compiler and of a model's compilation."""
    from torch._dynamo.utils import counters

    loop = make_loop(name)
    loop.step()
    start_s = _spent_s(lambda: start_compiler(torch.device("cpu")))
    before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    steps = _steps(loop, WAYS[way])
    after = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    graphs, breaks = (b - a for a, b in zip(before, after, strict=True))
    compile_s = sum(steps[:-1]) - (len(steps) - 1) * steps[-1]
    return {"start_s": start_s, "compile_s": compile_s, "graphs": graphs, "graph_breaks": breaks}


def _steps(loop: Loop, way: Compiled) -> list[float]:
    """Return the processor seconds of the first steps; the last step is free of compilation."""
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(loop.rows, compiled=way)) as run:
        return [_spent_s(lambda: run.train_step(run.window(loop.batch), loop.loss_fn)) for _ in range(STEPS)]


def _spent_s(call: Callable[[], object]) -> float:
    """Return the processor seconds of a call, including the compiler's processes."""
    before = processor_s()
    call()
    return processor_s() - before


def _line(row: Row) -> str:
    _, whole_s, blocks_s = medians(row)
    return (
        f"{row['model']}: start of the compiler {spread(row['start_s'])}, whole model {spread(row['whole_s'])}, "
        f"by block {spread(row['blocks_s'])}, ratio {blocks_s / whole_s:.2f} (n={row['n']})"
    )


if __name__ == "__main__":
    main()
