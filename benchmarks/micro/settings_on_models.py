"""Effect of each setting alone on unmodified models, in pairs of steps interleaved with a plain loop.

`python -m benchmarks.micro.settings_on_models [--quick] [--json] [--case TEXT]` prints a `setting_on_model` row for
every model and value: time and peak memory relative to the plain loop, the relative difference of the gradients, and
the processor seconds of compilation. Every case runs in a process of its own, without caches of compiled code.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import trimtab
from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.core.choice import COMPILED_BLOCKS, Scalar
from trimtab.losses import mean_of
from trimtab.planner.statistics import ratio_interval
from trimtab.plans.plan import Plan
from trimtab.state.peak_memory import alive_between_steps, peak_bytes
from trimtab.state.process_state import separate_heaps
from trimtab.training.batch import tensors_in

PAIRS, QUICK_PAIRS, WARM_UP = 12, 3, 3


@dataclass
class Loop:
    """A model with random weights, a batch, and the loss of a user's loop.

    Args:
        rows: samples of the batch.
    """

    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], Any]
    rows: int

    def __post_init__(self) -> None:
        self.model.train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)
        self._seen: list[torch.Tensor] = []
        # Before the hooks of a plan, which may take the gradients.
        self._recorder = self.optimizer.register_step_pre_hook(self._record)

    def step(self) -> None:
        """Run a step of the hand-written loop."""
        self.optimizer.zero_grad(set_to_none=True)
        mean_of(self.loss_fn(self.model, self.batch)).backward()
        self.optimizer.step()

    def live(self) -> Iterator[torch.Tensor]:
        """Yield the tensors alive between two steps."""
        yield from alive_between_steps(self.model, self.optimizer)
        yield from tensors_in(self.batch)

    def gradients_of(self, step: Callable[[], object]) -> list[torch.Tensor]:
        """Return the gradients of the first step, which the optimizer is about to use."""
        step()
        self._recorder.remove()
        return self._seen

    def _record(self, *_: Any) -> None:
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        self._seen += [p.grad.double() for p in parameters if p.grad is not None]


def _causal(model: nn.Module, ids: Any) -> Any:
    return model(input_ids=ids, labels=ids).loss


def _classified(model: nn.Module, batch: Any) -> Any:
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


def gpt2(layers: int, words: int, tokens: int, rows: int = 1) -> Loop:
    """Return Transformers' GPT-2 of width 128 without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_layer=layers, n_embd=128, n_head=4, vocab_size=words, n_positions=tokens, **off)
    return Loop(GPT2LMHeadModel(config), torch.randint(words, (rows, tokens)), _causal, rows)


def llama(layers: int, words: int, tokens: int, rows: int = 1, *, is_tied: bool = False) -> Loop:
    """Return Transformers' Llama of width 128, with the head's weight tied to the embedding or of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"num_hidden_layers": layers, "vocab_size": words, "max_position_embeddings": tokens}
    config = LlamaConfig(tie_word_embeddings=is_tied, **sizes, **width)
    return Loop(LlamaForCausalLM(config), torch.randint(words, (rows, tokens)), _causal, rows)


def vit(layers: int, rows: int) -> Loop:
    """Return Transformers' vision transformer of width 128 for images of 32 x 32 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    width = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4}
    config = ViTConfig(num_hidden_layers=layers, image_size=32, patch_size=4, num_labels=10, **width)
    batch = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    return Loop(ViTForImageClassification(config), batch, _classified, rows)


def resnet50(rows: int) -> Loop:
    """Return the ResNet-50 of the evaluation, on CIFAR-10's shapes."""
    task = load_task("cifar10_resnet50")
    batch = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    return Loop(task.make_model(), batch, task.loss_fn, rows)


MODELS: dict[str, Callable[[], Loop]] = {
    "GPT-2, 4 layers, 50,257 words": lambda: gpt2(4, 50_257, 512),
    "Llama, 4 layers, 50,257 words": lambda: llama(4, 50_257, 512),
    "Llama, 4 layers, 50,257 words, tied": lambda: llama(4, 50_257, 512, is_tied=True),
    "Llama, 4 layers, 50,257 words, 2,048 tokens": lambda: llama(4, 50_257, 512, rows=4),
    "GPT-2, 12 layers": lambda: gpt2(12, 1000, 128, rows=4),
    "GPT-2, 12 layers, one short text": lambda: gpt2(12, 1000, 16),
    "Llama, 12 layers": lambda: llama(12, 1000, 128, rows=4),
    "ViT, 12 layers": lambda: vit(12, rows=16),
    "ResNet-50": lambda: resnet50(rows=16),
}
# Model, and the values that a plan changes.
CASES: tuple[tuple[str, dict[str, Scalar]], ...] = (
    ("GPT-2, 4 layers, 50,257 words", {"loss_chunk": 64}),
    ("Llama, 4 layers, 50,257 words", {"loss_chunk": 64}),
    ("Llama, 4 layers, 50,257 words, tied", {"loss_chunk": 64}),
    ("Llama, 4 layers, 50,257 words, 2,048 tokens", {"loss_chunk": 64}),
    ("GPT-2, 12 layers", {"compiled": True}),
    ("GPT-2, 12 layers", {"compiled": COMPILED_BLOCKS}),
    ("Llama, 12 layers", {"compiled": True}),
    ("Llama, 12 layers", {"compiled": COMPILED_BLOCKS}),
    ("ViT, 12 layers", {"compiled": True}),
    ("ViT, 12 layers", {"compiled": COMPILED_BLOCKS}),
    ("GPT-2, 12 layers", {"micro_batch": 2}),
    ("GPT-2, 12 layers", {"precision": "bf16"}),
    ("GPT-2, 12 layers", {"allocator": "retain"}),
    ("GPT-2, 12 layers", {"fused_optimizer": True}),
    ("GPT-2, 12 layers, one short text", {"step_in_backward": True}),
    ("GPT-2, 4 layers, 50,257 words", {"step_in_backward": True}),
    ("ResNet-50", {"memory_layout": "channels_last"}),
    ("GPT-2, 12 layers", {"recompute": "every_block"}),
    ("GPT-2, 12 layers", {"recompute": "every_block", "compiled": COMPILED_BLOCKS}),
    ("GPT-2, 12 layers", {"recompute": "every_block", "compiled": True}),
    ("ResNet-50", {"recompute": "every_block"}),
    ("ResNet-50", {"recompute": "~0-15"}),
    ("GPT-2, 12 layers", {"optimizer_state": "bf16"}),
    ("GPT-2, 12 layers", {"optimizer_state": "8bit"}),
    ("GPT-2, 12 layers", {"optimizer_state": "4bit"}),
)


def name_of(case: tuple[str, dict[str, Scalar]]) -> str:
    """Return a case as text."""
    model, values = case
    return f"{model}: " + ", ".join(f"{name}={value}" for name, value in values.items())


def main() -> None:
    """Measure the cases, each in a process of its own."""
    options = _parser().parse_args()
    if options.number is not None:
        print(json.dumps(measure(CASES[options.number], QUICK_PAIRS if options.quick else PAIRS)))
        return
    chosen = [number for number, case in enumerate(CASES) if options.case in name_of(case)]
    rows = [row for number in chosen if (row := _in_process(number, quick=options.quick)) is not None]
    command.show("settings_on_models", rows, _line, as_json=options.json)


def _parser() -> Any:
    made = command.parser(__doc__)
    made.add_argument("--case", default="", metavar="TEXT", help="only cases whose name contains the text")
    made.add_argument("--number", type=int, metavar="N", help="measure one case here, and print its row")
    return made


def _in_process(number: int, *, quick: bool) -> dict[str, Any] | None:
    print(name_of(CASES[number]), file=sys.stderr)
    asked = [sys.executable, "-m", "benchmarks.micro.settings_on_models", "--number", str(number)]
    made = subprocess.run(
        asked + ["--quick"] * quick,
        env=os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if made.returncode:
        print(f"failed with exit status {made.returncode}", file=sys.stderr)
        return None
    return dict(json.loads(made.stdout.splitlines()[-1]))


def measure(case: tuple[str, dict[str, Scalar]], pairs: int) -> dict[str, Any]:
    """Return the row of a case: ratios over the plain loop, from the same weights and batch."""
    model, values = case
    theirs, ours, again = (make_loop(model) for _ in range(3))
    plan = Plan.fixed(ours.rows, **values)
    with separate_heaps(), trimtab.start(ours.model, ours.optimizer, plan) as run:

        def changed() -> None:
            run.train_step(run.window(ours.batch), ours.loss_fn)

        expected = theirs.gradients_of(theirs.step)
        spent_s, first_s = processor_s(), time.perf_counter()
        found = ours.gradients_of(changed)
        first_s, spent_s = time.perf_counter() - first_s, processor_s() - spent_s
        seconds = _interleaved((theirs.step, changed, again.step), pairs)
        peaks = [_peak(theirs, theirs.step), _peak(ours, changed)]
    usual_s = statistics.median(seconds[1])
    ratio, control = (ratio_interval([a / b for a, b in zip(arm, seconds[0], strict=True)]) for arm in seconds[1:])
    row = {"metric": "setting_on_model", "model": model, "values": values, "n": pairs}
    row |= {"time": ratio.mean, "low": ratio.low, "high": ratio.high}
    row |= {"control_low": control.low, "control_high": control.high}
    row |= {"memory": peaks[1] / peaks[0], "peak_bytes": peaks[1], "gradient_error": _error(found, expected)}
    compiles = {"first_step_s": first_s, "compile_s": first_s - usual_s, "compile_processor_s": spent_s - usual_s}
    return row | (compiles if values.get("compiled") else {})


def make_loop(name: str) -> Loop:
    """Return the loop of a model, with the same weights and batch at every call."""
    torch.manual_seed(0)
    return MODELS[name]()


def _peak(loop: Loop, step: Callable[[], object]) -> int:
    loop.optimizer.zero_grad(set_to_none=True)
    return peak_bytes(step, torch.device("cpu"), loop.live)


def _error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return ||g - g_plain|| / ||g_plain||."""
    squares = [
        ((ours - theirs).square().sum(), theirs.square().sum()) for ours, theirs in zip(found, expected, strict=True)
    ]
    off, whole = (sum(float(pair[index]) for pair in squares) for index in (0, 1))
    return math.sqrt(off / whole)


def processor_s() -> float:
    """Return the processor seconds of this process and its ended children."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _interleaved(steps: Sequence[Callable[[], object]], pairs: int) -> list[list[float]]:
    """Return the seconds of each step, in rounds of alternating order."""
    seconds: list[list[float]] = [[] for _ in steps]
    for index in range(WARM_UP + pairs):
        if index == WARM_UP:
            gc.collect()  # A compiler leaves many objects, whose collection would take longer than a step.
        order = range(len(steps)) if index % 2 else reversed(range(len(steps)))
        for arm in order:
            begin = time.perf_counter()
            steps[arm]()
            if index >= WARM_UP:
                seconds[arm].append(time.perf_counter() - begin)
    return seconds


def _line(row: dict[str, Any]) -> str:
    values = ", ".join(f"{name}={value}" for name, value in row["values"].items())
    compiled = f", compiled in {row['compile_processor_s']:.1f} s of processor time" if "compile_s" in row else ""
    return (
        f"{row['model']}: {values}: time {row['time']:.3f} ({row['low']:.3f} to {row['high']:.3f}, n={row['n']}), "
        f"memory {row['memory']:.3f}, gradients differ by {row['gradient_error']:.1e}{compiled}"
    )


if __name__ == "__main__":
    main()
