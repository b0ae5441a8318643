"""Tasks of the evaluation on a GPU, at the size of the paper, with an evaluation every few seconds.

The time to a target is only as precise as the time between evaluations. The built-in tasks evaluate every two or three
epochs (7 to 20 s), too rarely for a goal of one minute.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper import cifar10_resnet50 as images
from benchmarks.paper import wikitext2_gpt2 as text
from trimtab.tasks.task import Task


def _judged(task: Task, name: str, steps: int, evaluations: int, adapted: int) -> Task:
    """Return a copy of a task with other lengths.

    Args:
        task: Task to copy.
        name: Name of the copy.
        steps: Steps between evaluations.
        evaluations: Number of evaluations.
        adapted: Length of tuned plans.
    """
    every = steps * task.batch_size
    rows = {"eval_every_samples": every, "budget_samples": evaluations * every, "adapted_samples": adapted * every}
    return replace(task, name=name, **rows)


# Easier targets than the task's for text, within reach of the first minutes of an arm.
_FIRST = (2000.0, 1000.0, 500.0, 300.0)


# Evaluations every 50,000 images (3.3 s at 15,000 images/s) and 1.6M tokens (4.3 s at 370,000 tokens/s). An evaluation
# of GPT-2 in fp32 takes about 1.6 s, so twice as many evaluations would not fit a slice. The budget of the baseline
# fills slices of 90 minutes (images) and 150 minutes (text), which goals of 20 and 30 times its speed require.
resnet50_timed = _judged(images.task, "cifar10_resnet50_timed", images.STEPS_PER_EPOCH, 420, 20)
gpt2_timed = replace(
    _judged(text.task, "wikitext2_gpt2_timed", text.STEPS_PER_EPOCH * 2 // 3, 260, 18),
    targets=_FIRST + text.task.targets,
)

# ResNet-50 for eight epochs, 25 s at 16,000 images/s. Planning is charged to the minute.
_MINUTE = 16
resnet50_minute = replace(
    _judged(images.task, "cifar10_resnet50_minute", images.STEPS_PER_EPOCH // 2, 80, _MINUTE),
    planned_samples=_MINUTE * (images.STEPS_PER_EPOCH // 2) * images.task.batch_size,
)

# ResNet-50 with the length of He et al. 2016 (section 4.2) on CIFAR-10: 64,000 steps of 128 images. Only a few steps
# are timed; the length limits planning time.
HE_STEPS = 64_000
resnet50_long = replace(images.task, planned_samples=HE_STEPS * images.task.batch_size)
