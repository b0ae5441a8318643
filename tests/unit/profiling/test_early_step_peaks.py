"""Predicted peaks of steps with updates within the backward pass, compared with counted peaks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from trimtab.core.choice import SplitCheck
from trimtab.core.hardware import DeviceSpec
from trimtab.measure.memory_trace import trace_update_bytes
from trimtab.planner.cost_model import CostModel
from trimtab.plans.profile import Candidate, Profile
from trimtab.profiling.block_profile import measure_recomputable
from trimtab.profiling.candidate_traces import trace_candidates
from trimtab.profiling.loop_facts import loop_facts
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.smoke_test import CrashTest
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.loop_state import LoopState
from trimtab.state.peak_memory import peak_bytes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]
WORDS, WIDTH, DEPTH = 700, 128, 6
OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Text(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def loop_of(tokens, make=OPTIMIZERS["adamw"], *, tied=False):
    torch.manual_seed(0)
    model = Text(tied=tied).train()
    return TrainingLoop(model, make(model.parameters()), loss_fn, torch.randint(0, WORDS, (4, tokens)))


def counted(subject, candidate):
    with LoopState(subject.model, subject.optimizer), subject.start(candidate) as run:
        found = []
        for _ in range(
            4
        ):  # The first step creates the optimizer's state; some forwards are compared with a second one.
            subject.optimizer.zero_grad(set_to_none=True)
            step = functools.partial(subject.step, run)
            found.append(peak_bytes(step, torch.device("cpu"), subject.live_tensors))
    return min(found[1:])


def profile_of(subject, *candidates, blocks=False):
    """Return a profile with the traces of candidates, and no trial."""
    facts = loop_facts(subject.model, subject.optimizer, subject.rows, {})
    bare = Profile(DeviceSpec("a processor", "cpu"), facts, SplitCheck(True, "the loss is a mean"))
    with LoopState(subject.model, subject.optimizer):
        guard, notes = CrashTest(subject, candidates[0]), Notes()
        traces = trace_candidates(subject, candidates, lambda text: None, guard, notes)
        found = (measure_recomputable(subject, candidates[0]),) if blocks else ()
    assert not notes.found
    return Profile(bare.device, facts, bare.check, traces=traces, recomputables=found)


def predicted(profile, candidate):
    return CostModel(profile).traced_bytes(candidate)


@pytest.mark.parametrize(
    ("optimizer", "tied", "tokens"),
    [
        ("adamw", False, 8),
        ("adamw", True, 64),
        ("adamw", False, 512),
        ("momentum", True, 8),
        ("momentum", False, 64),
        ("adafactor", False, 8),
    ],
)
def test_the_peak_of_early_updates_is_the_counted_one(optimizer, tied, tokens):
    """With few tokens, the peak is in the update of the largest parameter; with many, beside the activations."""
    subject = loop_of(tokens, OPTIMIZERS[optimizer], tied=tied)
    profile = profile_of(subject, Candidate(4))
    for fused in (False, True) if optimizer != "adafactor" else (False,):
        candidate = Candidate(4, step_in_backward=True, fused_optimizer=fused)
        assert predicted(profile, candidate) == pytest.approx(counted(subject, candidate), rel=0.03)
    late = Candidate(4)
    assert predicted(profile, late) == pytest.approx(counted(subject, late), rel=0.03)


@pytest.mark.parametrize("tokens", [8, 512])
def test_the_saving_is_that_at_the_peak(tokens):
    """With many tokens the peak is at the beginning of the backward pass, where no gradient exists yet."""
    subject = loop_of(tokens)
    profile = profile_of(subject, Candidate(4))
    late, early = (predicted(profile, Candidate(4, step_in_backward=on)) for on in (False, True))
    gradients = sum(p.nbytes for p in subject.model.parameters())
    assert (late - early > 0.5 * gradients) is (tokens == 8)


@pytest.mark.parametrize("values", [{"precision": "bf16"}, {"loss_chunk": 8}, {"precision": "bf16", "loss_chunk": 8}])
def test_combinations_are_predicted(values):
    subject = loop_of(32)
    profile = profile_of(subject, Candidate(4, **values))
    candidate = Candidate(4, step_in_backward=True, **values)
    assert predicted(profile, candidate) == pytest.approx(counted(subject, candidate), rel=0.03)


@pytest.mark.parametrize(
    ("recompute", "tied", "tokens"),
    [
        ("every_block", False, 16),
        ("every_block", True, 256),
        ("(0) (1) 2 3 4 5", False, 256),
        ("~0 ~1 ~2 ~3 ~4 ~5", False, 256),
    ],
)
def test_recomputation_with_early_updates_is_predicted(recompute, tokens, tied):
    subject = loop_of(tokens, tied=tied)
    profile = profile_of(subject, Candidate(4), blocks=True)
    candidate = Candidate(4, recompute=recompute, step_in_backward=True)
    assert predicted(profile, candidate) == pytest.approx(counted(subject, candidate), rel=0.03)


def test_an_update_of_a_single_parameter_is_traced():
    """AdamW takes one tensor of the parameter's size for the denominator; a fused step takes none."""
    subject = loop_of(8)
    found = trace_update_bytes(subject.model, subject.optimizer)
    assert found.keys() == dict(subject.model.named_parameters()).keys()
    weight = subject.model.embedding.weight
    assert weight.nbytes <= found["embedding.weight"] <= 2 * weight.nbytes + 1024
    fused = loop_of(8, lambda ps: torch.optim.AdamW(ps, fused=True))
    assert max(trace_update_bytes(fused.model, fused.optimizer).values()) < 1024
