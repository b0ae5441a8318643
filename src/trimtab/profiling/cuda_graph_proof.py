"""Proof of CUDA graphs: compares the gradient of replayed graphs with the gradient without graphs.

Both use the same kernels, eager or compiled, so rounding by the compiler plays no role. The proof runs in the trial
that times the graphs, with other samples and weights than at capture, and with two random seeds. A graph that replays
captured values, or omits Python code between kernels, is wrong by as much as the new samples and weights change the
gradient; rounding is far less.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import BatchError
from trimtab.plans.profile import Candidate
from trimtab.profiling.rounding_tolerance import distances, norms, total
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.techniques.compiled_call import CompiledCall
from trimtab.techniques.cuda_graphs import GraphReplayer
from trimtab.training.batch import samples_at

# Largest relative difference of the gradient, and as a fraction of the change caused by other samples and weights if
# that is less than 1. Below the smallest such change, nothing can be concluded.
LIMIT, _LEAST_MOVE = 0.3, 0.1
# Fraction of a parameter's gradient and of its module's (by root mean square) that may be rounding, as for a bias
# that batch statistics cancel. And multiple of the difference between two passes without graphs.
_ROUNDED, _TIMES_NOISE = 0.02, 3.0
_LEAST_SIZE = 1e-7  # Fraction of the root mean square of all gradients; smaller modules are treated as this large.
_DRAWS = (1, 2)
Gradients = list[Tensor | None]


def replay_refusal(subject: TrainingLoop, candidate: Candidate) -> str | None:
    """Return the reason for rejecting CUDA graphs, or None. Called inside an open run of the candidate."""
    call = subject.model._compiled_call_impl
    recorder = call.recorder if isinstance(call, CompiledCall) else None
    if recorder is None:
        return "CUDA graphs could not be checked, because the model was compiled before planning"
    gradients = functools.partial(_gradients, subject, candidate, recorder)
    batch, rows = next(subject.batching.slices(subject.batch, subject.rows, candidate.micro_batch))
    try:
        other = samples_at(batch, [index // 2 for index in range(rows)])
    except BatchError as error:
        return f"CUDA graphs could not be checked, because no second batch could be made: {error.reason}"
    before = gradients(batch, _DRAWS[0], launched=False)
    apart, moved, differing = [], [], ""
    with _moved_weights(subject):
        for draw in _DRAWS:
            launches = recorder.launches
            launched = gradients(other, draw, launched=True)
            if recorder.launches == launches:
                unused = "no part of the forward was replayed as a CUDA graph"
                return recorder.refusal or (f"{unused}: {recorder.left}" if recorder.left else unused)
            own, again = (gradients(other, draw, launched=False) for _ in range(2))
            if [each is None for each in own] != [each is None for each in launched]:
                return "with CUDA graphs, other parameters receive gradients than without"
            apart.append(_relative(own, launched))
            moved.append(_relative(own, before))
            differing = differing or _differing(subject, before, own, again, launched)
    return _judged(apart, moved) or differing or None


def _judged(apart: Sequence[float | None], moved: Sequence[float | None]) -> str | None:
    if None in apart or None in moved:
        return "CUDA graphs could not be checked, because the gradient is zero, NaN or infinite"
    least, worst = min(each or 0.0 for each in moved), max(each or 0.0 for each in apart)
    if least < _LEAST_MOVE:
        return "CUDA graphs could not be checked, because other samples and weights hardly change the gradient"
    limit = LIMIT * min(1.0, least)
    if worst <= limit:
        return None
    return f"with CUDA graphs, the gradient differs by {worst:.2g} (relative), more than the limit of {limit:.2g}"


def _differing(subject: TrainingLoop, before: Gradients, own: Gradients, again: Gradients, launched: Gradients) -> str:
    """Return a sentence about the parameter whose gradient differs most relative to its limit; "" if none does.

    Gradients of the capture; on other samples and weights twice without graphs, and with replayed graphs.
    """
    names = [name for name, p in subject.model.named_parameters() if p.requires_grad]
    found = {
        name: (mine, _norm(mine), _norm(mine, captured), _norm(mine, repeated), _norm(mine, replayed))
        for name, captured, mine, repeated, replayed in zip(names, before, own, again, launched, strict=True)
        if mine is not None
    }
    count = sum(mine.numel() for mine, *_ in found.values())
    least = _LEAST_SIZE * math.sqrt(sum(norm**2 for _, norm, *_ in found.values()) / max(1, count))
    typical: dict[str, float] = {}  # Root mean square of the largest parameter gradient per module.
    for name, (mine, norm, *_) in found.items():
        module = name.rpartition(".")[0]
        typical[module] = max(typical.get(module, least), norm / math.sqrt(mine.numel()))
    worst, reason = 1.0, ""
    for name, (mine, norm, moved, noise, error) in found.items():
        rounded = _ROUNDED * (norm + typical[name.rpartition(".")[0]] * math.sqrt(mine.numel()))
        limit = LIMIT * min(norm, moved) + rounded + _TIMES_NOISE * noise
        if limit > 0 and error / limit > worst:
            worst, far = error / limit, f"by {error / norm:.2g} (relative)" if norm else "from zero"
            reason = f"with CUDA graphs, the gradient of {name} differs {far}"
    return reason


def _norm(gradient: Tensor, other: Tensor | None = None) -> float:
    found = gradient if other is None else other - gradient
    dense = found.coalesce().values() if found.is_sparse else found
    return float(torch.linalg.vector_norm(dense, dtype=torch.float64))


def _relative(own: Gradients, other: Gradients) -> float | None:
    """Return |own - other| / |own| over all tensors; None if it is not finite."""
    pairs = [(a, b) for a, b in zip(own, other, strict=True) if a is not None and b is not None]
    ours, theirs = ({str(i): pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
    error, norm = total(distances(ours, theirs)), total(norms(ours))
    return error / norm if norm > 0 and error / norm < math.inf else None


@contextlib.contextmanager
def _moved_weights(subject: TrainingLoop) -> Iterator[None]:
    """Change the weights in place and restore them: a captured graph reads them at fixed addresses."""
    weights: list[Tensor] = [p for p in subject.model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in weights]
    try:
        with torch.no_grad(), torch.random.fork_rng(_devices(subject)):
            for each in weights:
                each.mul_(2 * torch.randint_like(each, 2) - 1)  # Random signs keep all magnitudes.
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)


def _devices(subject: TrainingLoop) -> list[torch.device]:
    return [subject.device] if subject.device.type == "cuda" else []


def _gradients(
    subject: TrainingLoop, candidate: Candidate, recorder: GraphReplayer, batch: Any, draw: int, *, launched: bool
) -> Gradients:
    """Return a batch's gradients for a random seed; gradients and buffers of the model are restored."""
    model, host = subject.model, random.getstate()
    buffers = list(model.buffers())
    kept = [each.clone() for each in buffers]
    model.zero_grad(set_to_none=True)
    recorder.is_on = launched
    try:
        with torch.random.fork_rng(_devices(subject)):
            torch.manual_seed(draw)
            random.seed(draw)
            loss, _ = subject.loss(batch, candidate.precision)
            loss.backward()
    finally:
        recorder.is_on = True
        random.setstate(host)
        with torch.no_grad():
            for each, value in zip(buffers, kept, strict=True):
                # Copy only if changed, because a copy to another device would count as a change by the model.
                if not torch.equal(each, value):
                    each.copy_(value)
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    return found
