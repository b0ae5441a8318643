"""LoRA adapters of PEFT on a frozen bf16 base train through a run as in a plain loop, and are saved as always."""

from __future__ import annotations

import pytest
import torch

import trimtab
from trimtab.profiling.gradient_equivalence import TOLERANCE, check_splitting
from trimtab.profiling.training_loop import TrainingLoop

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT
WORDS, ROWS, CONTEXT, STEPS = 64, 8, 16, 20
SIZES = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
LAYERS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def base_model(kind="llama"):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, **SIZES)
        return transformers.GPT2LMHeadModel(config).bfloat16()
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **SIZES
    )
    return transformers.LlamaForCausalLM(config).bfloat16()


def adapted(kind="llama", adapters=torch.float32, dropout=0.0):
    """Return a model with adapters and their optimizer."""
    model, config = base_model(kind), peft.LoraConfig(r=4, target_modules=LAYERS[kind], lora_dropout=dropout)
    config.fan_in_fan_out, config.task_type = kind == "gpt2", "CAUSAL_LM"
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=adapters == torch.float32).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {adapters}
    return model, torch.optim.AdamW(trained, lr=1e-2)


def batches(number=STEPS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(WORDS, (ROWS, CONTEXT), generator=generator) for _ in range(number)]


def loss_fn(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def coupled(model, tokens):
    """A loss with a term over the batch, as of a load balance."""
    output = model(input_ids=tokens, labels=tokens)
    return output.loss + output.logits.float().mean(0).square().mean()


def train_plain(model, optimizer, micro_batch):
    for tokens in batches():
        optimizer.zero_grad()
        for piece in tokens.split(micro_batch):
            (loss_fn(model, piece) * (len(piece) / ROWS)).backward()
        optimizer.step()


def train_run(model, optimizer, plan, data, checkpoints=None, stops_after=None):
    losses = []
    with trimtab.start(model, optimizer, plan, checkpoints=checkpoints) as run:
        for window in run.windows(data):
            if run.num_windows == stops_after:
                break
            losses.append(run.train_step(window, loss_fn).item())
    return losses


def assert_close_to(own, ours, start):
    """Raise AssertionError if weights differ by more than 2% of the distance that training moved them."""
    for p, q, before in zip(ours.parameters(), own.parameters(), start.parameters(), strict=True):
        assert (p - q).norm() <= 0.02 * (q - before).norm()


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_adapters_train_as_in_a_plain_loop_with_the_same_split(kind, adapters):
    own, optimizer = adapted(kind, adapters)
    train_plain(own, optimizer, 2)
    ours, optimizer = adapted(kind, adapters)
    before = [p.clone() for p in ours.parameters()]
    train_run(ours, optimizer, trimtab.Plan.fixed(ROWS, 2), batches())
    for was, p, q in zip(before, ours.parameters(), own.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, was) != p.requires_grad


def test_split_adapters_train_as_on_whole_batches_up_to_rounding():
    own, optimizer = adapted()
    train_plain(own, optimizer, ROWS)
    ours, optimizer = adapted()
    train_run(ours, optimizer, trimtab.Plan.fixed(ROWS, 2), batches())
    assert_close_to(own, ours, adapted()[0])


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_adapters_may_be_split_and_a_coupling_loss_may_not(kind, adapters):
    model, optimizer = adapted(kind, adapters, dropout=0.1)
    check = check_splitting(TrainingLoop(model, optimizer, loss_fn, batches(1)[0]))
    assert (check.splittable, check.code) == (True, "split.proved"), check.reason
    if adapters == torch.bfloat16:
        assert TOLERANCE < check.relative_difference <= check.tolerance
    check = check_splitting(TrainingLoop(model, optimizer, coupled, batches(1)[0]))
    assert (check.splittable, check.code) == (False, "split.gradient_differs"), check.reason


@pytest.mark.slow
@pytest.mark.usefixtures("brief_trials")
def test_a_plan_of_adapters_splits_for_memory_and_is_proved():
    model, optimizer = adapted()
    smaller = trimtab.Objective(time=0, memory=1)
    plan = trimtab.plan(model, optimizer, loss_fn, batches(1)[0], objective=smaller)
    assert plan.splits
    assert plan.proof.code == "proof.holds"
    losses = train_run(model, optimizer, plan, batches())
    assert len(losses) == STEPS


def test_adapters_are_saved_and_merged_after_the_run(tmp_path):
    model, optimizer = adapted()
    names = {name for name, _ in base_model().named_parameters()}
    train_run(model, optimizer, trimtab.Plan.fixed(ROWS, 4, recompute="every_block"), batches(3))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path)
    tokens = batches(1)[0]
    expected = model.eval()(input_ids=tokens).logits
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, expected)
    plain = base_model().eval()(input_ids=tokens).logits
    merged = model.merge_and_unload()
    assert {name for name, _ in merged.named_parameters()} == names
    error = (merged(input_ids=tokens).logits - expected).float().norm()
    assert error < 0.2 * (plain - expected).float().norm()


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_resume_from_checkpoints(tmp_path, adapters):
    def train(folder, stops_after=None):
        model, optimizer = adapted(adapters=adapters, dropout=0.1)
        kept = trimtab.Checkpoints(tmp_path / folder, every_steps=2, every_s=None)
        plan = trimtab.Plan.fixed(ROWS, 4)
        return train_run(model, optimizer, plan, batches(6), kept, stops_after), list(model.parameters())

    torch.manual_seed(5)
    whole, expected = train("whole")
    torch.manual_seed(5)
    cut, _ = train("cut", 4)
    torch.manual_seed(77)
    rest, found = train("cut")
    assert cut + rest == whole
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))


def test_a_trainer_trains_and_saves_adapters(tmp_path):
    from trimtab.integrations.transformers import TrimtabTrainer

    def train(cls, folder, micro_batch, **own):
        model, _ = adapted()
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=ROWS // micro_batch,
            max_steps=3,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        rows = [{"input_ids": row, "labels": row} for tokens in batches(3) for row in tokens]
        trainer = cls(model=model, args=arguments, train_dataset=rows, **own)
        trainer.train()
        trainer.save_model(tmp_path / folder)
        return model

    own = train(transformers.Trainer, "own", 2)
    ours = train(TrimtabTrainer, "ours", ROWS, plan=trimtab.Plan.fixed(ROWS, 2))
    assert_close_to(own, ours, adapted()[0])
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "ours")
    tokens = batches(1)[0]
    assert torch.equal(loaded.eval()(input_ids=tokens).logits, ours.eval()(input_ids=tokens).logits)
