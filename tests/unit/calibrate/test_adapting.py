"""Short trainings of two plans: paired on the user's data, put back whole, and what is made of them."""

from __future__ import annotations

import pytest
import torch
from rank_cases import Tokens
from torch import nn

import trimtab
from trimtab.calibrate import adapting, trials
from trimtab.calibrate.short_race import short_race
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import ModelError, OptimizerError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.decide.learning_rate import RatePoint
from trimtab.decide.short_race import ShortPair, ShortRun, Verdict
from trimtab.measure.snapshot import fingerprint

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


def subject(make=Tokens, rate: float = 0.01) -> Subject:
    torch.manual_seed(0)
    model = make(torch.float32)
    return Subject(model, torch.optim.AdamW(model.parameters(), lr=rate), loss_fn, batches(1)[0])


def race(its: Subject, rival: Plan, data, **given):
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
    assert said[:2] == ["race of the plan as it stands, pair 1 of 1", "race of its rival, pair 1 of 1"]


def test_a_rival_that_is_never_beaten_is_run_for_all_pairs_beside_a_control(monkeypatch):
    monkeypatch.setattr("trimtab.calibrate.short_race.is_lost", lambda pair: False)
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
    with pytest.raises(ValueGivenError, match="data: given 7 batches; expected at least the 10"):
        race(subject(), STANDS, iter(batches(7)), num_steps=10, num_pairs=1)
    with pytest.raises(ValueGivenError, match="data: given 0 batches"):
        race(subject(), STANDS, [], num_steps=10)


def test_a_schedule_is_run_through_whole_in_each_training():
    rates = []

    class Noting(torch.optim.AdamW):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    its = subject()
    noting = Subject(its.model, Noting(its.model.parameters(), lr=0.01), loss_fn, its.batch)
    plan = Plan.fixed(ROWS, schedule="warmup_cosine")
    short_race(noting, plan, plan, batches(), lambda text: None, num_steps=40, num_pairs=1)
    assert rates[:40] == rates[40:80]
    assert rates[0] == pytest.approx(0.005)
    assert max(rates) == pytest.approx(0.01)
    assert rates[39] == pytest.approx(0.001)


def planned(its: Subject, monkeypatch, verdict: Verdict, adapt) -> tuple[Plan, list]:
    """Return a plan whose race was decided beforehand, and the plans that were raced."""
    raced, tested = [], []

    def short(its, stands, rival, data, progress):
        raced.append((stands, rival))
        return (ShortPair(ShortRun((1.0,), 1.0), ShortRun((1.0,), 1.0)),)

    def ranged(its, plan, data, progress):
        tested.append(plan.optimizer.value)
        best = 20 if plan.optimizer.value == "muon" else 10
        return tuple(RatePoint(1.3**i, 5 - 0.2 * i if i < best else 9.0) for i in range(best + 3))

    monkeypatch.setattr(adapting, "short_race", short)
    monkeypatch.setattr(adapting, "range_test", ranged)
    monkeypatch.setattr(adapting, "judge", lambda pairs, rival: verdict)
    return adapting.adapted(its, STANDS, adapt, batches(), lambda text: None), [tested, *raced]


def test_muon_is_kept_where_it_won_and_the_run_steps_by_it(monkeypatch):
    its = subject()
    found, (tested, (stands, rival)) = planned(its, monkeypatch, Verdict(True, "2x sooner", 1.5), {"optimizer"})
    assert (found.optimizer.value, found.tier) == ("muon", "F")
    assert "2x sooner" in str(found)
    assert (tested, stands.optimizer.value, rival.optimizer.value) == ([], "user", "muon")
    assert rival.learning_rate_scale == stands.learning_rate_scale
    with trimtab.start(its.model, its.optimizer, found) as run:
        for window in run.windows(batches(2)):
            run.train_step(window, loss_fn)
        assert "muon" in run.state_dict()


@pytest.mark.parametrize("won", [True, False])
def test_each_is_raced_at_the_rate_of_its_own_range_test(monkeypatch, won):
    adapt = ("learning_rate", "optimizer")
    found, (tested, (stands, rival)) = planned(subject(), monkeypatch, Verdict(won, "so"), adapt)
    assert tested == ["user", "muon"]
    assert 1 < stands.learning_rate_scale.value < rival.learning_rate_scale.value
    kept = rival if won else stands
    assert found.learning_rate_scale == kept.learning_rate_scale
    assert found.schedule.value == "warmup_cosine"
    assert found.optimizer.value == ("muon" if won else "user")


def test_a_plan_says_what_its_own_race_found(monkeypatch):
    monkeypatch.setattr(trials, "BLOCK_S", 0.003)
    its = subject()
    before = fingerprint(its.model, its.optimizer)
    given = {"adapt": "optimizer", "data": batches(), "num_blocks": 3}
    found = trimtab.plan(its.model, its.optimizer, its.loss_fn, its.batch, **given)
    assert "raced over 60 steps" in found.optimizer.reason
    assert found.optimizer.changed == (found.optimizer.value == "muon")
    assert 0 < found.search_s < found.planning_s
    assert found.optimizer.reason in str(found)
    assert fingerprint(its.model, its.optimizer) == before


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "change", "data", "error", "said"),
    [
        (sgd, None, [], OptimizerError, "given SGD; expected torch.optim.AdamW"),
        (None, lambda m: m.blocks.requires_grad_(False), [], ModelError, "no matrix in a block"),
        (None, None, None, ValueGivenError, "data: given nothing"),
    ],
)
def test_what_cannot_be_raced_is_refused_before_anything_is_measured(make, change, data, error, said):
    its = subject()
    if change is not None:
        change(its.model)

    def never(model, batch):
        raise AssertionError("something was measured")

    optimizer = its.optimizer if make is None else make(its.model)
    with pytest.raises(error, match=said):
        trimtab.plan(its.model, optimizer, never, its.batch, adapt="optimizer", data=data)


def test_one_of_several_ranks_does_not_race(monkeypatch):
    its = subject()
    monkeypatch.setattr(trimtab.api, "has_peers", lambda: True)
    with pytest.raises(ValueGivenError, match="adapt: given optimizer, on one of several ranks"):
        trimtab.plan(its.model, its.optimizer, loss_fn, its.batch, adapt="optimizer", data=batches())
