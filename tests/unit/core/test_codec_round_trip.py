"""Every value that goes to disk comes back as it was, and nothing else is let in."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises

from trimtab.core.batch_rule import BatchRule
from trimtab.core.block_costs import BlockChain, BlockChainModel, BlockCost, ExpensivePart
from trimtab.core.choice import Choice, Effect, MeasuredCost, RefusedByProof, Rejected, SplitCheck
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec, HostLink
from trimtab.core.objective import PRECISIONS, Budget, Objective, Reference
from trimtab.core.record import End, Evaluation, Event, Header, RunRecord, StepRecord, read_record, write_record
from trimtab.core.serialization import from_json, from_jsonable, read_json, to_json, to_jsonable, write_result
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate, LoaderTrial, LoaderTrials, LoopFacts, PaddingCount, Profile, Trial
from trimtab.settings.allocator import ALLOCATORS
from trimtab.settings.memory_layout import MEMORY_LAYOUTS
from trimtab.settings.schedule import SCHEDULES

text = st.text(max_size=12)
counts = st.integers(0, 2**62)
floats = st.floats()  # infinities, nan and -0.0 too
amounts = st.floats(min_value=0) | st.just(math.nan)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
jsonable = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2))
details = st.dictionaries(text, jsonable, max_size=3)
KINDS = {int: counts, float: floats, str: text, bool: st.booleans(), type(None): st.none(), Any: jsonable}


precisions = st.sampled_from(PRECISIONS)
# Strategies of fields with a valid range; a float that may be a string must be finite.
RANGES: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    **{cls: {"value": scalars} for cls in (Choice, Rejected, RefusedByProof)},
    Reference: {"precision": precisions, "clip_norm": st.none() | positive, "accumulate": st.integers(1, 99)},
    Budget: {"memory": st.none() | st.integers(1, 2**62), "time": st.none() | positive, "energy": st.none() | positive},
    HostLink: {"to_host_bytes_s": positive, "to_device_bytes_s": positive},
    StepRecord: {"terms": amounts, "wall_s": amounts},
    Evaluation: {"train_s": amounts},
}


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a field by its type."""
    arguments = typing.get_args(hint)
    if hint in KINDS:
        return KINDS[hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return st.one_of(map(of, arguments))
    if typing.get_origin(hint) is tuple:
        many = len(arguments) == 2 and arguments[1] is Ellipsis
        return st.lists(of(arguments[0]), max_size=2).map(tuple) if many else st.tuples(*map(of, arguments))
    if typing.get_origin(hint) is Mapping:
        return st.dictionaries(of(arguments[0]), of(arguments[1]), max_size=2)
    return values(hint) if dataclasses.is_dataclass(hint) else st.sampled_from(hint)


def values(cls: type, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return dataclasses with any value in every field that is not given; fields of a valid range are given."""
    hints = typing.get_type_hints(cls)
    ranges = {"schema": st.just(getattr(cls, "schema", None))} | RANGES.get(cls, {}) | given
    return st.builds(cls, **{name: ranges[name] if name in ranges else of(hint) for name, hint in hints.items()})


def choice(found: st.SearchStrategy[Any]) -> st.SearchStrategy[Choice]:
    return values(Choice, value=found)


weights = st.floats(0, 1e308)
stages = st.builds(
    BlockCost, floats, *[counts] * 10, st.booleans(), st.lists(st.builds(ExpensivePart), max_size=2).map(tuple)
)
chain_models = st.tuples(*[st.builds(BlockChain, st.tuples(stages, stages), counts)] * 2)
KINDS |= {
    Objective: st.tuples(weights, weights, weights).filter(any).map(lambda given: Objective(*given)),
    BlockChainModel: chain_models.map(lambda both: BlockChainModel(*both, (2, 4))),
    BatchRule: st.just(BatchRule()),
}


def plan_of(rows: int) -> st.SearchStrategy[Plan]:
    kept = {f.name: st.just(f.default) for f in dataclasses.fields(Plan) if isinstance(f.default, Choice)}
    return values(
        Plan,
        **kept
        | {
            "batch_size": st.just(rows),
            "micro_batch": choice(st.integers(1, rows)),
            "precision": choice(precisions),
            "memory_layout": choice(st.sampled_from(MEMORY_LAYOUTS)),
            "allocator": choice(st.sampled_from(ALLOCATORS)),
            "fused_optimizer": choice(st.booleans()),
            "loss_chunk": choice(st.none() | st.integers(1, 2**30)),
            "recompute": choice(st.sampled_from([None, "every_block", "0 (1-2)", "~0 (1) 2"])),
            "recompute_blocks": st.just(("a", "b", "c")),
            "compiled": choice(st.booleans()),
            "schedule": choice(st.sampled_from(SCHEDULES)),
            "learning_rate_scale": choice(positive),
            "clip_norm": choice(st.none() | positive),
            "num_ranks": st.just(1),
            "batch_rule": st.none(),
        },
    )


plans = st.integers(1, 10**6).flatmap(plan_of)


def comes_back(value: object) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert isinstance(json.loads(to_json(value), parse_constant=refuse), dict)
    back = from_json(type(value), to_json(value))
    assert repr(back) == repr(value)  # repr: nan equals nan, and 1 is not 1.0
    assert to_json(back) == to_json(value)


@settings(max_examples=15)
@given(plans)
def test_a_plan_comes_back_as_it_was(plan):
    comes_back(plan)


@settings(max_examples=12)  # each has hundreds of values
@given(values(Profile))
def test_a_profile_comes_back_as_it_was(profile):
    comes_back(profile)


@settings(max_examples=15)
@given(values(RunRecord))
def test_a_record_comes_back_as_it_was(record):
    comes_back(record)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        write_record(path, record)
        assert repr(read_record(path)) == repr(record)


@pytest.mark.parametrize(("value", "word"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_non_finite_floats_are_words_and_floats_again_where_the_field_is_one(value, word):
    step = StepRecord(0, 1, 1.0, value, 0.1, 0.2)
    assert to_jsonable(step)["loss"] == word
    assert repr(from_json(StepRecord, to_json(step)).loss) == repr(value)
    event = from_json(Event, to_json(Event("loss scale", 3, {"norm": value})))
    assert event.detail == {"norm": word}  # Any: nothing says that it was a float


PLAN = Plan(
    8,
    Choice(4, "fits", Effect.BITWISE, True, (Rejected(8, "needs 9 GiB"),)),
    check=SplitCheck(True, "per-sample loss", 1e-7),
    baseline=MeasuredCost(0.5, 10**9),
    predicted=MeasuredCost(0.25, between_s=(0.2, 0.3)),
)
PROFILE = Profile(
    DeviceSpec("cpu", "cpu", peak_flops={"fp32": 1e11}),
    LoopFacts(
        *(10, 10, 40, "AdamW", 8, 8.0, "samples", 1e9, False, True, False, "contiguous"),
        padding=PaddingCount(100, 30, 10, 2, "attention_mask"),
    ),
    SplitCheck(True, "per-sample loss"),
    trials=(Trial("modes", Candidate(8), (0.5, 0.4)),),
    loader=LoaderTrials(
        *(0.5, LoaderTrial(0, None, False, 0.7, 0.2), 0.0, (LoaderTrial(2, 2, False, 0.5, 0.3),), 8, 20),
        best=LoaderTrial(2, 2, False, 0.51, 0.3),
    ),
    environment={"torch": "2.13"},
)
RECORD = RunRecord(
    Header("run", 1),
    (StepRecord(0, 8, 8.0, 2.3, 0.1, 0.5), StepRecord(1, 8, 8.0, 2.2, 0.1, 0.5)),
    (Evaluation(16, 1.0, {"accuracy": 0.5}),),
    (Event("void", 1),),
    End("done"),
)
Keys = tuple[str | int, ...]


def objects(value: Any, path: str, keys: Keys = ()) -> Iterator[tuple[str, Keys, type]]:
    """Yield (path, keys down to it, class) of every dataclass in a value."""
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from objects(item, f"{path}[{i}]", (*keys, i))
    if dataclasses.is_dataclass(value):
        yield path, keys, type(value)
        for field in dataclasses.fields(value):
            yield from objects(getattr(value, field.name), f"{path}.{field.name}", (*keys, field.name))


def down(tree: Any, keys: Keys) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


OBJECTS = [
    pytest.param(whole, path, keys, cls, id=path)
    for whole in (PLAN, PROFILE, RECORD)
    for path, keys, cls in objects(whole, type(whole).__name__)
]


def refused(cls: type, tree: Any) -> FormatError:
    with pytest.raises(FormatError) as caught:
        from_jsonable(cls, tree)
    return caught.value


@pytest.mark.parametrize(("whole", "path", "keys", "cls"), OBJECTS)
def test_unknown_key_is_refused_by_its_path(whole, path, keys, cls):
    tree = to_jsonable(whole)
    down(tree, keys)["surplus"] = 1
    error = refused(type(whole), tree)
    assert error.field == f"{path}.surplus"
    assert path in str(error)


@pytest.mark.parametrize(("whole", "path", "keys", "cls"), OBJECTS)
def test_missing_key_is_refused_by_its_path(whole, path, keys, cls):
    tree = to_jsonable(whole)
    name = dataclasses.fields(cls)[0].name
    del down(tree, keys)[name]
    if cls in (Reference, Objective, Budget):  # every field has a default: a missing one is the default
        assert from_jsonable(type(whole), tree) == whole
    else:
        assert refused(type(whole), tree).field == f"{path}.{name}"


@pytest.mark.parametrize("wrong", [[1], "text"], ids=repr)
@pytest.mark.parametrize(("whole", "path", "keys", "cls"), OBJECTS)
def test_what_is_no_object_is_refused_by_its_path(whole, path, keys, cls, wrong):
    tree = wrong
    if keys:
        tree = to_jsonable(whole)
        down(tree, keys[:-1])[keys[-1]] = wrong
    assert refused(type(whole), tree).field == path


WRONG = [
    *((PLAN, "batch_size", wrong) for wrong in (8.0, True, None)),
    *((PLAN, "planning_s", wrong) for wrong in ("12", False, 10**400)),
    *((PLAN, path, wrong) for path, wrong in (("advice", "one"), ("advice[0]", 1), ("micro_batch.changed", 1))),
    *((PLAN, f"micro_batch.{name}", wrong) for name, wrong in (("effect", "fuzzy"), ("value", [4]), ("rejected", 9))),
    *((PLAN, f"micro_batch.rejected[0].{name}", 9) for name in ("code", "reason")),
    *((PLAN, path, "guessed") for path in ("baseline.peak_bytes", "meter.provenance")),
    *((PROFILE, "device.peak_flops", wrong) for wrong in ([], 1)),
    *((PROFILE, path, wrong) for path, wrong in (("environment.torch", 2.13), ("trials[0].block_s[1]", None))),
    *((RECORD, "steps[1].loss", wrong) for wrong in ("2.2", "Infinity")),
]


@pytest.mark.parametrize(("whole", "path", "wrong"), WRONG, ids=str)
def test_wrong_type_is_refused_by_its_path(whole, path, wrong):
    tree = to_jsonable(whole)
    *keys, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", path)]
    at = down(tree, keys)
    if isinstance(at, list) and last == len(at):
        at.append(wrong)
    else:
        at[last] = wrong
    assert refused(type(whole), tree).field == f"{type(whole).__name__}.{path}"


def test_another_schema_is_refused():
    for whole, field in ((PLAN, "plan.schema"), (PROFILE, "profile.schema")):
        assert refused(type(whole), to_jsonable(whole) | {"schema": 1}).field == field


@pytest.mark.parametrize(
    "given", ["", "{", "[]", "7", "null", '"plan"', "{'a': 1}", "[" * 100_000, "1" * 5_000], ids=lambda g: g[:8]
)
def test_text_that_is_no_object_is_refused(given):
    with pytest.raises(FormatError) as caught:
        from_json(Plan, given)
    assert caught.value.field == "Plan"
    assert caught.value.code in ("json.invalid", "json.value")


def test_a_file_is_read_back_or_refused(tmp_path):
    path = tmp_path / "plan.json"
    with raises(FormatError, code="file.unreadable"):
        read_json(Plan, path)
    for content in (b"\xff\xfe", b"{"):
        path.write_bytes(content)
        with pytest.raises(FormatError):
            read_json(Plan, path)
    path.write_text(to_json(PLAN, indent=2), encoding="utf-8")
    assert read_json(Plan, path) == PLAN


def test_a_value_out_of_range_in_a_file_is_refused_like_one_given_by_hand():
    tree = to_jsonable(PLAN)
    tree["micro_batch"]["value"] = 9
    with raises(ValueError, code="value.invalid", field="plan.micro_batch"):
        from_jsonable(Plan, tree)


def test_an_int_is_a_float_where_a_float_is_wanted():
    tree = to_jsonable(RECORD.steps[0]) | {"loss": 2}
    assert repr(from_jsonable(StepRecord, tree).loss) == "2.0"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY])
def test_a_file_in_whose_place_no_other_can_be_put_is_written_as_it_is(tmp_path, monkeypatch, number):
    """As one that is mounted, or lies in a folder that may not be written."""

    def refused(path, data, **how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("trimtab.core.serialization.write_over", refused)
    (tmp_path / "plan.json").write_text("first")
    write_result(tmp_path / "plan.json", "second")
    assert (tmp_path / "plan.json").read_text() == "second"
    with pytest.raises(OSError, match=os.strerror(number)):
        write_result(tmp_path / "new.json", "anything")


def test_a_result_is_written_whole_behind_its_link_or_to_what_is_no_file(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "plan.json")
    write_result(tmp_path / "link", "first")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "plan.json").read_text() == "first"
    write_result(Path(os.devnull), "anything")
    assert not Path(os.devnull).is_file()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)
    with raises(OSError, code="checkpoint.not_saved"):
        write_result(tmp_path / "plan.json", "second")
    assert (tmp_path / "plan.json").read_text() == "first"


def test_a_result_that_goes_where_output_goes_comes_after_it(tmp_path):
    """/dev/stdout is a file behind `>> log`, and what it held is not the command's."""
    code = (
        "from pathlib import Path; from trimtab.core.serialization import write_result; print('page', flush=True); "
        "write_result(Path('log'), 'plan\\n'); print('end')"
    )
    (tmp_path / "log").write_text("old\n")
    with (tmp_path / "log").open("a") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, cwd=tmp_path, check=True)
    assert (tmp_path / "log").read_text() == "old\npage\nplan\nend\n"
