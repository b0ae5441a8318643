"""The front door: `profile`, `plan`, `start`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from trimtab.calibrate.adapting import (
    TRAINED,
    RunLength,
    adaptations,
    adapted,
    batch_rule_of,
    require_adaptable,
)
from trimtab.calibrate.drawing import require_restorable
from trimtab.calibrate.elsewhere import profile_elsewhere
from trimtab.calibrate.example_batch import protected
from trimtab.calibrate.profiler import NUM_BLOCKS, profile_loop
from trimtab.calibrate.step_shape import step_shape
from trimtab.calibrate.subject import Subject
from trimtab.checkpoint.kept_run import kept
from trimtab.checkpoint.settings import Checkpoints
from trimtab.core import checks
from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import DeviceSpec, absent_device
from trimtab.core.objective import ASSUMED_REFERENCE, Budget, Objective, Reference
from trimtab.core.plan import Plan
from trimtab.core.profile import Profile
from trimtab.core.progress import silent
from trimtab.core.record import RecordWriter
from trimtab.core.stop import Stop
from trimtab.decide.planner import choose_there
from trimtab.decide.rank_profile import of_any_rank
from trimtab.distributed.alike import require_same_loop
from trimtab.distributed.backends import backend_of, is_to_share, require_plannable
from trimtab.distributed.exchange import has_peers
from trimtab.distributed.planning import Made, plan_together
from trimtab.distributed.rehearsal import of_live
from trimtab.distributed.stage_choice import Share, of_replicas, share_of
from trimtab.measure.energy import EnergyClock
from trimtab.measure.meters import Metering, elsewhere_meter, find_meter, measurable
from trimtab.runtime.batching import Batching, Count, Split, of_same_size
from trimtab.runtime.engine import LossFn, Run
from trimtab.runtime.optimizers import modules_beside, require_alone
from trimtab.runtime.recorder import Recorder
from trimtab.runtime.splitting import warn_of_unproved_split

MOST_BATCHES = 16
FREED = (
    "the batch was freed: it follows gradient noise and the times of a window; "
    "peaks are of windows of two batches, the loop's too"
)
_APART = (
    "This plan shares nothing between the ranks there are: each trains a model of its own, unless the loop reduces "
    "gradients itself. Plan on all of them, or wrap the model in DistributedDataParallel."
)
_IN_EVALUATION = (
    "The model is in evaluation mode, and is measured so: nothing is dropped, and batch statistics are not computed. "
    "Call model.train() before it is planned; to keep batch statistics frozen, .eval() on those modules behind it."
)
CUT = "the batch was freed: it is cut into as many micro-batches as gave most rows or tokens per second and byte"


def profile(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    example_batch: Any,
    *,
    budget: Budget | None = None,
    objective: Objective | None = None,
    reference: Reference | None = None,
    longest_batch: Any = None,
    data: Iterable[Any] | None = None,
    total_steps: int | None = None,
    frees_batch: bool = False,
    blocks: Iterable[str] = (),
    modules: Iterable[nn.Module] = (),
    num_blocks: int = NUM_BLOCKS,
    traces: bool = False,
    metering: Metering | None = None,
    count: Count | None = None,
    split: Split | None = None,
    progress: Callable[[str], None] = silent,
) -> Profile:
    """Measure a training loop and the settings worth trying on it; leaves no trace.

    Args:
        model, optimizer: as they will be trained; bit for bit the same afterwards, also when a trial fails.
        loss_fn: `loss_fn(model, batch)` -> a mean over samples, or `trimtab.Summed(loss_sum, count)` for unlike numbers
            of terms, such as tokens; alone or in a pair `(loss, auxiliary)`, see `Run.auxiliary`.
        example_batch: what the loader yields for one optimizer step.
        budget, objective: limits and weights; they decide which settings are tried.
        reference: what the user's loop does today; undeclared, "assumed fp32 eager".
        longest_batch: the longest batch the data holds, if lengths vary, of as many rows: everything is measured on it.
        data: the loop's loader; a few batches are drawn to time the wait for them. Loader, sampler, dataset and random
            generators are restored and workers started for this end, so that its next epochs are as without planning.
            Nothing is drawn from an iterator or from data that hold one; the profile's notes say so.
        total_steps: optimizer steps of the whole run, where they are known: they say how long measuring may take, and
            whether compiling the model can pay.
        frees_batch: whether windows may span several batches, as with `adapt="batch"`. Their gradients are then held
            beside a forward, and peaks are of windows of two batches.
        blocks: names of the modules that may compute their activations again in the backward, where those found in the
            model's tree are not the ones. Each runs once in a forward, and none lies in another.
        modules: trained by the same optimizer in addition to the model, such as a criterion with parameters. Those
            without parameters of the optimizer's are restored after planning.
        num_blocks: interleaved blocks of steps per candidate, at least 3. A gain is accepted from 5 blocks on.
        traces: whether to trace peaks though memory is neither limited nor weighed, so that the profile can be decided
            under other limits and for other devices.
        metering: how joules are known; by default by the meters there are.
        count: `count(batch)` -> number of samples. split: `split(batch, start, stop)` -> a batch of the samples from
            `start` to `stop`. For batches whose containers do not show them, such as packed, graph, time-first and
            vision-language batches; without, such a batch trains whole.
        progress: called with a line of text as work goes on.

    Raises:
        UsageError: model, optimizer, loss or batch do not fit together, the device is neither CPU nor CUDA, or on
            several ranks the loop has wrapped the model; nothing was changed.
    """
    require_plannable(model)
    reference = checks.dataclass_or("reference", reference, Reference, ASSUMED_REFERENCE)
    budget = checks.dataclass_or("budget", budget, Budget, Budget())
    objective = checks.dataclass_or("objective", objective, Objective, Objective())
    metering = checks.dataclass_or("metering", metering, Metering, Metering())
    batch, example, batching = example_batch, None, Batching(count, split)
    if longest_batch is not None:
        batch, example = of_same_size(longest_batch, example_batch, batching), example_batch
    named = checks.names("blocks", blocks)
    given = {"named_blocks": named, "example": example, "modules": modules_beside(model, modules), "batching": batching}
    subject = Subject(model, optimizer, loss_fn, batch, reference.clip_norm, frees_batch, **given)
    if not model.training:
        warnings.warn(_IN_EVALUATION, stacklevel=2)
    metered = find_meter(subject.device, metering)
    objective, facts = measurable(objective, budget, metered, metering.without)
    metered = dataclasses.replace(metered, facts=facts)
    times = checks.integer("num_blocks", num_blocks, low=3)
    steps = None if total_steps is None else checks.integer("total_steps", total_steps)
    asked = {"data": data, "total_steps": steps, "num_blocks": times, "traces": traces, "progress": progress}
    return profile_loop(subject, reference, objective, budget, metered=metered, **asked)


def plan_elsewhere(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    example_batch: Any,
    device: str | DeviceSpec,
    *,
    budget: Budget | None = None,
    objective: Objective | None = None,
    reference: Reference | None = None,
    blocks: Iterable[str] = (),
    progress: Callable[[str], None] = silent,
) -> Plan:
    """Plan for a device that is not here, from traces and its data sheet: nothing is run, every figure is predicted.

    Args:
        model, optimizer, example_batch: on the CPU, or without memory; they are not changed.
        device: a name of the table, such as "H100 SXM", or a spec with peaks and bandwidth.
        budget: its memory is the device's at the most.
        The rest as in `profile`.

    Raises:
        UsageError: the device is not known, or a step cannot be traced. InfeasibleError: no settings meet the budget.
    """
    asked = {"budget": budget, "objective": objective, "reference": reference, "blocks": blocks, "progress": progress}
    return choose_there(profile_there(model, optimizer, loss_fn, example_batch, device, **asked))


def profile_there(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    example_batch: Any,
    device: str | DeviceSpec,
    *,
    budget: Budget | None = None,
    objective: Objective | None = None,
    reference: Reference | None = None,
    blocks: Iterable[str] = (),
    rows: int | None = None,
    progress: Callable[[str], None] = silent,
) -> Profile:
    """Return what `plan_elsewhere` decides by; arguments and errors as there.

    Args:
        rows: of a step, where the batch is an example of other rows.
    """
    spec = absent_device(device) if isinstance(device, str) else device
    limits = checks.dataclass_or("budget", budget, Budget, Budget()).within(spec.memory_bytes)
    weights = checks.dataclass_or("objective", objective, Objective, Objective())
    measurable(weights, limits, elsewhere_meter(spec.name))
    return profile_elsewhere(
        model,
        optimizer,
        protected(loss_fn),
        example_batch,
        spec,
        reference=checks.dataclass_or("reference", reference, Reference, ASSUMED_REFERENCE),
        objective=weights,
        budget=limits,
        named_blocks=checks.names("blocks", blocks),
        rows=None if rows is None else checks.integer("rows", rows),
        progress=progress,
    )


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    example_batch: Any,
    *,
    budget: Budget | None = None,
    objective: Objective | None = None,
    reference: Reference | None = None,
    longest_batch: Any = None,
    adapt: str | Collection[str] | None = None,
    batch_rule: BatchRule | None = None,
    data: Iterable[Any] | None = None,
    total_steps: int | None = None,
    blocks: Iterable[str] = (),
    modules: Iterable[nn.Module] = (),
    num_blocks: int = NUM_BLOCKS,
    metering: Metering | None = None,
    count: Count | None = None,
    split: Split | None = None,
    rehearse: bool = True,
    progress: Callable[[str], None] = silent,
) -> Plan:
    """Measure, then decide: which settings to change on this machine, and why. Observes only; `print(plan)` explains.

    On several ranks, of a model that the loop has not wrapped, all call it: rank 0 measures its share of a batch, and
    the plan it hands to the others says how they share the model. Under a memory limit, which is a rank's, or where
    memory is weighed, the ZeRO stage is chosen by what a rank holds at each; else every rank holds the whole model.
    Where the stage is chosen, or the plan would change how gradients are sent, all ranks first run such plans on copies
    of model and optimizer, for some windows that call `loss_fn`; what is the user's stays as it was.

    Args:
        adapt: None keeps the user's maths (tier S). Tier F: "learning_rate" also finds a peak learning rate by a range
            test, and a schedule; its cost is in `plan.search_s`. "batch" lets a window span several batches while
            training, as gradient noise and measured times ask for, the learning rate following. Others are raced over
            short trainings in pairs, in one process, and kept where they are clearly sooner at the same loss:
            "optimizer" Muon for the matrices of the model's blocks, "schedule" other shapes of that schedule, and
            "dropout" none, by the loss of batches not trained on yet, for a run that does not repeat its data. Or
            several of them.
        batch_rule: how, with "batch"; by default goodput, in windows of up to 16 loader batches. Without, one that only
            measures: `BatchRule("fixed")`.
        data: training batches, as in `profile`, and to train on a little; needed with all but "batch". The first
            batches of an iterator are used up by that.
        rehearse: whether several ranks run plans before one is chosen; without, what is predicted is taken.
        The rest as in `profile`.

    Raises:
        UsageError: as in `profile`. InfeasibleError: no settings meet the budget. RankError: another rank ended or is
            silent, or ranks failed, as where memory runs out, after they had sent unlike much in such windows.
    """
    require_plannable(model)
    batching = Batching(count, split)
    beside, freed = modules_beside(model, modules), adaptations(adapt, data)
    require_alone(beside, is_alone=not is_to_share(model))
    trains = bool(freed & TRAINED)
    if trains:
        require_restorable(data)
    require_adaptable(freed, model, optimizer, is_alone=not has_peers())
    rule = batch_rule_of("batch" in freed, batch_rule)
    budget = checks.dataclass_or("budget", budget, Budget, Budget())
    objective = checks.dataclass_or("objective", objective, Objective, Objective())
    batch, is_shared = example_batch if longest_batch is None else longest_batch, is_to_share(model)
    if is_shared and isinstance(data, Iterator):
        given = "an iterator, which planning would draw from on one of several ranks"
        raise ValueGivenError("data", given=given, expected="a loader, or nothing")

    def measured() -> Profile:
        return profile(
            model,
            optimizer,
            loss_fn,
            example_batch,
            budget=budget,
            objective=objective,
            reference=reference,
            longest_batch=longest_batch,
            data=None if trains and isinstance(data, Iterator) else data,  # whole for what trains on it
            total_steps=total_steps,
            blocks=blocks,
            modules=beside,
            frees_batch=rule is not None and rule.spans_batches,
            num_blocks=num_blocks,
            metering=metering,
            count=count,
            split=split,
            progress=progress,
        )

    def made(found: Profile, kept: str = "") -> Made:
        chosen = of_replicas(of_any_rank(found) if is_shared else found, kept)
        if trains and data is not None:
            loop = Subject(model, optimizer, loss_fn, example_batch, modules=beside, batching=batching)
            chosen = adapted(loop, chosen, freed, data, progress, RunLength.of(data, total_steps), found.budget)
        if rule is not None:
            wanted = default_rule(chosen) if batch_rule is None else rule
            chosen = chosen.freed(wanted, FREED if wanted.spans_batches else CUT)
        return Made(chosen, step_shape(model, found, chosen) if is_shared else None, kept)

    def of_rank() -> Made | Share:
        found = measured()
        loop = (model, optimizer, protected(loss_fn), batch)
        adapts = trains or rule is not None
        share = share_of(found, loop, progress, adapts=adapts)
        return share if isinstance(share, Share) else made(found, share)

    if not is_shared:
        return made(measured()).plan
    clips = None if reference is None else reference.clip_norm
    how = {"clip_norm": clips, "progress": progress, "batching": batching}
    rehearsal = partial(of_live, model, optimizer, protected(loss_fn), batch, **how)
    return plan_together(of_rank, next(model.parameters()).device, rehearsal if rehearse else None)


def default_rule(plan: Plan) -> BatchRule:
    """Return the rule that frees a plan's batch by default: goodput, for windows of up to sixteen loader batches."""
    return BatchRule(k_max=MOST_BATCHES * plan.num_micro_batches)


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    *,
    total_samples: int | None = None,
    total_tokens: int | None = None,
    clip_norm: float | None = None,
    nonfinite: str | None = None,
    out_of_memory: str | None = None,
    stop: Stop | None = None,
    record: RecordWriter | None = None,
    energy: EnergyClock | None = None,
    checkpoints: Checkpoints | None = None,
    modules: Iterable[nn.Module] = (),
    count: Count | None = None,
    split: Split | None = None,
) -> Run:
    """Apply a plan in place and return the run; `run.close()` (or leaving its `with` block) undoes it.

    Args:
        total_samples, total_tokens: what the run will train on, the one or the other; needed when the plan has a
            schedule by progress. Tokens are the terms that `Summed` counts.
        clip_norm: limit on the global gradient norm, as the user's loop applies it (paper eq. 12).
        nonfinite: for steps with a non-finite loss or gradient. "skip" drops the step, "stop" raises `NonFiniteError`
            before it is applied; both wait for the device in each step. "warn" (also None) warns once after such a
            step, "error" raises; both read the loss a step later, without waiting. "continue" checks nothing.
        out_of_memory: in `run.train_step`, "split" runs the window again in smaller micro-batches, "stop" raises. None:
            split in one process, unless the plan's check found that splitting changes the maths, or the model has batch
            statistics. Of several ranks only one that holds the whole model can (zero_stage 0), without a batch rule.
        stop: when to end before the data does.
        record: where to write a line per step; stays open for its owner.
        energy: what counts joules for that record, a line about every ten seconds; None: they are not in it.
        checkpoints: where the run is kept, and gone on from; needs `run.windows(loader)`, which knows its place.
        modules: trained by the same optimizer in addition to the model, such as a criterion with parameters; in one
            process. Checkpoints include them.
        count, split: as in `profile`.

    Raises:
        UsageError: the plan does not fit this model, optimizer or device; nothing was changed.
    """
    if not isinstance(plan, Plan):
        raise ValueGivenError(
            "plan", given=f"a {type(plan).__name__}", expected="a Plan", way_out="Make one with trimtab.plan(...)."
        )
    if energy is not None and record is None:
        raise ValueGivenError("energy", given="a clock without a record", expected="record=..., which its joules go to")
    backend = backend_of(
        model,
        plan,
        {"clip_norm": clip_norm, "nonfinite": nonfinite, "total_samples": total_samples, "total_tokens": total_tokens},
    )
    exchange, beside = backend.exchange, modules_beside(model, modules)
    require_alone(beside, is_alone=not exchange.has_peers)
    require_same_loop(model, optimizer, exchange, spreads=plan.zero_stage.value is not None)
    warn_of_unproved_split(plan)
    if exchange.num_ranks == 1 and exchange.has_peers:  # gradients may be reduced by hand, and other ranks would wait
        out_of_memory = out_of_memory or "stop"
        if plan.batch_rule is not None:
            raise ValueGivenError(
                "plan.batch_rule",
                given="a batch that is freed, on one of several ranks that nothing joins as far as can be seen",
                expected="a model in DistributedDataParallel or fully_shard: each rank would have a k of its own",
                way_out="Or a plan that shares the model between ranks: zero_stage=0.",
            )
        if is_to_share(model):
            warnings.warn(_APART, stacklevel=2)
    options = {"total_samples": total_samples, "total_tokens": total_tokens, "clip_norm": clip_norm}
    options |= {
        "nonfinite": nonfinite,
        "out_of_memory": out_of_memory,
        "stop": checks.dataclass_or("stop", stop, Stop, None),
    }
    options |= {"modules": beside, "batching": Batching(count, split)}
    options |= {"backend": backend, "recorder": None if record is None else Recorder(record, energy)}
    settings: Checkpoints | None = checks.dataclass_or("checkpoints", checkpoints, Checkpoints, None)
    if settings is not None:
        return kept(settings, model, optimizer, plan, options)
    if record is not None:
        record.require_own()
    return Run(model, optimizer, plan, **options)
