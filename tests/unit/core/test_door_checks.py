"""Checks at the door: the value unchanged, or an error that names the field and the bound."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.core import validation
from trimtab.core.errors import ValueGivenError

bounds = st.floats(-1e9, 1e9)


@given(st.floats() | st.integers(), bounds, bounds, st.booleans())
def test_a_number_passes_exactly_when_it_lies_within(value, one, other, open_low):
    low, high = sorted((one, other))
    inside = (low < value if open_low else low <= value) and value <= high
    if inside:
        passed = validation.number("x", value, low=low, high=high, open_low=open_low)
        assert passed == value
        assert type(passed) is float
    else:
        with raises(ValueGivenError, code="value.invalid", field="x"):
            validation.number("x", value, low=low, high=high, open_low=open_low)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, True, "1", None, 1j], ids=lambda v: str(v)[:5]
)
def test_what_is_no_finite_number_is_refused(value):
    with raises(ValueGivenError, code="value.invalid", field="x"):
        validation.number("x", value)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"low": 0}, "a finite number >= 0"),
        ({"low": 0, "open_low": True}, "a finite number > 0"),
        ({"low": 0, "high": 1}, "a finite number >= 0 and <= 1"),
        ({"high": 1}, "a finite number and <= 1"),
    ],
)
def test_the_bound_is_named(bounds, words):
    with pytest.raises(ValueGivenError) as caught:
        validation.number("x", math.nan, **bounds)
    assert caught.value.expected == words


@given(st.integers(), st.integers(-100, 100), st.integers(0, 100))
def test_a_whole_number_passes_exactly_when_it_lies_within(value, low, width):
    if low <= value <= low + width:
        assert validation.integer("x", value, low=low, high=low + width) == value
    else:
        with raises(ValueGivenError, code="value.invalid", field="x"):
            validation.integer("x", value, low=low, high=low + width)


@pytest.mark.parametrize("value", [1.0, True, "1", None, math.nan, 0, 2**62 + 1])
def test_what_is_no_positive_whole_number_is_refused(value):
    with raises(ValueGivenError, code="value.invalid", field="x"):
        validation.integer("x", value)


@pytest.mark.parametrize("value", ["c", "", "A", None, 0, ["a"], "ab"])
def test_a_name_outside_the_list_is_refused_and_the_list_named(value):
    assert validation.one_of("x", "b", ("a", "b")) == "b"
    with raises(ValueGivenError, code="value.invalid", field="x"):
        validation.one_of("x", value, iter("ab"))


@pytest.mark.parametrize("value", [["a", "b"], ("a", "b"), iter(["a", "b"]), {"a": 1, "b": 2}])
def test_names_pass_as_a_tuple(value):
    assert validation.names("x", value) == ("a", "b")


@pytest.mark.parametrize("value", ["ab", b"ab", 3, None, ["a", 1]])
def test_what_are_no_names_is_refused(value):
    with raises(ValueGivenError, code="value.invalid", field="x"):
        validation.names("x", value)


class One:
    """An array of one element, as of a library that core does not know."""

    def __init__(self, value: object, shape: tuple[int, ...] = (1, 1)) -> None:
        self.value, self.shape = value, shape

    def item(self) -> object:
        assert math.prod(self.shape) == 1
        return self.value


@pytest.mark.parametrize("value", [2, 2.0, Fraction(2), One(2.0), One(2, ()), np.float32(2), np.ones(1) * 2])
def test_a_figure_is_of_one_element(value):
    found = validation.float_value("x", value)
    assert found == 2
    assert type(found) is float


@pytest.mark.parametrize("value", [math.inf, -math.inf, np.float32("inf"), One(math.nan)])
def test_a_figure_may_be_no_finite_number(value):
    assert not math.isfinite(validation.float_value("x", value))


REFUSED = [True, "1", None, 1j, [1.0], One(1.0, (2,)), One(True), One("1"), np.str_("1"), np.array("1"), np.bool_(True)]


@pytest.mark.parametrize("value", [*REFUSED, np.complex64(1), np.ones(2)])
def test_what_is_no_figure_is_refused_and_how_to_make_one_is_said(value):
    with raises(ValueGivenError, code="value.invalid", field="x"):
        validation.float_value("x", value)
