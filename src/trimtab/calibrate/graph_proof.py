"""The proof of CUDA graphs: does what they launch compute the gradient that the model has without being launched?

That is, as it is or as it was compiled, by the same kernels: how compiling rounds is no matter of graphs. Held in the
trial that times them, of other rows and weights than they were recorded with, under two draws of random numbers. A
graph that launched with what it was recorded with, or left out what Python does between kernels, would be as far off as
that moved the gradient; what is rounded otherwise is not.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trimtab.calibrate.equivalence import relative
from trimtab.calibrate.subject import Subject
from trimtab.core.errors import BatchError
from trimtab.core.profile import Candidate
from trimtab.runtime.batches import samples_at
from trimtab.runtime.compiled import CompiledCall
from trimtab.runtime.cuda_graphs import Recorder

# Of the gradient, relative, and of what other rows and weights moved it by, where that is less than all of it; below
# the least such move nothing is told.
LIMIT, _LEAST_MOVE = 0.3, 0.1
# Of a parameter's gradient and of its module's, by the root mean square: less may be rounding, as of a bias that batch
# statistics undo. And how many times what two passes without graphs are apart.
_ROUNDED, _TIMES_NOISE = 0.02, 3.0
_LEAST_SIZE = 1e-7  # of all gradients' root mean square: a module's that are smaller are taken to be of this size
_DRAWS = (1, 2)
Gradients = list[Tensor | None]


def replay_refusal(subject: Subject, candidate: Candidate) -> str | None:
    """Return why graphs are not taken, or None. Called while a run of the candidate is open."""
    call = subject.model._compiled_call_impl
    recorder = call.recorder if isinstance(call, CompiledCall) else None
    if recorder is None:
        return "the model was compiled before"
    gradients = functools.partial(_gradients, subject, candidate, recorder)
    batch, rows = next(subject.batching.slices(subject.batch, subject.rows, candidate.micro_batch))
    try:
        other = samples_at(batch, [index // 2 for index in range(rows)])
    except BatchError as error:
        return f"no other batch can be made of this one to prove graphs on: {error.given}"
    before = gradients(batch, _DRAWS[0], launched=False)
    apart, moved, differing = [], [], ""
    with _moved_weights(subject):
        for draw in _DRAWS:
            launches = recorder.launches
            launched = gradients(other, draw, launched=True)
            if recorder.launches == launches:
                return recorder.refusal or f"nothing of its forward was launched: {recorder.left or 'not one call'}"
            own, again = (gradients(other, draw, launched=False) for _ in range(2))
            if [each is None for each in own] != [each is None for each in launched]:
                return "launched as graphs its gradient arrives at other parameters"
            apart.append(_relative(own, launched))
            moved.append(_relative(own, before))
            differing = differing or _differing(subject, _Held(before, own, again, launched))
    return _judged(apart, moved) or differing or None


def _judged(apart: Sequence[float | None], moved: Sequence[float | None]) -> str | None:
    if None in apart or None in moved:
        return "its gradient is zero or not finite: nothing can be proved of graphs"
    least, worst = min(each or 0.0 for each in moved), max(each or 0.0 for each in apart)
    if least < _LEAST_MOVE:
        return "other rows and weights hardly move its gradient: nothing can be proved of graphs"
    limit = LIMIT * min(1.0, least)
    return None if worst <= limit else f"launched as graphs its gradient differs by {worst:.2g}, relative ({limit:.2g})"


class _Held(NamedTuple):
    """Gradients that are held against one another: of the rows and weights of before, and three times of others."""

    before: Gradients
    own: Gradients
    again: Gradients
    launched: Gradients


def _differing(subject: Subject, held: _Held) -> str:
    """Return of which parameter the gradient differs, of several the one that does most for its size; "": of none."""
    names = [name for name, p in subject.model.named_parameters() if p.requires_grad]
    found = {
        name: (own, _norm(own), *(_norm(own, other) for other in others))
        for name, own, *others in zip(names, held.own, held.before, held.again, held.launched, strict=True)
        if own is not None
    }
    count = sum(own.numel() for own, *_ in found.values())
    least = _LEAST_SIZE * math.sqrt(sum(norm**2 for _, norm, *_ in found.values()) / max(1, count))
    typical: dict[str, float] = {}  # root mean square of the parameter of a module that has the largest
    for name, (own, norm, *_) in found.items():
        module = name.rpartition(".")[0]
        typical[module] = max(typical.get(module, least), norm / math.sqrt(own.numel()))
    worst, said = 1.0, ""
    for name, (own, norm, moved, noise, error) in found.items():
        rounded = _ROUNDED * (norm + typical[name.rpartition(".")[0]] * math.sqrt(own.numel()))
        limit = LIMIT * min(norm, moved) + rounded + _TIMES_NOISE * noise
        if limit > 0 and error / limit > worst:
            worst, far = error / limit, f"by {error / norm:.2g}, relative" if norm else "from zero"
            said = f"launched as graphs the gradient of {name} differs {far}"
    return said


def _norm(gradient: Tensor, other: Tensor | None = None) -> float:
    """Return the norm of a gradient, or of what another is apart from it."""
    found = gradient if other is None else other - gradient
    dense = found.coalesce().values() if found.is_sparse else found
    return float(torch.linalg.vector_norm(dense, dtype=torch.float64))


def _relative(own: Gradients, other: Gradients) -> float | None:
    pairs = [(a, b) for a, b in zip(own, other, strict=True) if a is not None and b is not None]
    return relative([a for a, _ in pairs], [b for _, b in pairs])


@contextlib.contextmanager
def _moved_weights(subject: Subject) -> Iterator[None]:
    """Move the weights in place, and put them back: what was recorded reads them where they lie."""
    weights = [p for p in subject.model.parameters() if p.requires_grad]
    kept = [p.detach().clone() for p in weights]
    try:
        with torch.no_grad(), torch.random.fork_rng(_devices(subject)):
            for each in weights:
                each.mul_(2 * torch.randint_like(each, 2) - 1)  # other signs: all stays as large as it was
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, kept)


def _devices(subject: Subject) -> list[torch.device]:
    """Return where random numbers are drawn beside the host."""
    return [subject.device] if subject.device.type == "cuda" else []


def _gradients(
    subject: Subject, candidate: Candidate, recorder: Recorder, batch: Any, draw: int, *, launched: bool
) -> Gradients:
    """Return a batch's gradients under random numbers that are a draw's; leaves none in the model, nor any buffer."""
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
                if not torch.equal(each, value):  # of one on another device each change counts as the model's
                    each.copy_(value)
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    return found
