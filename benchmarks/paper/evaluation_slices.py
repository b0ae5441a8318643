"""Slices of the paper's evaluation: commands that take minutes and resume earlier results.

Slices of a folder run in order, and each adds pairs: `trimtab compare` with a higher number of pairs reuses the pairs
that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.experiments.phase_result import FILE as PHASES
from trimtab.experiments.results import RESULT
from trimtab.experiments.scaling import FILE as SCALING

TASKS, GPU_TASKS = "{tasks}", "{gpu tasks}"  # placeholders for evaluation_tasks.py and evaluation_gpu_tasks.py
PLANS = "{plans}"  # placeholder for the folder of hand-written plans
MINUTES = {"cpu": 25.0, "gpu": 9.0, "tiny": 9.0}  # time limit of a slice
CAP_S, AROUND_S = 90, 130  # training of an arm in a paired run to a target; start and evaluations of a paired run
COUNTED_S = 50  # measuring peak memory of each arm in the first pair of an ablation
MINUTE_S = 60  # training time for the goal of a target within a minute
# Total over training time in a long run: evaluations take 1.2 s per 12 s of training (images), 1.6 s per 32 s (text).
EVALUATED = 1.15
CONTROL_S = 60  # maximum training time of controls and of arms that only measure throughput
TIMED_STEPS = "60"  # steps of an arm that is only timed
HALF = "half of "  # prefix of a memory limit: half the peak recorded in an arm's file
SIZES = ("cpu", "gpu", "tiny")
DONE, TO_DO = "done", "to do"


@dataclass(frozen=True)
class Slice:
    """A command of the evaluation.

    Args:
        name: Name of the slice and of its record.
        says: Description.
        command: Arguments of `trimtab`, or a benchmark's file and its arguments.
        result: Result file, relative to the evaluation's folder.
        minutes: Approximate minutes on two cores or on an H200.
        needs: Requirements: "gpu", "2 gpus", "meter", "bf16" (CPU), "command NAME", or a file of an earlier slice.
        prints: True if the standard output of the command is the result.
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
        """True if the command cannot resume, so that an incomplete result must be deleted first."""
        return self.command[0] == "train"

    @property
    def writes_file(self) -> bool:
        """True if the command writes a file without creating its folder."""
        return self.command[0] == "phases"

    @property
    def folder(self) -> str:
        """Folder of the result. Slices of the same folder run in order."""
        return self.result.partition("/")[0]


@dataclass(frozen=True)
class Ran:
    """Record of a completed slice."""

    slice: str
    command: str
    sources: str
    environment: dict[str, str]
    seconds: float
    result: str
    schema: int = 1


def slices(size: str, minutes: float | None = None) -> tuple[Slice, ...]:
    """Return the slices of an evaluation.

    Args:
        size: "cpu", "gpu", or "tiny" for a smoke test.
        minutes: Time limit of a slice; None for the default of the size. On a GPU, a pair of runs to a target takes the
            whole limit, because the baseline trains for the remaining time. Nine minutes yield a bound on such a goal;
            a measurement takes an hour.
    """
    minutes = MINUTES[size] if minutes is None else minutes
    return tuple(_gpu(minutes) if size == "gpu" else {"cpu": _cpu, "tiny": _tiny}[size]())


def _races(
    folder: str,
    says: str,
    command: tuple[str, ...],
    pairs: tuple[int, ...],
    minutes: float,
    *needs: str,
    whole: bool,
) -> Iterator[Slice]:
    """Yield a comparison as slices with increasing numbers of pairs; the first also makes the plans.

    Args:
        folder: Folder of results.
        says: Description.
        command: Arguments of `trimtab compare`.
        pairs: Number of pairs after each slice.
        minutes: Minutes of a slice.
        needs: Requirements of every slice.
        whole: True to train to the end, False to time a few steps.
    """
    start = ("compare", *command, "--out", folder, *(("--to-end",) if whole else ("--steps", TIMED_STEPS)))
    for number in pairs:
        ran = (*start, "--pairs", str(number))
        yield Slice(f"{folder}-{number}", f"{says}: to race {number}", ran, f"{folder}/{RESULT}", minutes, needs)


def _growing(
    name: str, says: str, counts: tuple[int, ...], make: Callable[[int], tuple[str, ...]], **how: Any
) -> Iterator[Slice]:
    """Yield slices of a command with increasing counts."""
    for count in counts:
        yield Slice(f"{name}-{count}", f"{says}: {count}", (*make(count), "--out", name), **how)


_FIVE = (1, 2, 3, 4, 5)


# Minutes measured on two cores: a pair of all recipes, and a pair of an ablation.
_TOOK = {"cifar": (8.8, 2.5), "wikitext": (7.6, 7)}


def _ablations(
    name: str, says: str, of: tuple[str, ...], *how: str, minutes: float, needs: tuple[str, ...] = ()
) -> Iterator[Slice]:
    """Yield an ablation as slices with increasing numbers of pairs.

    Args:
        name: Folder of results.
        says: Description.
        of: Task, and options that select the plan.
        how: Options of the length; "--to-end" by default.
        minutes: Minutes of a slice.
        needs: Requirements of every slice.
    """

    def make(seeds: int) -> tuple[str, ...]:
        return "ablate", *of, "--pairs", str(seeds), *(how or ("--to-end",))

    rest = {"result": f"{name}/{RESULT}", "minutes": minutes, "needs": (*needs, "command ablate")}
    yield from _growing(name, says, _FIVE, make, **rest)


def _cpu() -> Iterator[Slice]:
    for kind, short, ablated, peers in (
        ("cifar", "cifar10_short", "cifar10_short", "paper,strong"),
        ("wikitext", "wikitext2_short", "wikitext2_ablate", "paper,strong,muon"),
    ):
        race, changes = _TOOK[kind]
        raced = (f"{TASKS}:{short}", "--against", peers)
        how = {"whole": True}
        yield from _races(f"{kind}-recipes", f"{short}, S, P1 to P3", raced, _FIVE, race, **how)
        task, brief = f"{TASKS}:{ablated}", ("--steps", TIMED_STEPS)
        says = f"{ablated}, races of each change"
        yield from _ablations(f"{kind}-ablate", says, (task,), *brief, minutes=changes)
    yield from _freed()
    yield from _judged()
    yield from _by_hand()
    yield from _phases()
    yield from _growing(
        "cifar-scale",
        "cifar10_resnet on 1 and 2 ranks of one thread, rounds",
        (1, 3, 5),
        lambda rounds: ("scale", "cifar10_resnet", "--ranks", "1,2", "--rounds", str(rounds), "--scaling", "weak"),
        result=f"cifar-scale/{SCALING}",
        minutes=4.7,
    )
    yield from _predictions()
    yield _monitor("digits_resnet", 4.4)
    record = ("train", "cifar10_resnet", "--steps", "100", "--record", "energy.jsonl", "--json")
    yield Slice("energy", "cifar10_resnet, joules of a run", record, "energy.jsonl", 2, ("meter",))


def _freed() -> Iterator[Slice]:
    """Yield comparisons of tuned plans, long enough to repay planning, and plans with more tuned settings.

    The longer comparisons stop the equivalent plan early. The last two, of text, only make plans, which contain the
    verdicts of short trainings.
    """
    only = ("--adapt", "learning-rate")
    freed = (f"{TASKS}:cifar10_half", *only)
    yield from _races("cifar-freed", "cifar10_half, S and F", freed, _FIVE, 9.8, whole=True)
    for kind, task, minutes, cap_s in (("cifar", "cifar10_long", 12.5, 120), ("wikitext", "wikitext2_long", 22, 150)):
        longer = (f"{TASKS}:{task}", *only, "--cap", str(cap_s), "--baseline-cap", "900")
        says, how = f"{task}, F beside S for {cap_s} s", {"whole": True}
        yield from _races(f"{kind}-long", says, longer, _FIVE, minutes, **how)
    for name, task, adapts in (
        ("digits", "digits_resnet", "learning-rate,schedule"),
        ("text", f"{TASKS}:repeated_gpt", "learning-rate,schedule,optimizer"),
    ):
        options = (task, "--adapt", adapts)
        says = f"{task.rpartition(':')[2]}, S and F by races: {adapts}"
        yield from _races(f"{name}-options", says, options, _FIVE, 3, whole=True)
    for name, adapts, minutes in (("dropout", "dropout", 18.7), ("muon", "learning-rate,schedule,optimizer", 15)):
        options = (f"{TASKS}:wikitext2_long", "--adapt", adapts)
        says = f"wikitext2_long, F by races: {adapts}"
        command = ("plan", *options, "--json")
        yield Slice(f"wikitext-{name}", says, command, f"wikitext-{name}.json", minutes, prints=True)


def _judged() -> Iterator[Slice]:
    """Yield quality on all test images, and the do-no-harm test.

    The do-no-harm test interleaves steps in a single process, because dozens of paired runs would be needed to show
    that a plan without changes does no harm.
    """
    judged = (f"{TASKS}:cifar10_judged",)
    yield from _races("cifar-judged", "cifar10_judged, S", judged, _FIVE, 6.7, whole=True)
    command = ("no_harm.py", "--json", "--tasks", "cifar10_resnet", "wikitext2_gpt")
    yield Slice("no-harm", "P2 and its plan, step by step", command, "no-harm.json", 9.3, prints=True)


def _by_hand() -> Iterator[Slice]:
    """Yield ablations of hand-written plans, which fix the changes to ablate.

    - "paper": the paper's components that a CPU supports. For images, accumulation takes four whole batches at four
      times the learning rate, because splitting a batch would change batch statistics.
    - "freed": tuned settings. Images train to the end, to measure quality and time to a target; text trains to the end
      only here, because it takes longer.
    - "half": half precision, the paper's largest component, on CPUs with bf16 instructions.
    """
    for folder, task, plan, how, minutes in (
        ("cifar-ablate-paper", "cifar10_ablate", "paper-images", (), 8.2),
        ("cifar-ablate-windows", "cifar10_ablate", "paper-windows", (), 4),
        ("cifar-ablate-freed", "cifar10_ablate", "freed-images", (), 8.2),
        ("wikitext-ablate-paper", "wikitext2_ablate", "paper-text", ("--steps", TIMED_STEPS), 6),
        ("wikitext-ablate-freed", "wikitext2_ablate", "freed-text", (), 14),
        ("text-ablate-regularised", "repeated_gpt", "regularised-text", (), 3.5),
        ("cifar-ablate-half", "cifar10_ablate", "half-images", (), 4),
        ("wikitext-ablate-half", "wikitext2_ablate", "half-text", (), 7.3),
    ):
        says, of = f"{task}, races of each change of {plan}", (f"{TASKS}:{task}", "--plan", f"{PLANS}/{plan}.json")
        needs = ("bf16",) if plan.startswith("half") else ()
        yield from _ablations(folder, says, of, *how, minutes=minutes, needs=needs)


def _phases() -> Iterator[Slice]:
    """Yield timings of step phases that comparisons do not contain: recomputation and communication of ranks."""
    paper = ("--plan", f"{PLANS}/paper-text.json")
    for folder, says, of in (
        ("wikitext-phases", "wikitext2_ablate, phases of paper-text", (f"{TASKS}:wikitext2_ablate", *paper)),
        (
            "wikitext-phases-ranks",
            "wikitext2_short, phases of paper-text on 2 ranks",  # twice the samples: the plan is per rank
            (f"{TASKS}:wikitext2_short", *paper, "--ranks", "2"),
        ),
        ("cifar-phases-ranks", "cifar10_short, phases of S on 2 ranks", (f"{TASKS}:cifar10_short", "--ranks", "2")),
        ("cifar-phases", "cifar10_short, phases of S", (f"{TASKS}:cifar10_short",)),
        ("wikitext-phases-s", "wikitext2_short, phases of S", (f"{TASKS}:wikitext2_short",)),
    ):
        yield _clocked(folder, says, of, 3)


def _clocked(folder: str, says: str, of: tuple[str, ...], minutes: float, *needs: str) -> Slice:
    result = f"{folder}/{PHASES}"
    return Slice(folder, says, ("phases", *of, "--rounds", "24", "--out", result), result, minutes, needs)


def _gpu(minutes: float) -> Iterator[Slice]:
    tasks = {"gpt2": "wikitext2_gpt2", "resnet": "cifar10_resnet50", "resnet7x7": "cifar10_resnet50_7x7"}
    longer = {"resnet": f"{GPU_TASKS}:resnet50_long"}
    timed = {kind: tuple(_timed(kind, task, longer.get(kind, task))) for kind, task in tasks.items()}
    for kind in ("gpt2", "resnet"):  # goals first, because GPU time is short
        yield from timed[kind][:1]
    yield from _limited()
    record = ("train", "wikitext2_gpt2", "--steps", "1500", "--record", "energy.jsonl", "--json")
    yield Slice("energy", "wikitext2_gpt2, joules of a run", record, "energy.jsonl", 4, ("gpu", "meter"))
    yield _monitor("wikitext2_gpt2", 6, "gpu")
    # 85% accuracy within a minute, planning included. Only the plan counts, so the other arms train for seconds.
    minute = (f"{GPU_TASKS}:resnet50_minute", "--adapt", "learning-rate,schedule")
    minute = (*minute, "--cap", f"{MINUTE_S}", "--baseline-cap", f"{MINUTE_S}")
    says = "resnet50_minute, F to 85%"
    yield from _races("resnet-minute", says, minute, _FIVE, 5, "gpu", whole=True)
    reference_s = max(CAP_S, (60 * minutes - 3 * CAP_S - AROUND_S) // EVALUATED)  # remaining after the control, S and F
    for kind, task in (("resnet", "resnet50_timed"), ("gpt2", "gpt2_timed")):
        # Caps on training time make a pair fit a slice. A target that is not reached by then yields a bound.
        caps = ("--cap", str(CAP_S), "--baseline-cap", f"{reference_s:g}")
        adapts = "learning-rate,schedule" + (",optimizer" if kind == "gpt2" else "")  # Muon supports matrices only
        freed = (f"{GPU_TASKS}:{task}", "--adapt", adapts, *caps)
        yield from _races(f"{kind}-freed", f"{task}, S and F to targets", freed, _FIVE, minutes, "gpu", whole=True)
    for kind, task in (("resnet", "resnet50_timed"), ("gpt2", "gpt2_timed")):
        yield from _whole(kind, task, minutes)
    for kind, task in tasks.items():
        yield from timed[kind][0 if kind == "resnet7x7" else 1 :]
        muon = ",muon" if kind == "gpt2" else ""
        raced = (task, "--against", f"strict,paper,strong{muon}")
        yield from _races(f"{kind}-recipes", f"{task}, S, P0 to P3, timed", raced, (2, 4, 6, 8), 4, "gpu", whole=False)
    for kind, task in (("resnet", "cifar10_resnet50"), ("gpt2", "wikitext2_gpt2")):
        ranks = (task, "--ranks", "2")
        yield _clocked(f"{kind}-phases-ranks", f"{task}, phases of S on 2 ranks", ranks, 6, "gpu", "2 gpus")
        says = f"{task}, races of each change"
        yield from _ablations(f"{kind}-ablate", says, (task,), "--steps", TIMED_STEPS, minutes=4, needs=("gpu",))
        for folder, ranks, most in ((f"{kind}-scale", "1,2,4", "4 gpus"), (f"{kind}-scale2", "1,2", "2 gpus")):
            scale = ("scale", task, "--ranks", ranks, "--scaling", "weak", "--rounds")
            yield from _growing(
                folder,
                f"{task} on {ranks} ranks, rounds",
                _FIVE,
                lambda rounds, scale=scale: (*scale, str(rounds)),
                result=f"{folder}/{SCALING}",
                minutes=6,
                needs=("gpu", most),
            )
    yield from _predictions()


def _timed(kind: str, task: str, planned: str) -> Iterator[Slice]:
    """Yield timed comparisons of the equivalent plan with P0.

    For images also with P0 in strict fp32, because torch computes convolutions in TF32 by default.
    """
    peers = () if kind == "gpt2" else ("--against", "strict")
    how = (planned, *peers)
    yield from _races(f"{kind}-timed", f"{task}, S and P0, timed", how, (5, 8), 3, "gpu", whole=False)


def _limited() -> Iterator[Slice]:
    """Yield comparisons of P2 with its plan under memory limits. The first also measures the peak memory of P2."""
    strong = ("wikitext2_gpt2", "--against", "strong", "--memory")
    arm = "gpt2-small/steps.json"
    limits = (("gpt2-small", "4.5GB", "4.5 GB", ""), ("gpt2-half", HALF + arm, "half of P2's memory", arm))
    for folder, limit, says, first in limits:
        needs = ("gpu", *filter(None, [first]))
        yield from _races(folder, f"GPT-2 within {says}", (*strong, limit), (3, 5), 5, *needs, whole=False)


def _whole(kind: str, task: str, minutes: float) -> Iterator[Slice]:
    """Yield the data of tables I to III: paired runs to targets of the paper's recipe and of each of its components.

    All arms except the controls have the same cap, chosen so that a slice fits its limit. The first pair of the
    ablation also measures the peak memory of each arm.
    """
    peers, plan = ("paper,strong,muon", "paper-gpt2") if kind == "gpt2" else ("paper,strong", "paper-resnet50")
    arms = 2 + peers.count(",") + 1  # plus the baseline and S
    cap_s = (60 * minutes - AROUND_S - 2 * CONTROL_S) // arms
    raced = (f"{GPU_TASKS}:{task}", "--against", peers, "--cap", f"{cap_s:g}")
    says = f"{task}, S, P0 to P3 to targets"
    yield from _races(f"{kind}-whole", says, raced, _FIVE, minutes, "gpu", whole=True)
    changes = 4 if kind == "gpt2" else 3
    cap_s = (60 * minutes - AROUND_S - COUNTED_S - 2 * CONTROL_S) // (
        3 + 2 * changes
    )  # 3: the loop twice, and the plan
    of = (f"{GPU_TASKS}:{task}", "--plan", f"{PLANS}/{plan}.json")
    says = f"{task}, the paper's components to targets"
    length = ("--to-end", "--cap", f"{cap_s:g}")
    yield from _ablations(f"{kind}-ablate-paper", says, of, *length, minutes=minutes, needs=("gpu",))


def _predictions() -> Iterator[Slice]:
    """Yield predictions for GPT-2 with 32 x 1,024 tokens on an H200, made on the current machine."""
    for name, limit in (("prediction", ()), ("prediction-small", ("--memory", "4.5GB"))):
        command = ("plan", "wikitext2_gpt2", "--device", "H200", *limit, "--json")
        says = f"GPT-2 at 32 x 1,024 on an H200, as told{' within 4.5 GB' if limit else ''}"
        yield Slice(name, says, command, f"{name}.json", 1, prints=True)


def _monitor(task: str, minutes: float, *needs: str) -> Slice:
    command = ("monitor.py", "--json", "--tasks", task)
    return Slice("monitor", f"{task}, the noise monitor's cost", command, "monitor.json", minutes, needs, prints=True)


def _tiny() -> Iterator[Slice]:
    quick = ("compare", "digits_resnet", "--quick", "--out", "digits")
    yield Slice("digits-1", "digits_resnet, one pair", (*quick, "--pairs", "1"), f"digits/{RESULT}", 1)
    yield Slice("digits-2", "digits_resnet, two pairs", (*quick, "--pairs", "2"), f"digits/{RESULT}", 1)
    record = ("train", "digits_resnet", "--steps", "4", "--record", "run.jsonl", "--json")
    yield Slice("run", "digits_resnet, a record", record, "run.jsonl", 1)
    yield next(_predictions())
