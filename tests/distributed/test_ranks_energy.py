"""Two ranks over gloo on one machine: one of them reads the processor, and both are told one sum."""

from __future__ import annotations

from ranks import run_cases

RANK = """
    from trimtab.core.energy_reading import Energy, Provenance, absent_energy
    from trimtab.distributed.rank_energy import meter_of_rank
    from trimtab.distributed.process_group import total
    from trimtab.energy.energy_meter import WINDOW_S, EnergyClock
    from trimtab.energy.meter_selection import Metering

    metered = meter_of_rank(torch.device("cpu"), Metering(watts=15))
    read = Energy(2.0, 30.0, Provenance.ESTIMATED, ("15 W",))
    own = read if metered.is_reader else absent_energy("another rank reads it")
    lost = absent_energy("the counter is gone") if metered.is_reader else own
    found = {"reads": metered.is_reader, "absent": metered.own.is_absent, "job": metered.job.sources}
    found["joules"], found["lost"] = metered.of_all(own, total).joules, metered.of_all(lost, total).joules
    counter = folder.parent / "tree" / "intel-rapl:0" / "energy_uj"
    shared = meter_of_rank(torch.device("cpu"), Metering(root=counter.parents[1]))
    clock = EnergyClock(shared.meter)
    clock.start()
    dist.barrier()
    if rank == 1:
        counter.write_text("51000000")
    dist.barrier()
    while clock.seconds < WINDOW_S:
        time.sleep(WINDOW_S / 4)
        clock.tick()
    energy = shared.of_all(clock.read(), total)
    found["counted"] = [shared.is_reader, shared.job.sources, energy.joules, energy.provenance.value]
    nothing = meter_of_rank(torch.device("cpu"), Metering(root=folder / "powercap"))
    found["nothing"] = [nothing.job.is_absent, nothing.of_all(own, total).joules]
"""


def test_one_meter_is_read_once_and_told_to_all(tmp_path):
    zone = tmp_path / "tree" / "intel-rapl:0"
    zone.mkdir(parents=True)
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "262143000000"), ("energy_uj", "1000000")):
        (zone / name).write_text(text)
    (found,) = run_cases(RANK, tmp_path, "all")
    assert [each["reads"] for each in found] == [True, False]
    assert [each["absent"] for each in found] == [False, True]
    assert [each["job"] for each in found] == [["15 W, as given"]] * 2
    assert [(each["joules"], each["lost"]) for each in found] == [(30.0, None)] * 2
    assert [each["nothing"] for each in found] == [[True, None]] * 2
    # One counter of the machine, which both keep busy: its 50 joules are the job's, and not twice.
    counted = [["rapl package-0"], 50.0, "measured"]
    assert [each["counted"] for each in found] == [[True, *counted], [False, *counted]]
