"""Forks processes that have imported torch already: to import it takes longer than most programs of a few ranks.

Reads requests, a line of JSON each, and answers each by a line. What is forked runs a program as a Python of its own
would: as `__main__`, with its arguments, environment, folder and modules' paths. Nothing was computed here, nor any
thread or process group begun.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import random
import signal
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

from forked_launch import process_exit

# What ranks import, but for what few of them do; each is bare of side effects but for the warnings of torch's own.
MODULES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.profiler",
    "trimtab.api",
    "trimtab.distributed.ddp",
    "trimtab.distributed.fsdp2",
    "trimtab.distributed.plan_on_ranks",
    "trimtab.distributed.zero1",
)


_LOADED: set[str] = set()  # modules that requests asked for

Running = dict[int, int | None]  # what each process ended with, None where it runs


def serve() -> None:
    """Answer requests until there are none."""
    answers, running = os.dup(1), Running()
    os.dup2(2, 1)  # no program's output is taken for an answer
    _load(running, modules=MODULES)
    does = {"load": _load, "start": _start, "poll": _poll, "kill": _kill}
    for line in sys.stdin:
        request = json.loads(line)
        answer = does[request.pop("do")](running, **request)
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _load(running: Running, *, modules: Sequence[str]) -> None:
    """Import what programs do."""
    missing = [name for name in modules if name not in _LOADED]
    if not missing:
        return
    _LOADED.update(missing)
    logging.disable(logging.WARNING)  # DeepSpeed warns of an accelerator that it does not find
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in missing:
            importlib.import_module(name)
        if "torch._inductor.compile_fx" in missing:
            _warm_compiler()
    logging.disable(logging.NOTSET)
    gc.collect()
    gc.freeze()  # what is forked neither searches the imports for garbage nor copies the pages they lie in


def _warm_compiler() -> None:
    """Look once for what each program that compiles would look for: the processor's extensions, torch's own sources."""
    from torch._inductor import codecache, cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list()
    codecache.torch_key()


def _start(running: Running, **program: Any) -> int:
    """Fork a process that runs a program; returns its number."""
    if os.path.isdir("/proc/self/task") and len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads is not to be forked")
    process = os.fork()
    if process == 0:
        _be(**program)
    running[process] = None
    return process


def _poll(running: Running, *, process: int) -> int | None:
    """Return what a process ended with, as `subprocess` says it; None where it runs."""
    if running[process] is None:
        ended, status = os.waitpid(process, os.WNOHANG)
        running[process] = os.waitstatus_to_exitcode(status) if ended else None
    return running[process]


def _kill(running: Running, *, process: int) -> int | None:
    """End a process that runs."""
    if _poll(running, process=process) is None:
        os.kill(process, signal.SIGKILL)
        running[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return running[process]


def _be(
    *,
    code: str,
    name: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    paths: list[str],
    said: str,
    told: str,
) -> None:
    """Be a process that runs a program, and end; what it prints is in `said`, what it tells of errors in `told`."""
    with process_exit():
        with open(os.devnull, "rb") as nothing, open(said, "ab") as output, open(told, "ab") as errors:
            os.dup2(nothing.fileno(), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:0] = paths
        sys.argv = [name, *arguments]
        random.seed()
        import numpy as np

        np.random.seed()
        main = types.ModuleType("__main__")
        main.__file__ = name
        sys.modules["__main__"] = main
        exec(compile(code, name, "exec"), vars(main))


if __name__ == "__main__":
    serve()
