"""The profile of a loop: facts, phases, counted FLOP, and every trial the search asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trimtab.calibrate.equivalence import check_splitting
from trimtab.calibrate.subject import Subject
from trimtab.calibrate.trials import run_stage
from trimtab.core.objective import Budget, Objective, Reference
from trimtab.core.profile import Candidate, LoopFacts, Profile
from trimtab.decide.search import next_stage, reference_candidate
from trimtab.measure import allocator
from trimtab.measure.flops import count_flops
from trimtab.measure.machine import device_spec, environment
from trimtab.measure.snapshot import Snapshot
from trimtab.measure.timing import PhaseClock
from trimtab.runtime.layout import channels_last_hazard, is_channels_last
from trimtab.runtime.optimizers import is_fused, supports_fused

NUM_BLOCKS = 5
_PHASE_STEPS = 3


def silent(text: str) -> None:
    """Report progress to nobody."""


def profile_loop(
    subject: Subject,
    reference: Reference,
    objective: Objective,
    budget: Budget,
    *,
    num_blocks: int = NUM_BLOCKS,
    progress: Callable[[str], None] = silent,
) -> Profile:
    """Measure a loop and the candidates its search asks for; the subject is bit for bit as before, also on error."""
    start = time.perf_counter()
    with Snapshot(subject.model, subject.optimizer) as snapshot:
        progress("checking that splitting keeps the gradient")
        check = check_splitting(subject)
        facts = _facts(subject)
        device = device_spec(subject.device)
        profile = Profile(device, facts, check, reference, environment=environment())
        while (stage := next_stage(profile, objective, budget)) is not None:
            profile = profile.with_trials(run_stage(subject, stage, num_blocks, progress, profile.trials))
            snapshot.restore()
        phases = measure_phases(subject, reference_candidate(profile), steps=_phase_steps(profile))
    seconds = time.perf_counter() - start
    return Profile(device, facts, check, reference, profile.trials, phases, environment(), seconds)


def _phase_steps(profile: Profile) -> int:
    """Return fewer steps where one is long."""
    return max(1, min(_PHASE_STEPS, round(1.0 / (profile.trials[0].step_s or 1.0))))


def measure_phases(subject: Subject, candidate: Candidate, steps: int = _PHASE_STEPS) -> dict[str, float]:
    """Return seconds per step by phase (forward, backward, optimizer, other) of a candidate. Leaves no trace."""
    with Snapshot(subject.model, subject.optimizer), subject.start(candidate) as run:
        run.train_step(run.window(subject.batch), subject.loss_fn)
        clock = PhaseClock(subject.device)
        for _ in range(steps):
            _phased_step(run, subject, clock)
    return {name: seconds / steps for name, seconds in clock.seconds.items()}


def _phased_step(run: Any, subject: Subject, clock: PhaseClock) -> None:
    micros = iter(run.window(subject.batch))
    while True:
        with clock.phase("data"):
            micro = next(micros, None)
        if micro is None:
            break
        with clock.phase("forward"), run.autocast():
            result = subject.loss_fn(run.model, micro)
        with clock.phase("backward"):
            run.backward(*result) if isinstance(result, tuple) else run.backward(result)
    with clock.phase("optimizer"):
        run.step()


def _facts(subject: Subject) -> LoopFacts:
    model, optimizer = subject.model, subject.optimizer
    parameters = list(model.parameters())
    flops, terms, kind = _count_step(subject)
    return LoopFacts(
        num_parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        optimizer=type(optimizer).__name__,
        batch_rows=subject.rows,
        terms_per_step=terms,
        terms=kind,
        flops_per_step=flops,
        has_convolutions=any(p.dim() == 4 for p in parameters),
        supports_fused=supports_fused(optimizer),
        is_fused=is_fused(optimizer),
        layout="channels_last" if is_channels_last(model) else "contiguous",
        layout_hazard=channels_last_hazard(model),
        can_retain=subject.device.type == "cpu" and allocator.can_retain(),
    )


def _count_step(subject: Subject) -> tuple[float | None, float, str]:
    """Return (FLOP of forward and backward, terms, "rows" or "tokens") of the example batch."""
    terms: list[Any] = []

    def forward_backward() -> None:
        loss, count = subject.loss()
        terms.append(count)
        loss.backward()

    with Snapshot(subject.model, subject.optimizer):
        try:
            flops: float | None = count_flops(forward_backward)
        except NotImplementedError:  # an operator that does not run under the counter's dispatch mode
            flops = None
    count = terms[0] if terms else None
    return flops, float(subject.rows if count is None else count), "rows" if count is None else "tokens"
