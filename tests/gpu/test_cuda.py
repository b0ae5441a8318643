"""What only a CUDA device can show. `make gpu-check` runs these; elsewhere they are skipped."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from state_digest import fingerprint
from sync import without_waiting
from torch import nn

import trimtab
from trimtab.adaptive_batch.noise_probes import OverheadBudget
from trimtab.core.recompute_schedule import schedule_of
from trimtab.experiments.phases import StepClock
from trimtab.losses import Summed
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate
from trimtab.profiling.plan_proof import prove
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state import process_state
from trimtab.state.loop_state import LoopState
from trimtab.state.peak_memory import peak_bytes, unused_bytes
from trimtab.techniques.activation_checkpointing import use_schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    body = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 144, 10)]
    model = nn.Sequential(*body).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, (torch.randn(24, 3, 16, 16), torch.randint(0, 10, (24,)))


def loss_fn(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["keep", "channels_last"])
def test_a_run_matches_the_plain_autocast_loop(precision: str, layout: str, request: pytest.FixtureRequest) -> None:
    model, optimizer, batch = make()
    if precision == "fp32":  # Adam's first steps are of one length: rounding would show in the sign of what is small
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for place in process_state.fp32_places():
            request.addfinalizer(partial(setattr, place, "fp32_precision", place.fp32_precision))
            place.fp32_precision = "ieee"
    plain = copy.deepcopy(model)
    plain_optimizer = type(optimizer)(plain.parameters(), lr=optimizer.param_groups[0]["lr"])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with trimtab.start(model, optimizer, Plan.fixed(24, precision=precision, memory_layout=layout)) as run:
        for _ in range(5):
            run.train_step(run.window(batch), loss_fn)
    for _ in range(5):
        plain_optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = loss_fn(plain, [t.cuda() for t in batch])
        loss.backward()
        plain_optimizer.step()
    tolerance = 1e-5 if precision == "fp32" else 6e-3  # AdamW moves 1e-3 a step: rounding may flip a small one's sign
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_modules_in_fp32_match_a_loop_that_disables_autocast(precision: str) -> None:
    model, optimizer, batch = make()
    plain = copy.deepcopy(model)
    inputs = batch[0].cuda()
    with torch.autocast("cuda", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision]):
        features = plain[:5](inputs)
        with torch.autocast("cuda", enabled=False):
            logits = plain[5](features.float())
    assert features.dtype is not logits.dtype is torch.float32
    with trimtab.start(model, optimizer, Plan.fixed(24, precision=precision, fp32_modules="5")) as run:
        with run.autocast():
            found = run.model(inputs)
        assert torch.equal(found, logits)
        run.train_step(run.window(batch), loss_fn)
    assert [type(each) for each in model] == [type(each) for each in plain]


def test_tf32_is_proved_against_fp32() -> None:
    model, optimizer, batch = make()
    subject = TrainingLoop(model, optimizer, loss_fn, batch)
    reference = Candidate(subject.rows)
    modes = [place.fp32_precision for place in process_state.fp32_places()]
    proof = prove(subject, reference.having(precision="tf32"), reference)
    assert (proof.holds, proof.precisions) == (True, ("fp32", "tf32")), proof.reason
    assert [place.fp32_precision for place in process_state.fp32_places()] == modes


@pytest.mark.parametrize("fused", [False, True])
def test_fused_steps_keep_their_counters_on_the_right_device(fused: bool) -> None:
    model, optimizer, batch = make()
    loss_fn(model, [t.cuda() for t in batch]).backward()
    optimizer.step()
    with trimtab.start(model, optimizer, Plan.fixed(24, micro_batch=7, fused_optimizer=fused)) as run:
        run.train_step(run.window(batch), loss_fn)
    optimizer.zero_grad()
    loss_fn(model, [t.cuda() for t in batch]).backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


def test_planning_leaves_no_trace_and_tries_half_precision() -> None:
    model, optimizer, batch = make()
    before = fingerprint(model, optimizer)
    plan = trimtab.plan(model, optimizer, loss_fn, batch)
    assert fingerprint(model, optimizer) == before
    tried = {loser.value for loser in plan.precision.rejected} | {plan.precision.value}
    assert {"fp32", "tf32", "bf16", "fp16"} <= tried


def test_a_snapshot_takes_no_memory_of_the_device() -> None:
    model, optimizer, batch = make()
    loss_fn(model, [t.cuda() for t in batch]).backward()
    optimizer.step()
    model.held = [torch.ones(2**20, device="cuda")]
    before, weights = fingerprint(model, optimizer), torch.cuda.memory_allocated()
    with LoopState(model, optimizer):
        assert torch.cuda.memory_allocated() == weights
        optimizer.step()
        model.held[0].mul_(2)
        assert fingerprint(model, optimizer) != before
    assert fingerprint(model, optimizer) == before


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_count_may_lie_on_either_device(where: str) -> None:
    model, optimizer, batch = make()

    def summed(model: nn.Module, batch: Any) -> Any:
        rows = torch.tensor(len(batch[0]), device=where)
        return Summed(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), rows)

    with trimtab.start(model, optimizer, Plan.fixed(24, micro_batch=7), clip_norm=1.0) as run:
        loss = run.train_step(run.window(batch), summed)
        assert run.applied_steps == 1
        assert torch.isfinite(loss)


def test_peak_memory_counts_what_the_step_allocates() -> None:
    size = 64 * 2**20
    found = peak_bytes(lambda: torch.empty(size, dtype=torch.uint8, device="cuda").sum(), torch.device("cuda"), tuple)
    assert found >= size


def test_a_peak_is_not_of_what_was_let_go_in_a_cycle() -> None:
    def left_behind() -> None:
        held: list[Any] = [torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")]
        held.append(held)

    device = torch.device("cuda")
    before = peak_bytes(lambda: torch.empty(2**20, device="cuda").sum(), device, tuple)
    left_behind()
    after = peak_bytes(lambda: torch.empty(2**20, device="cuda").sum(), device, tuple)
    assert after < before + 128 * 2**20


def test_a_step_does_not_synchronise() -> None:
    model, optimizer, batch = make()
    batch = tuple(t.cuda() for t in batch)
    with trimtab.start(model, optimizer, Plan.fixed(24, micro_batch=6, precision="bf16"), clip_norm=1.0) as run:
        run.train_step(run.window(batch), loss_fn)
        with without_waiting():
            run.train_step(run.window(batch), loss_fn)


@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_a_measured_step_does_not_synchronise_either(policy: str, each_measured: Any) -> None:
    """Norms, their copy to the host and the clock's events are all in the stream; what is decided is a window late."""
    model, optimizer, batch = make()
    batch = tuple(t.cuda() for t in batch)
    rate = "sqrt" if policy == "goodput" else "none"
    rule = trimtab.BatchRule(policy, k=4, k_max=8, learning_rate=rate, min_windows=100)
    with trimtab.start(model, optimizer, Plan.fixed(24, micro_batch=6, batch_rule=rule)) as run:
        for _ in range(4):
            run.train_step(run.window(batch), loss_fn)
        with without_waiting():
            for _ in range(3):
                run.train_step(run.window(batch), loss_fn)
    assert each_measured.closed == 7


@pytest.mark.parametrize("k", [1, 4])
def test_noise_is_measured_as_on_the_host(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late copies, events in the stream of work, norms on the device."""
    monkeypatch.setattr(OverheadBudget, "is_due", lambda self, sparse=0: True)
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Linear(16, 4).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        rule = trimtab.BatchRule("fixed", k=k, k_max=4, learning_rate="none", min_windows=100)
        generator = torch.Generator().manual_seed(1)
        plan = Plan.fixed(8, batch_rule=rule)
        with trimtab.start(model, optimizer, plan) as run:
            for _ in range(60):
                batch = [torch.randn(8, 16, generator=generator) for _ in range(k)]
                run.train_step(run.window(*batch), lambda model, rows: model(rows).square().mean())
            assert run.noise is not None
            found.append((run.noise.trace, run.noise.norm2, run.noise.num_windows))
    assert found[0][2] == found[1][2]
    assert found[1][:2] == pytest.approx(found[0][:2], rel=1e-3)


def test_memory_that_runs_out_is_survived_by_smaller_micro_batches() -> None:
    model = nn.Sequential(nn.Linear(256, 8192), nn.ReLU(), nn.Linear(8192, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(65536, 256)
    with trimtab.start(model, optimizer, Plan.fixed(65536)) as run:
        run.train_step(run.window(batch[:256]), lambda model, rows: model(rows).square().mean())
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 2.5 * 2**30 / total))
        try:
            with pytest.warns(RuntimeWarning, match="out of memory"):
                run.train_step(run.window(batch), lambda model, rows: model(rows).square().mean())
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert run.applied_steps == 2
        assert run.window(batch).micro_batch < 65536


def test_a_peak_tells_what_no_tensor_was_in() -> None:
    """A hole of 40 MiB between two blocks that are held serves nothing larger."""

    def step() -> None:
        blocks = [torch.empty(40 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(3)]
        del blocks[1]
        blocks.append(torch.empty(60 * 2**20, dtype=torch.uint8, device="cuda"))

    found = peak_bytes(step, torch.device("cuda"), tuple)
    unused = unused_bytes(torch.device("cuda"))
    assert unused is not None
    assert 40 * 2**20 <= unused <= found - 140 * 2**20


def test_phases_add_up_to_what_the_stream_took() -> None:
    """By events, without one wait for the device while steps run."""
    model, optimizer, batch = make()
    batch = tuple(each.cuda() for each in batch)
    clock, ends = StepClock(torch.device("cuda")), [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def step() -> None:
        optimizer.zero_grad()
        clock.forward(loss_fn, model, batch).backward()
        optimizer.step()

    step()
    with clock.on(model), without_waiting():
        ends[0].record()
        for _ in range(10):
            step()
        ends[1].record()
    seconds = clock.seconds()
    assert {phase for phase, _ in seconds} == {"forward", "backward", "optimizer", "rest"}
    assert sum(seconds.values()) == pytest.approx(ends[0].elapsed_time(ends[1]) / 1e3, rel=0.05)
    assert ("backward", "Conv2d") in seconds


class Compilable(nn.Module):
    """With a forward of its own: torch compiles nothing of a bare nn.Sequential."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # which a loop in fp32 does not ask for
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compiled_model_learns_what_it_does_as_it_was(precision: str) -> None:
    """Of dropout too, whose masks are drawn as without; 60 windows hold those in which it is checked."""
    torch.manual_seed(0)
    body = [nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(256), nn.Linear(256, 1)]
    model = Compilable(*body).cuda()
    plain = copy.deepcopy(model)
    rows = torch.randn(32, 64)
    losses = []
    for each, compiled in ((model, True), (plain, False)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2)
        with trimtab.start(each, optimizer, Plan.fixed(32, precision=precision, compiled=compiled)) as run:
            for _ in range(60):
                loss = run.train_step(run.window(rows), lambda model, rows: (model(rows) - 1).square().mean())
        losses.append(float(loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if precision == "fp32" else 0.05)


def test_a_plan_of_a_long_run_is_compiled_on_trial() -> None:
    """Of large tensors that are moved again and again, what is fused is worth much of a step.

    The batch lies on the device: from the host it takes longer than all that is computed of it.
    """
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.LayerNorm(2048), nn.GELU(), nn.Tanh())]
    model = Compilable(*layers, nn.Linear(2048, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.randn(16_384, 2048).cuda(), torch.randint(0, 10, (16_384,)).cuda())
    plan = trimtab.plan(model, optimizer, loss_fn, batch, total_steps=50_000)
    assert plan.compiled.value, plan.compiled


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kept", ["~0", "~0[]", "~0[0]", "~0[0-3]"])
def test_a_step_is_the_same_whatever_results_a_block_keeps(kept: str, autocast: bool) -> None:
    """With batch statistics, dropout masks that are drawn again, and attention with dropout."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.dropout(torch.relu(self.norm(self.one(x))), 0.2)
            q, k, v = self.two(y).view(8, 16, 3, 2, 32).permute(2, 0, 3, 1, 4)
            z = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            return x + nn.functional.gelu(z.transpose(1, 2).reshape(128, 64))

    def steps(text: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Block()).cuda().train()
        undo = use_schedule(model, ["0"], schedule_of(text, 1))
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(128, 64, device="cuda")).square().mean()
            loss.backward()
        undo()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    for ours, theirs in zip(steps(kept), steps("0"), strict=True):
        torch.testing.assert_close(ours, theirs)  # The backward of attention adds in any order.
