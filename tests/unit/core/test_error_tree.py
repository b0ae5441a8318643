"""The tree drawn in the docstring is the tree that exists, and every message has its three parts."""

from __future__ import annotations

import builtins
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


def test_other_bases_are_builtin_exceptions():
    assert all(issubclass(getattr(builtins, other), Exception) for _, other in drawn_tree().values() if other)


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
    error = CLASSES[name]("batch", got="7", expected="an even number", hint="Use 8.")
    error.add_note("rank 1")
    back = again(error)
    assert type(back) is type(error)
    assert (str(back), vars(back)) == (str(error), vars(error))


def test_every_class_has_a_code_of_its_own_that_another_replaces_and_that_survives_pickling():
    codes = [cls.default_code for cls in CLASSES.values()]
    assert len(set(codes)) == len(codes)
    for cls in CLASSES.values():
        error = cls("batch", got="7", expected="an even number")
        assert error.code == cls.default_code
        assert pickle.loads(pickle.dumps(error)).code == cls.default_code
        assert cls("batch", got="7", expected="an even number", code="batch.odd").code == "batch.odd"
