"""Cost of checkpoints: saving relative to a plain synced write, resuming relative to a plain read of the same bytes.

`python -m benchmarks.micro.checkpoint_cost [--quick] [--json] [--rounds 12] [--folder FOLDER]` prints seconds and
ratios to the plain write or read, interleaved in rounds, for GPT-2 Small's weights and AdamW's two moments: 1.5 GB (a
twelfth with `--quick`).

- Saving is `run.checkpoint()` of a run with its full number of checkpoints, so it also deletes the oldest.
- Resuming is the time from `trimtab.start` to the first window, with model and optimizer already built.
- The control repeats the plain method. A shared disk may need many rounds.
- Reading uses the page cache (warm) or asks the kernel to drop it first (cold), which is not guaranteed.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import trimtab
from benchmarks import command
from trimtab.planner.statistics import ratio_interval, resolution

LAYERS, WIDTH, TOKENS, POSITIONS = 12, 768, 50_257, 1_024
KEPT = 2  # default number of checkpoints of a run
Ways = dict[str, Callable[[], None]]


def shapes(layers: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of GPT-2's parameters."""
    yield from ((tokens, WIDTH), (POSITIONS, WIDTH))
    for _ in range(layers):
        yield from ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
        yield from ((3 * WIDTH,), (4 * WIDTH,), *[(WIDTH,)] * 6)
    yield from [(WIDTH,)] * 2


class Everything(nn.Module):
    """Parameters with the shapes of GPT-2, and a cheap loss that depends on all of them."""

    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.randn(shape) for shape in shapes(layers, tokens))

    def forward(self, batch: Tensor) -> Tensor:
        """Return a scalar loss."""
        return batch.mean() * sum(each.square().mean() for each in self.all)


class Kept:
    """Checkpointed run with the state of GPT-2."""

    BATCH = torch.ones(1, 1)

    def __init__(self, folder: Path, layers: int, tokens: int) -> None:
        self.model = Everything(layers, tokens)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._folder = folder
        self.run: trimtab.Run | None = None

    def begin(self) -> None:
        """Start or resume the run, up to its first window."""
        kept = trimtab.Checkpoints(self._folder, every_steps=None, every_s=None)
        self.run = trimtab.start(self.model, self.optimizer, trimtab.Plan.fixed(1), checkpoints=kept)
        self._windows = self.run.windows(itertools.repeat(self.BATCH))
        self._window = next(self._windows)

    def step(self) -> None:
        """Train on the current window."""
        assert self.run is not None
        self.run.train_step(self._window, lambda model, batch: model(batch))

    def advance(self) -> None:
        """Train on the next window."""
        self._window = next(self._windows)
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        """State dicts of model and optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def tensors_of(state: Any) -> list[Tensor]:
    """Return all tensors of a nested state dict."""
    if isinstance(state, Tensor):
        return [state]
    return [tensor for each in state.values() for tensor in tensors_of(each)] if isinstance(state, dict) else []


def plain_write(path: Path, tensors: list[Tensor]) -> None:
    """Write the tensors' bytes to a file and sync it."""
    with path.open("xb", buffering=0) as file:
        for tensor in tensors:
            rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            while len(rest):
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def plain_read(path: Path, tensors: list[Tensor]) -> None:
    """Read the bytes into newly allocated memory."""
    taken = [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors]
    with path.open("rb", buffering=0) as file:
        for each in taken:
            rest = memoryview(each.numpy())
            while len(rest):
                rest = rest[file.readinto(rest) :]


def rounds(ways: Ways, num: int, before: Callable[[], None]) -> dict[str, list[float]]:
    """Return the seconds of each method per round.

    The order within a round is random, because a method affects memory and disk of the next. The first round is
    dropped.

    Args:
        ways: Methods by name.
        num: Number of rounds.
        before: Called before each method, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    chance = random.Random(0)
    for index in range(num + 1):
        for name in chance.sample([*ways], len(ways)):
            before()
            start = time.perf_counter()
            ways[name]()
            if index:  # the first round warms up memory and disk
                seconds[name].append(time.perf_counter() - start)
        print(f"round {index} of {num}", file=sys.stderr)
    return seconds


def rows_of(metric: str, seconds: dict[str, list[float]], size: int) -> list[dict[str, Any]]:
    """Return a row per method with its time relative to the plain method."""
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


def saving(place: Path, kept: Kept, num: int) -> dict[str, list[float]]:
    """Time the methods of saving. The run trains a step before each save."""
    assert kept.run is not None
    state, run = kept.state, kept.run
    tensors = tensors_of(state)

    def ready() -> None:
        for name in ("plain", "torch"):
            (place / name).unlink(missing_ok=True)
        kept.advance()
        os.sync()

    def torch_save() -> None:
        with (place / "torch").open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    for _ in range(KEPT):
        ready()
        run.checkpoint()
    ways: Ways = {
        "plain": lambda: plain_write(place / "plain", tensors),
        "checkpoint": run.checkpoint,
        "control": lambda: plain_write(place / "plain", tensors),
        "torch.save, synced": torch_save,
    }
    return rounds(ways, num, ready)


def reading(place: Path, kept: Kept, num: int, *, cold: bool) -> dict[str, list[float]]:
    """Time the methods of reading the saved state."""
    tensors = tensors_of(kept.state)

    def ready() -> None:
        if kept.run is not None:
            kept.run.close()
        if cold:
            _drop(place)

    ways: Ways = {
        "plain": lambda: plain_read(place / "plain", tensors),
        "going on": kept.begin,
        "control": lambda: plain_read(place / "plain", tensors),
    }
    return rounds(ways, num, ready)


def _drop(place: Path) -> None:
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def main() -> None:
    """Measure saving and reading and print the costs."""
    parser = command.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=12, help="of all ways, 3 with --quick")
    options = parser.parse_args()
    layers, tokens, num = (1, 5_000, 3) if options.quick else (LAYERS, TOKENS, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        place = Path(folder)
        kept = Kept(place / "run", layers, tokens)
        kept.begin()
        kept.step()
        size = sum(tensor.nbytes for tensor in tensors_of(kept.state))
        rows = rows_of("save_ratio", saving(place, kept, num), size)
        (place / "plain").unlink(missing_ok=True)
        plain_write(place / "plain", tensors_of(kept.state))
        rows += rows_of("read_warm_ratio", reading(place, kept, num, cold=False), size)
        rows += rows_of("read_cold_ratio", reading(place, kept, num, cold=True), size)
    command.show("checkpoint_cost", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['metric']:<16} {row['way']:<20} {row['median_s']:7.2f} s  {row['mean']:.2f} of the plain way "
        f"(95% {row['low']:.2f} to {row['high']:.2f}, n={row['n']}, resolution {row['resolution']:.2f})"
    )


if __name__ == "__main__":
    main()
