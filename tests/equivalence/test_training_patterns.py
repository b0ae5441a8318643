"""Public training patterns through plans set by hand: equal to the plain loop, warned of, or refused; never silent."""

from __future__ import annotations

import pytest
from training_patterns import PATTERNS, PLANS
from training_patterns.outcomes import outcome


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("name", PATTERNS)
def test_training_is_equal_warned_of_or_refused(name, plan_name):
    found = outcome(name, plan_name)
    assert found.kind == PATTERNS[name].expected.get(plan_name, "equal"), found.detail
