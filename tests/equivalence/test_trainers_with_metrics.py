"""Trainers that record metrics in `compute_loss`, as TRL's SFTTrainer does: the metrics do not prevent a split.

TRL is tested where it is installed. `RecordsMetrics` has the structure of its trainer, and is always tested.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict

import pytest
import torch
from test_hosts_of_unlike_lengths import InOrder
from test_transformers import EXACT, ROWS, STEPS, arguments, difference, history, in_double, model, rows
from torch import nn
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer

import trimtab
from trimtab.integrations.transformers import TrimtabTrainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]
HAS_TRL = importlib.util.find_spec("trl") is not None
SMALLER = {"num_blocks": 3, "objective": trimtab.Objective(time=0, memory=1)}


class RecordsMetrics(InOrder, Trainer):
    """A trainer that counts tokens and averages metrics in every forward, and logs them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._total_train_tokens = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = in_double(outputs, labels, num_items_in_batch)
        counts = labels[:, 1:] != -100
        hits = (outputs["logits"][:, :-1].argmax(-1) == labels[:, 1:]) & counts
        metrics = self._metrics["train" if model.training else "eval"]
        metrics["mean_token_accuracy"].append((hits.sum() / counts.sum()).item())
        self._total_train_tokens += inputs["input_ids"].numel()
        metrics["num_tokens"] = [self._total_train_tokens]
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        metrics = self._metrics["train"]
        logs.update({name: sum(values) / len(values) for name, values in metrics.items() if values})
        super().log(logs, start_time)
        metrics.clear()


class Ours(TrimtabTrainer, RecordsMetrics):
    pass


def trained(kind, folder, held=None, **own):
    given = arguments(folder, remove_unused_columns=False)
    trainer = kind(model=held or model(), args=given, train_dataset=rows(64), **own)
    trainer.train()
    return trainer


def test_a_batch_is_split_although_each_forward_records_metrics(tmp_path):
    plain = trained(RecordsMetrics, tmp_path / "plain")
    ours = trained(Ours, tmp_path / "ours", planning=SMALLER)
    assert (ours.plan.check.splittable, ours.plan.check.code) == (True, "split.proved"), ours.plan.check.reason
    assert history(ours, "num_tokens") == history(plain, "num_tokens")
    assert difference(ours.model, plain.model) <= 1e-6  # A plan may change rounding.


def test_metrics_are_recorded_once_for_each_micro_batch(tmp_path):
    plain = trained(RecordsMetrics, tmp_path / "plain")
    ours = trained(Ours, tmp_path / "ours", plan=trimtab.Plan.fixed(ROWS, 2))
    assert difference(ours.model, plain.model) <= EXACT
    assert history(ours, "num_tokens") == history(plain, "num_tokens")
    assert history(ours, "num_tokens")[-1] == STEPS * ROWS * 12


def test_metrics_that_a_subclass_does_not_declare_prevent_a_split(tmp_path):
    class Undeclared(Ours):
        metric_attributes = ()

    ours = trained(Undeclared, tmp_path, planning=SMALLER)
    assert (ours.plan.check.splittable, ours.plan.check.code) == (False, "split.state_changes")
    assert not ours.plan.splits


def test_a_state_that_changes_the_loss_prevents_a_split_also_with_declared_metrics(tmp_path):
    class Anneals(Ours):
        """A trainer with a weight of the loss that every forward reduces."""

        weight = 1.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.weight *= 0.9
            return self.weight * super().compute_loss(model, inputs, False, num_items_in_batch)

    ours = trained(Anneals, tmp_path, planning=SMALLER)
    assert (ours.plan.check.splittable, ours.plan.check.code) == (False, "split.state_changes")


def test_a_step_that_runs_out_of_memory_counts_its_tokens_once(tmp_path):
    class RunsOut(GPT2LMHeadModel):
        def forward(self, input_ids=None, **kwargs):
            if self.training and len(input_ids) > 3:
                raise torch.OutOfMemoryError("out of memory, as a test has it")
            return super().forward(input_ids=input_ids, **kwargs)

    held = model()
    held.__class__ = RunsOut
    plain = trained(RecordsMetrics, tmp_path / "plain")
    with pytest.warns(RuntimeWarning, match="out of memory"):
        ours = trained(Ours, tmp_path / "ours", held, plan=trimtab.Plan.fixed(ROWS))
    assert difference(held, plain.model) <= EXACT
    assert history(ours, "num_tokens") == history(plain, "num_tokens")


@pytest.mark.skipif(not HAS_TRL, reason="trl is not installed; RecordsMetrics has the structure of its trainer")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")  # of TRL
def test_trls_trainer_of_adapters_on_a_bf16_base_is_split_and_trains_as_without_trimtab(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain = trained_by_trl(tmp_path / "plain")
    ours = trained_by_trl(tmp_path / "ours", planning=SMALLER)
    assert (ours.plan.check.splittable, ours.plan.check.code) == (True, "split.proved"), ours.plan.check.reason
    split = trained_by_trl(tmp_path / "split", plan=trimtab.Plan.fixed(ROWS, 2, precision="bf16"))
    for other in (ours, split):
        assert history(other, "num_tokens") == history(plain, "num_tokens")
        assert history(other, "loss") == pytest.approx(history(plain, "loss"), abs=2e-3)
        assert history(other, "mean_token_accuracy") == pytest.approx(history(plain, "mean_token_accuracy"), abs=0.05)
    assert difference_of_adapters(split.model, plain.model) <= 0.1


def trained_by_trl(folder, **own):
    """Return TRL's trainer after four steps, with trimtab if `own` has a plan or arguments for planning."""
    import datasets
    import peft
    import tokenizers
    import transformers
    import trl

    words = {f"w{index}": index for index in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        pad_token_id=60,
        eos_token_id=61,
    )
    texts = [{"text": " ".join(f"w{(7 * row + word) % 60}" for word in range(4 + row % 9))} for row in range(32)]
    kind = type("SFT", (TrimtabTrainer, trl.SFTTrainer), {}) if own else trl.SFTTrainer
    trainer = kind(
        model=LlamaForCausalLM(config).bfloat16(),
        args=trl.SFTConfig(
            str(folder),
            per_device_train_batch_size=ROWS,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-3,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named),
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        **own,
    )
    trainer.train()
    return trainer


def difference_of_adapters(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of a matrix that starts from zero, relative to its norm."""
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return max(float((a - b).norm() / b.norm()) for (name, a), (_, b) in pairs if "lora_B" in name)
