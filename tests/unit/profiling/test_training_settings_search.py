"""Short trainings of two plans: paired on the user's data, put back whole, and what is made of them."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from call_counts import OutOfReach
from raising import raises
from rank_cases import Tokens
from small_loops import sgd, train
from state_digest import fingerprint
from torch import nn

import trimtab
from trimtab.core.choice import MeasuredCost
from trimtab.core.errors import ModelError, OptimizerError, ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.planner.tuned_plan import (
    PairedTrainingVerdict,
    RatePoint,
    ShortPair,
    ShortRun,
    adapt_setting,
    within_limits,
)
from trimtab.plans.plan import Plan
from trimtab.profiling import training_settings_search
from trimtab.profiling.candidate_traces import trace_optimizer_states
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.training_settings_search import RunLength, range_test, short_race, tune_plan

pytestmark = pytest.mark.slow

ROWS = 4
STANDS, MUON = Plan.fixed(ROWS), Plan.fixed(ROWS, optimizer="muon")


class Dropping(Tokens):
    def forward(self, tokens):
        return nn.functional.dropout(super().forward(tokens), 0.2, self.training)


def batches(count: int = 40):
    made = []
    for step in range(count):
        first = torch.randint(11, (ROWS, 1), generator=torch.Generator().manual_seed(step))
        tokens = (first + torch.arange(7)) % 11  # what follows can be learnt
        made.append((tokens[:, :-1], tokens[:, 1:]))
    return made


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def subject(make=Tokens, rate: float = 0.01) -> TrainingLoop:
    torch.manual_seed(0)
    model = make(torch.float32)
    return TrainingLoop(model, torch.optim.AdamW(model.parameters(), lr=rate), loss_fn, batches(1)[0])


def noted(its: TrainingLoop, note) -> tuple[TrainingLoop, list]:
    """Return a loop that notes something in each loss, and the notes, which planning does not restore."""
    kept = OutOfReach(seen=[])

    def noting(model, batch):
        kept.held.seen.append(note(model, batch))
        return loss_fn(model, batch)

    return TrainingLoop(its.model, its.optimizer, noting, its.batch), kept.held.seen


def first_token(model, batch):
    return int(batch[0][0, 0])


def race(its: TrainingLoop, rival: Plan, data, **given):
    said: list[str] = []
    return short_race(its, STANDS, rival, data, said.append, **given), said


def test_a_pair_is_of_the_same_weights_batches_and_random_numbers():
    its = subject(Dropping)
    before = fingerprint(its.model, its.optimizer)
    found, said = race(its, MUON, batches(), num_steps=12, num_pairs=1)
    (pair,) = found
    assert pair.stands.losses[0] == pair.rival.losses[0]
    assert pair.stands.losses != pair.rival.losses
    assert len(pair.stands.losses) == len(pair.rival.losses) == 12
    assert min(pair.stands.step_s, pair.rival.step_s) > 0
    assert fingerprint(its.model, its.optimizer) == before
    assert len(said) >= 2
    assert all("pair 1 of 1" in line for line in said)


def test_a_rival_that_is_never_beaten_is_run_for_all_pairs_beside_a_control(monkeypatch):
    monkeypatch.setattr("trimtab.profiling.training_settings_search.is_lost", lambda pair: False)
    found, _ = race(subject(Dropping), STANDS, batches(), num_steps=10, num_pairs=3)
    assert len(found) == 3
    for pair in found:
        assert pair.stands.losses == pair.rival.losses  # its rival is the plan itself
        assert pair.again.losses != pair.stands.losses  # and the control draws other dropout
    assert len({pair.stands.losses for pair in found}) == 3
    plain, _ = race(subject(), STANDS, batches(), num_steps=10, num_pairs=1)
    assert plain[0].again.losses == plain[0].stands.losses


def test_the_first_lost_pair_ends_the_race():
    slow = Plan.fixed(ROWS, learning_rate_scale=1e-6)
    found, said = race(subject(), slow, batches(), num_steps=40)
    assert len(found) == 1
    assert found[0].again is None
    assert found[0].samples == 0
    assert len(said) == 2


def test_data_is_gone_through_again_where_it_ends_and_an_iterators_is_not():
    found, _ = race(subject(), STANDS, batches(7), num_steps=10, num_pairs=1)
    assert len(found[0].stands.losses) == 10
    with raises(ValueGivenError, code="data.too_few_batches", field="data"):
        race(subject(), STANDS, iter(batches(7)), num_steps=10, num_pairs=1)
    with raises(ValueGivenError, code="data.too_few_batches", field="data"):
        race(subject(), STANDS, [], num_steps=10)


def test_a_schedule_is_run_through_whole_in_each_training():
    noted = OutOfReach(rates=[])

    class Noting(torch.optim.AdamW):
        def step(self, closure=None):
            noted.held.rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    its = subject()
    noting = TrainingLoop(its.model, Noting(its.model.parameters(), lr=0.01), loss_fn, its.batch)
    plan = Plan.fixed(ROWS, schedule="warmup_cosine")
    short_race(noting, plan, plan, batches(), lambda text: None, num_steps=40, num_pairs=1)
    rates = noted.held.rates
    assert rates[:40] == rates[40:80]
    assert rates[0] == pytest.approx(0.005)
    assert max(rates) == pytest.approx(0.01)
    assert rates[39] == pytest.approx(0.001)


def planned(
    its: TrainingLoop, monkeypatch, verdict: PairedTrainingVerdict, adapt, *, run_steps=None, base=STANDS, **limits
) -> tuple[Plan, list]:
    """Return a plan whose race was decided beforehand, and the plans that were raced."""
    raced, tested = [], []

    def short(its, stands, rival, data, progress, **how):
        raced.append((stands, rival))
        return (ShortPair(ShortRun((1.0,), 1.0), ShortRun((1.0,), 1.0)),)

    def ranged(its, plan, data, progress):
        tested.append(plan.optimizer.value)
        best = 20 if plan.optimizer.value == "muon" else 10
        return tuple(RatePoint(1.3**i, 5 - 0.2 * i if i < best else 9.0, 3.0) for i in range(best + 3))

    monkeypatch.setattr(training_settings_search, "short_race", short)
    monkeypatch.setattr(training_settings_search, "range_test", ranged)
    monkeypatch.setattr(training_settings_search, "judge_rival", lambda pairs, rival: verdict)
    length = RunLength(run_steps)
    return tune_plan(its, base, adapt, batches(60), lambda text: None, length, **limits), [
        tested,
        *raced,
    ]


def test_muon_is_kept_where_it_won_and_the_run_steps_by_it(monkeypatch):
    its = subject()
    found, (tested, (stands, rival)) = planned(
        its, monkeypatch, PairedTrainingVerdict(True, "2x sooner", 1.5), {"optimizer"}
    )
    assert (found.optimizer.value, found.plan_kind) == ("muon", "tuned")
    assert "2x sooner" in found.explain()
    assert (tested, stands.optimizer.value, rival.optimizer.value) == ([], "user", "muon")
    assert rival.learning_rate_scale == stands.learning_rate_scale
    with trimtab.start(its.model, its.optimizer, found) as run:
        train(run, batches(2), loss_fn)
        assert "muon" in run.state_dict()


@pytest.mark.parametrize("won", [True, False])
def test_each_is_raced_at_the_rate_and_the_rise_of_its_own_range_test(monkeypatch, won):
    adapt, verdict = ("learning_rate", "optimizer"), PairedTrainingVerdict(won, "so")
    found, (tested, (stands, rival)) = planned(subject(), monkeypatch, verdict, adapt, run_steps=100)
    assert tested == ["user", "muon"]
    assert (stands.warmup_fraction.value, rival.warmup_fraction.value) == (0.09, 0.19)
    assert found.warmup_fraction == (rival if won else stands).warmup_fraction
    assert 1 < stands.learning_rate_scale.value < rival.learning_rate_scale.value
    kept = rival if won else stands
    assert found.learning_rate_scale == kept.learning_rate_scale
    assert found.schedule.value == "warmup_cosine"
    assert found.optimizer.value == ("muon" if won else "user")


@pytest.mark.usefixtures("brief_trials")
@pytest.mark.parametrize(("steps", "rise"), [(None, None), (100, 0.09)])
def test_a_plan_is_told_how_long_the_run_is(monkeypatch, steps, rise):
    its = subject()
    planned(its, monkeypatch, PairedTrainingVerdict(False, "so"), {"learning_rate"})  # for its range test
    given = {"adapt": "learning_rate", "data": batches(), "num_blocks": 3, "total_steps": steps}
    found = trimtab.plan(its.model, its.optimizer, its.loss_fn, its.batch, **given)
    assert found.schedule.value == "warmup_cosine"
    assert found.warmup_fraction.value == rise
    rates = []
    with trimtab.start(its.model, its.optimizer, found, total_samples=100 * ROWS) as run:
        its.optimizer.register_step_pre_hook(lambda *_: rates.append(its.optimizer.param_groups[0]["lr"]))
        train(run, batches(12), loss_fn)
    assert rates.index(max(rates)) in ((4, 5) if rise is None else (8, 9))


@pytest.mark.parametrize(
    ("make", "clips"),
    [
        (torch.optim.AdamW, 3.0),
        (torch.optim.Adam, 3.0),
        (functools.partial(torch.optim.Adam, weight_decay=0.1), None),  # added to gradients after they are clipped
        (torch.optim.SGD, None),
    ],
)
def test_gradients_are_clipped_where_an_optimizer_divides_by_their_size(monkeypatch, make, clips):
    its = subject()
    its = replace(its, optimizer=make(its.model.parameters(), lr=0.01))
    found, _ = planned(its, monkeypatch, PairedTrainingVerdict(False, "so"), {"learning_rate"})
    assert found.clip_norm.value == clips
    own, norms = {"clip_norm": 1e-3, "total_samples": 10 * ROWS}, []  # which goes before it
    with trimtab.start(its.model, its.optimizer, found, **own) as run:
        its.optimizer.register_step_pre_hook(lambda *_: norms.append(norm_of(its.model)))
        train(run, batches(2), loss_fn)
        assert run.plan.clip_norm.value == (None if clips is None else 1e-3)
    assert norms == [pytest.approx(1e-3, rel=1e-2)] * 2


def test_a_limit_that_was_set_by_hand_is_not_overridden():
    its = subject()
    with raises(ValueGivenError, code="clip_norm.differs_from_plan", field="clip_norm"):
        trimtab.start(its.model, its.optimizer, Plan.fixed(ROWS, clip_norm=3.0), clip_norm=0.25)


def norm_of(model):
    return float(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm())


def test_a_range_test_tells_the_norms_of_its_gradients_and_clips_none():
    its = subject()
    loss = loss_fn(its.model, batches(1)[0])
    gradients = torch.autograd.grad(loss, list(its.model.parameters()))
    norm = float(torch.cat([each.flatten() for each in gradients]).norm())
    limit = replace(STANDS.clip_norm, value=1e-3)
    plain, clipped = (
        range_test(its, plan, batches(), lambda text: None, num_steps=12)
        for plan in (STANDS, replace(STANDS, clip_norm=limit))
    )
    assert plain[0].norm == clipped[0].norm == pytest.approx(norm, rel=1e-5)  # before it is clipped
    assert len({point.norm for point in plain}) == 12
    assert [point.loss for point in plain] != [point.loss for point in clipped]


@pytest.mark.usefixtures("brief_trials")
def test_a_plan_says_what_its_own_race_found():
    its = subject()
    before = fingerprint(its.model, its.optimizer)
    given = {"adapt": "optimizer", "data": batches(), "num_blocks": 3}
    found = trimtab.plan(its.model, its.optimizer, its.loss_fn, its.batch, **given)
    assert found.optimizer.code.startswith("paired_run.")
    assert "60 steps" in found.optimizer.reason
    assert found.optimizer.changed == (found.optimizer.value == "muon")
    assert 0 < found.search_s < found.planning_s
    assert found.optimizer.reason in found.explain()
    assert fingerprint(its.model, its.optimizer) == before


@pytest.mark.parametrize(
    ("make", "change", "data", "error", "field"),
    [
        (sgd, None, [], OptimizerError, "optimizer"),
        (None, lambda m: m.blocks.requires_grad_(False), [], ModelError, "model"),
        (None, None, None, ValueGivenError, "data"),
    ],
)
def test_what_cannot_be_raced_is_refused_before_anything_is_measured(make, change, data, error, field):
    its = subject()
    if change is not None:
        change(its.model)

    def never(model, batch):
        raise AssertionError("something was measured")

    optimizer = its.optimizer if make is None else make(its.model)
    with pytest.raises(error) as caught:
        trimtab.plan(its.model, optimizer, never, its.batch, adapt="optimizer", data=data)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "adapt", ["optimizer", "optimizer_state", ("learning_rate", "schedule"), ("learning_rate", "dropout")]
)
def test_one_of_several_ranks_does_not_race(monkeypatch, adapt):
    its = subject()
    monkeypatch.setattr(trimtab.api, "has_peers", lambda: True)
    with raises(ValueGivenError, code="adapt.needs_single_process", field="adapt"):
        trimtab.plan(its.model, its.optimizer, loss_fn, its.batch, adapt=adapt, data=batches())


# The shape of the schedule.


@pytest.mark.parametrize("won", [True, False])
def test_a_schedule_is_raced_against_a_straight_line_by_samples_alone(monkeypatch, won):
    adapt = ("learning_rate", "schedule")
    found, (_, (stands, rival)) = planned(subject(), monkeypatch, PairedTrainingVerdict(won, "so it was", 1.3), adapt)
    assert (stands.schedule.value, rival.schedule.value) == ("warmup_cosine", "warmup_linear")
    assert found.schedule.value == ("warmup_linear" if won else "warmup_cosine")
    assert {loser.value for loser in found.schedule.rejected} >= {"warmup_cosine" if won else "warmup_linear"}
    assert "so it was" in found.explain()
    assert found.search_s > 0
    assert (found.measured, found.verified) == (stands.measured, stands.verified)  # no step became slower by it


IN_HALF = replace(Plan.fixed(ROWS, precision="bf16"), measured=MeasuredCost(1.0, 1000))


@pytest.mark.parametrize("is_gain", [True, False])
def test_float8_products_are_kept_where_they_won(is_gain, monkeypatch):
    its = subject()
    counted = replace(IN_HALF, measured=MeasuredCost(1.0, 900))
    monkeypatch.setattr(
        training_settings_search, "_with_counted_peak", lambda _, plan: replace(plan, measured=counted.measured)
    )
    verdict = PairedTrainingVerdict(is_gain, "1.2x sooner", 0.8)
    found, (_, (stands, rival)) = planned(its, monkeypatch, verdict, {"float8"}, base=IN_HALF)
    assert (stands.float8.value, rival.float8.value) == (None, 1024)
    assert (found.float8.value, found.plan_kind) == ((1024, "tuned") if is_gain else (None, "equivalent"))
    assert [each.value for each in found.float8.rejected] == [None if is_gain else 1024]
    if is_gain:
        assert (found.measured.peak_bytes, found.measured.step_s) == (900, pytest.approx(0.8))
        budget = Budget(memory=800)
        found, _ = planned(its, monkeypatch, verdict, {"float8"}, base=IN_HALF, budget=budget)
        assert (found.float8.value, found.float8.code) == (None, "budget.memory")


def test_float8_products_are_raced_in_bf16_only(monkeypatch):
    found, (_, *raced) = planned(subject(), monkeypatch, PairedTrainingVerdict(True, "so"), {"float8"})
    assert not raced
    assert found.float8.value is None


def test_a_schedule_is_raced_only_if_the_rate_is_free_and_changes(monkeypatch):
    monkeypatch.setattr(training_settings_search, "short_race", lambda *_, **__: pytest.fail("raced"))
    monkeypatch.setattr(
        training_settings_search, "range_test", lambda *_: tuple(RatePoint(1.3**i, 5.0 + i) for i in range(20))
    )
    found = tune_plan(subject(), STANDS, ("learning_rate", "schedule"), batches(), lambda text: None)
    assert found.schedule.value == "user"
    its = subject()
    with raises(ValueGivenError, code="adapt.schedule_without_rate", field="adapt"):
        trimtab.plan(its.model, its.optimizer, loss_fn, its.batch, adapt="schedule", data=batches())


def test_a_rival_of_muon_has_the_schedule_that_was_raced(monkeypatch):
    adapt = ("learning_rate", "schedule", "optimizer")
    found, (_, _, (stands, rival)) = planned(subject(), monkeypatch, PairedTrainingVerdict(True, "so"), adapt)
    assert (rival.optimizer.value, stands.optimizer.value) == ("muon", "user")
    assert rival.schedule == stands.schedule
    assert rival.schedule.value == "warmup_linear"
    assert found.optimizer.value == "muon"


# Dropout.


class Heavy(Tokens):
    """Drops so much that hardly anything is left to learn by."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens):
        return self.drop(super().forward(tokens))


def test_the_loss_of_unseen_batches_is_that_of_evaluation_before_each_step():
    its = subject(Heavy)
    said: list[str] = []
    none = Plan.fixed(ROWS, dropout=0.0)
    (pair,) = short_race(its, STANDS, none, batches(), said.append, 8, 1, by_unseen=True)
    its.model.eval()
    with torch.no_grad():
        first = float(loss_fn(its.model, batches(1)[0]))
    assert pair.stands.losses[0] == pytest.approx(first)
    assert pair.rival.losses[0] == pytest.approx(first)  # evaluation drops nothing, whatever the plan
    assert pair.stands.losses[-1] != pair.rival.losses[-1]
    its.model.train()
    (trained,) = short_race(its, STANDS, none, batches(), said.append, 8, 1)
    assert trained.stands.losses[0] != pytest.approx(first)


def test_evaluating_changes_no_training():
    its = subject(Heavy)
    its.model.blocks.eval()
    before = fingerprint(its.model, its.optimizer)
    noting, modes = noted(its, lambda model, batch: (model.training, model.blocks.training))
    for by_unseen in (False, True):
        short_race(noting, STANDS, STANDS, batches(), lambda text: None, 4, 1, by_unseen=by_unseen)
        assert set(modes) == ({(True, False), (False, False)} if by_unseen else {(True, False)})
    assert fingerprint(its.model, its.optimizer) == before
    assert its.model.training
    assert not its.model.blocks.training


@pytest.mark.usefixtures("brief_trials")
def test_dropout_that_nothing_needs_is_dropped(monkeypatch):
    # Steps of a millisecond on a busy machine decide by its noise; here each takes one tick.
    ticking = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("trimtab.profiling.training_settings_search.time", ticking)
    its = subject(Heavy)
    before = fingerprint(its.model, its.optimizer)
    given = {"adapt": "dropout", "data": batches(60), "num_blocks": 3, "total_steps": 60}
    found = trimtab.plan(its.model, its.optimizer, its.loss_fn, its.batch, **given)
    assert fingerprint(its.model, its.optimizer) == before
    assert "a run of 1 epoch" in found.dropout.reason
    assert (found.dropout.value, found.plan_kind) == (0.0, "tuned")
    with trimtab.start(its.model, its.optimizer, found):
        assert its.model.drop.p == 0.0
    assert its.model.drop.p == 0.5


@pytest.mark.parametrize(
    ("make", "data", "passes", "said"),
    [
        (Tokens, batches(60), 1.0, "no dropout"),
        (Heavy, batches(60), None, "total_steps"),
        (Heavy, batches(60), 4.0, "4 epochs"),
        (Heavy, batches(40), 0.5, "40 batches"),
    ],
)
def test_where_no_race_could_tell_dropout_is_kept_and_why(monkeypatch, make, data, passes, said):
    monkeypatch.setattr(training_settings_search, "short_race", lambda *_, **__: pytest.fail("raced"))
    found = tune_plan(subject(make), STANDS, ("dropout",), data, lambda text: None, RunLength(passes=passes))
    assert (found.dropout.value, found.plan_kind) == (None, "equivalent")
    assert said in found.dropout.reason


def test_dropout_is_kept_if_operators_are_recomputed_by_number():
    base = STANDS.recomputing("~0[0] 1", ("one", "two"), "asked for")
    found = tune_plan(subject(Heavy), base, ("dropout",), batches(60), lambda text: None, RunLength(passes=1.0))
    assert (found.dropout.value, found.recompute.value) == (None, "~0[0] 1")
    assert "by number" in found.dropout.reason


def test_passes_are_known_by_length_and_steps():
    assert RunLength.of(batches(40), 100) == RunLength(100, 2.5)
    assert RunLength.of(iter(batches(4)), 100) == RunLength(100, None)
    assert RunLength.of(batches(4), None) == RunLength()

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from batches(4)

    assert RunLength.of(torch.utils.data.DataLoader(Endless()), 100).passes is None


def test_pairs_of_few_batches_that_are_not_shuffled_differ_in_their_order(monkeypatch):
    monkeypatch.setattr("trimtab.profiling.training_settings_search.is_lost", lambda pair: False)
    noting, seen = noted(subject(), first_token)
    data = [(torch.full((ROWS, 6), i), torch.full((ROWS, 6), i)) for i in range(8)]
    short_race(noting, STANDS, STANDS, data, lambda text: None, 8, 3, by_unseen=True, same_step=True)
    orders = [seen[i : i + 16 : 2] for i in range(0, len(seen), 48)]  # of each pair's first training
    assert [sorted(order) for order in orders] == [list(range(8))] * 3
    assert len({tuple(order) for order in orders}) == 3


def test_a_rival_whose_step_breaks_a_limit_does_not_win():
    plan = replace(STANDS, measured=MeasuredCost(0.095, 100, energy_j=1.0))
    won = PairedTrainingVerdict(True, "sooner", 1.3)
    assert within_limits(Budget(), plan, won) is won
    assert within_limits(Budget(time=0.13), plan, won) is won
    for limit in (Budget(time=0.1), Budget(energy=1.2)):
        found = within_limits(limit, plan, won)
        assert not found.is_gain
        assert "over the budget" in found.reason
        assert (
            adapt_setting("optimizer", plan, replace(plan, optimizer=MUON.optimizer), found, 1.0).optimizer.value
            == "user"
        )


def test_what_is_unseen_is_of_one_pass():
    """Two trainings of 8 batches in each pass of 20: the last four of each are dropped."""
    noting, seen = noted(subject(), first_token)
    data = [(torch.full((ROWS, 6), i % 11), torch.full((ROWS, 6), i % 11)) for i in range(20)]
    short_race(noting, STANDS, STANDS, data, lambda text: None, 8, 3, by_unseen=True, same_step=True)
    trainings = [set(seen[i : i + 16]) for i in range(0, len(seen), 16)]  # each batch is evaluated, then trained on
    assert trainings
    assert all(each in ({*range(8)}, {8, 9, 10, *range(5)}) for each in trainings)
    few = data[:5]
    with raises(ValueGivenError, code="data.too_few_batches", field="data"):
        short_race(noting, STANDS, STANDS, few, lambda text: None, 8, 1, by_unseen=True)


# Low-bit optimizer state.


class Wide(nn.Module):
    """A model whose state is most of the memory of a step."""

    def __init__(self, dtype):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(11, 128), nn.ModuleList(nn.Linear(128, 128) for _ in range(12))
        self.head = nn.Linear(128, 11)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def state_planned(monkeypatch, lost: set[str], stands: Plan = STANDS, make=Wide) -> tuple[Plan, list[Plan]]:
    """Return a plan for which storages in `lost` were refused beforehand, and the rivals."""
    rivals = []

    def short(its, stands, rival, data, progress, **how):
        rivals.append(rival)
        return ()

    def judge(pairs, stands, objective, kind, saved):
        assert saved > 0.05
        return PairedTrainingVerdict(kind not in lost, f"{kind} was so", 1.25, "paired_run.tested")

    monkeypatch.setattr(training_settings_search, "short_race", short)
    monkeypatch.setattr(training_settings_search, "judge_smaller", judge)
    return tune_plan(subject(make), stands, ("optimizer_state",), batches(60), lambda text: None), rivals


@pytest.mark.parametrize(
    ("lost", "value", "tried"),
    [(set(), "8bit", ["8bit"]), ({"8bit"}, "bf16", ["8bit", "bf16"]), ({"8bit", "bf16"}, "user", ["8bit", "bf16"])],
)
def test_state_is_raced_in_8_bits_and_then_in_bf16(monkeypatch, lost, value, tried):
    fused = Plan.fixed(ROWS, fused_optimizer=True)
    found, rivals = state_planned(monkeypatch, lost, fused)
    assert [rival.optimizer_state.value for rival in rivals] == tried
    assert not any(rival.fused_optimizer.value for rival in rivals)
    assert (found.optimizer_state.value, found.fused_optimizer.value) == (value, value == "user")
    assert found.plan_kind == ("equivalent" if value == "user" else "tuned")
    assert {loser.value for loser in found.optimizer_state.rejected} >= lost
    assert found.search_s > 0


def test_a_plan_with_low_bit_state_has_its_step_time_and_peak(monkeypatch):
    measured = replace(STANDS, measured=MeasuredCost(1.0, 2**30), predicted=MeasuredCost(1.0, 2**30))
    found, (rival,) = state_planned(monkeypatch, set(), measured)
    assert found.measured.step_s == found.predicted.step_s == 1.25
    assert found.predicted.peak_bytes == rival.predicted.peak_bytes < 2**30
    traced = trace_optimizer_states(subject(Wide), STANDS, ("8bit",))
    assert 2**30 - found.predicted.peak_bytes == traced["user"] - traced["8bit"]
    tables = 135_000  # bytes of the format, which are traced, and which a counted step of torch tensors leaves out
    assert found.measured.peak_bytes == pytest.approx(traced["8bit"] - tables, rel=0.01)


def test_state_that_saves_little_and_muon_are_not_raced(monkeypatch):
    monkeypatch.setattr(training_settings_search, "short_race", lambda *_, **__: pytest.fail("raced"))
    for make, stands in ((functools.partial(Wide), MUON), (Narrow, STANDS)):
        found = tune_plan(subject(make), stands, ("optimizer_state",), batches(60), lambda text: None)
        assert found.optimizer_state.value == "user"
        assert found.optimizer == stands.optimizer


class Narrow(Tokens):
    """A model with a single parameter that is large enough, and a step that takes more memory than the state."""

    def __init__(self, dtype):
        super().__init__(dtype)
        self.wide = nn.Linear(64, 64)


def test_a_real_race_accepts_state_in_8_bits():
    its = subject(Wide, rate=1e-4)
    before = fingerprint(its.model, its.optimizer)
    only_memory = Objective(time=0, memory=1)
    found = tune_plan(its, STANDS, ("optimizer_state",), batches(60), lambda text: None, objective=only_memory)
    assert fingerprint(its.model, its.optimizer) == before
    assert (found.optimizer_state.value, found.optimizer_state.code) == ("8bit", "paired_run.less_memory")
    with trimtab.start(its.model, its.optimizer, found) as run:
        train(run, batches(2), loss_fn)


@pytest.mark.usefixtures("brief_trials")
def test_planning_races_by_its_objective_and_with_permission_only(monkeypatch):
    seen = []

    def judge(pairs, stands, objective, kind, saved):
        seen.append(objective)
        return PairedTrainingVerdict(True, "so", 1.0, "paired_run.tested")

    monkeypatch.setattr(training_settings_search, "short_race", lambda *_, **__: ())
    monkeypatch.setattr(training_settings_search, "judge_smaller", judge)
    its = subject(Wide)
    given = {"data": batches(), "num_blocks": 3, "objective": Objective(time=1, memory=3)}
    plain = trimtab.plan(its.model, its.optimizer, its.loss_fn, its.batch, **given)
    assert (plain.optimizer_state.value, seen) == ("user", [])
    found = trimtab.plan(its.model, its.optimizer, its.loss_fn, its.batch, adapt="optimizer_state", **given)
    assert (found.optimizer_state.value, seen) == ("8bit", [Objective(time=1, memory=3)])


@pytest.mark.parametrize("make", [torch.optim.RMSprop, torch.optim.SGD])
def test_an_optimizer_without_low_bit_state_is_refused_before_anything_is_measured(make):
    its = subject(Wide)
    optimizer = make(its.model.parameters(), lr=0.1)
    with pytest.raises(OptimizerError) as caught:
        trimtab.plan(its.model, optimizer, None, its.batch, adapt="optimizer_state", data=batches())
    assert caught.value.code.startswith("optimizer_state.")
