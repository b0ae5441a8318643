"""Adapters on a base with 4-bit weights (QLoRA) train through a run as in a plain loop, resume and are merged.

bitsandbytes is tested where it is installed. `PackedLinear` has the structure of its layers, and is always tested: a
frozen parameter of a class with its own `__deepcopy__`, and scales outside of the data of the parameter.
"""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import nn

import trimtab
from trimtab.measure.memory_trace import trace_step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
ROWS, WIDTH, STEPS = 8, 64, 6
SMALLER = {"num_blocks": 3, "objective": trimtab.Objective(time=0, memory=1)}


class Packed(nn.Parameter):
    """8-bit weights with scales, as bitsandbytes' Params4bit."""

    def __new__(cls, data, scales):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.scales = scales
        return made

    def __deepcopy__(self, memo):
        made = Packed(torch.empty(0), copy.deepcopy(self.scales))
        made.data = copy.deepcopy(self.data)
        return made


class Product(torch.autograd.Function):
    """A product with weights that exist in full only within the function."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        ctx.scales = weight.scales
        return x @ (weight.to(x.dtype) * weight.scales.to(x.dtype)).t()

    @staticmethod
    def backward(ctx, slope):
        (weight,) = ctx.saved_tensors
        return slope @ (weight.to(slope.dtype) * ctx.scales.to(slope.dtype)), None


class PackedLinear(nn.Module):
    """A frozen product in 8 bits, and a trained low-rank product."""

    def __init__(self):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        scales = weight.abs().amax(1, keepdim=True) / 127
        self.weight = Packed((weight / scales).round().to(torch.int8), scales)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + torch.tanh(Product.apply(x, self.weight) + self.up(self.down(x)))


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(*(PackedLinear() for _ in range(4)))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batches(number=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 32, WIDTH, generator=generator) for _ in range(number)]


def loss_fn(model, batch):
    return (model(batch) - batch.flip(-1)).square().mean()


def test_the_memory_of_a_packed_base_is_traced_without_memory():
    model, optimizer = loop()
    model[0].weight.requires_grad_(False)
    whole, part = (trace_step(model, optimizer, loss_fn, batches(1)[0][:rows]) for rows in (ROWS, ROWS // 2))
    assert whole > part > 0
    assert type(model[0].weight) is Packed
    assert torch.equal(loop()[0][0].weight, model[0].weight)


def test_adapters_on_a_packed_base_are_planned_and_train_as_in_a_plain_loop():
    own, optimizer = loop()
    for batch in batches():
        optimizer.zero_grad()
        loss_fn(own, batch).backward()
        optimizer.step()
    model, optimizer = loop()
    plan = trimtab.plan(model, optimizer, loss_fn, batches(1)[0], **SMALLER)
    assert plan.check.code == "split.proved"
    assert not [note for note in plan.notes if "fake tensors" in note.text]
    train(model, optimizer, plan)
    for (name, ours), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        assert torch.equal(ours, theirs) if not ours.requires_grad else torch.allclose(ours, theirs, atol=1e-5), name


def train(model, optimizer, plan, loss_fn=loss_fn, data=None, stops_after=None, checkpoints=None):
    losses = []
    with trimtab.start(model, optimizer, plan, checkpoints=checkpoints) as run:
        for window in run.windows(batches() if data is None else data):
            if run.num_windows == stops_after:
                break
            losses.append(run.train_step(window, loss_fn).item())
    return losses


needs_bitsandbytes = pytest.mark.skipif(
    not HAS_BITSANDBYTES, reason="bitsandbytes is not installed; PackedLinear has the structure of its layers"
)
# Of bitsandbytes and PEFT.
ignores = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def next_tokens(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def tokens():
    return list(torch.randint(64, (STEPS, ROWS, 16), generator=torch.Generator().manual_seed(2)))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return the folder of a base model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,  # bitsandbytes needs blocks of 64 weights for a forward without gradients on a CPU.
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def quantised(base):
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    return LlamaForCausalLM.from_pretrained(base, quantization_config=how, device_map={"": "cpu"})


def adapted(base):
    import peft

    model = peft.prepare_model_for_kbit_training(quantised(base), use_gradient_checkpointing=False)
    torch.manual_seed(1)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapters).train()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train_plain(base):
    model, optimizer = adapted(base)
    for batch in tokens():
        optimizer.zero_grad()
        next_tokens(model, batch).backward()
        optimizer.step()
    return model


@needs_bitsandbytes
@ignores
def test_adapters_on_a_4_bit_base_are_planned_train_resume_and_are_merged_as_without_trimtab(base, tmp_path):
    import peft

    own = train_plain(base)
    model, optimizer = adapted(base)
    plan = trimtab.plan(model, optimizer, next_tokens, tokens()[0], **SMALLER)
    assert (plan.check.code, plan.proof.code) == ("split.proved", "proof.holds")
    assert not [note for note in plan.notes if "fake tensors" in note.text]

    whole = trimtab.Plan.fixed(ROWS)
    train(model, optimizer, whole, next_tokens, tokens(), 3, trimtab.Checkpoints(tmp_path / "kept", every_steps=1))
    model, optimizer = adapted(base)
    train(model, optimizer, whole, next_tokens, tokens(), None, trimtab.Checkpoints(tmp_path / "kept"))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own.parameters(), strict=True))

    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(quantised(base), tmp_path / "adapters")
    with (
        torch.no_grad()
    ):  # In this order for all models, because a forward without gradients packs weights for the CPU.
        before = [each.eval()(tokens()[0]).logits for each in (again, model, own)]
        merged = [each.merge_and_unload()(tokens()[0]).logits for each in (model, own)]
    assert torch.equal(before[0], before[2])
    assert torch.equal(before[1], before[2])
    assert torch.equal(*merged)


@needs_bitsandbytes
@ignores
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "AdamW"])
def test_an_optimizer_of_bitsandbytes_trains_and_resumes_as_in_a_plain_loop(name, tmp_path):
    import bitsandbytes
    from raising import raises

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
        return model, getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-3)

    own, optimizer = made()
    for batch in batches():
        optimizer.zero_grad()
        loss_fn(own, batch).backward()
        optimizer.step()
    with raises(trimtab.errors.OptimizerError, code="optimizer_state.class"):
        trimtab.start(*made(), trimtab.Plan.fixed(ROWS, optimizer_state="8bit"))
    model, optimizer = made()
    plan = trimtab.plan(model, optimizer, loss_fn, batches(1)[0], num_blocks=3)
    assert plan.fused_optimizer.code == "optimizer.no_fused"
    whole = trimtab.Plan.fixed(ROWS)
    train(model, optimizer, whole, stops_after=3, checkpoints=trimtab.Checkpoints(tmp_path, every_steps=1))
    model, optimizer = made()
    train(model, optimizer, whole, checkpoints=trimtab.Checkpoints(tmp_path))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), own.parameters(), strict=True))
