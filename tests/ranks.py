"""Runs a program on some ranks, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

# gloo's threads may outlive the interpreter, and end it with an error.
LEAVE = """
import os
os._exit(0)
"""


def run_program(path: Path, folder: Path, *arguments: object, ranks: int = 2) -> None:
    """Run a program's file as rank 0, 1, ... of so many, which it gets as arguments, and the folder to meet in."""
    _run([sys.executable, str(path)], [(rank, ranks, folder, *arguments) for rank in range(ranks)])


def run_ranks(code: str, folder: Path, *arguments: object, ranks: int = 2) -> None:
    """Run `code` as rank 0, 1, ..., with the rank, the folder to meet in and what else it needs as arguments."""
    command = [sys.executable, "-c", textwrap.dedent(code) + LEAVE]
    _run(command, [(rank, folder, *arguments) for rank in range(ranks)])


def _run(command: list[str], arguments: list[tuple[object, ...]]) -> None:
    running = [subprocess.Popen([*command, *map(str, each)], stderr=subprocess.PIPE) for each in arguments]
    try:
        for each in running:
            _, error = each.communicate(timeout=600)
            assert each.returncode == 0, error.decode()[-3000:]
    finally:
        for each in running:  # one that waits for another that failed
            each.kill()
            each.communicate()
