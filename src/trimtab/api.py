"""Public functions: `profile`, `plan` and `start`."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trimtab.checkpoint.config import Checkpoints
from trimtab.checkpoint.manager import kept
from trimtab.core import validation
from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import ModelError, UsageError, ValueGivenError
from trimtab.core.hardware import DeviceSpec, absent_device
from trimtab.core.objective import ASSUMED_REFERENCE, Budget, Objective, Reference
from trimtab.core.progress import silent
from trimtab.core.record import RecordWriter
from trimtab.core.stopping_rule import Stop
from trimtab.distributed.backend_selection import backend_of, is_to_share, require_plannable
from trimtab.distributed.dry_run import of_live
from trimtab.distributed.plan_on_ranks import BroadcastPlan, StageMeasurements, of_replicas, plan_together, share_of
from trimtab.distributed.process_group import has_peers, is_first_rank
from trimtab.distributed.rank_consistency import require_same_loop
from trimtab.energy.energy_meter import EnergyClock
from trimtab.energy.meter_selection import Metering as Metering
from trimtab.energy.meter_selection import elsewhere_meter, find_meter, measurable
from trimtab.planner.multi_rank_plan import of_any_rank
from trimtab.planner.plan_choice import choose_there
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.profiling.communication_profile import step_shape
from trimtab.profiling.plan_cache import CachedPlan, default_folder, parts_of_key
from trimtab.profiling.profiler import NUM_BLOCKS, profile_loop
from trimtab.profiling.sample_batches import first_batch, loader_of, require_restorable
from trimtab.profiling.target_device import profile_elsewhere
from trimtab.profiling.training_loop import TrainingLoop, protect_batch
from trimtab.profiling.training_settings_search import (
    TRAINED,
    RunLength,
    batch_rule_of,
    require_adaptable,
    tunable_settings,
    tune_plan,
)
from trimtab.progress_display import ProgressArgument, shown
from trimtab.settings.step_in_backward import switched_off, with_gradient
from trimtab.techniques.optimizer_in_backward import late_reason
from trimtab.techniques.optimizers import modules_beside, require_alone
from trimtab.training.batch import BatchSplitting, Count, Split, of_same_size
from trimtab.training.nonfinite import BEFORE_THE_STEP
from trimtab.training.run import LossFn, Run
from trimtab.training.split_conditions import warn_of_unproved_split
from trimtab.training.step_recorder import StepRecorder

MOST_BATCHES = 16
FREED = (
    "the batch size is adaptive, by gradient noise and step times; "
    "memory peaks are of steps of two loader batches, for the baseline too"
)
_APART = (
    "This job has several ranks, but the plan and the model do not reduce gradients, so that every rank trains a "
    "separate model unless the loop reduces gradients. Call trimtab.plan on all ranks, or wrap the model in "
    "DistributedDataParallel."
)
_IN_EVALUATION = (
    "The model is in evaluation mode, and is measured without dropout and without updates of batch statistics. Call "
    "model.train() before trimtab.plan. To keep batch statistics frozen, call .eval() on the normalisation modules "
    "afterwards."
)
CUT = "the batch is split into the number of micro-batches with the most samples or tokens per second and byte"


class _ShortTraceback:
    """Context manager that removes internal frames from the traceback of a `UsageError`.

    `TRIMTAB_TRACEBACK=1` keeps them. A cause, such as the error of a loss function, keeps its frames.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UsageError) and not os.environ.get("TRIMTAB_TRACEBACK"):
            error.__traceback__ = None  # The frames of the callers are added as the error leaves the block.
            if error.__cause__ is not None:
                error.__cause__.__suppress_context__ = True


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
    adapts_batch_size: bool = False,
    blocks: Iterable[str] = (),
    modules: Iterable[nn.Module] = (),
    num_blocks: int = NUM_BLOCKS,
    traces: bool = False,
    metering: Metering | None = None,
    count: Count | None = None,
    split: Split | None = None,
    progress: Callable[[str], None] = silent,
) -> Profile:
    """Measure a training loop and the candidate settings for it.

    Planning leaves no trace: model, optimizer and random generators are restored bit for bit, also if a trial fails.

    Args:
        model: the model as it will be trained.
        optimizer: the model's optimizer.
        loss_fn: `loss_fn(model, batch)` returns a mean over samples, or `trimtab.Summed(loss_sum, count)` if samples
            have unequal numbers of terms, such as tokens; alone or in a pair `(loss, auxiliary)`, see
            `Run.auxiliary`.
        example_batch: a batch of the loader, for one optimizer step.
        budget: hard limits on memory, time and energy; with `objective`, determines the candidates to try.
        objective: weights of time, memory and energy.
        reference: precision, clipping and accumulation of the user's loop; by default "assumed fp32 eager".
        longest_batch: the longest batch in the data, with the same number of samples, if lengths vary. All
            measurements then use it.
        data: the loop's loader; a few batches are drawn to time the data wait. Loader, sampler, dataset and random
            generators are restored, and workers started for the measurement are ended, so the next epochs are as
            without planning. Iterators, and data that contain an iterator, are not drawn from; the profile's notes
            record this.
        total_steps: optimizer steps of the whole run, if known. Limits the time spent on measuring and determines if
            compilation can pay off.
        adapts_batch_size: True if a window may span several batches, as with `adapt="batch"`. Gradients are then held
            during a forward, and peaks are those of windows of two batches.
        blocks: names of the modules to consider for activation checkpointing, instead of those found in the module
            tree. Each must run once per forward, and none may contain another.
        modules: modules in addition to the model, such as a criterion with parameters, that the same optimizer
            trains. Modules without parameters of the optimizer are restored after planning.
        num_blocks: interleaved blocks of steps per candidate, at least 3. A gain is accepted from 5 blocks on.
        traces: True to trace peaks even if memory is neither limited nor weighted, so that a plan can be chosen from
            the profile under other limits and for other devices.
        metering: source of the energy figures; by default the meters found on the machine.
        count: `count(batch)` returns the number of samples. Needed, with `split`, for packed, graph, time-first and
            vision-language batches, whose containers do not show their samples; otherwise such a batch is not split.
        split: `split(batch, start, stop)` returns a batch of the samples from `start` to `stop`.
        progress: called with a line of text as the measurement advances.

    Raises:
        UsageError: model, optimizer, loss or batch do not fit together, the device is neither CPU nor CUDA, or the
            model is already wrapped on several ranks. Nothing was changed.
    """
    require_plannable(model)
    reference = validation.dataclass_or("reference", reference, Reference, ASSUMED_REFERENCE)
    budget = validation.dataclass_or("budget", budget, Budget, Budget())
    objective = validation.dataclass_or("objective", objective, Objective, Objective())
    metering = validation.dataclass_or("metering", metering, Metering, Metering())
    batch, example, batching = example_batch, None, BatchSplitting(count, split)
    if longest_batch is not None:
        batch, example = of_same_size(longest_batch, example_batch, batching), example_batch
    named = validation.names("blocks", blocks)
    subject = TrainingLoop(
        model,
        optimizer,
        loss_fn,
        batch,
        reference.clip_norm,
        adapts_batch_size,
        named_blocks=named,
        example=example,
        modules=modules_beside(model, modules),
        batching=batching,
    )
    if not model.training:
        warnings.warn(_IN_EVALUATION, stacklevel=2)
    metered = find_meter(subject.device, metering)
    objective, facts = measurable(objective, budget, metered, metering.without)
    metered = dataclasses.replace(metered, facts=facts)
    times = validation.integer("num_blocks", num_blocks, low=3)
    steps = None if total_steps is None else validation.integer("total_steps", total_steps)
    with _ShortTraceback():
        return profile_loop(
            subject,
            reference,
            objective,
            budget,
            data=data,
            total_steps=steps,
            num_blocks=times,
            traces=traces,
            metered=metered,
            progress=progress,
        )


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
    """Return a profile for a device that is not in this machine, from traces and the device's data sheet.

    Nothing is run; all figures are predictions. Model, optimizer and batch may be on the CPU or the meta device, and
    are not changed.

    Args:
        device: a name in the device table, such as "H100 SXM", or a spec with peaks and bandwidth.
        budget: as in `profile`; memory is limited to the device's.
        rows: samples per step, if not those of the example batch.

    Raises:
        UsageError: the device is unknown, or a step cannot be traced.
    """
    spec = absent_device(device) if isinstance(device, str) else device
    limits = validation.dataclass_or("budget", budget, Budget, Budget()).within(spec.memory_bytes)
    weights = validation.dataclass_or("objective", objective, Objective, Objective())
    measurable(weights, limits, elsewhere_meter(spec.name))
    return profile_elsewhere(
        model,
        optimizer,
        protect_batch(loss_fn),
        example_batch,
        spec,
        reference=validation.dataclass_or("reference", reference, Reference, ASSUMED_REFERENCE),
        objective=weights,
        budget=limits,
        named_blocks=validation.names("blocks", blocks),
        rows=None if rows is None else validation.integer("rows", rows),
        progress=progress,
    )


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    loader_or_batch: Any,
    *,
    memory: int | str | None = None,
    time: float | None = None,
    budget: Budget | None = None,
    objective: Objective | None = None,
    reference: Reference | None = None,
    longest_batch: Any = None,
    adapt: str | Collection[str] | None = None,
    batch_rule: BatchRule | None = None,
    data: Iterable[Any] | None = None,
    total_steps: int | None = None,
    accumulate: int = 1,
    blocks: Iterable[str] = (),
    modules: Iterable[nn.Module] = (),
    num_blocks: int = NUM_BLOCKS,
    metering: Metering | None = None,
    count: Count | None = None,
    split: Split | None = None,
    dry_runs: bool = True,
    device: str | DeviceSpec | None = None,
    cache: bool | str | Path = False,
    progress: ProgressArgument = "auto",
) -> Plan:
    """Measure the loop and choose settings for this machine. Nothing is changed; `print(plan)` explains the choices.

    With `device`, plan for a device that is not in this machine, from traces and the device's data sheet: nothing is
    run, and all figures are predictions. Model, optimizer and batch may be on the CPU or the meta device.

    On several ranks with an unwrapped model, every rank calls `plan`. Rank 0 measures its part of a batch, and its
    plan, broadcast to all ranks, includes how to shard the model. With a memory limit (per rank) or a memory weight,
    the ZeRO stage is chosen by the memory of a rank at each stage; otherwise every rank holds the whole model. If the
    stage is chosen, or if the plan would change the communication of gradients, all ranks first run a few windows of
    such plans on copies of model and optimizer (a dry run, which calls `loss_fn`).

    Values of `adapt`:

    - "learning_rate": a peak learning rate from a range test, and a schedule. `plan.search_s` includes the cost.
    - "batch": the number of batches per window follows gradient noise and step times during training, and the
      learning rate follows the batch size.
    - "optimizer": Muon for the matrices of the model's blocks.
    - "schedule": other shapes of the learning-rate schedule.
    - "dropout": no dropout, judged by the loss of unseen batches, for a run within one epoch.
    - "optimizer_state": state of Adam, AdamW or SGD in 8 bits or bf16.
    - "float8": float8 products in large linear layers of a bf16 plan, by torchao on CUDA.

    The last five are compared with the unchanged setting in short paired trainings in one process, and accepted if
    they reach the same loss significantly sooner; low-bit state if it reaches the same loss and lowers the objective.

    Args:
        loader_or_batch: the loop's loader, whose first batch is the example and which is otherwise used as `data`; or
            a batch of it. A list or tuple is a batch. The loader yields the same batches afterwards.
        memory, time: limits of the budget: peak bytes of a step, such as "8GiB", and seconds per optimizer step.
        accumulate: batches of the loader that an optimizer step accumulates, as with `run.of_batches`. The plan is for
            a single batch, with an equal part of the limits on time and energy.
        cache: True to keep the plan in the user's cache folder, or a folder. A later call for the same model, shapes,
            arguments, machine and versions returns it without measuring.
        adapt: names of the training settings that the plan may change (a tuned plan). None keeps batch size, learning
            rate, schedule and optimizer (an equivalent plan).
        batch_rule: policy for adapt="batch"; by default goodput, with windows of up to 16 loader batches. Without
            adapt="batch", only `BatchRule("fixed")`, which measures the noise scale.
        data: training batches, as in `profile`, and for short trainings; required with every `adapt` but "batch". An
            iterator loses the batches drawn from it.
        dry_runs: True to run candidate plans on all ranks before one is chosen; False to rely on predictions.
        device: target device: a name in the device table, such as "H100 SXM", or a spec with peaks and bandwidth. The
            memory budget is limited to the device's memory. Arguments that need measurements are refused.
        progress: "auto" shows a progress bar on a terminal, and otherwise a line on standard error every ten seconds;
            None shows nothing; a function is called with a line of text as the measurement advances.
        The rest as in `profile`.

    Raises:
        UsageError: as in `profile`; the target device is unknown, or a step cannot be traced for it.
        InfeasibleError: no settings meet the budget.
        RankError: another rank ended or does not answer, or ranks failed in a dry run after a different number of
            collectives, for example because memory ran out.
    """
    budget = limits_of(budget, memory, time)
    loader = loader_of(loader_or_batch)
    example_batch = loader_or_batch if loader is None else first_batch(loader)
    data = loader if data is None and device is None else data
    num_batches = validation.integer("accumulate", accumulate)
    arguments = {
        "budget": budget.of_batch(num_batches),
        "objective": objective,
        "reference": reference,
        "longest_batch": longest_batch,
        "adapt": adapt,
        "batch_rule": batch_rule,
        "total_steps": total_steps,
        "accumulate": num_batches,
        "blocks": validation.names("blocks", blocks),
        "modules": modules_beside(model, modules),
        "num_blocks": num_blocks,
        "metering": metering,
        "count": count,
        "split": split,
        "dry_runs": dry_runs,
        "device": device,
    }

    def make() -> Plan:
        with _ShortTraceback(), shown(progress, is_first_rank=is_first_rank()) as told:
            return _planned(model, optimizer, loss_fn, example_batch, data=data, progress=told, **arguments)

    if cache is False:
        return make()
    _refuse_caching(adapt)
    parts = parts_of_key(model, optimizer, loss_fn, example_batch, arguments)
    kept_plan = CachedPlan(default_folder() if cache is True else Path(cache), parts)
    if (found := kept_plan.read()) is not None:
        return found
    made = make()
    kept_plan.write(made)
    return made


def limits_of(budget: Budget | None, memory: int | str | None, time: float | None) -> Budget:
    """Return the budget, or one with the limits given as `memory` and `time`.

    Raises:
        ValueGivenError: a budget and a limit are given.
    """
    if budget is not None and (memory is not None or time is not None):
        raise ValueGivenError(
            "budget",
            problem="Both budget and memory or time are given, which may contradict each other.",
            hint="Pass trimtab.Budget(memory=..., time=...) alone, or memory and time alone.",
            code="argument.conflict",
        )
    found: Budget = validation.dataclass_or("budget", budget, Budget, Budget(memory, time))
    return found


def _refuse_caching(adapt: str | Collection[str] | None) -> None:
    if adapt is None and not has_peers():
        return
    what = "of several ranks" if adapt is None else "that tunes the training (adapt), which depends on the data"
    raise ValueGivenError(
        "cache",
        problem=f"The cache cannot keep a plan {what}.",
        hint="Remove cache, and keep the plan yourself with plan.save(path) and trimtab.Plan.load(path).",
        code="cache.unsupported",
    )


def _planned(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    example_batch: Any,
    *,
    budget: Budget,
    objective: Objective | None,
    reference: Reference | None,
    longest_batch: Any,
    adapt: str | Collection[str] | None,
    batch_rule: BatchRule | None,
    data: Iterable[Any] | None,
    total_steps: int | None,
    accumulate: int,
    blocks: tuple[str, ...],
    modules: tuple[nn.Module, ...],
    num_blocks: int,
    metering: Metering | None,
    count: Count | None,
    split: Split | None,
    dry_runs: bool,
    device: str | DeviceSpec | None,
    progress: Callable[[str], None],
) -> Plan:
    """Make a plan from an example batch; arguments as in `plan`."""
    if device is not None:
        measuring = {
            "longest_batch": longest_batch,
            "adapt": adapt,
            "batch_rule": batch_rule,
            "data": data,
            "total_steps": total_steps,
            "modules": modules,
            "metering": metering,
            "count": count,
            "split": split,
        }
        _refuse_measuring(device, measuring)
        found = profile_there(
            model,
            optimizer,
            loss_fn,
            example_batch,
            device,
            budget=budget,
            objective=objective,
            reference=reference,
            blocks=blocks,
            progress=progress,
        )
        return choose_there(found)
    require_plannable(model)
    batching = BatchSplitting(count, split)
    beside, freed = modules_beside(model, modules), tunable_settings(adapt, data)
    require_alone(beside, is_alone=not is_to_share(model))
    trains = bool(freed & TRAINED)
    if trains:
        require_restorable(data)
    require_adaptable(freed, model, optimizer, is_alone=not has_peers())
    rule = batch_rule_of("batch" in freed, batch_rule)
    objective = validation.dataclass_or("objective", objective, Objective, Objective())
    if freed or rule is not None or has_peers():  # Settings of the training, and ranks, act on whole gradients.
        own = validation.dataclass_or("reference", reference, Reference, ASSUMED_REFERENCE)
        reference = dataclasses.replace(own, keeps_gradients=True)
    batch, is_shared = example_batch if longest_batch is None else longest_batch, is_to_share(model)
    if is_shared and isinstance(data, Iterator):
        raise ValueGivenError(
            "data",
            got="an iterator, from which only one of several ranks would draw batches",
            expected="a loader or None",
            hint="Pass the DataLoader itself as data=, not iter(loader).",
            code="data.iterator",
        )

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
            # An iterator is left whole for the short trainings.
            data=None if trains and isinstance(data, Iterator) else data,
            total_steps=None if total_steps is None else total_steps * accumulate,  # Steps of one batch.
            blocks=blocks,
            modules=beside,
            adapts_batch_size=accumulate > 1 or (rule is not None and rule.spans_batches),
            num_blocks=num_blocks,
            metering=metering,
            count=count,
            split=split,
            progress=progress,
        )

    def made(found: Profile, kept: str = "") -> BroadcastPlan:
        chosen = of_replicas(of_any_rank(found) if is_shared else found, kept)
        if trains and data is not None:
            loop = TrainingLoop(model, optimizer, loss_fn, example_batch, modules=beside, batching=batching)
            how = RunLength.of(data, total_steps), found.budget, objective
            chosen = tune_plan(loop, chosen, freed, data, progress, *how)
        if rule is not None:
            wanted = default_rule(chosen) if batch_rule is None else rule
            chosen = chosen.freed(wanted, FREED if wanted.spans_batches else CUT)
        return BroadcastPlan(chosen, step_shape(model, found, chosen) if is_shared else None, kept)

    def of_rank() -> BroadcastPlan | StageMeasurements:
        found = measured()
        loop = (model, optimizer, protect_batch(loss_fn), batch)
        adapts = trains or rule is not None
        share = share_of(found, loop, progress, adapts=adapts)
        return share if isinstance(share, StageMeasurements) else made(found, share)

    if not is_shared:
        return made(measured()).plan
    clips = None if reference is None else reference.clip_norm
    rehearsal = partial(
        of_live,
        model,
        optimizer,
        protect_batch(loss_fn),
        batch,
        clip_norm=clips,
        progress=progress,
        batching=batching,
    )
    return plan_together(of_rank, next(model.parameters()).device, rehearsal if dry_runs else None)


def _refuse_measuring(device: str | DeviceSpec, arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None and value != ():
            raise ValueGivenError(
                name,
                problem=f"{name} needs measurements, but a plan for target device {device} is predicted from traces.",
                hint=f"Leave out {name}, or leave out device to plan for this machine.",
                code="device.cannot_measure",
            )


def default_rule(plan: Plan) -> BatchRule:
    """Return the batch rule for adapt="batch": goodput, with windows of up to 16 loader batches."""
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
        model, optimizer: the objects that the plan was made for.
        total_samples: samples of the whole run; needed, or `total_tokens`, if the plan has a schedule by progress.
        total_tokens: the same in terms counted by `Summed`.
        clip_norm: limit on the global gradient norm, as the user's loop applies it (paper eq. 12).
        nonfinite: for steps with a non-finite loss or gradient. "skip" drops the step, "stop" raises `NonFiniteError`
            before it is applied; both wait for the device in each step. "warn" (also None) warns once after such a
            step, "error" raises; both read the loss a step later, without waiting. "continue" checks nothing.
        out_of_memory: "split" reruns the window of `run.train_step` in smaller micro-batches, "stop" raises. None:
            "split" in one process, unless the plan's check found that splitting changes the gradient or the model has
            batch statistics; with `plan.step_in_backward`, only before the window's first update. On several ranks
            "split" needs a whole model per rank (zero_stage 0) and no batch rule.
        stop: conditions that end the run before its data end.
        record: writer of a line per step; it stays open for its owner.
        energy: clock whose joules are added to the record about every ten seconds; None: the record has none.
        checkpoints: where checkpoints are written and resumed from. Needs `run.windows(loader)`, which tracks the
            data position.
        modules: modules in addition to the model, such as a criterion with parameters, that the same optimizer
            trains; in one process only. Checkpoints include them.
        count, split: as in `profile`.

    Raises:
        UsageError: the plan does not fit this model, optimizer or device. Nothing was changed.
    """
    if not isinstance(plan, Plan):
        by_hand = f"Plan.fixed({plan})" if type(plan) is int else "Plan.fixed(batch_size)"
        raise ValueGivenError(
            "plan",
            got=f"a {type(plan).__name__}",
            expected="a trimtab.Plan",
            hint=f"Make a plan with trimtab.plan(...) or trimtab.{by_hand}, or read one with trimtab.Plan.load(path).",
            code="plan.not_plan",
        )
    if energy is not None and record is None:
        raise ValueGivenError(
            "energy",
            problem="energy= was passed without record=, so that the energy would not be recorded.",
            hint="Pass record=trimtab.RecordWriter(path, header).",
            code="energy.no_record",
        )
    if isinstance(model, nn.Module) and any(each.is_meta for each in model.parameters()):
        raise ModelError(
            "model",
            got="parameters on the device 'meta', which have no values",
            expected="a model on the CPU or a GPU",
            hint="Call model.to_empty(device=...) and load or initialise the weights first.",
            code="model.on_meta",
        )
    needs = {
        "clip_norm": clip_norm,
        "nonfinite": nonfinite in BEFORE_THE_STEP,
        "out_of_memory='split'": out_of_memory == "split",
        "stop=Stop(grad_norm=...)": isinstance(stop, Stop) and stop.grad_norm is not None,
        "a job of several ranks": has_peers(),
    }
    plan = with_gradient(plan, needs)
    if plan.step_in_backward.value and isinstance(optimizer, torch.optim.Optimizer):
        reason = late_reason(optimizer)  # The loop may have changed since planning.
        plan = switched_off(plan, reason) if reason else plan
    backend = backend_of(
        model,
        plan,
        {"clip_norm": clip_norm, "nonfinite": nonfinite, "total_samples": total_samples, "total_tokens": total_tokens},
    )
    exchange, beside = backend.exchange, modules_beside(model, modules)
    require_alone(beside, is_alone=not exchange.has_peers)
    require_same_loop(model, optimizer, exchange, spreads=plan.zero_stage.value is not None)
    warn_of_unproved_split(plan, model)
    # The loop may reduce gradients by hand, and a retry on this rank would make others wait.
    if exchange.num_ranks == 1 and exchange.has_peers:
        out_of_memory = out_of_memory or "stop"
        if plan.batch_rule is not None:
            raise ValueGivenError(
                "plan.batch_rule",
                problem="The plan adapts the batch size, but the model is not wrapped for the job's several ranks, so "
                "that each rank would choose a different batch size.",
                hint="Wrap the model in DistributedDataParallel or fully_shard, or use a plan with zero_stage=0.",
                code="batch_rule.ranks_unconnected",
            )
        if is_to_share(model):
            warnings.warn(_APART, stacklevel=2)
    options: dict[str, Any] = {
        "total_samples": total_samples,
        "total_tokens": total_tokens,
        "clip_norm": clip_norm,
        "nonfinite": nonfinite,
        "out_of_memory": out_of_memory,
        "stop": validation.dataclass_or("stop", stop, Stop, None),
        "modules": beside,
        "batching": BatchSplitting(count, split),
        "backend": backend,
        "recorder": None if record is None else StepRecorder(record, energy),
    }
    settings: Checkpoints | None = validation.dataclass_or("checkpoints", checkpoints, Checkpoints, None)
    if settings is not None:
        return kept(settings, model, optimizer, plan, options)
    if record is not None:
        record.require_own()
    return Run(model, optimizer, plan, **options)
