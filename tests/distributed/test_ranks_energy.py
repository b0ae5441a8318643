"""Two ranks over gloo on one machine: one of them reads the processor, and both are told one sum."""

from __future__ import annotations

import json

from ranks import run_ranks

RANK = """
    import json, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from trimtab.core.energy import Energy, Provenance, absent
    from trimtab.distributed.energy import meter_of_rank
    from trimtab.distributed.process_group import total
    from trimtab.measure.meters import Metering

    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    metered = meter_of_rank(torch.device("cpu"), Metering(watts=15))
    own = Energy(2.0, 30.0, Provenance.ESTIMATED, ("15 W",)) if metered.is_reader else absent("another rank reads it")
    lost = absent("the counter is gone") if metered.is_reader else own
    found = {"reads": metered.is_reader, "absent": metered.own.is_absent, "job": metered.job.sources}
    found["joules"], found["lost"] = metered.of_all(own, total).joules, metered.of_all(lost, total).joules
    nothing = meter_of_rank(torch.device("cpu"), Metering(root=Path(folder) / "powercap"))
    found["nothing"] = [nothing.job.is_absent, nothing.of_all(own, total).joules]
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_one_meter_is_read_once_and_told_to_all(tmp_path):
    run_ranks(RANK, tmp_path)
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["reads"] for each in found] == [True, False]
    assert [each["absent"] for each in found] == [False, True]
    assert [each["job"] for each in found] == [["15 W, as given"]] * 2
    assert [(each["joules"], each["lost"]) for each in found] == [(30.0, None)] * 2
    assert [each["nothing"] for each in found] == [[True, None]] * 2
