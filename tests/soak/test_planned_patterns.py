"""Public training patterns through `trimtab.plan` and `trimtab.start`: equal, warned of, or refused; never silent."""

from __future__ import annotations

import pytest
from training_patterns import PATTERNS
from training_patterns.outcomes import planned_outcomes


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.usefixtures("brief_trials")
def test_training_by_a_plan_is_equal_warned_of_or_refused(name):
    for plan_name, found in planned_outcomes(name).items():
        assert found.kind == PATTERNS[name].outcomes.get(plan_name, "equal"), f"{plan_name}: {found.detail}"
