"""What a checkpoint costs: saved and read with every byte checked, over the same bytes written and synced, or read.

`python benchmarks/checkpoint_cost.py [--quick] [--json] [--rounds 12] [--folder FOLDER]` prints seconds and ratios to
the plain way, rounds of all ways: GPT-2 Small's weights and AdamW's two moments, 1.5 GB (a twelfth of it with
`--quick`). The control is the plain way once more: a disk that others use too may need many rounds. Reading is from the
page cache (warm), or with it dropped (cold), which is asked for and not promised.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import command
import torch
from torch import Tensor

from trimtab.checkpoint.envelope import newest_good, write
from trimtab.checkpoint.state_files import read_state, write_state
from trimtab.decide.statistics import ratio_interval, resolution

LAYERS, WIDTH, TOKENS, POSITIONS = 12, 768, 50_257, 1_024
Ways = dict[str, Callable[[], None]]


def shapes(layers: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of GPT-2's parameters."""
    yield from ((tokens, WIDTH), (POSITIONS, WIDTH))
    for _ in range(layers):
        yield from ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
        yield from ((3 * WIDTH,), (4 * WIDTH,), *[(WIDTH,)] * 6)
    yield from [(WIDTH,)] * 2


def full_state(layers: int, tokens: int) -> dict[str, Any]:
    """Return weights, and an optimizer's moments of them."""
    weights = {f"parameter.{index}": torch.randn(shape) for index, shape in enumerate(shapes(layers, tokens))}
    moments = {
        index: {"step": torch.tensor(1.0), "exp_avg": torch.randn_like(each), "exp_avg_sq": torch.rand_like(each)}
        for index, each in enumerate(weights.values())
    }
    return {"model": weights, "optimizer": {"state": moments}}


def tensors_of(state: Any) -> list[Tensor]:
    """Return the tensors of a state."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for each in state.values() for tensor in tensors_of(each)]


def plain_write(path: Path, tensors: list[Tensor]) -> None:
    """Write bytes and bring them to disk."""
    with path.open("xb", buffering=0) as file:
        for tensor in tensors:
            rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while len(rest):
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def plain_read(path: Path, tensors: list[Tensor]) -> None:
    """Read bytes into memory of their own, all of it at once."""
    taken = [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors]
    with path.open("rb", buffering=0) as file:
        for each in taken:
            rest = memoryview(each.numpy())
            while len(rest):
                rest = rest[file.readinto(rest) :]


def checked_read(parent: Path) -> None:
    """Read the newest checkpoint that is whole."""
    found = newest_good(parent)
    assert found.folder is not None
    read_state(found.folder)


def rounds(ways: Ways, num: int, before: Callable[[], None]) -> dict[str, list[float]]:
    """Return seconds of each way, one of each a round, in an order by chance: what came before leaves its memory."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    chance = random.Random(0)
    for index in range(num + 1):
        for name in chance.sample([*ways], len(ways)):
            before()
            start = time.perf_counter()
            ways[name]()
            if index:  # the first round brings up memory and disk
                seconds[name].append(time.perf_counter() - start)
        print(f"round {index} of {num}", file=sys.stderr)
    return seconds


def rows_of(metric: str, seconds: dict[str, list[float]], size: int) -> list[dict[str, Any]]:
    """Return what each way took, beside the plain one."""
    plain = seconds["plain"]
    ratios = {name: [a / b for a, b in zip(each, plain, strict=True)] for name, each in seconds.items()}
    control = resolution(ratio_interval(ratios["control"]))
    rows = []
    for name, each in seconds.items():
        ratio = ratio_interval(ratios[name])
        row = {"metric": metric, "way": name, "bytes": size, "median_s": statistics.median(each), "seconds": each}
        rows.append(
            row | {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "n": ratio.n, "resolution": control}
        )
    return rows


def saving(place: Path, state: dict[str, Any], num: int) -> dict[str, list[float]]:
    """Time the ways of saving, each into a place of its own."""
    tensors = tensors_of(state)

    def empty() -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        os.sync()

    def torch_save() -> None:
        with (place / "torch").open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    ways: Ways = {
        "plain": lambda: plain_write(place / "plain", tensors),
        "checkpoint": lambda: _commit(place, state),
        "control": lambda: plain_write(place / "plain", tensors),
        "torch.save, synced": torch_save,
    }
    return rounds(ways, num, empty)


def _commit(place: Path, state: dict[str, Any]) -> None:
    write(place, "step-1", lambda folder: write_state(folder, state), {"step": 1})


def reading(place: Path, state: dict[str, Any], num: int, *, cold: bool) -> dict[str, list[float]]:
    """Time the ways of reading what was saved."""
    tensors = tensors_of(state)
    ways: Ways = {
        "plain": lambda: plain_read(place / "plain", tensors),
        "checkpoint": lambda: checked_read(place),
        "control": lambda: plain_read(place / "plain", tensors),
    }
    return rounds(ways, num, lambda: _drop(place) if cold else None)


def _drop(place: Path) -> None:
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    """Measure saving and reading, and print what each costs."""
    parser = command.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=12, help="of all ways, 3 with --quick")
    options = parser.parse_args()
    layers, tokens, num = (1, 5_000, 3) if options.quick else (LAYERS, TOKENS, options.rounds)
    state = full_state(layers, tokens)
    size = sum(tensor.nbytes for tensor in tensors_of(state))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder) / "place"
        rows = rows_of("save_ratio", saving(place, state, num), size)
        shutil.rmtree(place)
        place.mkdir()
        plain_write(place / "plain", tensors_of(state))
        _commit(place, state)
        rows += rows_of("read_warm_ratio", reading(place, state, num, cold=False), size)
        rows += rows_of("read_cold_ratio", reading(place, state, num, cold=True), size)
    command.show("checkpoint_cost", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['metric']:<16} {row['way']:<20} {row['median_s']:7.2f} s  {row['mean']:.2f} of the plain way "
        f"(95% {row['low']:.2f} to {row['high']:.2f}, n={row['n']}, resolution {row['resolution']:.2f})"
    )


if __name__ == "__main__":
    main()
