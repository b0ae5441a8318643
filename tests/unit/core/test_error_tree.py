"""The tree drawn in the docstring is the tree that exists, and every message has its three parts."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from trimtab.core import errors

CLASSES = {
    name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and cls.__module__ == errors.__name__
}


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Return name -> (parent, other base) as drawn in the module's docstring."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        name = re.match(r"([ │├└─]*)([A-Z]\w+(?:Error))\b", line)
        if not name:
            continue
        depth = len(name[1])
        while above and above[-1][0] >= depth:
            above.pop()
        also = re.search(r"\(also an? (\w+)\)", line)
        tree[name[2]] = (above[-1][1] if above else None, also[1] if also else None)
        above.append((depth, name[2]))
    return tree


def test_the_tree_drawn_is_the_tree_that_exists():
    existing = {}
    for name, cls in CLASSES.items():
        ours = [base.__name__ for base in cls.__bases__ if base.__name__ in CLASSES]
        others = [base.__name__ for base in cls.__bases__ if base.__name__ not in CLASSES and base is not Exception]
        assert len(ours) <= 1
        assert len(others) <= 1
        existing[name] = (ours[0] if ours else None, others[0] if others else None)
    assert drawn_tree() == existing
    assert len(existing) > 10


def test_an_error_has_a_reason_for_other_sentences():
    assert errors.BatchError("batch", got="7", expected="an even number").reason == "7"
    assert errors.BatchError("batch", got="7", problem="The batch has 7 samples.").reason == "The batch has 7 samples"


@pytest.mark.parametrize("name", CLASSES)
def test_a_message_says_what_was_given_what_was_expected_and_the_way_out(name):
    error = CLASSES[name]("batch", got="7", expected="an even number", hint="Use 8.")
    assert str(error) == "batch: got 7; expected an even number. Use 8."
    assert str(CLASSES[name]("batch", got="7", expected="an even number")) == str(error).removesuffix(" Use 8.")
    assert CLASSES[name].__doc__


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", CLASSES)
def test_an_error_survives_the_way_between_processes(name, again):
    for code in ("", "batch.odd"):
        error = CLASSES[name]("batch", got="7", expected="an even number", hint="Use 8.", code=code)
        error.add_note("rank 1")
        back = again(error)
        assert type(back) is type(error)
        assert (str(back), vars(back)) == (str(error), vars(error))
        assert back.code == code or back.code == CLASSES[name].default_code


def test_every_class_has_a_code_of_its_own():
    assert len({cls.default_code for cls in CLASSES.values()}) == len(CLASSES)
