"""Goals of the evaluation: thresholds for trimtab's plans. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.paper.claims import LEAST, MOST, WITHIN

MONITOR, NO_HARM, PREDICTED = "monitor_overhead_ratio", "do_no_harm_ratio", "predicted_time_ratio"
SMALL_BYTES = 4.5e9  # memory limit for training GPT-2


@dataclass(frozen=True)
class Goal:
    """A required value of a measurement.

    Args:
        says: Description.
        size: Size of the evaluation.
        run: Folder or file of the run. For predictions, the file of the plan under the limit; for measurements step by
            step, the file of a benchmark's rows.
        measure: Name of the measure.
        arm: Measured arm; for measurements step by step, the task.
        against: Arm to compare with. For predictions, the file of the plan without a limit.
        sense: Direction of the requirement: at least, at most or within.
        bar: Required value. For predictions, the ratio of step times with and without the limit.
        charged: True if planning and search time is included.
        target: Value of the metric; None for the hardest target with a known time.
        of_value: True if the requirement is on the arm's value, not on its ratio to `against`.
        unit: Unit in messages.
    """

    says: str
    size: str
    run: str
    measure: str
    arm: str
    against: str
    sense: str
    bar: float
    charged: bool = False
    target: float | None = None
    of_value: bool = False
    unit: str = "x"


def _cpu(kind: str, same: float, freed: float) -> tuple[Goal, ...]:
    recipes = f"{kind}-recipes"
    lengths = {"freed": "", "long": ", in a longer run"} if kind == "cifar" else {"long": ""}
    beside = f"{kind}-{next(iter(lengths))}"  # comparison with both S and F
    harm, quality = f"{kind}: no harm to P2, 0.97", f"{kind}: S within 0.5% of P0's quality"
    of_freed = f"{kind}: F ends no more than 0.5% below P0's quality"
    unit = "%" if kind == "wikitext" else " points"
    of_quality = ("final_metric", "equivalent_plan", "reference", WITHIN, 0.5)
    by_all = Goal(f"{quality}, by all test images", "cpu", "cifar-judged", *of_quality, unit=unit)
    by_steps = Goal(f"{harm}, step by step", "cpu", "no-harm.json", NO_HARM, "cifar10_resnet", "", LEAST, 0.97)
    return (
        Goal(f"{kind}: S {same}x P0", "cpu", recipes, "throughput", "equivalent_plan", "reference", LEAST, same),
        Goal(
            f"{kind}: S {same}x P0, beside F", "cpu", beside, "throughput", "equivalent_plan", "reference", LEAST, same
        ),
        *(
            Goal(
                f"{kind}: F {freed:g}x P0 to the target, search charged{which}",
                *("cpu", f"{kind}-{run}", "time_to_target", "tuned_plan", "reference", MOST, 1 / freed, True),
            )
            for run, which in lengths.items()
        ),
        Goal(harm, "cpu", recipes, "do_no_harm", "strong_plan", "strong", LEAST, 0.97),
        Goal(quality, "cpu", recipes, *of_quality, unit=unit),
        Goal(of_freed, "cpu", f"{kind}-long", "final_metric", "tuned_plan", "reference", WITHIN, 0.5, unit=unit),
        *([by_all, by_steps] if kind == "cifar" else []),
    )


GOALS = (
    *_cpu("wikitext", 1.3, 4.0),
    *_cpu("cifar", 1.8, 3.0),
    Goal("GPT-2: S 8x P0", "gpu", "gpt2-timed", "throughput", "equivalent_plan", "reference", LEAST, 8),
    Goal(
        "GPT-2: S 370,000 tokens/s",
        *("gpu", "gpt2-timed", "throughput", "equivalent_plan", "reference", LEAST, 370e3),
        of_value=True,
        unit=" tokens/s",
    ),
    Goal(
        "GPT-2: S 465,000 tokens/s (stretch: the published H100 level)",
        *("gpu", "gpt2-timed", "throughput", "equivalent_plan", "reference", LEAST, 465e3),
        of_value=True,
        unit=" tokens/s",
    ),
    Goal("ResNet-50 3x3: S 4x P0", "gpu", "resnet-timed", "throughput", "equivalent_plan", "reference", LEAST, 4),
    Goal(
        "ResNet-50 3x3: S 4x P0 in strict FP32",
        "gpu",
        "resnet-timed",
        "throughput",
        "equivalent_plan",
        "strict",
        LEAST,
        4,
    ),
    Goal(
        "ResNet-50 3x3: S 15,000 images/s",
        *("gpu", "resnet-timed", "throughput", "equivalent_plan", "reference", LEAST, 15e3),
        of_value=True,
        unit=" images/s",
    ),
    Goal(
        "GPT-2: F 30x P0 to the target, search charged",
        *("gpu", "gpt2-freed", "time_to_target", "tuned_plan", "reference", MOST, 1 / 30, True),
    ),
    Goal(
        "ResNet-50 3x3: F 20x P0 to the target, search charged",
        *("gpu", "resnet-freed", "time_to_target", "tuned_plan", "reference", MOST, 1 / 20, True),
    ),
    Goal(
        "ResNet-50 3x3: F 85% in 60 s, planning counted",
        *("gpu", "resnet-minute", "time_to_target", "tuned_plan", "reference", MOST, 60.0, True, 0.85),
        of_value=True,
        unit=" s",
    ),
    Goal("GPT-2: half of P2's memory", "gpu", "gpt2-half", "peak_memory", "strong_plan", "strong", MOST, 0.5),
    Goal("GPT-2: and 0.98x its speed", "gpu", "gpt2-half", "do_no_harm", "strong_plan", "strong", LEAST, 0.98),
    Goal(
        "GPT-2: within 4.5 GB",
        *("gpu", "gpt2-small", "peak_memory", "strong_plan", "strong", MOST, SMALL_BYTES),
        of_value=True,
        unit=" bytes",
    ),
    Goal("GPT-2: and 1.35x P2's time", "gpu", "gpt2-small", "do_no_harm", "strong_plan", "strong", LEAST, 1 / 1.35),
    *(
        Goal(
            "GPT-2: within 4.5 GB at 1.35x the time without a limit, as told for an H200",
            *(size, "prediction-small.json", PREDICTED, "", "prediction.json", MOST, 1.35),
        )
        for size in ("cpu", "gpu")
    ),
    *(
        Goal("the noise monitor takes 0.25%", size, "monitor.json", MONITOR, "", "", MOST, 1.0025)
        for size in ("cpu", "gpu")
    ),
)
