"""Rank 0 makes something that the others wait for: for as long as it lives, and no longer."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from ranks import started

RANK = """
    import faulthandler, json, os, signal, sys, threading, time
    import torch
    import torch.distributed as dist
    import trimtab
    from trimtab.distributed.process_group import from_first

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(90)  # of one that does not end, where it waits
    rank, folder, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])

    waits = f"{sys.argv[2]}/waits"

    def make():
        while case in ("stops", "dies") and not os.path.exists(waits):
            time.sleep(0.01)  # one that is lost while others still join is another matter
        if case == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if case == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "long":
            time.sleep(6.0)
        if case == "raises":
            time.sleep(1.6)  # by when the other looks but now and then
            raise ValueError("no plan")
        return "made"

    def end():
        with open(f"{folder}/rank-{rank}.json", "w") as file:
            json.dump(found, file)
        os._exit(0)

    found = {}
    try:
        with trimtab.process_group(2.0 if case == "long" else 3.0):
            if rank:
                open(waits, "w").close()
            try:
                found["made"] = [from_first(make), from_first(lambda: "again")]
            except ValueError as error:
                found["error"] = f"{type(error).__name__}: {error}"
                end()  # at once, and what it holds of the store with it
            found["threads"] = [each.name for each in threading.enumerate() if "heartbeat" in each.name]
            dist.barrier()
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found |= {name: getattr(error, name, None) for name in ("is_echo", "code", "ranks", "cause", "got")}
    end()
"""


def run(folder: Path, case: str, leaves: tuple[int, ...] = (0, 1)) -> list[dict]:
    """Return what the ranks found that end by themselves."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with started(RANK, folder, [(rank, folder, case, port) for rank in range(2)]) as running:
        for rank in leaves:
            running[rank].wait(120)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in leaves]


def test_what_takes_longer_than_the_limit_is_waited_for_and_the_heart_stops_with_it(tmp_path):
    for each in run(tmp_path, "long"):
        assert each == {"made": ["made", "again"], "threads": []}


@pytest.mark.parametrize("case", ["stops", "dies"])
def test_a_first_rank_that_gives_no_sign_is_named(tmp_path, case):
    """It holds the store, too, as it does where no launcher's own process holds it."""
    (other,) = run(tmp_path, case, leaves=(1,))
    assert other["error"].startswith("RankError: ")
    assert (other["code"], other["ranks"]) == ("ranks.silent", [0])
    assert ("3 s" if case == "stops" else "TCPStore") in other["got"]
    assert not other["is_echo"]


def test_what_the_first_rank_raises_is_said_by_it(tmp_path):
    one, other = run(tmp_path, "raises")
    assert one["error"] == "ValueError: no plan"
    assert "ValueError: no plan" in other["error"]
    assert (other["code"], other["ranks"], other["cause"]) == ("ranks.ended", [0], "ValueError")
    assert other["is_echo"]
