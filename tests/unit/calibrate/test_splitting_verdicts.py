"""Whether a batch may be split is proved on the user's own model, and a refusal says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from trimtab.calibrate.equivalence import TOLERANCE, check_splitting
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import LossError
from trimtab.losses import Summed
from trimtab.measure.snapshot import fingerprint

ROWS = 16


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Tanh(), nn.Linear(8, 3))


def class_batch(rows=ROWS):
    torch.manual_seed(1)
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


def class_mean(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


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
    return Subject(model, optimizer, loss_fn, class_batch() if batch is None else batch)


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
    "float64": (lambda: mlp().double(), class_mean, (class_batch()[0].double(), class_batch()[1])),
}


def freeze_first(model):
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(("model", "loss_fn", "batch"), SPLITTABLE.values(), ids=SPLITTABLE)
def test_sums_over_rows_may_be_split(model, loss_fn, batch):
    check = check_splitting(subject(model(), loss_fn, batch))
    assert check.splittable, check.reason
    assert check.relative_difference <= 1e-5 < check.tolerance == TOLERANCE
    assert "changes the gradient by" in check.reason


REFUSED = {
    "batch norm": (lambda: mlp(nn.BatchNorm1d(8)), class_mean, class_batch(), "BatchNorm1d computes over the batch"),
    "batch norm on few rows": (lambda: mlp(nn.BatchNorm1d(8)), class_mean, class_batch(4), "BatchNorm1d computes"),
    "a fixed number of rows": (lambda: mlp(), sixteen_rows, class_batch(), "does not run alone: RuntimeError: shape"),
    "batch norm without running statistics": (
        lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)),
        class_mean,
        class_batch(),
        "differs by",
    ),
    "spectral norm": (lambda: spectral(), class_mean, class_batch(), "SpectralNorm"),
    "a counting buffer": (lambda: mlp(Counting()), class_mean, class_batch(), "Counting"),
    "a buffer that is replaced": (lambda: mlp(Averaging()), class_mean, class_batch(), "Averaging"),
    "two kinds": (lambda: mlp(nn.BatchNorm1d(8), Counting()), class_mean, class_batch(), "BatchNorm1d, Counting"),
    "an in-batch contrastive loss": (lambda: mlp(), contrastive, class_batch(), "differs by"),
    "statistics in the loss": (lambda: mlp(), batch_mean_subtracted, class_batch(), "differs by"),
    "a sum returned as a mean": (
        lambda: mlp(),
        loss_sum_called_a_mean,
        class_batch(),
        "it is a sum over rows",
    ),
    "token means of unequal lengths": (lambda: mlp(), token_mean, token_batch(), "differs by"),
    "one row": (lambda: mlp(), class_mean, class_batch(1), "the batch has one row"),
    "a gradient of zero": (lambda: mlp(), lambda m, b: 0 * class_mean(m, b), class_batch(), "zero or not finite"),
    "no number": (lambda: mlp(), lambda m, b: float("nan") * class_mean(m, b), class_batch(), "zero or not finite"),
}


def spectral():
    model = mlp()
    spectral_norm(model[0])
    return model


@pytest.mark.parametrize(("model", "loss_fn", "batch", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_computed_over_the_batch_may_not(model, loss_fn, batch, reason):
    check = check_splitting(subject(model(), loss_fn, batch))
    assert not check.splittable
    assert reason in check.reason
    if "differs by" in reason:
        assert check.relative_difference > TOLERANCE


def test_batch_norm_is_refused_by_one_forward_alone():
    """Which tells the statistics; three gradients more would prove what is known, and take a second of planning."""
    calls = []

    def counted(model, batch):
        calls.append(len(batch[0]))
        return class_mean(model, batch)

    check = check_splitting(subject(mlp(nn.BatchNorm1d(8)), counted))
    assert (check.splittable, check.relative_difference) == (False, None)
    assert calls == [ROWS]


@pytest.mark.parametrize("case", [*SPLITTABLE, *REFUSED])
def test_the_check_leaves_no_trace(case):
    model, loss_fn, batch = (SPLITTABLE | REFUSED)[case][:3]
    tried = subject(model(), loss_fn, batch)
    before = fingerprint(tried.model, tried.optimizer)
    check_splitting(tried)
    assert fingerprint(tried.model, tried.optimizer) == before


def test_what_is_no_loss_is_an_error_and_no_verdict():
    tried = subject(mlp(), lambda model, batch: model(batch[0]))
    before = fingerprint(tried.model, tried.optimizer)
    with pytest.raises(LossError):
        check_splitting(tried)
    assert fingerprint(tried.model, tried.optimizer) == before


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


@pytest.mark.parametrize("dropout", [nn.Identity, nn.Dropout, nn.AlphaDropout])
def test_a_model_without_a_loss_in_evaluation_mode_is_proved_in_training_mode(dropout):
    model = Detector(dropout)
    check = check_splitting(Subject(model, torch.optim.SGD(model.parameters(), lr=0.1), own_loss, class_batch()))
    assert check.splittable, check.reason
    assert model.training
    assert all(module.training for module in model.modules())


def test_randomness_that_cannot_be_switched_off_there_is_no_proof():
    model = Detector(share=0.5)
    check = check_splitting(Subject(model, torch.optim.SGD(model.parameters(), lr=0.1), own_loss, class_batch()))
    assert not check.splittable


class Centred(nn.Module):
    """Subtracts the batch's mean while training, and only then; no buffer shows it."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


class LoadBalanced(nn.Module):
    """Adds to the loss, while training, what balances the load of two experts over the batch."""

    def __init__(self):
        super().__init__()
        self.body, self.gate = mlp(), nn.Linear(4, 2)

    def forward(self, batch):
        balance = self.gate(batch[0]).softmax(1).mean(0).square().sum() if self.training else 0.0
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1]) + balance


@pytest.mark.parametrize("dropout", [nn.Identity, nn.Dropout])
def test_what_couples_the_rows_in_training_mode_alone_is_seen(dropout):
    check = check_splitting(subject(mlp(Centred(), dropout())))
    assert not check.splittable
    assert "differs by" in check.reason
    assert "evaluation mode" not in check.reason


def test_a_balancing_loss_over_the_batch_is_seen():
    model = LoadBalanced()
    check = check_splitting(Subject(model, torch.optim.SGD(model.parameters(), lr=0.1), own_loss, class_batch()))
    assert not check.splittable
    assert "differs by" in check.reason


class Masked(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


def test_a_gradient_that_is_random_in_training_mode_is_proved_in_evaluation_mode_and_says_so():
    check = check_splitting(subject(mlp(Masked())))
    assert check.splittable
    assert check.relative_difference <= 1e-5
    assert "proved in evaluation mode: in training mode its gradient is random" in check.reason


def test_a_proof_in_training_mode_says_nothing_of_another():
    assert "mode" not in check_splitting(subject(mlp(nn.Dropout(0.5)))).reason


def test_an_lstm_without_dropout_is_proved_as_it_trains():
    """In evaluation mode cuDNN has no backward of it."""
    modes = set()

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            modes.add(self.lstm.training)
            return self.head(self.lstm(x)[0])

    assert check_splitting(subject(Recurrent(), token_sum, token_batch())).splittable
    assert modes == {True}


def gradient_penalty(model, batch):
    """Begins with a gradient of the first layer: without gradients it fails before any statistics are updated."""
    inputs = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model[0](inputs).sum(), inputs, create_graph=True)
    return nn.functional.cross_entropy(model(inputs), batch[1]) + slope.square().sum(1).mean()


def test_batch_statistics_are_seen_in_a_loss_that_takes_gradients_of_its_own():
    check = check_splitting(subject(mlp(nn.BatchNorm1d(8)), gradient_penalty))
    assert not check.splittable
    assert check.reason.startswith("BatchNorm1d computes over the batch")


def test_a_loop_that_runs_in_its_own_precision_only_is_refused_and_not_an_error():
    def half_only(model, batch):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("the kernel wants 16 bits")
        return class_mean(model, batch)

    check = check_splitting(subject(mlp(), half_only), "bf16")
    assert not check.splittable
    assert "nothing can be proved" in check.reason
    assert "RuntimeError: the kernel wants 16 bits" in check.reason
    with pytest.raises(RuntimeError, match="16 bits"):
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
    assert check.splittable
    assert check.reason.endswith("; on the first 4 of 16 rows, as more do not fit in memory")
    assert fingerprint(tried.model, tried.optimizer) == before


def test_where_no_two_rows_fit_there_is_no_proof():
    def never(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    check = check_splitting(subject(mlp(), never))
    assert (check.splittable, check.reason) == (False, "the batch runs out of memory in fp32: nothing can be proved")


def test_the_example_is_proved_beside_the_longest_batch():
    """Means over tokens split as they should where no row has padding: the longest batch shows nothing else."""
    longest = subject(mlp(), token_mean, token_batch((9,) * 8))
    assert check_splitting(longest).splittable
    check = check_splitting(replace(longest, example=token_batch()))
    assert not check.splittable
    assert check.reason.endswith("; of the example batch")
    assert check_splitting(replace(longest, loss_fn=token_sum, example=token_batch())).splittable


class Subtracting(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


class Counting(nn.Module):
    """Keeps how often it ran in training, and asks it there alone: two passes are of other weights."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += self.training
        return x * (1 + self.passes) if self.training else x


@pytest.mark.parametrize(
    "module", [nn.BatchNorm1d(8), Subtracting(), Counting()], ids=["batch norm", "a mean of its own", "a count"]
)
def test_a_model_that_is_handed_over_in_evaluation_mode_is_proved_as_it_trains(module):
    model = mlp(module).eval()
    assert not check_splitting(subject(model)).splittable
    assert not any(each.training for each in model.modules())
    assert check_splitting(subject(mlp(nn.LayerNorm(8), nn.Dropout(0.5)).eval())).splittable


def test_a_refusal_tells_the_way_out():
    tokens = check_splitting(subject(mlp(), token_mean, token_batch()))
    assert tokens.reason.endswith("as tokens, may be split as trimtab.Summed(loss_sum, count)")
    inputs, targets = class_batch()
    half = check_splitting(subject(mlp().bfloat16(), class_mean, (inputs.bfloat16(), targets)))
    assert not half.splittable
    assert "its weights are bfloat16" in half.reason
    assert "weights in fp32 may be split" in half.reason
