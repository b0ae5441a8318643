"""A window that is no number is void: it is skipped once, or stopped at, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import math

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import NonFiniteError, UsageError
from trimtab.plans.plan import Plan
from trimtab.techniques import mixed_precision
from trimtab.training.nonfinite import PATIENCE, NonFinitePolicy

ROWS, WINDOWS, BAD = 8, 6, 3


pytestmark = pytest.mark.filterwarnings("ignore:The backward of Poison receives gradients multiplied by the loss scale")


class Poison(torch.autograd.Function):
    """The identity, with a gradient that is no number."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Loop:
    """Dropout and batch statistics; regression, so that a label may be no number too."""

    def __init__(self, place: str = "", value: float = math.nan):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            [torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator)]
            for _ in range(WINDOWS)
        ]
        if place in ("input", "label"):
            self.batches[BAD][("input", "label").index(place)][2] = value
        self.place, self.value, self.window = place, value, -1

    def loss(self, model, batch):
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        if self.window == BAD and self.place == "loss":
            return loss * self.value
        return Poison.apply(loss, self.value) if self.window == BAD and self.place == "gradient" else loss

    def train(self, run, stop_at=WINDOWS):
        torch.manual_seed(2)
        for window in run.windows(self.batches[:stop_at]):
            self.window += 1
            run.train_step(window, self.loss)

    def tensors(self):
        found = dict(self.model.state_dict())
        for index, each in enumerate(self.optimizer.state.values()):
            found |= {f"{index}.{name}": value for name, value in each.items()}
        return found


def skipping_by_hand(place: str, value: float) -> Loop:
    """Train the plain loop, which does not see the bad batch but for its random numbers."""
    loop = Loop(place, value)
    torch.manual_seed(2)
    for index, batch in enumerate(loop.batches):
        if index == BAD:
            for half in zip(*(part.split(4) for part in batch), strict=True):
                copy.deepcopy(loop.model)(half[0])
            continue
        loop.optimizer.zero_grad()
        for half in zip(*(part.split(4) for part in batch), strict=True):
            (loop.loss(loop.model, half) * 0.5).backward()
        loop.optimizer.step()
    return loop


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["input", "label", "loss", "gradient"])
def test_a_window_that_is_no_number_is_skipped_once(place, value):
    ours, plain = Loop(place, value), skipping_by_hand(place, value)
    with trimtab.start(ours.model, ours.optimizer, Plan.fixed(ROWS, 4), nonfinite="skip") as run:
        ours.train(run)
    assert (run.applied_steps, run.consumed_samples) == (WINDOWS - 1, WINDOWS * ROWS)
    theirs = plain.tensors()
    for name, tensor in ours.tensors().items():
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, theirs[name]), name


def test_without_putting_buffers_back_batch_statistics_would_be_lost(monkeypatch):
    """So that the test above can fail."""
    monkeypatch.setattr("trimtab.training.window_snapshot.WindowSnapshot.restore_skipped", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_window_that_is_no_number_is_skipped_once("input", math.nan)


def test_a_plain_loop_loses_everything_in_one_step():
    loop = Loop("input")
    with (
        pytest.warns(RuntimeWarning, match="non-finite"),
        trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, 4)) as run,
    ):
        loop.train(run)
    assert not torch.isfinite(loop.model[0].weight).any()


@pytest.mark.parametrize("place", ["input", "label", "loss", "gradient"])
def test_a_run_told_to_stop_stands_as_before_the_window(place):
    ours, before = Loop(place), Loop(place)
    with trimtab.start(before.model, before.optimizer, Plan.fixed(ROWS, 4)) as run:
        before.train(run, stop_at=BAD)
    with trimtab.start(ours.model, ours.optimizer, Plan.fixed(ROWS, 4), nonfinite="stop") as run:
        with raises(NonFiniteError, code="step.nonfinite", field="gradient"):
            ours.train(run)
        assert (run.applied_steps, run.consumed_samples) == (BAD, BAD * ROWS)
        stands = ours.tensors()
        for name, tensor in before.tensors().items():
            assert torch.equal(tensor, stands[name]), name
        ours.place = ""
        run.train_step(run.window(ours.batches[BAD + 1]), ours.loss)  # and it goes on where that is wanted
        assert run.applied_steps == BAD + 1


def test_a_run_that_only_skips_stops_with_the_likely_cause():
    loop = Loop()
    for batch in loop.batches:
        batch[0][0] = math.nan
    loop.batches *= 10
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS), nonfinite="skip") as run:
        with raises(NonFiniteError, code="step.nonfinite", field="gradient"):
            loop.train(run, stop_at=60)
        assert (run.applied_steps, run.consumed_samples) == (0, PATIENCE * ROWS)


def scaled_by_hand() -> tuple[Loop, list[float]]:
    """Train the plain fp16 loop, whose bad window overflows; what torch's scaler does not, it puts buffers back then.

    Returns the loop, and the loss scale before each window and in the end.
    """
    loop, scaler, scales = Loop("gradient"), torch.amp.GradScaler("cpu"), []
    torch.manual_seed(2)
    for index, batch in enumerate(loop.batches):
        loop.window = index
        before, scale = [buffer.clone() for buffer in loop.model.buffers()], scaler.get_scale()
        loop.optimizer.zero_grad()
        for half in zip(*(part.split(4) for part in batch), strict=True):
            with torch.autocast("cpu", torch.float16):
                loss = loop.loss(loop.model, half)
            scaler.scale(loss * 0.5).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        scales.append(scale)
        if scaler.get_scale() < scale:
            for buffer, value in zip(loop.model.buffers(), before, strict=True):
                buffer.copy_(value)
    return loop, [*scales, scaler.get_scale()]


def test_an_fp16_overflow_of_dropout_and_batch_statistics_is_skipped_once():
    ours, (plain, scales) = Loop("gradient"), scaled_by_hand()
    skipped = [index for index in range(WINDOWS) if scales[index + 1] < scales[index]]
    assert BAD in skipped
    assert len(skipped) < WINDOWS - 1
    with trimtab.start(ours.model, ours.optimizer, Plan.fixed(ROWS, 4, precision="fp16")) as run:
        ours.train(run)
        assert (run.applied_steps, run.loss_scale) == (WINDOWS - len(skipped), scales[-1])
    theirs = plain.tensors()
    for name, tensor in ours.tensors().items():
        assert torch.equal(tensor, theirs[name]), name


def overflowing(model, batch):
    """A loss that is a number, with gradients that overflow fp16 at any scale."""
    out = model(batch[0])
    return (out * 0).mean() + Poison.apply(out.float().mean(), math.inf)


def test_fp16_that_overflows_at_every_scale_is_left_for_a_wider_precision(tmp_path):
    loop = Loop()
    wider = mixed_precision.fp16_replacement(torch.device("cpu"))
    with trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer:
        run = trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, precision="fp16"), record=writer)
        with run:
            buffers = {name: value.clone() for name, value in loop.model.named_buffers()}
            for _ in range(21):
                run.train_step(run.window(loop.batches[0]), overflowing)
            assert run.applied_steps == 0
            assert str(run.plan.precision.value) == wider
            assert "gradients overflow at a loss scale of" in run.plan.precision.reason
            assert run.loss_scale is None
            for name, value in loop.model.named_buffers():
                assert torch.equal(value, buffers[name])
            run.train_step(run.window(loop.batches[0]), loop.loss)
            assert run.applied_steps == 1
    (event,) = trimtab.read_record(tmp_path / "run.jsonl").events
    assert (event.name, event.detail["from"], event.detail["to"]) == ("precision", "fp16", wider)


def test_fp16_on_a_loss_that_is_no_number_stops_instead_of_stepping_silently():
    loop = Loop()
    for batch in loop.batches:
        batch[1][:] = math.nan
    loop.batches *= 10
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, precision="fp16")) as run:
        with raises(NonFiniteError, code="step.nonfinite", field="gradient"):
            loop.train(run, stop_at=60)
        assert (run.applied_steps, run.consumed_samples) == (0, PATIENCE * ROWS)


def test_bad_data_does_not_lower_the_loss_scale():
    """One window in three is no number; by its loss it is not fp16 that failed."""
    loop = Loop()
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, precision="fp16")) as run:
        while run.applied_steps == 0:
            run.train_step(run.window(loop.batches[0]), loop.loss)
        settled = run.loss_scale
        for index in range(60):
            batch = [part.clone() for part in loop.batches[index % WINDOWS]]
            batch[1][0] = math.nan if index % 3 == 0 else 0.5
            run.train_step(run.window(batch), loop.loss)
        assert run.applied_steps == 41
        assert run.loss_scale == settled


def test_where_fp16_was_left_gradients_that_are_no_numbers_are_still_skipped():
    """The loss is a number and its gradient is none at any precision: fp16 was not the cause."""
    loop = Loop()
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, precision="fp16")) as run:
        loop.batches, loop.loss = loop.batches[:1] * 60, overflowing
        with raises(NonFiniteError, code="step.nonfinite", field="gradient"):
            loop.train(run, stop_at=60)
        assert run.plan.precision.value != "fp16"
        assert run.applied_steps == 0
    for name, tensor in loop.tensors().items():
        assert torch.isfinite(tensor).all(), name


def weightless(model, batch):
    """A loss that is no number, of which no gradient comes: as a mean over labels that are all ignored."""
    return model(batch[0]).sum() * 0 + math.nan


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_a_loss_that_is_no_number_is_seen_where_its_gradient_is_one(precision, policy):
    loop = Loop()
    plan = Plan.fixed(ROWS, precision=precision)
    with trimtab.start(loop.model, loop.optimizer, plan, nonfinite=policy) as run:
        run.train_step(run.window(loop.batches[0]), loop.loss)
        before, scale, steps = copy.deepcopy(loop.tensors()), run.loss_scale, run.applied_steps
        with (
            contextlib.nullcontext()
            if policy == "skip"
            else raises(NonFiniteError, code="step.nonfinite", field="gradient")
        ):
            run.train_step(run.window(loop.batches[1]), weightless)
        for name, tensor in loop.tensors().items():
            assert torch.equal(tensor, before[name]), name
        assert run.loss_scale == scale
        loop.place = ""
        run.train_step(run.window(loop.batches[0]), loop.loss)
        assert run.applied_steps == steps + 1


def test_fp16_that_overflows_half_the_time_is_left():
    voids, number = NonFinitePolicy(None), torch.tensor(1.0)
    for index in range(64):
        voids.note(number, applied=index % 2 == 0)
    cause = voids.outlasts(1024.0, number)
    assert cause.code == "fp16.overflows"
    assert cause.reason.startswith("50% ")
    calm = NonFinitePolicy(None)
    for index in range(200):
        calm.note(number, applied=index % 10 != 0)
    assert calm.outlasts(1024.0, number) is None


def test_data_that_is_no_number_does_not_count_as_overflow():
    voids = NonFinitePolicy(None)
    for index in range(64):
        voids.note(torch.tensor(math.nan), applied=index % 2 == 0, has_bad_data=lambda: True)
    assert voids.outlasts(1024.0, torch.tensor(1.0)) is None


class Huge(nn.Module):
    """Its forward goes beyond fp16 in one window of so many, and comes back to numbers of one."""

    def __init__(self, one_in=1):
        super().__init__()
        self.first, self.last, self.one_in, self.calls = nn.Linear(6, 16), nn.Linear(16, 1), one_in, 0

    def forward(self, x):
        factor = 1e6 if self.calls % self.one_in == 0 else 1.0
        self.calls += 1
        return self.last(factor * self.first(x)).float() / factor


@pytest.mark.parametrize("one_in", [1, 3])
def test_a_forward_beyond_fp16_is_computed_in_a_wider_precision(one_in):
    """No loss scale mends it, and the data are not to blame: bf16 and fp32 hold such values."""
    loop = Loop()
    torch.manual_seed(0)
    loop.model = Huge(one_in)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    loop.batches *= 20
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, precision="fp16")) as run:
        loop.train(run, stop_at=100)
        assert run.plan.precision.value == mixed_precision.fp16_replacement(torch.device("cpu"))
        assert "non-finite" in run.plan.precision.reason
        assert run.applied_steps >= (90 if one_in == 1 else 70)
    assert all(torch.isfinite(p).all() for p in loop.model.parameters())


def beyond_fp16(windows, state=None):
    """Return a run's state after windows whose forward is beyond fp16, its precision, and its losses."""
    loop = Loop()
    torch.manual_seed(0)
    loop.model = Huge()
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    with trimtab.start(loop.model, optimizer, Plan.fixed(ROWS, precision="fp16")) as run:
        if state is not None:
            run.load_state_dict(state)
        losses = [float(run.train_step(run.window(loop.batches[0]), loop.loss)).hex() for _ in range(windows)]
        return run.state_dict(), run.plan.precision.value, losses


def test_windows_that_were_lost_before_a_resume_count_towards_leaving_fp16():
    saved, before, lost = beyond_fp16(7)
    assert (before, set(lost)) == ("fp16", {"nan"})  # and so the weights are those of the start
    _, left, whole = beyond_fp16(12)
    assert left != "fp16"
    _, after, rest = beyond_fp16(5, saved)
    assert (after, rest) == (left, whole[7:])


def test_overflows_do_not_use_up_the_patience_with_skipped_windows():
    voids = NonFinitePolicy("skip")
    for _ in range(2 * PATIENCE):
        voids.note(torch.tensor(1.0), applied=False)
    assert voids.in_a_row == 0


def test_one_of_several_ranks_decides_by_what_all_of_them_know():
    """Its own loss is not known to the others; the reduced gradient is."""
    number, none = torch.tensor(1.0), torch.tensor(math.nan)
    voids = NonFinitePolicy("skip", is_alone=False)
    assert not voids.is_void(number, none, scaled=False)
    assert voids.is_void(none, number, scaled=False)
    assert not voids.is_void(number, none, scaled=True)
    assert voids.outlasts(2.0**-10, none).code == "fp16.overflows_at_any_scale"


def test_an_unknown_policy_is_refused_and_nothing_changed():
    loop = Loop()
    for options in ({"nonfinite": "ignore"}, {"out_of_memory": "retry"}, {"stop": 3}):
        with pytest.raises(UsageError):
            trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS), **options)
    trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS)).close()


def test_the_counts_are_saved():
    voids, other = NonFinitePolicy("skip"), NonFinitePolicy("skip")
    for index in range(30):
        voids.note(torch.tensor(1.0), applied=index % 3 != 0)
    other.load_state_dict(voids.state_dict())
    assert other.state_dict() == voids.state_dict()
    with pytest.raises(UsageError):
        other.load_state_dict(voids.state_dict() | {"total": -1})
