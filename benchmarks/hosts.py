"""What our windows cost in the loops of others: short trainings by the host alone and through us, in turns, in pairs.

`python benchmarks/hosts.py [--quick] [--json] [--rounds 30] [--only transformers lightning accelerate]` prints
`host_overhead_ratio` rows: ours over the host's in seconds a step (the median of a training's steps but the first), a
batch as one micro-batch and nothing planned, so that the work is the same. The control is the host once more.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import command
import torch
from torch import nn

from trimtab.core.plan import Plan
from trimtab.decide.statistics import ratio_interval, resolution
from trimtab.tasks import load_task

STEPS, FIRST = 12, 3  # of a training; those that are not timed
BAR = 1.01
ORDERS = tuple(itertools.permutations(("host", "ours", "control")))
Training = Callable[[bool], list[float]]  # through us, or by the host alone -> the moments its steps ended


class Moments:
    """When steps ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def note(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        self.at.append(time.perf_counter())


def transformers_training(ours: bool) -> list[float]:
    """Train a small GPT-2 by a Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from trimtab.integrations.transformers import TrimtabTrainer

    moments = Moments()
    seen = type("Seen", (TrainerCallback,), {"on_step_end": lambda self, *_, **__: moments.note()})
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (8 * STEPS, 64))]
    with tempfile.TemporaryDirectory() as folder:
        given = {"per_device_train_batch_size": 8, "max_steps": STEPS, "report_to": "none", "save_strategy": "no"}
        arguments = TrainingArguments(folder, use_cpu=True, disable_tqdm=True, logging_strategy="no", **given)
        kind, own = (TrimtabTrainer, {"plan": Plan.fixed(8)}) if ours else (Trainer, {})
        model = GPT2LMHeadModel(config)
        kind(model=model, args=arguments, train_dataset=data, callbacks=[seen()], **own).train()
    return moments.at


def _digits() -> tuple[Any, nn.Module, torch.optim.Optimizer, list[Any]]:
    task = load_task("digits_resnet")
    torch.manual_seed(0)
    model = task.make_model().train()
    batches = list(itertools.islice(task.load_data().batches(0, task.batch_rows), STEPS))
    return task, model, task.make_optimizer(model), batches


def lightning_training(ours: bool) -> list[float]:
    """Train a small network on digits by Lightning's Trainer."""
    import lightning.pytorch as pl

    from trimtab.integrations.lightning import TrimtabStrategy

    task, model, optimizer, batches = _digits()
    moments = Moments()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> Any:
            return task.loss_fn(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_batch_end(self, *_: Any) -> None:
            moments.note()

    strategy = TrimtabStrategy(plan=Plan.fixed(task.batch_rows)) if ours else "auto"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, enable_model_summary=False, **quiet
    )
    trainer.fit(Module(), batches)
    return moments.at


def accelerate_training(ours: bool) -> list[float]:
    """Train a small network on digits by an Accelerator."""
    from accelerate import Accelerator

    from trimtab.integrations.accelerate import start

    task, model, optimizer, batches = _digits()
    accelerator, moments = Accelerator(cpu=True), Moments()
    if ours:
        with start(accelerator, model, optimizer, Plan.fixed(task.batch_rows)) as run:
            for window in run.windows(batches):
                run.train_step(window, task.loss_fn)
                moments.note()
        return moments.at
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(task.loss_fn(model, batch))
        optimizer.step()
        moments.note()
    return moments.at


HOSTS: Mapping[str, Training] = {
    "transformers": transformers_training,
    "lightning": lightning_training,
    "accelerate": accelerate_training,
}


def rows(hosts: Iterable[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row of each host."""
    for host in hosts:
        seconds: dict[str, list[float]] = {"host": [], "ours": [], "control": []}
        for index in range(rounds + 1):
            for arm in ORDERS[index % len(ORDERS)]:
                at = HOSTS[host](arm == "ours")
                each = [after - before for before, after in itertools.pairwise(at[FIRST:])]
                if index:  # the first round imports, and brings up the machine
                    seconds[arm].append(statistics.median(each))
        plain = seconds["host"]
        pairs = {arm: [a / b for a, b in zip(seconds[arm], plain, strict=True)] for arm in ("ours", "control")}
        ours, control = ratio_interval(pairs["ours"]), ratio_interval(pairs["control"])
        row = {"metric": "host_overhead_ratio", "host": host, "step_s": statistics.median(plain)}
        row |= {"mean": ours.mean, "low": ours.low, "high": ours.high, "n": ours.n}
        yield row | {"resolution": resolution(control), "control_half_width": control.half_width}


def main() -> None:
    """Measure every host, and print what our windows cost there."""
    parser = command.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of three short trainings each")
    parser.add_argument("--only", nargs="+", choices=HOSTS, default=tuple(HOSTS), help="hosts to measure")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # hosts' own, of few workers and the like
    logging.disable(logging.WARNING)
    found = []
    for row in rows(options.only, 6 if options.quick else options.rounds):
        found.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    command.show("hosts", found, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    bar = BAR + row["control_half_width"]
    verdict = "within" if row["high"] <= bar else "over"
    interval = f"(95% {row['low']:.4f} to {row['high']:.4f}, n={row['n']})"
    step = f"of {1000 * row['step_s']:.1f} ms a step"
    return f"{row['host']:<14} {row['mean']:.4f} {interval} {step}; {verdict} 1% + A/A half-width {bar:.4f}"


if __name__ == "__main__":
    main()
