"""A plan's dropout: set for a run, of all that drops something, and put back."""

from __future__ import annotations

import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import ModelError, ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.settings.dropout import dropout_modules, use_dropout
from trimtab.tasks.models.gpt import GPT, GPTShape


class Own(nn.Module):
    """A module with a probability of its own, beside what it is made of."""

    def __init__(self, dropout: float | bool | nn.Module) -> None:
        super().__init__()
        self.attention_dropout, self.layer = dropout, nn.Linear(2, 2)


def probabilities(model: nn.Module) -> list[float]:
    return [getattr(module, name) for module, name in dropout_modules(model)]


def test_all_that_drops_is_found_and_nothing_else():
    model = nn.Sequential(
        nn.Dropout(0.1),
        nn.Dropout(0.0),
        nn.Dropout2d(0.2),
        nn.AlphaDropout(0.3),
        nn.MultiheadAttention(4, 2, dropout=0.4),
        nn.LSTM(4, 4, num_layers=2, dropout=0.5),
        Own(0.6),
        Own(True),
        Own(nn.Dropout(0.7)),
        nn.Linear(2, 2),
    )
    assert probabilities(model) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    undo = use_dropout(model, 0.25)
    assert set(probabilities(model)) == {0.25}
    assert model[1].p == 0.0
    undo()
    assert probabilities(model) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


def test_a_run_drops_as_planned_and_leaves_it_as_it_was():
    model = GPT(GPTShape(11, 8, num_layers=1, num_heads=2, width=8, dropout=0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = probabilities(model)
    assert set(before) == {0.3}
    tokens = torch.randint(11, (2, 8))
    with trimtab.start(model, optimizer, Plan.fixed(2, dropout=0.0)) as run:
        assert torch.equal(run.model(tokens), run.model(tokens))
    assert probabilities(model) == before
    assert not torch.equal(model(tokens), model(tokens))


def test_equals_a_plain_loop_without_dropout():
    def trained(dropout: float, plan: Plan) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = GPT(GPTShape(11, 8, num_layers=1, num_heads=2, width=8, dropout=dropout))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with trimtab.start(model, optimizer, plan) as run:
            for seed in range(3):
                tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(seed))
                run.train_step(
                    run.window(tokens),
                    lambda m, b: nn.functional.cross_entropy(m(b[:, :-1]).flatten(0, 1), b[:, 1:].flatten()),
                )
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(trained(0.3, Plan.fixed(4, dropout=0.0)), trained(0.0, Plan.fixed(4)), strict=True):
        assert torch.equal(ours, theirs)


def test_what_cannot_be_set_is_refused_and_nothing_is_changed():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ModelError, code="dropout.no_modules", field="model"):
        trimtab.start(model, optimizer, Plan.fixed(2, dropout=0.0))
    with raises(ValueGivenError, code="value.invalid", field="plan.dropout"):
        Plan.fixed(2, dropout=1.5)


def test_such_a_plan_is_of_tier_f():
    plan = Plan.fixed(2, dropout=0.0)
    assert plan.plan_kind == "tuned"
    assert "dropout 0.0" in plan.changes_in_words


def test_operators_keep_their_numbers_unless_dropout_is_switched_off_or_certain():
    """With a probability of 0 or 1, torch draws nothing, so that the operators of a schedule have other numbers."""
    for probability in (0.0, 1.0):
        with raises(ValueGivenError, code="recompute.dropout", field="plan.recompute"):
            Plan.fixed(8, recompute="~0[0] 1", dropout=probability)
        assert Plan.fixed(8, recompute="~0 (1)", dropout=probability).dropout.value == probability
    assert Plan.fixed(8, recompute="~0[0] 1", dropout=0.5).dropout.value == 0.5
