"""Whether a batch may be split is proved on the user's own model, and a refusal says why."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from call_counts import OutOfReach
from small_loops import class_loss as class_mean
from small_loops import sgd, square_loss
from state_digest import fingerprint
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import trimtab
from trimtab.core.errors import LossError
from trimtab.losses import Summed
from trimtab.profiling.gradient_equivalence import TOLERANCE, check_splitting
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.loop_state import LoopState
from trimtab.state.peak_memory import peak_growth

ROWS = 16


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def class_batch(rows=ROWS):
    torch.manual_seed(1)
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


def token_batch(lengths=(9, 9, 1, 2, 7, 1, 1, 9)):
    torch.manual_seed(1)
    inputs, targets = torch.randn(len(lengths), 9, 4), torch.randint(0, 3, (len(lengths), 9))
    for row, length in zip(targets, lengths, strict=True):
        row[length:] = -100
    return inputs, targets


def token_mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def token_sum(model, batch):
    loss = nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return Summed(loss, (batch[1] != -100).sum())


def contrastive(model, batch):
    """Each row against all others of the batch: a smaller batch has fewer negatives."""
    rows = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(rows @ rows.t() / 0.1, torch.arange(len(rows)))


def batch_mean_subtracted(model, batch):
    """Statistics over the batch without a buffer to show for it."""
    out = model(batch[0])
    return nn.functional.cross_entropy(out - out.mean(0), batch[1])


def loss_sum_called_a_mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def sixteen_rows(model, batch):
    """A model with its batch size written into it."""
    return nn.functional.cross_entropy(model(batch[0]).view(ROWS, 3), batch[1])


class Counting(nn.Module):
    """A module with a buffer that every forward advances."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x


class Averaging(Counting):
    """Puts a new tensor in its buffer's place instead of writing to it."""

    def forward(self, x):
        self.calls = self.calls + len(x)
        return x


def frozen_statistics():
    model = mlp(nn.BatchNorm1d(8))
    model[1].eval()
    return model


def subject(model, loss_fn=class_mean, batch=None):
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    return TrainingLoop(model, optimizer, loss_fn, class_batch() if batch is None else batch)


class Detector(nn.Module):
    """Gives its loss while training and predictions in evaluation mode, as detection models do."""

    def __init__(self, dropout=nn.Identity, share=0.0):
        super().__init__()
        self.body = mlp(dropout())
        self.share = share

    def forward(self, batch):
        out = nn.functional.dropout(self.body(batch[0]), self.share, self.training)
        return nn.functional.cross_entropy(out, batch[1]) if self.training else {"scores": out}


def own_loss(model, batch):
    return model(batch)


class Centred(nn.Module):
    """Subtracts the batch's mean while training, and only then; no buffer shows it."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


class Noisy(nn.Module):
    """Adds noise that is no dropout, as a variational or a diffusion model does."""

    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class Forward(nn.Module):
    """Runs a function in every training forward."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x) if self.training else x


def keeps_a_queue(module, x):
    queue = getattr(module, "queue", torch.zeros(4, 8))
    module.queue = torch.cat([queue, x.detach()])[-4:]
    return x + 1e-2 * queue.mean()


def counts_in_python(module, x):
    module.calls = getattr(module, "calls", 0) + 1
    return x / module.calls


def draws_from_python(module, x):
    return x * random.random()


def draws_from_numpy(module, x):
    return x * np.random.rand()


def draws_from_its_own(module, x):
    module.generator = getattr(module, "generator", torch.Generator())
    return x * torch.rand((), generator=module.generator)


def remembers_the_last(module, x):
    """The state is the same after every forward on one batch, and read by the next one."""
    last = getattr(module, "last", 0.0)
    module.last = x.detach().mean()
    return x + last


class Small(nn.Module):
    """A term over the batch with a small weight, in a layer that nothing else trains."""

    def __init__(self, weight):
        super().__init__()
        self.body, self.gate, self.weight = mlp(), nn.Linear(4, 4), weight

    def forward(self, batch):
        shares = self.gate(batch[0]).softmax(1).mean(0)
        return 10 * F.cross_entropy(self.body(batch[0]), batch[1]) + self.weight * shares.square().sum()


class ZeroGradient(nn.Module):
    """A bias in front of a normalisation: its true gradient is zero, and computed ones are rounding."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.InstanceNorm1d(8)

    def forward(self, x):
        return self.norm(self.linear(x).unsqueeze(-1).expand(-1, -1, 4) * torch.arange(4.0)).mean(-1) + x


def gradient_penalty(model, batch):
    """Begins with a gradient of the first layer: without gradients it fails before any statistics are updated."""
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model[0](inputs).sum(), inputs, create_graph=True)
    return nn.functional.cross_entropy(model(inputs), batch[1]) + slope.square().sum(1).mean()


def keeps_to_look_at(module, x):
    module.last = x.detach()
    return x


def never_fits(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory")


SPLITTABLE = {
    "a plain mlp": (lambda: mlp(), class_mean, class_batch()),
    "three rows": (lambda: mlp(), class_mean, class_batch(3)),
    "two rows": (lambda: mlp(), class_mean, class_batch(2)),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), class_mean, class_batch()),
    "layer norm": (lambda: mlp(nn.LayerNorm(8)), class_mean, class_batch()),
    "frozen batch norm": (frozen_statistics, class_mean, class_batch()),
    "a frozen layer": (lambda: freeze_first(mlp()), class_mean, class_batch()),
    "token sums": (lambda: mlp(), token_sum, token_batch()),
    "token sums, one row of nothing": (lambda: mlp(), token_sum, token_batch((9, 0, 5, 1))),
    "token means of equal lengths": (lambda: mlp(), token_mean, token_batch((9,) * 8)),
    "a loss in training mode alone": (lambda: Detector(), own_loss, class_batch()),
    "dropout and a loss in training mode alone": (lambda: Detector(nn.Dropout), own_loss, class_batch()),
    "a value that is kept to be looked at": (lambda: mlp(Forward(keeps_to_look_at)), class_mean, class_batch()),
    "a gradient that is all rounding": (lambda: mlp(ZeroGradient()), class_mean, class_batch()),
    "float64": (lambda: mlp().double(), class_mean, (class_batch()[0].double(), class_batch()[1])),
}


def freeze_first(model):
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(("model", "loss_fn", "batch"), SPLITTABLE.values(), ids=SPLITTABLE)
def test_sums_over_rows_may_be_split(model, loss_fn, batch):
    tried = subject(model(), loss_fn, batch)
    before = fingerprint(tried.model, tried.optimizer)
    check = check_splitting(tried)
    assert fingerprint(tried.model, tried.optimizer) == before
    assert all(module.training for module in tried.model.modules() if not isinstance(module, nn.BatchNorm1d))
    assert check.splittable, check.reason
    assert check.relative_difference <= 1e-5 < check.tolerance == TOLERANCE
    assert check.code == "split.proved"


REFUSED = {
    "batch norm": (lambda: mlp(nn.BatchNorm1d(8)), class_mean, class_batch(), "split.batch_statistics"),
    "batch norm on few rows": (lambda: mlp(nn.BatchNorm1d(8)), class_mean, class_batch(4), "split.batch_statistics"),
    "a fixed number of rows": (lambda: mlp(), sixteen_rows, class_batch(), "split.part_fails"),
    "batch norm without running statistics": (
        lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)),
        class_mean,
        class_batch(),
        "split.gradient_differs",
    ),
    "spectral norm": (lambda: spectral(), class_mean, class_batch(), "split.state_changes"),
    "a counting buffer": (lambda: mlp(Counting()), class_mean, class_batch(), "split.state_changes"),
    "a buffer that is replaced": (lambda: mlp(Averaging()), class_mean, class_batch(), "split.state_changes"),
    "two kinds": (lambda: mlp(nn.BatchNorm1d(8), Counting()), class_mean, class_batch(), "split.batch_statistics"),
    "an in-batch contrastive loss": (lambda: mlp(), contrastive, class_batch(), "split.gradient_differs"),
    "statistics in the loss": (lambda: mlp(), batch_mean_subtracted, class_batch(), "split.gradient_differs"),
    "a sum returned as a mean": (
        lambda: mlp(),
        loss_sum_called_a_mean,
        class_batch(),
        "split.loss_is_sum",
    ),
    "token means of unequal lengths": (lambda: mlp(), token_mean, token_batch(), "split.token_mean"),
    "one row": (lambda: mlp(), class_mean, class_batch(1), "split.one_sample"),
    "noise that is no dropout": (lambda: mlp(Noisy()), class_mean, class_batch(), "split.random"),
    "a gradient of zero": (lambda: mlp(), lambda m, b: 0 * class_mean(m, b), class_batch(), "split.no_gradient"),
    "a mean in training mode": (lambda: mlp(Centred()), class_mean, class_batch(), "split.gradient_differs"),
    "a mean and dropout": (lambda: mlp(Centred(), nn.Dropout()), class_mean, class_batch(), "split.gradient_differs"),
    "a term over the batch": (lambda: Small(1.0), own_loss, class_batch(), "split.gradient_differs"),
    "a small term over the batch": (lambda: Small(1e-5), own_loss, class_batch(), "split.gradient_differs"),
    "statistics and a gradient penalty": (
        *(lambda: mlp(nn.BatchNorm1d(8)), gradient_penalty, class_batch()),
        "split.batch_statistics",
    ),
    "no two rows that fit": (lambda: mlp(), never_fits, class_batch(), "split.out_of_memory"),
    "a keeper of a queue": (lambda: mlp(Forward(keeps_a_queue)), class_mean, class_batch(), "split.state_changes"),
    "a count in Python": (lambda: mlp(Forward(counts_in_python)), class_mean, class_batch(), "split.state_changes"),
    "Python's generator": (lambda: mlp(Forward(draws_from_python)), class_mean, class_batch(), "split.state_changes"),
    "NumPy's generator": (lambda: mlp(Forward(draws_from_numpy)), class_mean, class_batch(), "split.state_changes"),
    "its own generator": (lambda: mlp(Forward(draws_from_its_own)), class_mean, class_batch(), "split.state_changes"),
    "the last batch": (lambda: mlp(Forward(remembers_the_last)), class_mean, class_batch(), "split.state_changes"),
    "no number": (lambda: mlp(), lambda m, b: float("nan") * class_mean(m, b), class_batch(), "split.no_gradient"),
}


def spectral():
    model = mlp()
    spectral_norm(model[0])
    return model


@pytest.mark.parametrize(("model", "loss_fn", "batch", "code"), REFUSED.values(), ids=REFUSED)
def test_what_is_computed_over_the_batch_may_not(model, loss_fn, batch, code):
    tried = subject(model(), loss_fn, batch)
    before = fingerprint(tried.model, tried.optimizer)
    check = check_splitting(tried)
    assert fingerprint(tried.model, tried.optimizer) == before
    assert (check.splittable, check.code) == (False, code), check.reason
    if code in ("split.gradient_differs", "split.token_mean", "split.loss_is_sum"):
        assert check.relative_difference > TOLERANCE


class Scaled(nn.Module):
    """Has parameters of a single element, in which two roundings may agree by chance."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.scale + self.shift


def class_mean_in_fp32(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


HALF_SPLITTABLE = {
    "class means": (lambda: mlp(), class_mean, class_batch()),
    "class means in fp32": (lambda: mlp(nn.LayerNorm(8), Scaled()), class_mean_in_fp32, class_batch()),
    "token sums": (lambda: mlp(), token_sum, token_batch()),
}
HALF_REFUSED = {
    name: REFUSED[name]
    for name in (
        "batch norm",
        "batch norm without running statistics",
        "an in-batch contrastive loss",
        "statistics in the loss",
        "a mean in training mode",
        "a sum returned as a mean",
        "token means of unequal lengths",
        "a fixed number of rows",
    )
}


def in_half(dtype, model, loss_fn, batch):
    return subject(model().to(dtype), loss_fn, (batch[0].to(dtype), batch[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("model", "loss_fn", "batch"), HALF_SPLITTABLE.values(), ids=HALF_SPLITTABLE)
def test_weights_in_half_precision_are_judged_by_their_own_rounding(model, loss_fn, batch, dtype):
    check = check_splitting(in_half(dtype, model, loss_fn, batch))
    assert (check.splittable, check.code) == (True, "split.proved"), check.reason
    assert TOLERANCE < check.relative_difference <= check.tolerance < 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("model", "loss_fn", "batch", "code"), HALF_REFUSED.values(), ids=HALF_REFUSED)
def test_half_precision_excuses_no_coupling_loss(model, loss_fn, batch, code, dtype):
    check = check_splitting(in_half(dtype, model, loss_fn, batch))
    assert (check.splittable, check.code) == (False, code), check.reason


def test_a_coupling_of_a_few_percent_is_found_in_bf16():
    def weakly_coupled(model, batch):
        out = model(batch[0])
        return nn.functional.cross_entropy(out - 0.1 * out.mean(0), batch[1])

    case = (lambda: mlp(), weakly_coupled, class_batch())
    exact = check_splitting(subject(mlp(), weakly_coupled))
    assert 0.01 < exact.relative_difference < 0.1
    assert not check_splitting(in_half(torch.bfloat16, *case)).splittable


def test_batch_norm_is_refused_by_one_forward_alone():
    calls = OutOfReach(rows=[])

    def counted(model, batch):
        calls.held.rows.append(len(batch[0]))
        return class_mean(model, batch)

    check = check_splitting(subject(mlp(nn.BatchNorm1d(8)), counted))
    assert (check.splittable, check.relative_difference) == (False, None)
    assert calls.held.rows == [ROWS]


def test_what_is_no_loss_is_an_error_and_no_verdict():
    tried = subject(mlp(), lambda model, batch: model(batch[0]))
    before = fingerprint(tried.model, tried.optimizer)
    with pytest.raises(LossError):
        check_splitting(tried)
    assert fingerprint(tried.model, tried.optimizer) == before


def test_a_batch_of_one_kind_of_values_does_not_prove_another():
    def by_value(model, batch):
        out = model(batch[0])
        share = (batch[0].abs().mean(1) != batch[0].abs().mean(1)[0]).float()
        return (F.cross_entropy(out, batch[1], reduction="none") * (1 + share)).sum() / (1 + share).sum()

    check = check_splitting(subject(mlp(), by_value, (torch.ones(ROWS, 4) * 0.5, class_batch()[1])))
    assert not check.splittable


def test_an_lstm_without_dropout_is_proved_as_it_trains():
    """In evaluation mode cuDNN has no backward of it."""
    modes = OutOfReach(seen=set())

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            modes.held.seen.add(self.lstm.training)
            return self.head(self.lstm(x)[0])

    assert check_splitting(subject(Recurrent(), token_sum, token_batch())).splittable
    assert modes.held.seen == {True}


def test_a_loop_that_runs_in_its_own_precision_only_is_refused_and_not_an_error():
    def half_only(model, batch):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("the kernel wants 16 bits")
        return class_mean(model, batch)

    check = check_splitting(subject(mlp(), half_only), "bf16")
    assert (check.splittable, check.code) == (False, "split.whole_fails")
    with pytest.raises(RuntimeError):
        check_splitting(subject(mlp(), half_only))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError()])
def test_what_does_not_fit_whole_is_proved_on_the_rows_that_fit(error):
    def small_only(model, batch):
        if len(batch[0]) > 5:
            raise error
        return class_mean(model, batch)

    tried = subject(mlp(), small_only)
    before = fingerprint(tried.model, tried.optimizer)
    check = check_splitting(tried)
    assert check.splittable, check.reason
    assert fingerprint(tried.model, tried.optimizer) == before


def test_the_example_and_a_batch_of_the_data_are_proved_beside_the_longest():
    longest = subject(mlp(), token_mean, token_batch((9,) * 8))
    assert check_splitting(longest).splittable
    check = check_splitting(replace(longest, example=token_batch()))
    assert (check.splittable, check.code) == (False, "split.token_mean")
    assert check_splitting(replace(longest, loss_fn=token_sum, example=token_batch())).splittable
    tried = subject(mlp(), token_mean, token_batch((9,) * 8))
    assert check_splitting(tried).splittable
    check = check_splitting(replace(tried, second=token_batch()))
    assert (check.splittable, check.code) == (False, "split.token_mean")


class CountingPasses(nn.Module):
    """Keeps how often it ran in training, and asks it there alone: two passes are of other weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += self.training
        return x * (1 + self.passes) if self.training else x


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(8), Centred(), CountingPasses()], ids=["batch norm", "a mean of its own", "a count"]
)
def test_a_model_that_is_handed_over_in_evaluation_mode_is_proved_as_it_trains(module):
    model = mlp(module).eval()
    assert not check_splitting(subject(model)).splittable
    assert not any(each.training for each in model.modules())
    assert check_splitting(subject(mlp(nn.LayerNorm(8), nn.Dropout(0.5)).eval())).splittable


@pytest.mark.usefixtures("brief_trials")
def test_planning_takes_the_second_batch_from_the_data():
    model = mlp()
    optimizer = sgd(model)
    batches = [token_batch((9,) * 8), token_batch((9,) * 8), token_batch()]
    found = trimtab.profile(model, optimizer, token_mean, batches[0], data=batches, num_blocks=3)
    assert (found.check.splittable, found.check.code) == (False, "split.token_mean")


def test_the_check_copies_no_state_that_planning_holds():
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256, bias=False), nn.Tanh())))
    optimizer = torch.optim.Adam(model.parameters())
    tried = TrainingLoop(model, optimizer, square_loss, torch.randn(8, 256))
    tried.loss()[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    with LoopState(model, optimizer) as start:
        grown = peak_growth(lambda: check_splitting(tried, start=start))
    assert grown < 2.9 * parameters  # two gradients, and temporaries of one of the eight layers
