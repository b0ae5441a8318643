"""Overhead of trimtab's windows in other frameworks: training with and without trimtab, interleaved step by step.

`python -m benchmarks.micro.hosts [--quick] [--json] [--rounds 600] [--only transformers lightning ...]` prints
`host_overhead_ratio` rows: seconds per step with trimtab relative to the framework alone, paired by neighbouring steps.
Both use the same micro-batches and no plan, so the work is equal. A step includes all that the framework does between
two steps. The control repeats the framework. Each training has a thread; only one thread runs at a time.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.api import Run
from trimtab.planner.statistics import ratio_interval, resolution
from trimtab.plans.plan import Plan

FIRST, LAST = 5, 1  # untimed rounds: set-up and warm-up at the start, shutdown at the end
ROWS = 8  # samples per step of the language model
BAR = 1.01
ARMS = ("host", "ours", "control")
# An arm inherits caches and heap from its predecessor, so every arm follows every other equally often.
ORDERS = tuple(itertools.permutations(ARMS))
QUICK_ROUNDS = 6 * len(ORDERS)  # equally many rounds of each order
Training = Callable[[bool, int, int, Callable[[], None]], nn.Module]
COMPARED_STEPS = 20  # steps before weights are compared with the framework's


class Turns:
    """Scheduler that interleaves training threads step by step, for a given number of rounds.

    Attributes:
        seconds: Seconds of each arm's steps, from the end of its previous step to the end of this step, without the
            time of other arms.
    """

    def __init__(self, rounds: int) -> None:
        self._order = [arm for index in range(rounds) for arm in ORDERS[index % len(ORDERS)]]
        self._changed, self._done = threading.Condition(), 0
        self._error: BaseException | None = None
        self._began = 0.0
        self.seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}

    def train(self, arm: str, training: Callable[[Callable[[], None]], None]) -> None:
        """Train in the current thread. An exception ends the other threads."""
        try:
            self._await(arm)
            training(lambda: self._stepped(arm))
            if arm in self._order[self._done :]:  # otherwise other threads would wait for this arm
                raise RuntimeError(f"the training {arm!r} ended before its last step")
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def finished(self) -> dict[str, list[float]]:
        """Wait for all threads and return the seconds. Raises the exception of a failed thread."""
        if self._error is not None:
            raise self._error
        return self.seconds

    def _stepped(self, arm: str) -> None:
        self.seconds[arm].append(time.perf_counter() - self._began)
        with self._changed:
            self._done += 1
            self._changed.notify_all()
        self._await(arm)

    def _await(self, arm: str) -> None:
        with self._changed:
            if arm in self._order[self._done :]:
                self._changed.wait_for(lambda: self._error is not None or self._order[self._done] == arm)
            if self._error is not None:
                raise RuntimeError("another training ended")
        self._began = time.perf_counter()


def transformers_training(ours: bool, k: int, steps: int, stepped: Callable[[], None]) -> nn.Module:
    """Train a small GPT-2 with transformers' Trainer."""
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from trimtab.integrations.transformers import TrimtabTrainer

    seen = type("Seen", (TrainerCallback,), {"on_step_end": lambda *_, **__: stepped()})
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512, n_positions=64, bos_token_id=0, eos_token_id=0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (ROWS * steps, 64))]
    with tempfile.TemporaryDirectory() as folder:
        given = {"per_device_train_batch_size": ROWS // k, "gradient_accumulation_steps": k, "max_steps": steps}
        given |= {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
        arguments = TrainingArguments(folder, use_cpu=True, disable_tqdm=True, **given)
        kind, own = (TrimtabTrainer, {"plan": Plan.fixed(ROWS, ROWS // k)}) if ours else (Trainer, {})
        model = GPT2LMHeadModel(config)
        trainer = kind(model=model, args=arguments, train_dataset=data, callbacks=[seen()], **own)
        trainer.remove_callback(PrinterCallback)  # standard output is reserved for results
        trainer.train()
    return model


def _digits(steps: int, k: int = 1) -> tuple[Any, nn.Module, torch.optim.Optimizer, list[Any]]:
    """Return the digits task, a model, an optimizer and the batches of `steps` steps with `k` batches each."""
    task = load_task("digits_resnet")
    torch.manual_seed(0)
    model = task.make_model().train()
    batches, micro = itertools.islice(task.load_data().batches(0, task.batch_size), steps), task.batch_size // k
    parts = [part for batch in batches for part in zip(*(column.split(micro) for column in batch), strict=True)]
    return task, model, task.make_optimizer(model), parts


def _ours(run: Run, task: Any, loader: Iterable[Any], stepped: Callable[[], None]) -> None:
    with run:
        for window in run.windows(loader):
            run.train_step(window, task.loss_fn)
            stepped()


def lightning_training(ours: bool, k: int, steps: int, stepped: Callable[[], None]) -> nn.Module:
    """Train a small network on digits with Lightning's Trainer."""
    import lightning.pytorch as pl

    from trimtab.integrations.lightning import TrimtabStrategy

    task, model, optimizer, parts = _digits(steps, k)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> Any:
            return task.loss_fn(self.net, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % k == 0:
                stepped()

    strategy = TrimtabStrategy(plan=Plan.fixed(task.batch_size, task.batch_size // k)) if ours else "auto"
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "accumulate_grad_batches": k}
    pl.Trainer(strategy=strategy, enable_model_summary=False, **given, **quiet).fit(
        Module(), DataLoader(parts, batch_size=None)
    )
    return model


def fabric_training(ours: bool, k: int, steps: int, stepped: Callable[[], None]) -> nn.Module:
    """Train a small network on digits with Fabric."""
    from lightning.fabric import Fabric

    from trimtab.integrations.lightning import start

    task, model, optimizer, batches = _digits(steps)
    fabric = Fabric(accelerator="cpu", devices=1)
    if ours:
        _ours(start(fabric, model, optimizer, Plan.fixed(task.batch_size)), task, batches, stepped)
        return model
    wrapped, optimizer = fabric.setup(model, optimizer)
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(task.loss_fn(wrapped, batch))
        optimizer.step()
        stepped()
    return model


def accelerate_training(ours: bool, k: int, steps: int, stepped: Callable[[], None]) -> nn.Module:
    """Train a small network on digits with Accelerate."""
    from accelerate import Accelerator

    from trimtab.integrations.accelerate import start

    task, model, optimizer, parts = _digits(steps, k)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(parts, batch_size=None))
    if ours:
        _ours(start(accelerator, model, optimizer, Plan.fixed(task.batch_size // k)), task, loader, stepped)
        return model
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(task.loss_fn(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        if (index + 1) % k == 0:
            stepped()
    return model


# (framework, training function, micro-batches per step). Fabric does not accumulate gradients.
CASES: tuple[tuple[str, Training, int], ...] = (
    ("transformers", transformers_training, 1),
    ("transformers", transformers_training, 4),
    ("lightning", lightning_training, 1),
    ("lightning", lightning_training, 4),
    ("fabric", fabric_training, 1),
    ("accelerate", accelerate_training, 1),
    ("accelerate", accelerate_training, 4),
)


def seconds_of(training: Training, k: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the timed steps per arm."""
    steps = FIRST + rounds + LAST
    turns, threads = Turns(steps), list[threading.Thread]()
    for arm in ARMS:

        def train(stepped: Callable[[], None], ours: bool = arm == "ours") -> None:
            training(ours, k, steps, stepped)

        threads.append(threading.Thread(target=turns.train, args=(arm, train), name=arm))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {arm: each[FIRST : FIRST + rounds] for arm, each in turns.finished().items()}


def difference(training: Training, k: int) -> float:
    """Return the largest weight difference to the framework alone, relative to each tensor's largest weight."""
    theirs, ours = (training(is_ours, k, COMPARED_STEPS, lambda: None).state_dict() for is_ours in (False, True))
    floats = [name for name, each in theirs.items() if each.is_floating_point()]
    apart = [((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp_min(1e-30)) for name in floats]
    return float(torch.stack(apart).max())


def rows(hosts: Iterable[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row per case of the given frameworks."""
    for host, training, k in CASES:
        if host not in hosts:
            continue
        seconds = seconds_of(training, k, rounds)
        plain = seconds["host"]
        pairs = {arm: [a / b for a, b in zip(seconds[arm], plain, strict=True)] for arm in ("ours", "control")}
        ours, control = ratio_interval(pairs["ours"]), ratio_interval(pairs["control"])
        row = {"metric": "host_overhead_ratio", "host": host, "num_micro_batches": k}
        row |= {"step_s": statistics.median(plain), "weights_apart": difference(training, k)}
        row |= {"mean": ours.mean, "low": ours.low, "high": ours.high, "n": ours.n}
        yield row | {"resolution": resolution(control), "control_half_width": control.half_width}


def main() -> None:
    """Measure all frameworks and print the overhead."""
    parser = command.parser(__doc__)
    names = sorted({host for host, _, _ in CASES})
    parser.add_argument("--rounds", type=int, default=600, help="of a step of each of three trainings")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="hosts to measure")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # frameworks warn about few workers and similar
    logging.disable(logging.WARNING)
    found = []
    for row in rows(options.only, QUICK_ROUNDS if options.quick else options.rounds):
        found.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    command.show("hosts", found, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    bar = BAR + row["control_half_width"]
    verdict = "within" if row["high"] <= bar else "over"
    interval = f"(95% {row['low']:.4f} to {row['high']:.4f}, n={row['n']})"
    step = f"of {1000 * row['step_s']:.1f} ms a step"
    step += f", weights {row['weights_apart']:.1e} apart after {COMPARED_STEPS}"
    host = f"{row['host']} k={row['num_micro_batches']}"
    return f"{host:<18} {row['mean']:.4f} {interval} {step}; {verdict} 1% + A/A half-width {bar:.4f}"


if __name__ == "__main__":
    main()
