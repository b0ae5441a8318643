"""Ranks of a launcher that are forked before the launcher has threads, from a process that has torch imported.

A rank that is a new Python spends seconds of processor time on imports. Each forked rank waits for a command of torch's
launcher and then runs the command as a new Python would: as a child of the launcher, in a session of its own, with the
command's environment and arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

_LOOK_S = 0.01


def prefork(ranks: int) -> None:
    """Fork ranks; the launcher of this process starts new Pythons only for the ranks beyond this number."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    waiting = list[_ForkedRank]()
    for _ in range(ranks):
        waiting.append(_ForkedRank([each.commands for each in waiting]))

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if not waiting:
            return new_python(handler, args, env)
        rank = waiting.pop(0)
        rank.start(args, env, handler._stdout, handler._stderr)
        return rank

    new_python = subprocess_handler.SubprocessHandler._popen
    subprocess_handler.SubprocessHandler._popen = popen


class _ForkedRank:
    """A forked process with the methods of `subprocess.Popen` that torch's launcher calls.

    Args:
        others: file descriptors of the commands of other ranks. A rank closes its copies; otherwise the other ranks
            would not notice the launcher's end.
    """

    def __init__(self, others: list[int]) -> None:
        reads, self.commands = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for each in (self.commands, *others):
                os.close(each)
            _wait_for_command(reads)
        os.close(reads)

    def start(self, args: tuple[str, ...], env: dict[str, str], output: Any, errors: Any) -> None:
        """Have the process run a command; returns after the process has begun a session of its own."""
        names = [None if file is None else file.name for file in (output, errors)]
        command = {"args": args, "env": env, "output": names[0], "errors": names[1]}
        with open(self.commands, "w") as file:
            json.dump(command, file)
        while os.getsid(self.pid) != self.pid:  # before that, a signal to its process group reaches the launcher too
            time.sleep(_LOOK_S)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None if the process runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(_LOOK_S)
        return status


def _wait_for_command(reads: int) -> None:
    """Run the command that arrives and end; without a command, end with the launcher."""
    with open(reads) as file:
        text = file.read()
    if not text:
        os._exit(0)
    os.setsid()
    command = json.loads(text)
    with process_exit():
        for number, name in ((1, command["output"]), (2, command["errors"])):
            if name is not None:
                with open(name, "ab") as file:
                    os.dup2(file.fileno(), number)
        os.environ.clear()
        os.environ.update(command["env"])
        _reseed()
        _run(command["args"][1:])


@contextlib.contextmanager
def process_exit() -> Iterator[None]:
    """End the process after the program in the context, with the exit status and messages of a Python interpreter."""
    status = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # gloo's threads may outlive the interpreter, and end it with an error


def _reseed() -> None:
    """Draw other random numbers than the launcher, as a new Python does; restore its handler of SIGINT."""
    import numpy as np

    random.seed()
    np.random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(arguments: list[str]) -> None:
    """Run a Python's arguments: flags, then a module's or a file's name, then the program's own arguments."""
    while arguments[0] in ("-u", "-P"):
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
