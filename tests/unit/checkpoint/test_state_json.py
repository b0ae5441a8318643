"""States of Python's own types as JSON: bit for bit, or refused by where they are."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises

from trimtab.checkpoint.state_files import MAX_DEPTH, Packer, Unpacker
from trimtab.core.errors import FormatError

floats = st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack(">d", bits.to_bytes(8, "big"))[0])
scalars = st.none() | st.booleans() | st.integers() | floats | st.text() | st.binary()
keys = st.text() | st.integers()
states = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=15,
)


def unpack(packed):
    return Unpacker({}).unpack(packed)


def back(state):
    """Return a state after a way through text."""
    return unpack(json.loads(json.dumps(Packer().pack(state), allow_nan=False)))


def exactly(value):
    """Return what two states have in common that do not differ in any bit, type or order."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, list | tuple):
        return type(value), [exactly(each) for each in value]
    if isinstance(value, dict):
        return type(value), [(type(key), key, exactly(each)) for key, each in value.items()]
    return type(value), value


@given(states)
def test_a_state_comes_back_bit_for_bit(state):
    assert exactly(back(state)) == exactly(state)


@pytest.mark.parametrize(
    "value",
    [-0.0, 5e-324, 1e308, float("inf"), float("nan"), -float("nan"), 2**63, -(1 << 20_000)],
    ids=lambda v: type(v).__name__,
)
def test_numbers_that_json_does_not_know(value):
    assert exactly(back([value])) == exactly([value])


def test_a_key_and_what_looks_like_it_stay_two():
    state = {"1": "text", 1: "number", "map": [["a", 1]], "tensor": {"name": "0"}}
    assert exactly(back(state)) == exactly(state)


def test_pythons_generator_goes_on():
    generator = random.Random(3)
    generator.gauss(0, 1)
    other = random.Random()
    other.setstate(back(generator.getstate()))
    assert [other.gauss(0, 1) for _ in range(5)] == [generator.gauss(0, 1) for _ in range(5)]


def test_an_ordered_dict_comes_back_as_a_dict_in_its_order():
    assert exactly(back(OrderedDict([("z", 1), ("b", 2)]))) == exactly({"z": 1, "b": 2})


def test_what_a_mapping_knows_of_keys_that_are_not_there_comes_back():
    state = {"counts": Counter({3: 2, "a": -1}), "lists": defaultdict(list, {"z": [1.0], "b": []})}
    state |= {"none": defaultdict(None, {1: 2}), "in it": defaultdict(dict, {0: Counter([5, 5])})}
    found = back(state)
    assert exactly(found) == exactly(state)
    assert [*found["counts"].elements()] == [3, 3]
    factories = [found[name].default_factory for name in ("lists", "none", "in it")]
    assert factories == [list, None, dict]


def test_a_counter_that_was_written_as_a_dict_is_read_as_one():
    """As of before it had a kind of its own."""
    assert exactly(unpack({"map": [[3, 1]]})) == exactly({3: 1})


class Level(IntEnum):
    ONE = 1


Pair = namedtuple("Pair", "a b")
LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("state", "field", "got"),
    [
        ({"a": [0, {"b": object()}]}, "state['a'][1]['b']", "builtins.object"),
        ({"a": {1, 2}}, "state['a']", "builtins.set"),
        ((lambda: 0,), "state[0]", "builtins.function"),
        ([Level.ONE], "state[0]", "Level"),
        ([Pair(1, 2)], "state[0]", "Pair"),
        ([1j], "state[0]", "builtins.complex"),
        ([bytearray(b"x")], "state[0]", "builtins.bytearray"),
        ({"a": {True: 1}}, "state['a'] key True", "bool"),
        ([Counter("ab"), Counter([(1, 2)])], "state[1] key (1, 2)", "tuple"),
        ({"a": defaultdict(lambda: 0)}, "state['a']", "<function "),
        ([defaultdict(Counter)], "state[0]", "<class 'collections.Counter'>"),
        ({(1, 2): 1}, "state key (1, 2)", "tuple"),
        (["\ud800"], "state[0]", r"'\ud800'"),
    ],
)
def test_what_it_cannot_hold_is_refused_by_its_place(state, field, got):
    with raises(FormatError, code="state.unsupported_type", field=field) as refused:
        Packer().pack(state)
    assert got in refused.value.got


def test_the_error_of_a_default_factory_lists_the_allowed_ones():
    with raises(FormatError, code="state.unsupported_type") as refused:
        Packer().pack(defaultdict(lambda: 0))
    assert "bool, int, float" in refused.value.expected


def test_a_structure_that_contains_itself_is_refused():
    with raises(FormatError, code="state.too_deep", field="state" + "[0]" * (MAX_DEPTH + 1)) as refused:
        Packer().pack(LOOP)
    assert str(MAX_DEPTH) in refused.value.got


@pytest.mark.parametrize(
    "packed",
    [
        [1],
        {},
        {"map": [], "list": []},
        {"unknown": 1},
        {"map": {"a": 1}},
        {"map": [["a"]]},
        {"map": [["a", 1], ["a", 2]]},
        {"map": [[{"list": []}, 1]]},
        {"map": [[1.5, 1]]},
        {"counter": {"a": 1}},
        {"counter": [["a", 1], ["a", 2]]},
        {"default": []},
        {"default": {"list": []}},
        {"default": ["list"]},
        {"default": ["list", {"a": 1}]},
        {"default": ["open", []]},
        {"default": [["list"], []]},
        {"default": [None, []]},
        {"list": "ab"},
        {"tuple": 3},
        {"int": 3},
        {"int": "0xg"},
        {"float": "ff"},
        {"float": 1.0},
        {"bytes": "*"},
        {"bytes": 7},
        {"tensor": {"name": "0"}},
    ],
)
def test_what_no_writer_wrote_is_refused(packed):
    with raises(FormatError, code="state.malformed", field="state"):
        unpack(packed)
