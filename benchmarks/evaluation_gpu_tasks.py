"""Tasks of the evaluation on a GPU. Those raced to a target are of the paper's size, judged every few seconds.

A time to a target is known to about the time between evaluations. The tasks themselves are judged every two or three
epochs, which is 7 to 20 s of what the goals allow a minute for.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.tasks import cifar10_resnet50 as images
from trimtab.tasks import wikitext2_gpt2 as text
from trimtab.tasks.task import Task


def _judged(task: Task, name: str, steps: int, evaluations: int, adapted: int) -> Task:
    """Return a task that is judged every so many steps; with its training freed it ends at `adapted` of them."""
    every = steps * task.batch_rows
    rows = {"eval_every_rows": every, "budget_rows": evaluations * every, "adapted_rows": adapted * every}
    return replace(task, name=name, **rows)


# Above the paper's rungs for text: what the first minutes come to, in which a slice of an arm or an ablation ends.
_FIRST = (2000.0, 1000.0, 500.0, 300.0)


# 50,000 images, 3.3 s at 15,000 images/s; 1.6M tokens, 4.3 s at 370,000 tokens/s. An evaluation of GPT-2 in fp32 takes
# about 1.6 s, as told (a third of a step, a row at a time): at half as many tokens a race would be evaluated for longer
# than its slice has. The reference has rows for slices of an hour and a half of images, and two and a half of text: for
# less of them no time of another could be shown to be a twentieth, or a thirtieth, of its own.
resnet50_timed = _judged(images.TASK, "cifar10_resnet50_timed", images.STEPS_PER_EPOCH, 420, 20)
gpt2_timed = replace(
    _judged(text.TASK, "wikitext2_gpt2_timed", text.STEPS_PER_EPOCH * 2 // 3, 260, 18),
    targets=_FIRST + text.TASK.targets,
)

# ResNet-50 in a run of eight epochs, 25 s at 16,000 images/s: what is measured first is charged to a minute.
_MINUTE = 16
resnet50_minute = replace(
    _judged(images.TASK, "cifar10_resnet50_minute", images.STEPS_PER_EPOCH // 2, 80, _MINUTE),
    planned_rows=_MINUTE * (images.STEPS_PER_EPOCH // 2) * images.TASK.batch_rows,
)

# ResNet-50 for as long as He et al. 2016 (section 4.2) train on CIFAR-10: 64,000 steps of 128 images. A few are timed;
# how long the run is says what may be spent on it beforehand.
HE_STEPS = 64_000
resnet50_long = replace(images.TASK, planned_rows=HE_STEPS * images.TASK.batch_rows)
