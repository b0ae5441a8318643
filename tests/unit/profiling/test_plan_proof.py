"""The proof of a plan: right applications of settings hold, planted faults are found, moved weights are restored."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import replace

import pytest
import torch
from call_counts import OutOfReach
from small_loops import class_loss, sgd
from state_digest import fingerprint
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab import Summed
from trimtab.core.choice import Proof
from trimtab.core.errors import InfeasibleError
from trimtab.nn import LossHead
from trimtab.plans.profile import Candidate
from trimtab.profiling import plan_proof, rounding_tolerance
from trimtab.profiling.plan_proof import prove, refuted_settings
from trimtab.profiling.rounding_tolerance import last_bits_moved
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.settings import SEARCHED
from trimtab.state.loop_state import LoopState
from trimtab.state.peak_memory import peak_growth
from trimtab.techniques import optimizers
from trimtab.techniques.optimizer_in_backward import StepInBackward
from trimtab.training import accumulation, run

pytestmark = pytest.mark.slow

ROWS, WORDS = 8, 29


class Block(nn.Module):
    """A convolution with batch statistics would refuse a split, so the normalisation keeps a running mean by hand."""

    def __init__(self, width, dropout):
        super().__init__()
        self.convolution = nn.Conv2d(width, width, (3, 1), padding=(1, 0))
        self.norm = nn.GroupNorm(2, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(F.gelu(self.norm(self.convolution(x))))


class Net(nn.Module):
    """Token ids to logits, with convolutions, dropout and a loss head: every setting applies to it."""

    def __init__(self, width=16, dropout=0.2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(3))
        self.head = LossHead(width, WORDS)

    def forward(self, ids, targets):
        x = self.embedding(ids).permute(0, 2, 1).unsqueeze(-1)
        for block in self.blocks:
            x = block(x)
        loss_sum, count = self.head.loss(x.squeeze(-1).permute(0, 2, 1), targets)
        return Summed(loss_sum, count)


class Statistics(nn.Module):
    """A small image model with batch normalisation: its buffers move in every forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


def counted_loss(model, batch):
    return model(*batch)


def mean_loss(model, batch):
    found = model(*batch)
    return found.loss_sum / found.count


def text(loss_fn=counted_loss):
    model = Net()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (ROWS, 12), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return TrainingLoop(model, optimizer, loss_fn, (ids, ids.roll(1, 1)))


def images():
    model = Statistics()
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(ROWS, 3, 8, 8, generator=generator), torch.randint(0, 4, (ROWS,), generator=generator)
    return TrainingLoop(model, sgd(model, momentum=0.9), class_loss, batch)


REFERENCE = Candidate(ROWS)
VALUES = {
    "micro_batch": 3,
    "recompute": "every_block",
    "fused_optimizer": True,
    "loss_chunk": 20,
    "memory_layout": "channels_last",
    "precision": "bf16",
    "allocator": "retain",
}
EVERYTHING = replace(REFERENCE, **VALUES)
EACH = VALUES | {"compiled": True}
EARLY = replace(REFERENCE, step_in_backward=True)  # A fault planted by a hook would keep the step out of the backward.


def candidate_of(setting):
    return replace(REFERENCE, **{setting: EACH[setting]})


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """Compile by capturing graphs alone: kernels would take a C++ compiler seconds each."""
    compile_by = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: compile_by(module, backend="eager"))
    yield
    torch._dynamo.reset()


# Right applications


@pytest.mark.parametrize("setting", EACH)
def test_a_right_application_holds(setting):
    proof = prove(text(), candidate_of(setting), REFERENCE)
    assert (proof.holds, proof.code) == (True, "proof.holds"), proof.reason
    assert proof.settings == (setting,)
    assert proof.worst <= 1


def test_all_settings_together_hold_in_both_precisions():
    proof = prove(text(), EVERYTHING, REFERENCE)
    assert proof.holds, proof.reason
    assert proof.settings == tuple(
        sorted(VALUES, key=lambda name: (SEARCHED[name].blamed_last, [*SEARCHED].index(name)))
    )
    assert proof.precisions == ("fp32", "bf16")


@pytest.mark.parametrize("setting", ["memory_layout", "fused_optimizer", "precision", "allocator", "recompute"])
def test_batch_statistics_are_compared_too(setting):
    proof = prove(images(), candidate_of(setting), REFERENCE)
    assert proof.holds, proof.reason


def test_a_split_of_batch_statistics_does_not_hold():
    proof = prove(images(), candidate_of("micro_batch"), REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.differs")


def test_a_long_step_is_proved_on_fewer_samples():
    seen = OutOfReach(rows=set())
    subject = text()

    def loss_fn(model, batch):
        seen.held.rows.add(len(batch[0]))
        return model(*batch)

    assert prove(replace(subject, loss_fn=loss_fn), candidate_of("micro_batch"), REFERENCE, step_s=2.0).holds
    assert max(seen.held.rows) == 4


def test_a_learning_rate_of_zero_does_not_hide_the_step():
    subject = text()
    subject.optimizer.param_groups[0]["lr"] = 0.0
    assert prove(subject, candidate_of("fused_optimizer"), REFERENCE).holds
    assert subject.optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize("make", [text, images])
def test_the_proof_leaves_no_trace(make):
    subject = make()
    before = fingerprint(subject.model, subject.optimizer)
    prove(subject, EVERYTHING if make is text else candidate_of("micro_batch"), REFERENCE)
    assert fingerprint(subject.model, subject.optimizer) == before


def test_a_loop_that_cannot_be_repeated_is_unproved():
    def loss_fn(model, batch):
        return mean_loss(model, batch) * (1 + int.from_bytes(os.urandom(2)) / 2**16)

    proof = prove(text(loss_fn), candidate_of("fused_optimizer"), REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.not_reproducible")


# Planted faults


def weigh_alike(self, loss, rows):
    weighted = loss / self._num_micro_batches
    self._add(weighted.detach())
    return weighted


def wrong_weight(model, optimizer):
    """The forward sees one weight changed."""
    weight = next(model.parameters())
    with torch.no_grad():
        weight.mul_(1.01)
    return lambda: None


def stale_statistic(model, optimizer):
    """A buffer is put back to what it was before every forward."""
    module = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    before = module.running_mean.clone()

    def put_back(*_):
        module.running_mean.data.copy_(before)

    return module.register_forward_hook(put_back).remove


def other_random_numbers(model, optimizer):
    """Masks are drawn from another seed."""
    return model.register_forward_pre_hook(lambda *_: torch.manual_seed(99) and None).remove


def untrained_parameter(model, optimizer):
    """One parameter gets no gradient."""
    parameter = list(model.parameters())[2]
    parameter.requires_grad_(False)
    return lambda: parameter.requires_grad_(True)


def one_layer_only(model, optimizer):
    """One layer's gradient is a tenth too large."""
    parameter = list(model.parameters())[-1]

    def enlarge(*_):
        parameter.grad.mul_(1.1)

    return optimizer.register_step_pre_hook(enlarge).remove


FAULTS = (wrong_weight, other_random_numbers, untrained_parameter, one_layer_only)


@pytest.fixture
def planted(monkeypatch):
    """Plant a fault in the application of a setting: it is there while a run's plan has the setting."""
    applied = run.apply_plan

    def plant(setting, fault):
        def broken(model, called, optimizer, plan, *args, **options):
            undo = applied(model, called, optimizer, plan, *args, **options)
            is_on = plan.splits if setting == "micro_batch" else getattr(plan, setting).value == EACH[setting]
            if is_on:
                remove = fault(model, optimizer)
                undo.callback(remove)
            return undo

        monkeypatch.setattr(run, "apply_plan", broken)

    return plant


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("setting", EACH)
def test_no_planted_fault_escapes(planted, setting, fault):
    if setting in ("memory_layout", "compiled") and fault is other_random_numbers:
        pytest.skip("compiled kernels, and another order in memory, draw other masks by their nature")
    planted(setting, fault)
    proof = prove(text(), candidate_of(setting), REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.differs"), proof.reason


@pytest.mark.parametrize(
    "setting", ["memory_layout", "fused_optimizer", "precision", "allocator", "recompute", "compiled"]
)
def test_a_stale_statistic_does_not_escape(planted, setting):
    planted(setting, stale_statistic)
    proof = prove(images(), candidate_of(setting), REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.differs")


@pytest.mark.parametrize("setting", [name for name in VALUES if name != "precision"])
def test_the_setting_is_found_by_leaving_settings_out(planted, setting):
    planted(setting, one_layer_only)
    assert refuted_settings(text(), EVERYTHING, REFERENCE) == (setting,)


def test_two_faults_are_found_together(planted, monkeypatch):
    planted("recompute", untrained_parameter)
    first = run.apply_plan

    def both(model, called, optimizer, plan, *args, **options):
        undo = first(model, called, optimizer, plan, *args, **options)
        if plan.fused_optimizer.value:
            undo.callback(one_layer_only(model, optimizer))
        return undo

    monkeypatch.setattr(run, "apply_plan", both)
    assert set(refuted_settings(text(), EVERYTHING, REFERENCE)) == {"recompute", "fused_optimizer"}


@pytest.mark.parametrize("rate", [1e-3, 1e-4, 1e-9, 0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_never_move_do_not_escape(planted, dtype, rate):
    def never_move(model, optimizer):
        before = [p.detach().clone() for p in model.parameters()]
        return optimizer.register_step_post_hook(lambda *_: torch._foreach_copy_(_data(model), before)).remove

    subject = text()
    subject.model.to(dtype)
    subject.optimizer.param_groups[0]["lr"] = rate
    planted("allocator", never_move)
    assert not prove(subject, candidate_of("allocator"), REFERENCE).holds


def _data(model):
    return [p.data for p in model.parameters()]


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_a_mask_that_is_not_finite_is_no_difference(value):
    subject = text()
    subject.model.register_buffer("mask", torch.full((4, 4), value).triu(1))
    assert prove(subject, EVERYTHING, REFERENCE).holds
    subject = masked(lambda model, batch: model(batch)[:, 0].mean())
    subject.optimizer.param_groups[0]["lr"] = 0.1
    assert prove(subject, candidate_of("micro_batch"), REFERENCE).code == "proof.holds"


def test_a_loss_that_checks_its_values_is_proved():
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(ROWS, 3, 8, 8, generator=generator), torch.rand(ROWS, 4, generator=generator).softmax(1)

    def loss_fn(model, batch):
        if not torch.allclose(batch[1].sum(1), torch.ones(len(batch[1]))):
            raise ValueError("soft labels must sum to 1")
        return F.cross_entropy(model(batch[0]), batch[1])

    proof = prove(replace(images(), loss_fn=loss_fn, batch=batch), candidate_of("fused_optimizer"), REFERENCE)
    assert proof.holds, proof.reason


@pytest.mark.usefixtures("brief_trials")
def test_a_proof_that_fails_itself_refuses_all_settings(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no copy")

    monkeypatch.setattr(plan_proof, "_planned_steps", broken)
    monkeypatch.setattr(plan_proof, "_failed", broken)
    subject = text()
    plan = trimtab.plan(subject.model, subject.optimizer, subject.loss_fn, subject.batch, num_blocks=3)
    assert not plan.changes
    assert plan.proof is None or not plan.proof.holds


# Faults as they happen in an implementation


@pytest.mark.parametrize("step_s", [None, 2.0])
def test_micro_batches_that_weigh_alike_are_caught(monkeypatch, step_s):
    """The mean of means instead of the mean over samples: the split is 3, 3 and 2; a long step has fewer samples."""
    monkeypatch.setattr(accumulation.WindowWeights, "_weigh_mean", weigh_alike)
    given = {} if step_s is None else {"step_s": step_s}
    assert not prove(text(mean_loss), candidate_of("micro_batch"), REFERENCE, **given).holds


def test_sums_divided_by_the_first_count_are_caught(monkeypatch):
    monkeypatch.setattr(accumulation.WindowWeights, "correction", 1.0)
    assert not prove(text(), candidate_of("micro_batch"), REFERENCE).holds


def test_recomputation_with_other_masks_is_caught(monkeypatch):
    from trimtab.techniques import activation_checkpointing

    checkpoint = activation_checkpointing.checkpoint
    monkeypatch.setattr(
        activation_checkpointing,
        "checkpoint",
        lambda *args, **options: checkpoint(*args, **(options | {"preserve_rng_state": False})),
    )
    assert not prove(text(), candidate_of("recompute"), REFERENCE).holds
    assert not prove(text(), replace(candidate_of("recompute"), micro_batch=3), REFERENCE).holds


def test_a_fused_step_that_leaves_a_parameter_out_is_caught(monkeypatch):
    use_fused = optimizers.use_fused

    def broken(optimizer):
        undo = use_fused(optimizer)
        hook = optimizer.register_step_pre_hook(
            lambda *_: optimizer.param_groups[0]["params"][3].__setattr__("grad", None)
        )
        return lambda: (hook.remove(), undo())

    monkeypatch.setattr(optimizers, "use_fused", broken)
    assert not prove(text(), candidate_of("fused_optimizer"), REFERENCE).holds


@pytest.mark.parametrize("part", ["gradient", "update"])
def test_an_early_step_of_a_wrong_gradient_or_without_an_update_is_caught(monkeypatch, part):
    def update(hooks, parameter):
        if part == "gradient" and parameter.dim() == 2:
            parameter.grad *= 0.5
        if part == "update" and parameter.dim() == 2:
            parameter.grad = None
        else:
            whole(hooks, parameter)

    whole = StepInBackward.update
    monkeypatch.setattr(StepInBackward, "update", update)
    proof = prove(text(), EARLY, REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.differs")


def test_both_steps_of_a_proof_are_within_the_backward_pass(monkeypatch):
    seen = []
    whole = StepInBackward.update
    monkeypatch.setattr(StepInBackward, "update", lambda hooks, p: (seen.append(p), whole(hooks, p)))
    subject = text()
    assert prove(subject, EARLY, REFERENCE).holds
    trained = [p for p in subject.model.parameters() if p.requires_grad]
    assert all(sum(each is p for each in seen) >= 2 for p in trained)


def test_a_precision_that_changes_what_one_layer_computes_is_caught(monkeypatch):
    """The plan's forward runs under an autocast that is switched off for the plain loop."""
    subject = text()
    autocast = run.MixedPrecision.autocast
    block = subject.model.blocks[1]
    forward, is_planned = block.forward, []

    @contextlib.contextmanager
    def noted(self):
        is_planned.append(True)
        with autocast(self):
            yield
        is_planned.clear()

    monkeypatch.setattr(block, "forward", lambda x: forward(x) * (0.8 if is_planned else 1.0))
    monkeypatch.setattr(run.MixedPrecision, "autocast", noted)
    assert not prove(subject, candidate_of("precision"), REFERENCE).holds


def test_gradients_left_scaled_are_caught(monkeypatch):
    monkeypatch.setattr(run.UserBackend, "backward", lambda self, loss: (loss * 2).backward())
    assert not prove(text(), candidate_of("precision"), REFERENCE).holds


def test_a_proof_holds_one_copy_of_the_training_state():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    subject = TrainingLoop(model, optimizer, lambda model, batch: model(batch).square().mean(), torch.randn(ROWS, 512))
    state = 4 * sum(p.nbytes for p in model.parameters())  # with gradients and two moments
    with LoopState(model, optimizer) as start:
        grown = peak_growth(lambda: prove(subject, candidate_of("fused_optimizer"), REFERENCE, None, start))
    own = state  # gradients and moments of the loop itself, and one tensor in double precision
    assert grown < own + 1.1 * state


def made_nan(model, batch):
    return (model(batch) * float("nan")).mean()


def infinite_after_a_step(model, batch):
    return model(batch).square().sum() * 1e30


class Masked(nn.Module):
    """Holds a mask of infinities, as causal attention does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
        self.register_buffer("unset", torch.full((2,), float("nan")))

    def forward(self, x):
        return (self.linear(x).unsqueeze(1) + self.mask).softmax(-1).mean(1)


def masked(loss_fn):
    torch.manual_seed(1)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e20)
    return TrainingLoop(model, optimizer, loss_fn, torch.rand(ROWS, 8))


@pytest.mark.parametrize("setting", [None, "micro_batch", "fused_optimizer", "precision"])
@pytest.mark.parametrize("loss_fn", [made_nan, infinite_after_a_step])
def test_a_loop_that_is_not_finite_proves_nothing(loss_fn, setting):
    candidate = REFERENCE if setting is None else candidate_of(setting)
    proof = prove(masked(loss_fn), candidate, REFERENCE)
    assert (proof.holds, proof.code) == (False, "proof.nonfinite"), proof.reason
    if loss_fn is made_nan and setting is None:
        subject = masked(made_nan)
        with pytest.raises(InfeasibleError):  # and without a warning, which would be an error
            trimtab.plan(subject.model, subject.optimizer, made_nan, subject.batch)


@pytest.mark.usefixtures("brief_trials")
def test_a_loop_that_diverges_in_the_proof_alone_is_planned_unchanged_with_one_warning(monkeypatch):
    monkeypatch.setattr(plan_proof._Judge, "non_finite", lambda self: "linear.weight")
    subject = text()
    before = fingerprint(subject.model, subject.optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = trimtab.plan(subject.model, subject.optimizer, counted_loss, subject.batch, num_blocks=3)
    assert (plan.proof.holds, plan.proof.code, plan.proof.settings) == (False, "proof.nonfinite", ())
    assert [each.category for each in caught] == [RuntimeWarning]
    assert fingerprint(subject.model, subject.optimizer) == before


def test_the_setting_that_makes_a_loop_infinite_is_the_cause(monkeypatch):
    """Only in bf16 the plain loop is not finite: the other settings are kept."""
    known = plan_proof._compared

    def compared(steps, changed):
        if steps.precision == "bf16":
            return plan_proof.Proof(False, "", "proof.nonfinite", changed)
        return known(steps, changed)

    monkeypatch.setattr(plan_proof, "_compared", compared)
    tried = replace(REFERENCE, precision="bf16", micro_batch=3)
    assert prove(text(), tried, REFERENCE).code == "proof.nonfinite"
    assert refuted_settings(text(), tried, REFERENCE) == ("precision",)


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@pytest.mark.parametrize(("function", "holds"), [(Clamp, False), (Double, True)])
def test_a_backward_that_is_not_linear_does_not_pass_under_a_loss_scale(function, holds):
    def loss_fn(model, batch):
        return F.cross_entropy(function.apply(model(batch[0])), batch[1])

    subject = replace(images(), loss_fn=loss_fn)
    assert prove(subject, candidate_of("precision"), REFERENCE).holds
    assert prove(subject, replace(REFERENCE, precision="fp16"), REFERENCE).holds is holds


def tied_by_storage():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight.data = model[0].weight.data
    return model


def overlapping_views():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(3, 6))
    model[1].weight.data = model[0].weight.data[:, 2:5]
    return model


def channels_last():
    return nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)


def one_number():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(3.0))
    return model


@pytest.mark.parametrize("part", [7, rounding_tolerance._PART])
@pytest.mark.parametrize("model", [tied_by_storage, overlapping_views, channels_last, one_number])
def test_moved_weights_are_restored(model, part, monkeypatch):
    monkeypatch.setattr(rounding_tolerance, "_PART", part)
    model = model()
    before = [p.detach().clone() for p in model.parameters()]
    with last_bits_moved(model, seed=0, epsilon=0.01):
        for parameter, held in zip(model.parameters(), before, strict=True):
            assert ((parameter - held).abs() >= 0.009 * held.abs()).float().mean() > 0.5
            assert torch.allclose(parameter, held, rtol=0.03)
    assert all(torch.equal(p, held) for p, held in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("worst", "differing", "holds"), [(5.0, 6, True), (5.0, 7, False), (5_000.0, 1, False)])
def test_a_small_difference_is_compared_again_from_nearby_weights(monkeypatch, worst, differing, holds):
    """An activation at a kink differs from some starting weights, an error of the plan from all of them."""
    compared, seeds = plan_proof._compared, []

    def compare(steps, changed):
        seeds.append(steps.start_seed)
        if len(seeds) <= differing:
            return Proof(False, "differs", "proof.differs", worst=worst)
        return compared(steps, changed)

    monkeypatch.setattr(plan_proof, "_compared", compare)
    assert prove(images(), candidate_of("memory_layout"), REFERENCE).holds is holds
    assert len(set(seeds)) == len(seeds)
    assert len(seeds) == (1 if worst > 1_000 else 7)


def test_a_perturbed_start_is_the_start_of_both_loops():
    subject, seen = images(), []
    steps = plan_proof._TwoSteps(
        subject,
        LoopState(subject.trained, subject.optimizer),
        (subject.batch, subject.batch),
        "fp32",
        REFERENCE,
        ROWS,
        drops=True,
        drawing=set(),
        start_seed=3,
    )
    for loop in (steps.plain, steps.planned):
        seen.append(steps.copies(loop)["gradients"])
    plain = replace(steps, start_seed=0)
    assert all(torch.allclose(ours, seen[1][name], rtol=1e-4, atol=1e-6) for name, ours in seen[0].items())
    assert any(not torch.equal(ours, seen[0][name]) for name, ours in plain.copies(plain.plain)["gradients"].items())
