"""Two ranks over gloo on one machine: one of them reads the processor, and both are told one sum."""

from __future__ import annotations

import json

from ranks import run_ranks

RANK = """
    import json, math, sys
    import torch
    import torch.distributed as dist
    from trimtab.core.energy import Energy, Provenance, absent
    from trimtab.distributed.energy import of_all_ranks, reads_here
    from trimtab.distributed.process_group import total

    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    reads = reads_here(torch.device("cpu"))
    own = absent("another rank reads it") if reads.nothing else Energy(2.0, 30.0, Provenance.MEASURED, ("rapl",))
    lost = own if reads.nothing else absent("the counter is gone")
    found = {"reads": [reads.processor, reads.device]}
    found["joules"] = of_all_ranks(own, reads, total).joules
    found["lost"] = of_all_ranks(lost, reads, total).joules
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_one_meter_is_read_once_and_told_to_all(tmp_path):
    run_ranks(RANK, tmp_path)
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["reads"] for each in found] == [[True, False], [False, False]]
    assert [(each["joules"], each["lost"]) for each in found] == [(30.0, None)] * 2
