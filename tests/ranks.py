"""Runs a program on some ranks, each a process of its own, forked from one that has torch imported.

Two such servers, as the order of sets of strings differs between processes, and so between ranks on different ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
_SERVERS, _LOOK_S, _LIMIT_S = 2, 0.02, 600.0
_COMMAND = "from trimtab.cli import main\nmain()"
_LAUNCHER = "from torch.distributed.run import main\nmain()"
# Modules for `imports`: DeepSpeed's optimizers, one of which calls torch.compile when imported; sharded checkpoints.
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
SHARDED_CHECKPOINTS = ("torch.distributed.checkpoint", "safetensors.torch", "trimtab.distributed.sharded_loader")
_COMPILER = ("torch._inductor.compile_fx",)  # seconds to import


def run_program(path: Path, folder: Path, *arguments: object, ranks: int = 2, imports: Sequence[str] = ()) -> None:
    """Run a program's file as rank 0, 1, ... of so many, which it gets as arguments, and the folder to meet in."""
    given = [(rank, ranks, folder, *arguments) for rank in range(ranks)]
    _run(path.read_text(encoding="utf-8"), folder, given, name=str(path), imports=imports)


def run_ranks(code: str, folder: Path, *arguments: object, ranks: int = 2, imports: Sequence[str] = ()) -> None:
    """Run `code` as rank 0, 1, ..., with the rank, the folder to meet in and what else it needs as arguments."""
    given = [(rank, folder, *arguments) for rank in range(ranks)]
    _run(code, folder, given, imports=imports)


_CASES = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import trimtab

rank, ranks, cases = int(sys.argv[1]), int(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
torch.set_num_threads(1)
for number, (code, case) in enumerate(cases):
    folder = Path(sys.argv[3]).with_name(str(number))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    names = globals() | {"found": None}
    exec(compile(code, f"<case {number}: {case}>", "exec"), names)
    (folder / f"rank-{rank}.json").write_text(json.dumps(names["found"]))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the interpreter, and end it with an error
"""


def run_cases(code: str, folder: Path, *cases: object, ranks: int = 2, compiles: bool = False) -> list[list[Any]]:
    """Run `code` once per case, in one launch of ranks; returns its `found` of each rank, by case.

    The code is a program that has `rank`, `ranks`, `folder` (its own, of all ranks), `case` (any JSON), json, os, sys,
    time, Path, torch, dist, nn and trimtab, in a process group of its own. What it changes of modules, it has to
    restore, unless later cases want it too.
    """
    return run_codes(folder, [(code, case) for case in cases], ranks=ranks, compiles=compiles)


def run_codes(
    folder: Path, cases: Sequence[tuple[str, object]], *, ranks: int = 2, compiles: bool = False
) -> list[list[Any]]:
    """Run (code, case) after (code, case) as `run_cases` does."""
    for number in range(len(cases)):
        (folder / str(number)).mkdir()
    (folder / "cases.json").write_text(json.dumps([(textwrap.dedent(code), case) for code, case in cases]))
    _run(_CASES, folder, [(rank, ranks, folder / "cases.json") for rank in range(ranks)], compiles=compiles)
    return [reports(folder / str(number), ranks) for number in range(len(cases))]


def reports(folder: Path, ranks: int = 2) -> list[Any]:
    """Return what each rank wrote into `rank-N.json`."""
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def _run(code: str, folder: Path, arguments: Sequence[tuple[object, ...]], **how: object) -> None:
    with started(code, folder, arguments, **how) as running:
        for each in running:
            assert each.wait(_LIMIT_S) == 0, each.said()[-3000:]


@contextlib.contextmanager
def started(
    code: str,
    folder: Path,
    arguments: Sequence[tuple[object, ...]],
    *,
    name: str = "<rank>",
    compiles: bool = False,
    imports: Sequence[str] = (),
) -> Iterator[list[Rank]]:
    """Start a program once with each of these arguments; what still runs at the block's end is killed.

    Args:
        folder: for what they say. compiles: they compile models.
        imports: modules that all ranks need and that take long to import; imported once, before the ranks are forked.
    """
    running, code = list[Rank](), textwrap.dedent(code)
    for server in _servers():
        server.ask("load", modules=[*imports, *(_COMPILER if compiles else ())])
    try:
        for number, each in enumerate(arguments):
            running.append(Rank(number, folder / f"said-{number}", code, name, tuple(map(str, each))))
        yield running
    finally:
        for rank in running:  # one that waits for another that failed, or was stopped
            rank.kill()


@dataclass(frozen=True)
class Ended:
    """A command that has ended: with what status, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_command(
    folder: Path, *arguments: object, code: str = _COMMAND, forked_ranks: int = 0, **environment: str
) -> Ended:
    """Run `trimtab` with arguments in a folder, as a process of its own that has torch imported; or other `code`.

    What it starts itself, as ranks, finds the folder's modules too.

    Args:
        forked_ranks: the number of ranks of torch's launcher that are forked with torch imported; further ranks are
            new Pythons.
    """
    if forked_ranks:
        code = f"import forked_launch, trimtab.cli\nforked_launch.prefork({forked_ranks})\n{code}"
    paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
    environment = {"PYTHONPATH": os.pathsep.join(paths)} | environment
    said, told = (folder / f"{what}-{time.monotonic_ns()}" for what in ("printed", "errors"))
    how = {"folder": folder, "told": told, "environment": environment}
    rank = Rank(0, said, textwrap.dedent(code), "trimtab", tuple(map(str, arguments)), **how)
    try:
        return Ended(rank.wait(_LIMIT_S), *(each.read_text(encoding="utf-8") for each in (said, told)))
    finally:
        rank.kill()
        for each in (said, told):
            each.unlink(missing_ok=True)


def run_torchrun(folder: Path, *arguments: object, forked_ranks: int = 2) -> Ended:
    """Have torch's own launcher start two ranks of a program in a folder: `loop.py`, or `-m module`, and arguments."""
    given = ("--standalone", "--nproc-per-node", 2, *arguments)
    return run_command(folder, *given, code=_LAUNCHER, forked_ranks=forked_ranks)


class Rank:
    """A process that runs a program.

    Args:
        number: its rank. said: file of what it says. code, name: the program. folder: where it runs; None: here.
        told: file of its errors; None: that of what it says. environment: what it has beside ours.
    """

    def __init__(
        self,
        number: int,
        said: Path,
        code: str,
        name: str,
        arguments: tuple[str, ...],
        *,
        folder: Path | None = None,
        told: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._server, self._said = _servers()[number % _SERVERS], said
        said.write_bytes(b"")
        self._process = self._server.ask(
            "start",
            code=code,
            name=name,
            arguments=arguments,
            environment=dict(os.environ) | dict(environment or {}),
            folder=str(folder or os.getcwd()),
            paths=[str(folder or TESTS)],
            said=str(said),
            told=str(told or said),
        )

    def wait(self, limit_s: float) -> int:
        """Return the status that it ends with, negative for a signal."""
        end = time.monotonic() + limit_s
        while (status := self.status()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"a rank did not end in {limit_s:g} s: {self.said()[-3000:]}")
            time.sleep(_LOOK_S)
        return status

    def status(self) -> int | None:
        """Return the status that it ended with; None where it runs."""
        return self._server.ask("poll", process=self._process)

    def kill(self) -> None:
        """End it, where it runs."""
        self._server.ask("kill", process=self._process)

    def said(self) -> str:
        """Return what it wrote."""
        return self._said.read_text(encoding="utf-8", errors="replace")


class _Server:
    """A process of `rank_server.py`."""

    def __init__(self) -> None:
        command = [sys.executable, str(TESTS / "rank_server.py")]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # it forks, which a process of threads is not to do
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=one_thread, text=True, **pipes)
        atexit.register(self.close)

    def ask(self, does: str, **request: object):
        """Return the answer to a request."""
        self._process.stdin.write(json.dumps({"do": does} | request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of ranks ended with {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """Let it end."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


@functools.cache
def _servers() -> list[_Server]:
    """Return them, begun with the first ranks."""
    return [_Server() for _ in range(_SERVERS)]
