"""Time and memory of a candidate's activation checkpointing schedules."""

from __future__ import annotations

import functools
import math

from trimtab.core.block_costs import BlockChain, BlockChainModel
from trimtab.core.objective import Budget
from trimtab.core.recompute_schedule import (
    EVERY_BLOCK,
    KeptBlock,
    RecomputedSegment,
    Schedule,
    kept_in,
    schedule_of,
    to_notation,
)
from trimtab.planner.recompute_cost import keep_all, predict, sqrt_segments
from trimtab.plans.profile import Candidate, Profile, RecomputableBlocks


def chain_of(profile: Profile, candidate: Candidate) -> BlockChain | None:
    """Return the chain of a candidate's micro-batch; None without measured blocks."""
    found = profile.recomputable_of(candidate)
    if found is None:
        return None
    is_whole = candidate.micro_batch >= profile.loop.batch_size and not profile.adapts_batch_size
    model = found.early if candidate.step_in_backward else found.whole if is_whole else found.sliced
    return None if model is None else _at(model, candidate.micro_batch)


@functools.lru_cache(maxsize=256)
def _at(model: BlockChainModel, rows: int) -> BlockChain:
    return model.at(rows)


def peak_bytes(profile: Profile, candidate: Candidate) -> int | None:
    """Return the peak memory of a candidate's forward and backward; None if unknown."""
    chain = chain_of(profile, candidate)
    return None if chain is None else chain.held_bytes + predict(chain.stages, _whole(chain, candidate)).peak_bytes


def recompute_time_fraction(profile: Profile, candidate: Candidate) -> float | None:
    """Return the recomputed time of a candidate, as a fraction of the measured step without recomputation."""
    found, chain = profile.recomputable_of(candidate), chain_of(profile, candidate)
    if found is None or chain is None:
        return None
    recompute_s = predict(chain.stages, _whole(chain, candidate)).recompute_s
    return recompute_s * profile.loop.batch_size / int(candidate.micro_batch) / found.step_s


def schedules(profile: Profile, candidate: Candidate, budget: Budget, margin: float) -> tuple[str, ...]:
    """Return the schedules to consider for a candidate without recomputation, as text.

    Considered are: every block, segments of
    sqrt(L) blocks, and the schedule of least recomputation within the memory limit; with large micro-batches also
    those within fixed fractions of the peak. `margin` is added to a predicted peak before comparison.
    """
    found, chain = profile.recomputable_of(candidate), chain_of(profile, candidate)
    if found is None or chain is None:
        return ()
    limit = None if budget.memory_bytes is None else math.floor(budget.memory_bytes / (1 + margin))
    is_large = 4 * candidate.micro_batch >= profile.loop.batch_size
    if limit is None and not is_large:
        return ()
    return _schedules(chain, limit, found.schedules if is_large else ())


@functools.lru_cache(maxsize=1024)
def _schedules(chain: BlockChain, limit_bytes: int | None, known: tuple[str, ...]) -> tuple[str, ...]:
    stages, number = chain.stages, len(chain.stages) - 1
    found = [EVERY_BLOCK, to_notation(sqrt_segments(number, [stage.is_linked for stage in stages[: number - 1]]))]
    if all(stage.parts for stage in stages[:-1]):
        found.append(to_notation(tuple(KeptBlock(index, in_part=True) for index in range(number))))
    best = None
    if limit_bytes is not None:
        # The import loads numpy, which plans without a memory limit do not need.
        from trimtab.planner.recompute_solver import optimal

        best = optimal(chain.stages, limit_bytes - chain.held_bytes)
    found += [*known] if best is None else [to_notation(best[:-1]), *known]
    by_schedule = {schedule_of(each, number): each for each in reversed(found)}
    return tuple(text for schedule, text in by_schedule.items() if schedule != keep_all(number))


def _whole(chain: BlockChain, candidate: Candidate) -> Schedule:
    """Return a candidate's schedule including the final, kept stage after the blocks."""
    number = len(chain.stages) - 1
    blocks = keep_all(number) if candidate.recompute is None else schedule_of(candidate.recompute, number)
    return (*blocks, KeptBlock(number))


def in_words(found: RecomputableBlocks, candidate: Candidate) -> str:
    """Return the recomputed blocks of a candidate in words."""
    number, parts = len(found.blocks), list[str]()
    schedule = schedule_of(candidate.recompute or "", number)
    again = sum(len(part.stages) for part in schedule if isinstance(part, RecomputedSegment))
    parts += [f"{again} of {number} blocks"] if again else []
    in_part = [kept.results for kept in kept_in(schedule) if kept.in_part]
    plain, chosen = in_part.count(None), len(in_part) - in_part.count(None)
    cheap = "all operators except matrix products and attention"
    parts += [f"{cheap} in {plain} of {number} blocks"] if plain else []
    parts += [f"the operators chosen by cost in {chosen} of {number} blocks"] if chosen else []
    return f"recomputed in backward: {', and '.join(parts)}"
