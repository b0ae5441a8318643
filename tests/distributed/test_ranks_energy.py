"""Two ranks over gloo on one machine: one of them reads its counter, and both are told one sum."""

from __future__ import annotations

import json

from ranks import run_ranks

RANK = """
    import json, math, sys
    import torch
    import torch.distributed as dist
    from trimtab.core.energy import Energy, Provenance, absent
    from trimtab.distributed.energy import meter_of_rank
    from trimtab.distributed.process_group import total
    from trimtab.measure.energy import EnergyClock
    from trimtab.measure.meters import Metering

    class Steps:
        provenance, sources, period_s, reads = Provenance.MEASURED, ("a counter",), math.inf, 0
        def joules(self):
            self.reads += 1
            return 30.0 * self.reads

    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    own = Steps()
    metered = meter_of_rank(torch.device("cpu"), Metering(meter=own))
    clock = EnergyClock(metered.meter, window_s=0.0)
    clock.start()
    told = metered.of_all(clock.read(), total)
    lost = metered.of_all(absent("the counter is gone"), total)
    given = meter_of_rank(torch.device("cpu"), Metering(watts=100))
    found = {"reads": own.reads, "is_reader": metered.is_reader, "joules": told.joules, "lost": lost.joules}
    found |= {"job": metered.job.sources, "own": metered.own.is_absent, "given": given.job.provenance.value}
    with open(f"{folder}/rank-{rank}.json", "w") as file:
        json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_one_meter_is_read_once_and_told_to_all(tmp_path):
    run_ranks(RANK, tmp_path)
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(each["is_reader"], each["reads"], each["own"]) for each in found] == [(True, 2, False), (False, 0, True)]
    assert [(each["joules"], each["lost"]) for each in found] == [(30.0, None)] * 2
    assert [(each["job"], each["given"]) for each in found] == [(["a counter"], "estimated")] * 2
