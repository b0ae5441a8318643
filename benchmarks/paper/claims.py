"""Figures of the paper with their location: tables I to IV and the claims about them. Values only.

From "Systematic Training Compute Optimization for Large-Scale AI Models: A Dynamic Resource Allocation Approach"
(M. Nallaretnam, U. Thayasivam), the full version. Figures are as printed, in the paper's units.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU = "RTX 3090"
MACHINE = f"4x NVIDIA {GPU}, AMD Ryzen 9 5950X, PyTorch 2.0.1 (section IV.C)"
BATCH_IMAGES = 128  # section IV.B


@dataclass(frozen=True)
class Workload:
    """Tasks that can confirm the paper's claims for a workload, and smaller tasks that cannot.

    Args:
        says: data and model.
        models: tasks at the paper's size, grouped by model, because the paper does not state the stem of its ResNet.
        smaller: tasks on the same data, sized for two cores.
    """

    says: str
    models: tuple[tuple[str, ...], ...]
    smaller: tuple[str, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks at the paper's size."""
        return tuple(task for model in self.models for task in model)


IMAGES = Workload(
    "CIFAR-10, ResNet-50",
    (("cifar10_resnet50", "cifar10_resnet50_timed"), ("cifar10_resnet50_7x7",)),
    tuple(f"cifar10_resnet{size}" for size in ("", "_short", "_half", "_long", "_judged", "_ablate")),
)
TOKENS = Workload(
    "WikiText-2, GPT-2 Small",
    (("wikitext2_gpt2", "wikitext2_gpt2_timed"),),
    tuple(f"wikitext2_gpt{size}" for size in ("", "_short", "_long", "_ablate")),
)


@dataclass(frozen=True)
class Line:
    """A line of table I or II.

    Args:
        measure: the measure, as in `Finding`.
        says: description of the line.
        unit: unit of both figures.
        baseline, optimised: the two figures.
        change: change as printed.
    """

    measure: str
    says: str
    unit: str
    baseline: float
    optimised: float
    change: str


@dataclass(frozen=True)
class MainTable:
    """Table I or II.

    Args:
        name: name of the table.
        workload: data and model.
        target: held-out metric for the time to target.
        lines: lines of the table.
    """

    name: str
    workload: Workload
    target: float
    lines: tuple[Line, ...]


MAIN_TABLES = (
    MainTable(
        "Table I",
        IMAGES,
        0.85,
        (
            Line("time_to_target", "time to 85% accuracy", "min", 42.3, 31.2, "-26.2%"),
            Line("peak_memory", "peak memory", "GB", 8.24, 6.13, "-25.6%"),
            Line("throughput", "throughput", "img/s", 1240, 1580, "+27.4%"),
            Line("final_metric", "final accuracy", "%", 85.31, 85.14, "-0.2%"),
            Line("mfu", "FLOPs utilization", "%", 42.3, 58.7, "+38.8%"),
        ),
    ),
    MainTable(
        "Table II",
        TOKENS,
        45.0,
        (
            Line("time_to_target", "time to perplexity 45", "h", 3.82, 2.91, "-23.8%"),
            Line("peak_memory", "peak memory", "GB", 12.43, 9.32, "-25.0%"),
            Line("throughput", "throughput", "tok/s", 8520, 10_890, "+27.8%"),
            Line("final_metric", "final perplexity", "", 44.82, 45.13, "+0.7%"),
        ),
    ),
)


# Settings of a plan that match a component of table III.
SPLITTING, PRECISION, RECOMPUTE = ("micro_batch",), ("precision",), ("recompute",)
ACCUMULATION = (*SPLITTING, "batch_policy")  # Micro-batches of a split batch, or whole batches.
SCHEDULE = ("schedule", "warmup_fraction", "learning_rate_scale")


@dataclass(frozen=True)
class Component:
    """A line of table III: a component added to the lines above.

    Args:
        says: description of the line.
        choices: settings of a plan that match the component.
        minutes: time to 85% accuracy.
        memory_gb: peak memory.
        accuracy: final accuracy in percent.
    """

    says: str
    choices: tuple[str, ...]
    minutes: float
    memory_gb: float
    accuracy: float


COMPONENTS = (  # table III
    Component("baseline", (), 42.3, 8.24, 85.31),
    Component("+ gradient accumulation (k=4)", ACCUMULATION, 38.1, 7.12, 85.28),
    Component("+ mixed precision", PRECISION, 34.5, 6.45, 85.22),
    Component("+ learning-rate schedule", SCHEDULE, 32.8, 6.45, 85.19),
    Component("+ activation checkpointing", RECOMPUTE, 31.2, 6.13, 85.14),
)


@dataclass(frozen=True)
class Ranks:
    """A line of table IV: images per second and efficiency of the baseline and of the optimised recipe."""

    num: int
    baseline_per_s: float
    optimised_per_s: float
    baseline_efficiency: float
    optimised_efficiency: float


RANKS = (  # table IV
    Ranks(1, 1240, 1580, 1.0, 1.0),
    Ranks(2, 2310, 3040, 0.931, 0.962),
    Ranks(4, 4250, 5980, 0.857, 0.946),
)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about its recipe, as a limit for a measured figure.

    Args:
        says: the claim.
        source: section or table.
        measure: the measure, as in `Finding`.
        sense: "at most", "at least", "within" (of 0) or "about" the limit.
        bar: the limit.
        workload: data and model.
        target: held-out metric of a time to target.
        ranks: number of ranks of an efficiency.
        part: settings of a component, or the part of training or phase of a fraction of the gain.
    """

    says: str
    source: str
    measure: str
    sense: str
    bar: float
    workload: Workload
    target: float | None = None
    ranks: int | None = None
    part: tuple[str, ...] = ()


MOST, LEAST, WITHIN, ABOUT = "at most", "at least", "within", "about"
CLAIMS = (
    Claim("85% accuracy in 26.2% less time", "table I", "time_to_target", MOST, 0.738, IMAGES, 0.85),
    Claim("25.6% less peak memory", "table I", "peak_memory", MOST, 0.744, IMAGES),
    Claim("27.4% more images per second", "table I", "throughput", LEAST, 1.274, IMAGES),
    Claim("accuracy within 0.5%", "section V.A", "final_metric", WITHIN, 0.5, IMAGES),
    Claim("58.7% of the peak FLOP/s used", "table I", "mfu", LEAST, 0.587, IMAGES),
    Claim("perplexity 45 in 23.8% less time", "table II", "time_to_target", MOST, 0.762, TOKENS, 45.0),
    Claim("25.0% less peak memory", "table II", "peak_memory", MOST, 0.75, TOKENS),
    Claim("27.8% more tokens per second", "table II", "throughput", LEAST, 1.278, TOKENS),
    Claim("perplexity within 0.5%", "section V.A", "final_metric", WITHIN, 0.5, TOKENS),
    Claim("accumulation: 9.9% less time", "table III", "component_time", MOST, 0.901, IMAGES, 0.85, part=ACCUMULATION),
    Claim("accumulation: 13.6% less memory", "table III", "component_memory", MOST, 0.864, IMAGES, part=SPLITTING),
    Claim("mixed precision: 9.4% less time", "table III", "component_time", MOST, 0.906, IMAGES, 0.85, part=PRECISION),
    Claim("mixed precision: 9.4% less memory", "table III", "component_memory", MOST, 0.906, IMAGES, part=PRECISION),
    Claim("schedule: 4.9% less time", "table III", "component_time", MOST, 0.951, IMAGES, 0.85, part=("schedule",)),
    Claim("checkpointing: 5.0% less memory", "table III", "component_memory", MOST, 0.950, IMAGES, part=RECOMPUTE),
    Claim("96.2% scaling efficiency on 2 GPUs", "table IV", "scaling_efficiency", LEAST, 0.962, IMAGES, ranks=2),
    Claim("94.6% scaling efficiency on 4 GPUs", "table IV", "scaling_efficiency", LEAST, 0.946, IMAGES, ranks=4),
    Claim(
        "images, mixed precision: 28% speed-up",
        "section V.D",
        "component_throughput",
        LEAST,
        1.28,
        IMAGES,
        part=PRECISION,
    ),
    Claim(
        "text, mixed precision: 25% speed-up",
        "section V.D",
        "component_throughput",
        LEAST,
        1.25,
        TOKENS,
        part=PRECISION,
    ),
    Claim(
        "text, checkpointing: 32% less memory", "section V.D", "component_memory", MOST, 0.68, TOKENS, part=RECOMPUTE
    ),
    Claim("35% of the gain early in training", "section V.D", "gain_share", ABOUT, 0.35, IMAGES, part=("early",)),
    Claim("28% of the gain in the backward", "section V.D", "gain_share", ABOUT, 0.28, TOKENS, part=("backward",)),
    Claim("22% of the gain where memory bounds", "section V.D", "gain_share", ABOUT, 0.22, TOKENS, part=("memory",)),
    Claim(
        "15% of the gain in communication", "section V.D", "gain_share", ABOUT, 0.15, IMAGES, part=("communication",)
    ),
)
