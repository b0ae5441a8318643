"""The paper's evaluation as a list of slices: commands that end within minutes and go on where the last stopped.

Slices of one folder run in their order, each a little longer than the one before: `trimtab compare` with one race more
goes on with those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

TASKS, GPU_TASKS = "{tasks}", "{gpu tasks}"  # stand for the files of `evaluation_tasks` and `evaluation_gpu_tasks`
PLANS = "{plans}"  # stands for the folder of plans that are written by hand
MINUTES = 9.0  # that a slice may take
CAP_S, AROUND_S = 90, 90  # of training of an arm in a race to a target; of a race's start and its evaluations
HALF = "half of "  # a limit of half the peak that a file of an arm holds
SIZES = ("cpu", "gpu", "tiny")
DONE, TO_DO = "done", "to do"


@dataclass(frozen=True)
class Slice:
    """One command.

    Args:
        name: of it and of what is written down of it. says: what it is of. command: of `trimtab`, or a benchmark's
            file first. result: the file it leaves, below the evaluation's folder; what a `prints` one prints is put
            there. minutes: about, on two cores or on one H200. needs: what has to be there: "gpu", "2 gpus", "meter",
            "command NAME", or a file that an earlier slice leaves.
    """

    name: str
    says: str
    command: tuple[str, ...]
    result: str
    minutes: float
    needs: tuple[str, ...] = ()
    prints: bool = False

    @property
    def begins_anew(self) -> bool:
        """Whether it goes on with nothing: what a cut-off run of it left is in its way."""
        return self.command[0] == "train"

    @property
    def folder(self) -> str:
        """What it shares with others, which are run in turn."""
        return self.result.partition("/")[0]


@dataclass(frozen=True)
class Ran:
    """What is written down of a slice when it has ended."""

    slice: str
    command: str
    sources: str
    environment: dict[str, str]
    seconds: float
    result: str
    schema: int = 1


def slices(size: str, minutes: float = MINUTES) -> tuple[Slice, ...]:
    """Return the evaluation at a size: "cpu", "gpu", or "tiny", which shows that it runs and measures nothing.

    Args:
        minutes: that a slice may take, and a race to a target on a GPU takes: its reference trains for all that the
            other arms leave. In nine minutes such a goal can be bounded; to be shown it takes an hour.
    """
    return tuple(_gpu(minutes) if size == "gpu" else {"cpu": _cpu, "tiny": _tiny}[size]())


def _races(
    folder: str, says: str, command: tuple[str, ...], pairs: tuple[int, ...], minutes: float, *needs: str, whole: bool
) -> Iterator[Slice]:
    """Yield a comparison as plans first, then as so many races more at a time.

    Args:
        whole: whether they run to their end, or time a few steps. minutes: of plans, or of what a further slice runs.
    """
    report = f"{folder}/report.json"
    start = ("compare", *command, "--out", folder)
    plans = (*start, "--pairs", "1", "--whole", "0")
    yield Slice(f"{folder}-plans", f"{says}: plans, memory and phases", plans, report, minutes, needs)
    for number in pairs:
        ran = (*start, "--pairs", str(number), "--whole", str(number) if whole else "0")
        yield Slice(f"{folder}-{number}", f"{says}: to race {number}", ran, report, minutes, needs)


def _growing(
    name: str, says: str, counts: tuple[int, ...], make: Callable[[int], tuple[str, ...]], **how: Any
) -> Iterator[Slice]:
    """Yield a command with more and more of something."""
    for count in counts:
        yield Slice(f"{name}-{count}", f"{says}: {count}", (*make(count), "--out", name), **how)


_FIVE = (1, 2, 3, 4, 5)


def _cpu() -> Iterator[Slice]:
    for kind, short, half, ablated, peers in (
        ("cifar", "cifar10_short", "cifar10_half", "cifar10_short", "paper,strong"),
        ("wikitext", "wikitext2_short", "wikitext2_half", "wikitext2_ablate", "paper,strong,muon"),
    ):
        raced = (f"{TASKS}:{short}", "--adapt", "none", "--against", peers)
        yield from _races(f"{kind}-recipes", f"{short}, S, P1 to P3", raced, _FIVE, 7.5, whole=True)
        freed = (f"{TASKS}:{half}", "--no-peers", "--adapt", "learning-rate")
        yield from _races(f"{kind}-freed", f"{half}, S and F", freed, _FIVE, 8, whole=True)
        task = f"{TASKS}:{ablated}"
        yield from _growing(
            f"{kind}-ablate",
            f"{ablated}, races of each change",
            _FIVE,
            lambda seeds, task=task: ("ablate", task, "--seeds", str(seeds), "--whole", "0"),
            result=f"{kind}-ablate/report.json",
            minutes=7,
            needs=("command ablate",),
        )
    yield from _by_hand()
    yield from _growing(
        "cifar-scale",
        "cifar10_resnet on 1 and 2 ranks of one thread, rounds",
        (1, 3, 5),
        lambda rounds: ("scale", "cifar10_resnet", "--ranks", "1,2", "--rounds", str(rounds), "--scaling", "weak"),
        result="cifar-scale/scaling.json",
        minutes=6,
    )
    yield from _predictions()
    yield _monitor("digits_resnet", 4)
    record = ("train", "cifar10_resnet", "--steps", "100", "--record", "energy.jsonl", "--json")
    yield Slice("energy", "cifar10_resnet, joules of a run", record, "energy.jsonl", 2, ("meter",))


def _by_hand() -> Iterator[Slice]:
    """Yield ablations of plans that are written by hand: one of ours may make other changes, or none.

    Of the paper's components those that a processor has and batch statistics allow; of images to the end of training,
    as they and what is freed show in quality and in time to a target.
    """
    for folder, task, plan, whole, minutes in (
        ("cifar-ablate-paper", "cifar10_ablate", "paper-images", (), 7),
        ("cifar-ablate-freed", "cifar10_ablate", "freed-images", (), 7),
        ("wikitext-ablate-paper", "wikitext2_ablate", "paper-text", ("--whole", "0"), 6),
    ):
        yield from _growing(
            folder,
            f"{task}, races of each change of {plan}",
            _FIVE,
            lambda seeds, task=task, plan=plan, whole=whole: (
                *("ablate", f"{TASKS}:{task}", "--plan", f"{PLANS}/{plan}.json", "--seeds", str(seeds), *whole),
            ),
            result=f"{folder}/report.json",
            minutes=minutes,
            needs=("command ablate",),
        )


def _gpu(minutes: float) -> Iterator[Slice]:
    reference_s = max(CAP_S, 60 * minutes - 3 * CAP_S - AROUND_S)  # beside the control, S and F
    for kind, task in (
        ("resnet", "cifar10_resnet50"),
        ("resnet7x7", "cifar10_resnet50_7x7"),
        ("gpt2", "wikitext2_gpt2"),
    ):
        muon = ",muon" if kind == "gpt2" else ""
        timed = (task, "--adapt", "none", "--against", f"strict,paper,strong{muon}")
        yield from _races(f"{kind}-recipes", f"{task}, S, P0 to P3, timed", timed, (2, 4, 6, 8), 4, "gpu", whole=False)
    for kind, task in (("resnet", "resnet50_timed"), ("gpt2", "gpt2_timed")):
        # An arm's seconds are capped so that a race fits a slice; what is not reached by then is a bound.
        caps = ("--cap", str(CAP_S), "--reference-cap", f"{reference_s:g}")
        freed = (f"{GPU_TASKS}:{task}", "--no-peers", "--adapt", "learning-rate,schedule", *caps)
        yield from _races(f"{kind}-freed", f"{task}, S and F to targets", freed, _FIVE, minutes, "gpu", whole=True)
    for kind, task in (("resnet", "cifar10_resnet50"), ("gpt2", "wikitext2_gpt2")):
        yield from _growing(
            f"{kind}-ablate",
            f"{task}, races of each change",
            _FIVE,
            lambda seeds, task=task: ("ablate", task, "--seeds", str(seeds), "--whole", "0"),
            result=f"{kind}-ablate/report.json",
            minutes=4,
            needs=("gpu", "command ablate"),
        )
        yield from _growing(
            f"{kind}-scale",
            f"{task} on 1, 2 and 4 ranks, rounds",
            _FIVE,
            lambda rounds, task=task: ("scale", task, "--ranks", "1,2,4", "--rounds", str(rounds), "--scaling", "weak"),
            result=f"{kind}-scale/scaling.json",
            minutes=6,
            needs=("gpu", "4 gpus"),
        )
    strong = ("wikitext2_gpt2", "--adapt", "none", "--against", "strong", "--memory")
    arm = "gpt2-recipes/arm-strong.json"
    limits = (("gpt2-half", HALF + arm, "half of P2's memory", arm), ("gpt2-small", "4.5GB", "4.5 GB", ""))
    for folder, limit, says, first in limits:
        needs = ("gpu", *filter(None, [first]))
        yield from _races(folder, f"GPT-2 within {says}", (*strong, limit), (3, 5), 5, *needs, whole=False)
    yield from _predictions()
    yield _monitor("wikitext2_gpt2", 6, "gpu")
    record = ("train", "wikitext2_gpt2", "--steps", "200", "--record", "energy.jsonl", "--json")
    yield Slice("energy", "wikitext2_gpt2, joules of a run", record, "energy.jsonl", 4, ("gpu", "meter"))


def _predictions() -> Iterator[Slice]:
    """Yield what is told of GPT-2 at 32 x 1,024 tokens on an H200, wherever it is told."""
    for name, limit in (("prediction", ()), ("prediction-small", ("--memory", "4.5GB"))):
        command = ("plan", "wikitext2_gpt2", "--device", "H200", *limit, "--json")
        says = f"GPT-2 at 32 x 1,024 on an H200, as told{' within 4.5 GB' if limit else ''}"
        yield Slice(name, says, command, f"{name}.json", 1, prints=True)


def _monitor(task: str, minutes: float, *needs: str) -> Slice:
    command = ("monitor.py", "--json", "--tasks", task)
    return Slice("monitor", f"{task}, the noise monitor's cost", command, "monitor.json", minutes, needs, prints=True)


def _tiny() -> Iterator[Slice]:
    quick = ("compare", "digits_resnet", "--quick", "--adapt", "none", "--out", "digits")
    yield Slice("digits-1", "digits_resnet, one pair", (*quick, "--pairs", "1"), "digits/report.json", 1)
    yield Slice("digits-2", "digits_resnet, two pairs", (*quick, "--pairs", "2"), "digits/report.json", 1)
    record = ("train", "digits_resnet", "--steps", "4", "--record", "run.jsonl", "--json")
    yield Slice("run", "digits_resnet, a record", record, "run.jsonl", 1)
    yield next(_predictions())
