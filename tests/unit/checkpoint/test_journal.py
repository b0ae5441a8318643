"""What windows were made by: taken again by the same plan, and by no other."""

from __future__ import annotations

import pytest

from trimtab.checkpoint.journal import NAME, Journal
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.runtime.keeping import Decided

ONE, TWO, THREE = Decided(1, 2), Decided(4, 8, is_cut=True), Decided(2, 4)


def written(folder, plan="a plan", begins=0, **windows):
    """Return the journal of a run that decided windows, by number."""
    journal = Journal(folder / NAME, plan, writes=True)
    journal.go_on(begins)
    for index, window in windows.items():
        journal.add(int(index[1:]), window)
    return journal


def seen(folder, plan="a plan", begins=0, writes=False):
    journal = Journal(folder / NAME, plan, writes=writes)
    journal.go_on(begins)
    journal.close()
    return [journal.before(index) for index in range(3)]


def test_what_was_decided_is_decided_again_and_once(tmp_path):
    journal = written(tmp_path, _0=ONE, _1=TWO)
    journal.add(1, THREE)
    journal.close()
    assert seen(tmp_path) == [ONE, TWO, None]
    assert seen(tmp_path, begins=1) == [None, TWO, None]  # of windows that are over nothing is asked
    written(tmp_path, begins=2, _1=THREE, _2=THREE).close()
    assert seen(tmp_path) == [ONE, TWO, THREE]


def test_of_windows_that_are_over_nothing_is_held(tmp_path):
    journal = written(tmp_path, **{f"_{index}": ONE for index in range(1_000)})
    journal.close()
    assert journal._decided == {}
    again = Journal(tmp_path / NAME, "a plan", writes=True)
    again.go_on(400)
    assert len(again._decided) == 600
    for index in range(400, 1_000):
        assert again.before(index) == again.before(index) == ONE
        again.add(index, TWO)
    assert len(again._decided) == 1
    again.close()
    assert (tmp_path / NAME).read_bytes().count(b"\n") == 1_001


def test_a_torn_last_line_is_dropped_and_written_anew(tmp_path):
    written(tmp_path, _0=ONE, _1=TWO).close()
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-5])
    written(tmp_path, _1=THREE).close()
    assert seen(tmp_path) == [ONE, THREE, None]


@pytest.mark.parametrize("line", [b"{}", b"[]", b'{"window": 1, "k": 2}', b'{"window": "x", "num_batches": 1, "k": 1}'])
def test_any_other_damage_is_refused_by_its_line(tmp_path, line):
    written(tmp_path, _0=ONE).close()
    with (tmp_path / NAME).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(FormatError, match=rf"{NAME}:3: given a damaged line"):
        seen(tmp_path)


def test_what_another_plan_decided_says_nothing_of_windows_to_come(tmp_path):
    written(tmp_path, _0=ONE, _1=TWO, _2=THREE).close()
    assert seen(tmp_path, plan="another", begins=1, writes=True) == [None, None, None]
    assert seen(tmp_path, plan="another") == [ONE, None, None]
    assert seen(tmp_path, plan="a third", begins=0) == [None, None, None]


def test_another_run_is_followed_by_the_same_plan_alone(tmp_path):
    (tmp_path / "other").mkdir()
    written(tmp_path, _0=ONE, _1=TWO).close()
    journal = Journal(tmp_path / "other" / NAME, "a plan", writes=True)
    journal.follow(tmp_path / NAME)
    journal.go_on(0)
    assert [journal.before(index) for index in range(3)] == [ONE, TWO, None]
    journal.close()
    with pytest.raises(ValueGivenError, match=r"checkpoints\.follows: given decisions of another plan"):
        Journal(tmp_path / "x", "another", writes=True).follow(tmp_path / NAME)
    with pytest.raises(ValueGivenError, match="no decisions in"):
        Journal(tmp_path / "x", "a plan", writes=True).follow(tmp_path / "none" / NAME)
