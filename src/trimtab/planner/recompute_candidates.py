"""Time and memory of a candidate's activation checkpointing schedules, and of activation offload."""

from __future__ import annotations

import functools
import math

from trimtab.core.block_costs import BlockChain, BlockChainModel
from trimtab.core.hardware import HostLink
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
from trimtab.core.units import format_bytes
from trimtab.planner.offload_cost import OffloadCost, predict_offload
from trimtab.planner.recompute_cost import keep_all, predict, sqrt_segments
from trimtab.plans.profile import Candidate, Profile, RecomputableBlocks
from trimtab.settings import SETTINGS


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
    if chain is None:
        return None
    if candidate.offload is None:
        return chain.held_bytes + predict(chain.stages, _whole(chain, candidate)).peak_bytes
    cost = _offloaded(profile, chain, candidate.offload)
    return None if cost is None else chain.held_bytes + cost.peak_bytes


def added_time_fraction(profile: Profile, candidate: Candidate) -> float | None:
    """Return the time of recomputation or of unhidden copies, as a fraction of the measured step without either."""
    found, chain = profile.recomputable_of(candidate), chain_of(profile, candidate)
    if found is None or chain is None:
        return None
    if candidate.offload is None:
        added_s = predict(chain.stages, _whole(chain, candidate)).recompute_s
    elif cost := _offloaded(profile, chain, candidate.offload):
        added_s = cost.waiting_s
    else:
        return None
    return added_s * profile.loop.batch_size / int(candidate.micro_batch) / found.step_s


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


def offloads(profile: Profile, candidate: Candidate, budget: Budget, margin: float) -> tuple[int, ...]:
    """Return the numbers of first blocks to offload to consider, for a candidate that keeps all activations.

    Under a memory limit: the fewest blocks that fit by prediction, and one block more; () if no offload is needed. With
    a weight of memory: also half of the blocks, and all but the last.
    """
    chain, link = chain_of(profile, candidate), profile.host_link
    if chain is None or link is None or SETTINGS["offload"].refusal(profile) is not None:
        return ()
    limit = None if budget.memory_bytes is None else math.floor(budget.memory_bytes / (1 + margin))
    return _offloads(chain, link, limit, is_weighed=profile.objective.memory > 0)


@functools.lru_cache(maxsize=1024)
def _offloads(chain: BlockChain, link: HostLink, limit_bytes: int | None, *, is_weighed: bool) -> tuple[int, ...]:
    most = len(chain.stages) - 2  # The part after the blocks is a stage, and the last block is kept.
    if most < 1:
        return ()
    weighed = (max(1, most // 2), most) if is_weighed else ()
    if limit_bytes is None:
        return tuple(dict.fromkeys(weighed))
    fits = (
        number
        for number in range(most + 1)
        if chain.held_bytes + predict_offload(chain.stages, number, link).peak_bytes <= limit_bytes
    )
    fewest = next(fits, most)
    needed = (fewest, min(fewest + 1, most)) if fewest else ()
    return tuple(dict.fromkeys((*needed, *weighed)))


def _offloaded(profile: Profile, chain: BlockChain, number: int) -> OffloadCost | None:
    is_possible = profile.host_link is not None and number < len(chain.stages) - 1
    return predict_offload(chain.stages, number, profile.host_link) if is_possible and profile.host_link else None


def offload_in_words(profile: Profile, candidate: Candidate) -> str:
    """Return the offloaded blocks of a candidate in words."""
    chain = chain_of(profile, candidate)
    cost = None if chain is None else _offloaded(profile, chain, candidate.offload)
    if chain is None or cost is None:
        return f"the activations of {candidate.offload} blocks are kept in host memory"
    number, size = len(chain.stages) - 1, format_bytes(cost.moved_bytes)
    return f"the activations of {candidate.offload} of {number} blocks, {size}, are kept in host memory until backward"


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
