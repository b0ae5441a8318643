"""Hugging Face's Trainer, plain and with our windows: the same weights after twenty steps, where the host is right."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.integrations.transformers import TrimtabTrainer, WindowLabels, counts_nothing, refuse_conflicts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]
STEPS, ROWS, LENGTH, WORDS = 20, 8, 12, 17
EXACT = 1e-10  # of a tensor's largest weight, in double precision after twenty steps of AdamW


def model(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=WORDS,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return GPT2LMHeadModel(config).double()


def rows(num: int, *, ragged: bool = True) -> list[dict[str, torch.Tensor]]:
    """Return rows that count few tokens or many."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(num):
        tokens = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        labels = tokens.clone()
        if ragged:
            labels[2 + (5 * index) % (LENGTH - 2) :] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(folder, **changes) -> TrainingArguments:
    given = {"per_device_train_batch_size": ROWS, "max_steps": STEPS, "report_to": "none", "use_cpu": True}
    given |= {"save_strategy": "no", "logging_steps": 5, "lr_scheduler_type": "cosine", "warmup_steps": 3, "seed": 3}
    return TrainingArguments(str(folder), **{**given, "learning_rate": 1e-2, "disable_tqdm": True, **changes})


def in_double(outputs, labels, num_items_in_batch=None):
    """Return the loss that the host's models have, which they compute in fp32 whatever the weights are."""
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / num_items_in_batch


def trained(kind, folder, *, num_samples: int = 64, data=None, **changes):
    own = {key: changes.pop(key) for key in ("plan", "running", "planning") if key in changes}
    own["compute_loss_func"] = in_double
    trainer = kind(model=model(), args=arguments(folder, **changes), train_dataset=data or rows(num_samples), **own)
    trainer.train()
    return trainer


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def history(trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("k", [1, 2])
def test_its_windows_train_as_the_host_does(tmp_path, micro, k):
    changes = {"gradient_accumulation_steps": k, "per_device_train_batch_size": ROWS // k}
    plain = trained(Trainer, tmp_path / "plain", **changes)
    ours = trained(TrimtabTrainer, tmp_path / "ours", plan=trimtab.Plan.fixed(ROWS, micro), **changes)
    assert difference(ours.model, plain.model) <= EXACT
    assert ours.state.global_step == plain.state.global_step == STEPS
    for name, near in (("loss", 1e-6), ("grad_norm", 1e-6), ("learning_rate", 1e-12)):
        assert history(ours, name) == pytest.approx(history(plain, name), rel=near), name


def test_a_short_last_window_counts_as_it_does_in_the_host(tmp_path):
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    plain = trained(Trainer, tmp_path / "plain", num_samples=21, **changes)
    ours = trained(TrimtabTrainer, tmp_path / "ours", num_samples=21, plan=trimtab.Plan.fixed(ROWS, 3), **changes)
    assert difference(ours.model, plain.model) <= EXACT


def test_the_optimizer_is_the_hosts_own_object_and_is_handed_back(tmp_path):
    seen = []

    class Sees(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            seen.append(any(p.grad is not None for p in kwargs["model"].parameters()))

    ours = TrimtabTrainer(
        model=model(),
        args=arguments(tmp_path),
        train_dataset=rows(64),
        plan=trimtab.Plan.fixed(ROWS, 4),
        callbacks=[Sees()],
    )
    ours.train()
    assert seen == [True] * STEPS
    assert type(ours.optimizer).__name__ == "AcceleratedOptimizer"
    assert isinstance(ours.optimizer.optimizer, torch.optim.AdamW)
    assert ours.run is None


def test_it_plans_by_its_first_window_and_changes_nothing_by_that(tmp_path):
    plain = trained(Trainer, tmp_path / "plain")
    ours = trained(TrimtabTrainer, tmp_path / "ours", planning={"num_blocks": 3})
    assert ours.plan.batch_size == ROWS
    assert difference(ours.model, plain.model) <= 1e-6  # a plan may change rounding


def test_it_plans_under_a_limit_which_is_traced_without_any_label(tmp_path):
    planning = {"num_blocks": 3, "budget": trimtab.Budget(memory="1GiB")}
    ours = trained(TrimtabTrainer, tmp_path / "ours", planning=planning)
    assert ours.plan.predicted is not None
    assert difference(ours.model, trained(Trainer, tmp_path / "plain").model) <= 1e-6


def test_of_what_is_only_traced_nobody_knows_whether_it_counts():
    with FakeTensorMode():
        traced = torch.zeros(3).sum()
    assert not counts_nothing(traced)
    assert counts_nothing(torch.zeros(3).sum())
    assert counts_nothing(0)
    assert not counts_nothing(torch.ones(3).sum())


def test_memory_that_runs_out_splits_the_window(tmp_path):
    plain = trained(Trainer, tmp_path / "plain")

    class RunsOut(GPT2LMHeadModel):
        def forward(self, input_ids=None, **kwargs):
            if self.training and len(input_ids) > 3:
                raise torch.OutOfMemoryError("out of memory, as a test has it")
            return super().forward(input_ids=input_ids, **kwargs)

    held = model()
    held.__class__ = RunsOut
    given = arguments(tmp_path, remove_unused_columns=False)
    how = {"plan": trimtab.Plan.fixed(ROWS), "compute_loss_func": in_double}
    ours = TrimtabTrainer(model=held, args=given, train_dataset=rows(64), **how)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        ours.train()
    assert difference(held, plain.model) <= EXACT


def test_a_micro_batch_of_which_nothing_counts_is_no_nan(tmp_path):
    """Of a model whose loss is a mean whatever it is told: a mean over nothing is no number."""

    def mean(outputs, labels, num_items_in_batch=None):
        return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=-100)

    data = rows(64, ragged=False)
    for row in data[::2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    how = {"args": arguments(tmp_path), "train_dataset": data, "compute_loss_func": mean}
    plain, ours = Trainer(model=model(), **how), TrimtabTrainer(model=model(), plan=trimtab.Plan.fixed(ROWS, 1), **how)
    for trainer in (plain, ours):
        trainer.train()
    assert difference(ours.model, plain.model) <= EXACT


class MeansOnly:
    """A loss of the user's own, a mean over a batch's labels that leaves aside what the host counts in the window."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        logits, labels = outputs["logits"][:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, labels)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def test_a_mean_of_a_subclass_is_the_windows_where_the_host_adds_up_its_batches(tmp_path):
    """Its model takes a count with its inputs, so that the host believes each loss to be divided by it already."""
    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": ROWS // 2, "max_grad_norm": 0.0}
    changes |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "optim": "sgd", "logging_steps": 1}
    how = {"args": arguments(tmp_path, **changes), "train_dataset": rows(STEPS * ROWS, ragged=False)}
    ours = type("Ours", (MeansOnly, TrimtabTrainer), {})(model=model(), plan=trimtab.Plan.fixed(ROWS, 3), **how)
    plain = type("Plain", (MeansOnly, Trainer), {})(model=model(), **how)
    for trainer in (ours, plain):
        trainer.train()
    by_hand, loss_fn = model(), MeansOnly().compute_loss
    optimizer, losses = torch.optim.SGD(by_hand.parameters(), lr=1e-2), []
    for window in torch.stack([row["labels"] for row in how["train_dataset"]]).split(ROWS):
        optimizer.zero_grad()
        loss = loss_fn(by_hand, {"input_ids": window, "labels": window})
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert difference(ours.model, by_hand) <= EXACT
    assert difference(plain.model, by_hand) > 1e-6
    assert history(ours, "loss") == pytest.approx(losses, abs=1e-3)  # the host rounds what it logs
    assert history(plain, "loss")[0] == pytest.approx(2 * losses[0], rel=1e-3)


def test_what_a_subclass_counts_is_asked_of_each_micro_batch(tmp_path):
    """Where labels count in every row, and of what is counted there is none in half of them."""

    class CountsSome:
        def get_batch_samples(self, *args):
            batches, _ = super().get_batch_samples(*args)
            return batches, sum((batch["labels"][:, -1] < WORDS // 2).sum() for batch in batches)

    def mean(outputs, labels, num_items_in_batch=None):
        is_counted = labels[:, -1] < WORDS // 2
        return nn.functional.cross_entropy(outputs["logits"][is_counted, -1], labels[is_counted, -1])

    data = rows(64, ragged=False)
    how = {"args": arguments(tmp_path), "train_dataset": data, "compute_loss_func": mean}
    plain = type("Plain", (CountsSome, Trainer), {})(model=model(), **how)
    ours = type("Ours", (CountsSome, TrimtabTrainer), {})(model=model(), plan=trimtab.Plan.fixed(ROWS, 1), **how)
    for trainer in (plain, ours):
        trainer.train()
    assert difference(ours.model, plain.model) <= EXACT


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        ([[1, 2], [3, 4]], True),
        ([[1, -100], [3, 4]], False),  # nothing predicts a first label
        ([3, 4], True),
        ([3, -100], False),
        ([[1], [2]], False),  # nobody knows: each micro-batch is asked
        (None, False),
    ],
)
def test_labels_count_in_all_rows_where_each_has_one_that_some_version_counts(labels, count):
    batch = {} if labels is None else {"labels": torch.tensor(labels)}
    assert WindowLabels([batch]).count_in_all_rows is count
    assert not WindowLabels([batch, {"labels": torch.tensor([-100])}]).count_in_all_rows
    assert not WindowLabels([batch], is_known=False).count_in_all_rows


@pytest.mark.parametrize("kind", [Trainer, TrimtabTrainer])
def test_it_goes_on_from_the_hosts_checkpoint(tmp_path, kind):
    """As the host does: what it saves of a schedule and an optimizer is its own."""
    own = {"plan": trimtab.Plan.fixed(ROWS, 4)} if kind is TrimtabTrainer else {}
    whole = trained(kind, tmp_path / "whole", **own)
    changes = {"save_strategy": "steps", "save_steps": 7}
    trained(kind, tmp_path / "cut", **own, **changes)
    given = arguments(tmp_path / "cut", **changes)
    again = kind(model=model(), args=given, train_dataset=rows(64), compute_loss_func=in_double, **own)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-14"))
    assert difference(again.model, whole.model) <= EXACT


class Pictures(nn.Module):
    """A model that is not one of the host's, whose convolution a plan may lay out by channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, pixels, labels):
        logits = self.head(self.conv(pixels).amax((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_weights_that_a_plan_lays_out_otherwise_are_in_the_hosts_checkpoints(tmp_path):
    generator = torch.Generator().manual_seed(1)
    data = [{"pixels": torch.randn(3, 6, 6, generator=generator), "labels": torch.tensor(i % 5)} for i in range(32)]
    given = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    plan = trimtab.Plan.fixed(ROWS, memory_layout="channels_last")
    ours = TrimtabTrainer(model=Pictures(), args=given, train_dataset=data, plan=plan)
    ours.train()
    again = TrimtabTrainer(model=Pictures(), args=given, train_dataset=data, plan=plan)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert difference(again.model, ours.model) == 0


def test_of_a_window_that_an_epoch_ended_in_nothing_is_left(tmp_path):
    """As a callback may end one: what was collected is not of the next epoch's first window."""

    class Ends(TrainerCallback):
        has_ended = False

        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 1 and not self.has_ended:
                control.should_epoch_stop = self.has_ended = True

    seen = []

    class Sees(TrimtabTrainer):
        def _counted_loss(self, model, micro):
            seen.append(len(micro["labels"]))
            return super()._counted_loss(model, micro)

    changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_steps": 3}
    given = arguments(tmp_path, **changes)
    how = {"plan": trimtab.Plan.fixed(ROWS), "compute_loss_func": in_double, "callbacks": [Ends()]}
    Sees(model=model(), args=given, train_dataset=rows(2 * ROWS), **how).train()
    assert seen == [ROWS] * 3


def test_labels_of_which_some_count_are_not_split_where_the_host_counts_none(tmp_path):
    """A loss that is told no count is a mean over what counts in a micro-batch, which nobody knows."""

    class Uncounted(GPT2LMHeadModel):
        accepts_loss_kwargs = False

    def made(micro):
        held = model()
        held.__class__ = Uncounted
        return TrimtabTrainer(
            model=held, args=arguments(tmp_path), train_dataset=rows(64), plan=trimtab.Plan.fixed(ROWS, micro)
        )

    with raises(ValueGivenError, code="labels.not_counted", field="labels"):
        made(2).train()
    made(ROWS).train()


@pytest.mark.parametrize("runs_out", [False, True])
def test_a_mean_over_what_counts_in_a_batch_stays_one(tmp_path, runs_out):
    """Batches of a window are not joined, and what does not fit in memory is not split: nobody knows the counts."""

    class Uncounted(GPT2LMHeadModel):
        accepts_loss_kwargs = False

        def forward(self, input_ids=None, labels=None, **kwargs):
            if runs_out:
                raise torch.OutOfMemoryError("out of memory, as a test has it")
            logits = super().forward(input_ids=input_ids)["logits"]
            wide = logits[:, :-1].flatten(0, 1)
            return {"loss": nn.functional.cross_entropy(wide, labels[:, 1:].flatten()), "logits": logits}

    def made(kind, name, **own):
        held = model()
        held.__class__ = Uncounted
        changes = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": ROWS // 2}
        given = arguments(tmp_path / name, **changes)
        return kind(model=held, args=given, train_dataset=rows(64), **own)

    plain, ours = made(Trainer, "plain"), made(TrimtabTrainer, "ours", plan=trimtab.Plan.fixed(ROWS))
    if runs_out:
        with pytest.raises(torch.OutOfMemoryError):
            ours.train()
        return
    plain.train()
    ours.train()
    assert difference(ours.model, plain.model) <= EXACT


def test_numbers_are_no_labels_that_do_not_count(tmp_path):
    data = [{"x": torch.full((6,), float(i)).double(), "labels": torch.tensor(-100.0).double()} for i in range(8)]

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 1).double()

        def forward(self, x, labels):
            scores = self.head(x).flatten()
            return {"loss": nn.functional.mse_loss(scores, labels), "logits": scores}

    given = arguments(tmp_path, max_steps=1)
    TrimtabTrainer(model=Scores(), args=given, train_dataset=data, plan=trimtab.Plan.fixed(ROWS, 2)).train()


def test_an_error_in_the_loop_closes_the_run(tmp_path):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("stopped by a callback")

    record = trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("stopped"))
    ours = TrimtabTrainer(
        model=model(),
        args=arguments(tmp_path),
        train_dataset=rows(64),
        plan=trimtab.Plan.fixed(ROWS),
        running={"record": record},
        callbacks=[Stops()],
    )
    with record, pytest.raises(RuntimeError, match="stopped by a callback"):
        ours.train()
    end = trimtab.read_record(tmp_path / "run.jsonl").end
    assert (end.reason, end.detail["error"]) == ("error", "RuntimeError: stopped by a callback")
    assert ours.run is None
    assert type(ours.optimizer).__name__ == "AcceleratedOptimizer"


@pytest.mark.parametrize(
    "changes",
    [{"auto_find_batch_size": True}, {"torch_compile": True}, {"torch_empty_cache_steps": 2}],
)
def test_arguments_that_decide_what_a_plan_does_are_refused(tmp_path, changes):
    (name,) = changes
    with raises(ValueGivenError, code="trainer.decided_by_plan", field=f"args.{name}"):
        TrimtabTrainer(model=model(), args=arguments(tmp_path, **changes), train_dataset=rows(8))


@pytest.mark.parametrize(
    "changes",
    [{"average_tokens_across_devices": False}, {"ddp_find_unused_parameters": True}, {"ddp_bucket_cap_mb": 1}],
)
def test_of_ranks_what_a_plan_says_is_not_an_arguments(tmp_path, changes):
    (name,) = changes
    with raises(ValueGivenError, code="trainer.decided_by_plan", field=f"args.{name}"):
        refuse_conflicts(arguments(tmp_path, **changes), num_processes=2)


def test_a_compiler_that_the_environment_asks_for_is_refused(tmp_path, monkeypatch):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    try:
        with raises(ValueGivenError, code="trainer.decided_by_plan", field="Accelerator(dynamo_backend=...)") as caught:
            TrimtabTrainer(model=model(), args=arguments(tmp_path), train_dataset=rows(8))
        assert "ACCELERATE_DYNAMO_BACKEND" in caught.value.hint
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", ["clip_norm", "stop", "checkpoints", "total_samples"])
def test_what_the_host_does_is_not_asked_of_the_run(tmp_path, name):
    with raises(ValueGivenError, code="run.decided_by_trainer", field=f"running.{name}"):
        TrimtabTrainer(model=model(), args=arguments(tmp_path), train_dataset=rows(8), running={name: 1})


def test_a_plan_that_decides_what_the_arguments_do_is_refused(tmp_path):
    plan = trimtab.Plan.fixed(ROWS, schedule="warmup_cosine")
    with raises(ValueGivenError, code="plan.decided_by_trainer", field="plan.schedule"):
        TrimtabTrainer(model=model(), args=arguments(tmp_path), train_dataset=rows(8), plan=plan)
    with raises(ValueGivenError, code="argument.conflict", field="planning"):
        TrimtabTrainer(
            model=model(),
            args=arguments(tmp_path),
            train_dataset=rows(8),
            plan=trimtab.Plan.fixed(8),
            planning={"adapt": None},
        )
