"""Activation checkpointing schedules of a model's blocks, and a notation for schedules.

`0-3 (4) (5-6) ~7 8` keeps the activations of blocks 0 to 3 and 8, recomputes block 4 alone and blocks 5 and 6
together, and keeps only the results of matrix products and attention of block 7. `~7[0,2-3]` keeps only three results
of block 7, by number of the expensive operator in the order of the forward. Expensive operators are matrix products,
convolutions, attention and operators that draw random numbers, counted from 0. `~7[]` keeps no result. Segments may be
nested, as in `((0) 1) 2`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.core.errors import FormatError, ValueGivenError

EVERY_BLOCK = "every_block"
_FIELD = "plan.recompute"
_MOST_BLOCKS, _DEEPEST = 10_000, 300


@dataclass(frozen=True)
class KeptBlock:
    """A stage with kept activations. A stage kept in part must be outside of all segments.

    The first forward of a segment would hold that part until the end.

    Args:
        index: the stage, counted from 0.
        in_part: keep only the results of some operators.
        results: indices of the expensive operators with kept results, in ascending order; None for matrix products and
            attention. Only with `in_part`.
    """

    index: int
    in_part: bool = False
    results: tuple[int, ...] | None = None

    @property
    def detail(self) -> tuple[bool, tuple[int, ...] | None]:
        """How the stage is kept."""
        return self.in_part, self.results


@dataclass(frozen=True)
class RecomputedSegment:
    """Consecutive stages with a second forward before the backward, by a nested schedule."""

    parts: Schedule

    @property
    def stages(self) -> range:
        """Indices of the stages, nested segments included."""
        first, last = self.parts[0], self.parts[-1]
        while isinstance(first, RecomputedSegment):
            first = first.parts[0]
        while isinstance(last, RecomputedSegment):
            last = last.parts[-1]
        return range(first.index, last.index + 1)


Part = KeptBlock | RecomputedSegment
Schedule = tuple[Part, ...]


def stages_of(part: Part) -> range:
    """Return the stage indices of a part."""
    return part.stages if isinstance(part, RecomputedSegment) else range(part.index, part.index + 1)


def kept_in(schedule: Schedule) -> Iterator[KeptBlock]:
    """Yield all kept stages of a schedule, segments included."""
    for part in schedule:
        if isinstance(part, RecomputedSegment):
            yield from kept_in(part.parts)
        else:
            yield part


def check_schedule(schedule: Schedule, num_stages: int) -> None:
    """Raise `ValueGivenError` unless a schedule has `num_stages` stages, in order and without repetition.

    Stages kept in part must be outside of segments.
    """
    given = [kept.index for kept in kept_in(schedule)]
    if given != list(range(num_stages)):
        raise ValueGivenError(
            _FIELD, got=f"stages {given}"[:80], expected=f"the stages 0 to {num_stages - 1} once each and in order"
        )
    segments = (part for part in schedule if isinstance(part, RecomputedSegment))
    if any(kept.in_part for segment in segments for kept in kept_in(segment.parts)):
        raise ValueGivenError(
            _FIELD, got="a partly kept stage (~) inside a segment", expected="partly kept stages outside of segments"
        )


def to_notation(schedule: Schedule) -> str:
    """Return the notation of a schedule."""
    return " ".join(_written(schedule))


def _written(schedule: Schedule) -> Iterator[str]:
    run: list[KeptBlock] = []
    for part in (*schedule, None):
        if run and not (isinstance(part, KeptBlock) and part.detail == run[0].detail):
            in_part, results = run[0].detail
            numbers = _range(run[0].index, run[-1].index)
            yield f"{'~' if in_part else ''}{numbers}{'' if results is None else f'[{_numbers(results)}]'}"
            run = []
        if isinstance(part, KeptBlock):
            run.append(part)
        elif part is not None:
            yield f"({to_notation(part.parts)})"


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _numbers(numbers: tuple[int, ...]) -> str:
    """Return ascending numbers as text, such as "0,2-3"."""
    # Consecutive numbers have a common difference to their position.
    groups = itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0])
    runs = ([number for _, number in group] for _, group in groups)
    return ",".join(_range(run[0], run[-1]) for run in runs)


def read_schedule(text: str) -> Schedule:
    """Return the schedule of a notation; `FormatError` for an invalid notation."""
    tokens = re.findall(r"[()]|~?\d+(?:-\d+)?(?:\[[^\]]*\])?|\S", text)
    parts, rest = _read(tokens)
    if rest or not parts:
        raise _no_schedule(text)
    return parts


def _read(tokens: list[str], depth: int = 0) -> tuple[Schedule, list[str]]:
    """Return the parts up to the end or a closing parenthesis, and the remaining tokens."""
    if depth > _DEEPEST:
        raise _no_schedule(" ".join(tokens))
    parts: list[Part] = []
    while tokens and tokens[0] != ")":
        token, tokens = tokens[0], tokens[1:]
        if token == "(":
            inner, tokens = _read(tokens, depth + 1)
            if not inner or not tokens:
                raise _no_schedule(" ".join(["(", *tokens]))
            parts.append(RecomputedSegment(inner))
            tokens = tokens[1:]
            continue
        found = re.fullmatch(r"(~?)(\d+(?:-\d+)?)(?:\[(.*)\])?", token)
        if found is None or (found[3] is not None and not found[1]):
            raise _no_schedule(token)
        results = None if found[3] is None else _ascending(found[3], token)
        parts += [KeptBlock(index, bool(found[1]), results) for index in _interval(found[2], token)]
        if len(parts) > _MOST_BLOCKS:
            raise _no_schedule(" ".join(tokens))
    return tuple(parts), tokens


def _interval(text: str, token: str) -> range:
    """Return the numbers of "3" or "3-5"."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    numbers = (found[1], found[2] or found[1]) if found is not None else ()
    if not numbers or max(map(len, numbers)) >= len(str(_MOST_BLOCKS)) or int(numbers[0]) > int(numbers[1]):
        raise _no_schedule(token)
    return range(int(numbers[0]), int(numbers[1]) + 1)


def _ascending(text: str, token: str) -> tuple[int, ...]:
    """Return the numbers of "0,2-3"; "" has none."""
    runs = [_interval(each.strip(), token) for each in text.split(",")] if text.strip() else []
    numbers = tuple(itertools.islice(itertools.chain(*runs), _MOST_BLOCKS))
    if any(later <= sooner for sooner, later in itertools.pairwise(numbers)):
        raise _no_schedule(token)
    return numbers


def _no_schedule(text: str) -> FormatError:
    return FormatError(_FIELD, got=f"{text!r:.80}", expected="a schedule such as '0-3 (4) (5-6) ~7 8'")


def schedule_of(value: str, num_blocks: int) -> Schedule:
    """Return a schedule by name or notation; `FormatError`, or `ValueGivenError` for another number of blocks."""
    if value == EVERY_BLOCK:
        return tuple(RecomputedSegment((KeptBlock(index),)) for index in range(num_blocks))
    schedule = read_schedule(value)
    check_schedule(schedule, num_blocks)
    return schedule


def check_recompute(value: object, num_blocks: int) -> None:
    """Raise `FormatError` or `ValueGivenError` unless a value is None or a schedule of `num_blocks` blocks (any if 0).

    Segments of several blocks need the blocks' names, because the output of a block must go to the next block only.
    """
    if value is None:
        return
    if not isinstance(value, str):
        raise FormatError(
            _FIELD, got=repr(value), expected=f"a schedule such as '0-3 (4) (5-6) ~7 8', {EVERY_BLOCK!r} or None"
        )
    if value == EVERY_BLOCK:
        return
    schedule = read_schedule(value)
    check_schedule(schedule, num_blocks or sum(1 for _ in kept_in(schedule)))
    if not num_blocks and any(len(stages_of(part)) > 1 for part in schedule):
        raise ValueGivenError(
            _FIELD,
            got=f"{value!r:.80} without recompute_blocks",
            expected="recompute_blocks",
            problem=f"The schedule {value!r:.80} has a segment of several blocks, which needs `recompute_blocks`.",
            hint="Set `recompute_blocks` to the names of the blocks in forward order, or use segments of single "
            "blocks; each block's output must be used by the next block only.",
        )
