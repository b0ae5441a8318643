"""Fault injection for checkpointed runs: kills, and damaged checkpoints.

`python -m benchmarks.micro.faults [--quick] [--json] [--kills 6]` prints rows of `fault`: `kind`, `tried`, `survived`.

- `SIGKILL, ...`: a run is killed repeatedly at random moments, including during saves. `tried` is the number of losses
  that all ranks printed before and after kills, `survived` the number of losses bitwise equal to those of an
  uninterrupted run. `kills` counts kills after a completed window, `in_saves` kills that left an incomplete checkpoint.
- `truncated`, `one bit`, `zeroed block`: a file of the newest checkpoint is damaged. The run survives if it refuses the
  checkpoint, names the file and resumes from the previous checkpoint.

The programs are shared with the tests.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import command

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "faults")]

DAMAGED, QUICK_DAMAGED = 400, 60


def killed(kills: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row per configuration of killed runs."""
    from test_crash import WINDOWS, cell_of, crashed, whole

    cells = list(itertools.product(("fp32", "bf16"), WINDOWS, (False, True), (1, 2)))
    for precision, windows, recompute, ranks in cells[::5] if quick else cells:
        options = cell_of(precision, windows, recompute, ranks)
        with tempfile.TemporaryDirectory() as folder:
            found, did = crashed(Path(folder), options, kills, seed=len(windows) + ranks)
            expected = whole(Path(folder), options)
        alike = [window for window, said in found.items() if said == expected.get(window)]
        recomputed = "recomputed" if recompute else "kept"
        kind = f"SIGKILL, {precision}, {windows}, {recomputed}, {ranks} rank{'s' if ranks > 1 else ''}"
        row = {"metric": "fault", "kind": kind, "kills": did.counted, "in_saves": did.in_saves}
        yield row | {"tried": len(expected), "survived": len(alike)}


def damaged(count: int) -> Iterator[dict[str, Any]]:
    """Yield a row per kind of damage, applied to all files of a checkpoint in turn."""
    from saving import gone_on_from, save
    from test_checkpoint_files import FILES, blanked, flipped, truncated

    kinds: dict[str, Callable[..., bytes]] = {"truncated": truncated, "one bit": flipped, "zeroed block": blanked}
    for kind, damage in kinds.items():
        chance, tried, survived = random.Random(kind), 0, 0
        with tempfile.TemporaryDirectory() as folder:
            parent = Path(folder)
            save(parent, 1)
            newest = save(parent, 2)
            for name in itertools.cycle(FILES):
                if tried == count:
                    break
                content = (newest / name).read_bytes()
                changed = damage(content, chance)
                if changed == content:
                    continue
                (newest / name).write_bytes(changed)
                step, good = gone_on_from(parent)
                named = [f"step-2/{name}" in str(error) for _, error in good.refused]
                survived += named == [True] and step == 1
                tried += 1
                (newest / name).write_bytes(content)
        yield {"metric": "fault", "kind": kind, "kills": None, "in_saves": None, "tried": tried, "survived": survived}


def _line(row: dict[str, Any]) -> str:
    kills = "" if row["kills"] is None else f", killed {row['kills']} times, {row['in_saves']} of them inside a save"
    return f"{row['kind']:<48} {row['survived']} of {row['tried']}{kills}"


def main() -> None:
    """Print the rows."""
    parser = command.parser(__doc__)
    parser.add_argument("--kills", type=int, default=None, help="of each run: 6, or 2 when quick")
    options = parser.parse_args()
    rows = []
    every = damaged(QUICK_DAMAGED if options.quick else DAMAGED)
    for row in itertools.chain(every, killed(options.kills or (2 if options.quick else 6), quick=options.quick)):
        rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    command.show("faults", rows, _line, as_json=options.json)


if __name__ == "__main__":
    main()
