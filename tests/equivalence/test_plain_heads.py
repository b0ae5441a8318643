"""Models without a loss head, trained with a chunked loss as by their own loop, and planned so."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from raising import raises
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.core.errors import ModelError
from trimtab.profiling.loop_facts import loop_facts
from trimtab.settings import SETTINGS
from trimtab.settings.base import LiveLoop
from trimtab.settings.loss_chunk import LEAST_CLASSES, plain_head

WORDS, ROWS, CONTEXT, STEPS = LEAST_CLASSES, 6, 8, 3


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.block(self.embedding(tokens)))


def plain_loss(model, batch):
    tokens = batch["input_ids"]
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def labelled_loss(model, batch):
    return model(**batch).loss


def batches(labels: bool = True):
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        tokens = torch.randint(WORDS, (ROWS, CONTEXT), generator=generator)
        yield {"input_ids": tokens, **({"labels": tokens} if labels else {})}


def transformers_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=CONTEXT, n_embd=16, n_layer=1, n_head=2, **sizes)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return transformers.GPT2LMHeadModel(config)
    sizes |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **sizes))


LOOPS = {
    "plain": (Plain, plain_loss),
    "gpt2": (lambda: transformers_model("gpt2"), labelled_loss),
    "llama": (lambda: transformers_model("llama"), labelled_loss),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler, of the loss
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"precision": "bf16"}, {"compiled": True}], ids=str)
def test_chunks_train_as_the_own_loop(name, options):
    make, loss_fn = LOOPS[name]
    torch.manual_seed(0)
    own = make()
    trimmed = copy.deepcopy(own)
    with_labels = loss_fn is labelled_loss
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for batch in batches(with_labels):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("precision") == "bf16"):
            loss = loss_fn(own, batch)
        loss.backward()
        optimizer.step()
    plan = trimtab.Plan.fixed(ROWS, **{"micro_batch": ROWS} | options, loss_chunk=5)
    optimizer = torch.optim.SGD(trimmed.parameters(), lr=0.5)
    with trimtab.start(trimmed, optimizer, plan) as run:
        for window in run.windows(batches(with_labels)):
            ours = run.train_step(window, loss_fn)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if "precision" not in options else {"rtol": 3e-2, "atol": 5e-3}
    torch.testing.assert_close(ours.float(), loss.detach().float(), **tolerance)
    for a, b in zip(trimmed.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert not plain_head(trimmed)._forward_pre_hooks


@pytest.mark.usefixtures("brief_trials")
def test_planning_counts_the_tokens_whose_loss_is_chunked():
    model = Plain()
    profile = trimtab.profile(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plain_loss, next(batches(False)), num_blocks=3
    )
    assert (profile.loop.head_tokens, profile.loop.head_words) == (ROWS * (CONTEXT - 1), WORDS)
    assert not profile.loop.head_refusal


@pytest.mark.usefixtures("brief_trials")
def test_planning_names_an_operation_that_needs_the_logits():
    def loss_with_accuracy(model, batch):
        tokens = batch["input_ids"]
        logits = model(tokens)
        correct = (logits.argmax(-1) == tokens).float().mean()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), {"accuracy": correct}

    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = trimtab.plan(model, optimizer, loss_with_accuracy, next(batches(False)), num_blocks=3)
    assert plan.loss_chunk.value is None
    assert "argmax" in plan.loss_chunk.reason


def test_small_layers_are_no_heads():
    model = nn.Linear(4, LEAST_CLASSES - 1)
    assert plain_head(model) is None
    with raises(ModelError, code="loss_chunk.no_head"):
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), trimtab.Plan.fixed(4, loss_chunk=2))
    facts = loop_facts(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, {})
    assert facts.head_tokens is None


def test_logits_that_only_some_steps_need_are_computed_there_and_reported():
    """An accuracy in every second step, which planning may not have seen."""
    torch.manual_seed(0)
    own = Plain()
    trimmed, calls = copy.deepcopy(own), itertools.count()

    def loss_fn(model, batch):
        logits, targets = model(batch["input_ids"]), batch["input_ids"]
        if next(calls) % 2:
            with torch.no_grad():
                (logits.argmax(-1) == targets).float().mean()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for batch in batches(False):
        optimizer.zero_grad()
        loss_fn(own, batch).backward()
        optimizer.step()
    optimizer = torch.optim.SGD(trimmed.parameters(), lr=0.5)
    run = trimtab.start(trimmed, optimizer, trimtab.Plan.fixed(ROWS, loss_chunk=5))
    for window in run.windows(batches(False)):
        run.train_step(window, loss_fn)
    with pytest.warns(UserWarning, match="argmax"):
        run.close()
    for a, b in zip(trimmed.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_model_that_the_user_compiles_is_refused():
    model = Plain()
    model.compile(backend="eager")
    with raises(ModelError, code="loss_chunk.no_head"):
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), trimtab.Plan.fixed(ROWS, loss_chunk=5))


def test_a_head_whose_weight_deepspeed_divides_is_refused():
    model = Plain()
    plan = trimtab.Plan.fixed(ROWS, loss_chunk=5, num_ranks=2, zero_stage=3, engine="deepspeed")
    loop = LiveLoop(model, model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    with raises(ModelError, code="loss_chunk.sharded"):
        SETTINGS["loss_chunk"].require(loop, 5)
