"""The task's GPT-2 is the one that the transformers library has: parameters, logits, loss and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.paper.tasks import load_task
from trimtab.losses import mean_of
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

TINY = GPTShape(vocab_size=40, context=12, num_layers=3, num_heads=4, width=16, tied_head=True)
OURS = {  # by the library's name
    "wte": "token_embedding",
    "wpe": "position_embedding",
    "ln_f": "norm",
    "ln_1": "norm1",
    "ln_2": "norm2",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.project",
    "mlp.c_fc": "expand",
    "mlp.c_proj": "contract",
}


def library_gpt(shape: GPTShape) -> GPT2LMHeadModel:
    sizes = {"n_positions": shape.context, "n_embd": shape.width, "n_layer": shape.num_layers}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
    return GPT2LMHeadModel(GPT2Config(vocab_size=shape.vocab_size, n_head=shape.num_heads, **sizes, **drops))


def our_name(name: str) -> str:
    """Return what the task's model calls a parameter of the library's."""
    module, _, kind = name.removeprefix("transformer.").rpartition(".")
    block = module.split(".")[:2] if module.startswith("h.") else []
    rest = ".".join(module.split(".")[len(block) :])
    return ".".join([*(["blocks", block[1]] if block else []), OURS[rest], kind])


def turned(name: str, value: Tensor) -> Tensor:
    """Return a parameter as the task's model holds it: the library's projections are input by output."""
    return value.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else value


@pytest.fixture
def pair() -> tuple[GPT, GPT2LMHeadModel]:
    """Both models on the same weights, which are far from how they are drawn."""
    torch.manual_seed(0)
    theirs = library_gpt(TINY).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = GPT(TINY).double().eval()
    mine = dict(ours.named_parameters())
    copied = {our_name(name): turned(name, value) for name, value in theirs.named_parameters()}
    assert copied.keys() == mine.keys()
    with torch.no_grad():
        for name, value in copied.items():
            mine[name].copy_(value)
    return ours, theirs


def test_on_the_same_weights_logits_loss_and_gradients_are_the_librarys(pair):
    ours, theirs = pair
    tokens = torch.randint(TINY.vocab_size, (3, TINY.context))
    expected = theirs(tokens, labels=tokens)
    torch.testing.assert_close(ours(tokens), expected.logits, rtol=1e-10, atol=1e-10)
    mean = mean_of(next_token_loss(ours, (tokens,)))
    torch.testing.assert_close(mean, expected.loss.double(), rtol=1e-6, atol=0)
    mean.backward()
    expected.loss.backward()
    mine = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(mine[our_name(name)].grad, turned(name, parameter.grad), rtol=1e-5, atol=1e-7)


def test_ignored_labels_count_as_they_do_in_the_library(pair):
    ours, theirs = pair
    tokens = torch.randint(TINY.vocab_size, (2, TINY.context))
    labels = tokens.masked_fill(torch.arange(TINY.context) % 3 == 0, -100)
    mean = mean_of(next_token_loss(ours, (tokens[:, :-1], labels[:, 1:])))
    expected = theirs(tokens, labels=labels).loss
    torch.testing.assert_close(mean, expected.double(), rtol=1e-6, atol=0)


def flops(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as counter:
        found = model(torch.zeros(2, 1024, dtype=torch.long, device="meta"))
        getattr(found, "logits", found).sum().backward()
    return counter.get_total_flops()


def test_at_the_papers_size_it_has_the_librarys_parameters_and_flop():
    with torch.device("meta"):
        ours = load_task("wikitext2_gpt2").make_model()
        theirs = library_gpt(ours.shape)
    sizes = {name: value.shape for name, value in ours.named_parameters()}
    assert {our_name(n): turned(n, p).shape for n, p in theirs.named_parameters()} == sizes
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters()) == 124_439_808
    assert flops(ours) == flops(theirs) > 0
    assert theirs.config == GPT2Config(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)  # and these are its defaults
