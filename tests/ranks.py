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


def run_ranks(code: str, folder: Path, *arguments: object, ranks: int = 2) -> None:
    """Run `code` as rank 0, 1, ..., with the rank, the folder to meet in and what else it needs as arguments."""
    command = [sys.executable, "-c", textwrap.dedent(code) + LEAVE]
    running = [
        subprocess.Popen([*command, str(rank), str(folder), *map(str, arguments)], stderr=subprocess.PIPE)
        for rank in range(ranks)
    ]
    try:
        for each in running:
            _, error = each.communicate(timeout=600)
            assert each.returncode == 0, error.decode()[-3000:]
    finally:
        for each in running:  # one that waits for another that failed
            each.kill()
            each.communicate()
