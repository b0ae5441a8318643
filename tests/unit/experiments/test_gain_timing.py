"""The measured pass: two loops in turns, under the clock and without; and what it says of what it cannot tell."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_task import BATCH_SIZE, load_data
from tiny_task import task as tiny
from torch import nn
from torch.nn import functional as F

from trimtab import Summed
from trimtab.core.serialization import from_json, to_json
from trimtab.core.step_phases import TimedGain
from trimtab.experiments import gain_timing as gain_module
from trimtab.experiments.comparison.compare import step_memory
from trimtab.experiments.gain_timing import gain_in, measure_gain
from trimtab.experiments.phase_attribution import attribute, bound_seconds
from trimtab.measure import machine
from trimtab.measure.blocks import find_blocks
from trimtab.plans.plan import Plan
from trimtab.tasks.models.gpt import GPT, GPTShape

CPU = torch.device("cpu")
ROUNDS = 3


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(gain_module, "_LAP_S", 0.01)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e9, "fp16": 1e6})
    monkeypatch.setattr(machine, "measured_cpu_bandwidth", lambda threads: 1e9)


def measured(task=tiny, plan: Plan | None = None, **how) -> TimedGain:
    return measure_gain(task, load_data(), CPU, plan or Plan.fixed(task.batch_size), rounds=ROUNDS, **how)


def small_gpt() -> nn.Module:
    return GPT(GPTShape(vocab_size=16, context=16, num_layers=3, num_heads=2, width=32))


def token_loss(model, batch):
    tokens = (batch[0] > 0).long()  # (B, T): the points' signs
    return Summed(*model(tokens, tokens))


GPT_TASK = replace(tiny, make_model=small_gpt, loss_fn=token_loss, strong=None)


@pytest.fixture(scope="module")
def found() -> TimedGain:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gain_module, "_LAP_S", 0.01)
        patch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e9, "fp16": 1e6})
        patch.setattr(machine, "measured_cpu_bandwidth", lambda threads: 1e9)
        return measured(plan=Plan.fixed(BATCH_SIZE, 8))


def test_batches_are_copied_ahead_as_in_a_race(monkeypatch):
    """On a GPU data that stays on the host arrives while a step runs; the clock of phases is of that path too."""
    sent = []

    def watched(batches, device):
        sent.append(device)
        return iter(batches)

    monkeypatch.setattr(gain_module, "prefetch", watched)
    measured()
    assert sent == [CPU, CPU]


def test_phases_and_parts_add_up_to_what_the_step_saves(found):
    said = attribute(found)
    total = math.fsum(row.saved.mean for row in (*said.phases, said.unattributed))
    assert total == pytest.approx(said.whole.saved.mean)
    assert said.reference_clock.n == ROUNDS
    for lap in found.plan.laps:
        for phase in ("forward", "backward"):
            parts = [each for name, each in lap.parts.items() if name.split()[0] == phase]
            assert math.fsum(parts) == pytest.approx(lap.seconds[phase])
    assert found.reference.has == found.plan.has == ("data", "forward", "backward", "optimizer", "rest")
    assert len(found.reference.laps) == len(found.plan.laps) == ROUNDS
    assert all(lap.plain_s > 0 for arm in (found.reference, found.plan) for lap in arm.laps)
    assert (found.task, found.num_ranks, found.device.kind) == ("tiny", 1, "cpu")
    assert found.reference.notes == found.plan.notes == (gain_module._ALONE,)
    assert from_json(TimedGain, to_json(found)) == found


def test_roofs_are_of_a_whole_batch_however_it_is_cut(found):
    """The products' FLOP are as many in four micro-batches of 8 rows as in one of 32."""
    theirs, ours = found.reference.roofs, found.plan.roofs
    assert set(theirs) == set(ours) == {"forward", "backward", "optimizer"}
    products = 2 * BATCH_SIZE * (16 * 64 + 64 * 64 + 64 * 4)
    assert theirs["forward"].flops == ours["forward"].flops == products
    assert theirs["backward"].flops == ours["backward"].flops == 2 * products - 2 * BATCH_SIZE * 16 * 64
    assert ours["forward"].moved_bytes > theirs["forward"].moved_bytes  # weights are read four times
    assert "compute-bound" in bound_seconds(found.plan)


def test_what_a_plan_computes_again_is_found_and_what_it_holds_is_less():
    names = find_blocks(small_gpt())
    plan = Plan.fixed(BATCH_SIZE).recomputing("(0) (1) 2", names, "asked for")
    found = measured(GPT_TASK, plan)
    assert "recompute" not in found.reference.has
    assert found.plan.mean_s("recompute") > 0
    saved = {row.phase: row.saved.mean for row in attribute(found).phases}
    assert saved["recompute"] == pytest.approx(-found.plan.mean_s("recompute"))
    assert found.plan.roofs["backward"].flops > 1.2 * found.reference.roofs["backward"].flops
    plan = Plan.fixed(BATCH_SIZE).recomputing("(0) (1) 2", find_blocks(small_gpt()), "asked for")
    kept, again = (step_memory(GPT_TASK, load_data(), CPU, each) for each in (Plan.fixed(BATCH_SIZE), plan))
    assert again.most_bytes["activations"] < 0.8 * kept.most_bytes["activations"]


def test_a_slow_loader_is_found_as_data_in_both_arms():
    """It computes for a while for every batch; nothing here waits."""
    data, square = load_data(), torch.randn(300, 300)

    def augment(batch, draws):
        for _ in range(20):
            square @ square
        return batch

    found = measure_gain(tiny, replace(data, augment=augment), CPU, Plan.fixed(BATCH_SIZE), rounds=2)
    for arm in (found.reference, found.plan):
        assert arm.mean_s("data") > 0.5 * math.fsum(map(arm.mean_s, arm.has))
        assert bound_seconds(arm)["waiting for data"] == pytest.approx(arm.mean_s("data"))


def test_a_compiled_plan_has_phases_without_parts_or_roofs(monkeypatch):
    """Its model runs as one: no hook is put inside what is compiled."""
    monkeypatch.setattr(gain_module, "is_compiled", lambda model: True)
    found = measured()
    assert found.plan.has == ("data", "forward", "backward", "optimizer", "rest")
    assert {name for lap in found.plan.laps for name in lap.parts} == {"forward", "backward"}
    assert found.plan.roofs == {}
    assert gain_module._COMPILED in found.plan.notes
    assert "not known" in bound_seconds(found.plan)


def test_what_a_loop_hides_is_named():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    found = measured(replace(tiny, step=step))
    assert found.reference.has == ("data", "optimizer", "rest")
    assert any("step function" in note for note in found.reference.notes)
    assert "forward" in found.plan.has

    def looks(model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss if float(loss.detach()) < 1e9 else loss * 2

    found = measured(replace(tiny, loss_fn=looks))
    assert found.plan.roofs == {}
    assert any(note.startswith("the roofline bound is unknown: The step cannot be traced") for note in found.plan.notes)
    assert "forward" in found.plan.has


def test_a_device_of_unknown_peaks_has_no_roof(monkeypatch):
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {})
    assert any("not all peaks" in note for note in measured().reference.notes)


def test_the_process_is_left_as_it_was():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    measured()
    assert torch.equal(torch.rand(4), expected)


def test_a_long_pass_has_fewer_rounds(monkeypatch):
    monkeypatch.setattr(gain_module, "_PASS_S", 0.0)
    assert len(measure_gain(tiny, load_data(), CPU, Plan.fixed(BATCH_SIZE)).plan.laps) == 2


def test_a_folder_keeps_its_gain_and_one_that_cannot_be_measured_is_none(tmp_path):
    arguments = tiny, load_data(), CPU
    found = gain_in(tmp_path, *arguments, Plan.fixed(BATCH_SIZE))
    assert gain_in(tmp_path, *arguments, Plan.fixed(BATCH_SIZE)) == found
    (tmp_path / "gain.json").unlink()
    assert gain_in(tmp_path, *arguments, Plan.fixed(2 * BATCH_SIZE).recomputing("0", ("nowhere",), "")) is None
    assert not (tmp_path / "gain.json").exists()
