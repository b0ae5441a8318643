"""The paper's evaluation as a list of slices: commands that end within minutes and go on where the last stopped.

Slices of one folder run in their order, each a little longer than the one before: `trimtab compare` with one race more
goes on with those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.experiments.phase_page import FILE as PHASES

TASKS, GPU_TASKS = "{tasks}", "{gpu tasks}"  # stand for the files of `evaluation_tasks` and `evaluation_gpu_tasks`
PLANS = "{plans}"  # stands for the folder of plans that are written by hand
MINUTES = {"cpu": 25.0, "gpu": 9.0, "tiny": 9.0}  # that a slice may take
CAP_S, AROUND_S = 90, 130  # of training of an arm in a race to a target; of a race's start and its evaluations
COUNTED_S = 50  # of counting what each arm of an ablation holds, on its first race
MINUTE_S = 60  # of training, where a minute is all that a target may take
EVALUATED = 1.15  # of a long race, its seconds with evaluations: of images 1.2 s in 12, of text 1.6 in 32
CONTROL_S = 60  # that an arm trains for at the most which runs once more, or for its throughput alone
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
            "bf16" of the processor, "command NAME", or a file that an earlier slice leaves.
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
    def writes_file(self) -> bool:
        """Whether it writes a file where it is told to, and makes no folder for it."""
        return self.command[0] == "phases"

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


def slices(size: str, minutes: float | None = None) -> tuple[Slice, ...]:
    """Return the evaluation at a size: "cpu", "gpu", or "tiny", which shows that it runs and measures nothing.

    Args:
        minutes: that a slice may take, and a race to a target on a GPU takes: its reference trains for all that the
            other arms leave. In nine minutes such a goal can be bounded; to be shown it takes an hour. None: as long as
            is usual at the size.
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
    plans_minutes: float | None = None,
) -> Iterator[Slice]:
    """Yield a comparison as plans first, then as so many races more at a time.

    Args:
        whole: whether they run to their end, or time a few steps. minutes: of what a further slice runs.
        plans_minutes: of plans; None: as many.
    """
    report = f"{folder}/report.json"
    start = ("compare", *command, "--out", folder)
    plans, first = (*start, "--pairs", "1", "--whole", "0"), minutes if plans_minutes is None else plans_minutes
    yield Slice(f"{folder}-plans", f"{says}: plans, memory and phases", plans, report, first, needs)
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


# On two cores, as measured: a race of all recipes and the plans before it, a race of changes.
_TOOK = {"cifar": (8.8, 5.1, 2.5), "wikitext": (7.6, 10.2, 7)}


def _ablations(
    name: str, says: str, of: tuple[str, ...], *how: str, minutes: float, needs: tuple[str, ...] = ()
) -> Iterator[Slice]:
    """Yield an ablation of so many races more at a time.

    Args:
        of: the task, and what of it is ablated. how: options beside the number of races.
    """

    def make(seeds: int) -> tuple[str, ...]:
        return "ablate", *of, "--seeds", str(seeds), *how

    rest = {"result": f"{name}/report.json", "minutes": minutes, "needs": (*needs, "command ablate")}
    yield from _growing(name, says, _FIVE, make, **rest)


def _cpu() -> Iterator[Slice]:
    for kind, short, ablated, peers in (
        ("cifar", "cifar10_short", "cifar10_short", "paper,strong"),
        ("wikitext", "wikitext2_short", "wikitext2_ablate", "paper,strong,muon"),
    ):
        race, plans, changes = _TOOK[kind]
        raced = (f"{TASKS}:{short}", "--adapt", "none", "--against", peers)
        how = {"whole": True, "plans_minutes": plans}
        yield from _races(f"{kind}-recipes", f"{short}, S, P1 to P3", raced, _FIVE, race, **how)
        task, brief = f"{TASKS}:{ablated}", ("--whole", "0")
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
        result="cifar-scale/scaling.json",
        minutes=4.7,
    )
    yield from _predictions()
    yield _monitor("digits_resnet", 4.4)
    record = ("train", "cifar10_resnet", "--steps", "100", "--record", "energy.jsonl", "--json")
    yield Slice("energy", "cifar10_resnet, joules of a run", record, "energy.jsonl", 2, ("meter",))


def _freed() -> Iterator[Slice]:
    """Yield races of tier F, which pay its planning back where they are long enough; and plans that try more for it.

    In the longer ones tier S is stopped early. Of text what short trainings decided stands in the plans: none is raced.
    """
    only = ("--no-peers", "--adapt", "learning-rate")
    freed = (f"{TASKS}:cifar10_half", *only)
    yield from _races("cifar-freed", "cifar10_half, S and F", freed, _FIVE, 9.8, whole=True, plans_minutes=2.6)
    for kind, task, minutes, cap_s in (("cifar", "cifar10_long", 12.5, 120), ("wikitext", "wikitext2_long", 22, 150)):
        longer = (f"{TASKS}:{task}", *only, "--cap", str(cap_s), "--reference-cap", "900")
        says, how = f"{task}, F beside S for {cap_s} s", {"whole": True, "plans_minutes": 5}
        yield from _races(f"{kind}-long", says, longer, _FIVE, minutes, **how)
    for name, task, adapts in (
        ("digits", "digits_resnet", "learning-rate,schedule"),
        ("text", f"{TASKS}:repeated_gpt", "learning-rate,schedule,optimizer"),
    ):
        options = (task, "--no-peers", "--adapt", adapts)
        says = f"{task.rpartition(':')[2]}, S and F by races: {adapts}"
        yield from _races(f"{name}-options", says, options, _FIVE, 3, whole=True, plans_minutes=4.3)
    for name, adapts, minutes in (("dropout", "dropout", 18.7), ("muon", "learning-rate,schedule,optimizer", 15)):
        options = (f"{TASKS}:wikitext2_long", "--no-peers", "--adapt", adapts)
        says = f"wikitext2_long, F by races: {adapts}"
        yield from _races(f"wikitext-{name}", says, options, (), minutes, whole=False)


def _judged() -> Iterator[Slice]:
    """Yield what short races leave open: quality by all test images, and no harm.

    Harm is looked for step by step, in one process: a plan that changes nothing takes dozens of races to be shown to.
    """
    judged = (f"{TASKS}:cifar10_judged", "--no-peers", "--adapt", "none")
    yield from _races("cifar-judged", "cifar10_judged, S", judged, _FIVE, 6.7, whole=True, plans_minutes=2.7)
    command = ("no_harm.py", "--json", "--tasks", "cifar10_resnet", "wikitext2_gpt")
    yield Slice("no-harm", "P2 and its plan, step by step", command, "no-harm.json", 9.3, prints=True)


def _by_hand() -> Iterator[Slice]:
    """Yield ablations of plans that are written by hand: one of ours may make other changes, or none.

    Of the paper's components those that a processor has; of images, whose batch statistics a batch that is cut would
    change, accumulation is of four whole batches, at four times the rate. Of images to the end of training, as they and
    what is freed show in quality and in time to a target; of text what is freed alone, as its races take longer. With
    half precision, where a processor has it, both are: the paper's largest component, and the others of such plans.
    """
    for folder, task, plan, how, minutes in (
        ("cifar-ablate-paper", "cifar10_ablate", "paper-images", (), 8.2),
        ("cifar-ablate-windows", "cifar10_ablate", "paper-windows", (), 4),
        ("cifar-ablate-freed", "cifar10_ablate", "freed-images", (), 8.2),
        ("wikitext-ablate-paper", "wikitext2_ablate", "paper-text", ("--whole", "0"), 6),
        ("wikitext-ablate-freed", "wikitext2_ablate", "freed-text", (), 14),
        ("text-ablate-regularised", "repeated_gpt", "regularised-text", (), 3.5),
        ("cifar-ablate-half", "cifar10_ablate", "half-images", (), 4),
        ("wikitext-ablate-half", "wikitext2_ablate", "half-text", (), 7.3),
    ):
        says, of = f"{task}, races of each change of {plan}", (f"{TASKS}:{task}", "--plan", f"{PLANS}/{plan}.json")
        needs = ("bf16",) if plan.startswith("half") else ()
        yield from _ablations(folder, says, of, *how, minutes=minutes, needs=needs)


def _phases() -> Iterator[Slice]:
    """Yield what a step's phases take that no race has: what is computed again, and what ranks tell one another."""
    paper = ("--plan", f"{PLANS}/paper-text.json")
    for folder, says, of in (
        ("wikitext-phases", "wikitext2_ablate, phases of paper-text", (f"{TASKS}:wikitext2_ablate", *paper)),
        (
            "wikitext-phases-ranks",
            "wikitext2_short, phases of paper-text on 2 ranks",  # of twice the rows: the plan is of a rank's
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
    for kind in ("gpt2", "resnet"):  # what the goals ask for first: a turn on a GPU is short
        yield from timed[kind][:2]
    yield from _limited()
    record = ("train", "wikitext2_gpt2", "--steps", "1500", "--record", "energy.jsonl", "--json")
    yield Slice("energy", "wikitext2_gpt2, joules of a run", record, "energy.jsonl", 4, ("gpu", "meter"))
    yield _monitor("wikitext2_gpt2", 6, "gpu")
    # The minute that 85% may take, planning counted: of the plan alone, so that the others train for some seconds.
    minute = (f"{GPU_TASKS}:resnet50_minute", "--no-peers", "--adapt", "learning-rate,schedule")
    minute = (*minute, "--cap", f"{MINUTE_S}", "--reference-cap", f"{MINUTE_S}")
    says = "resnet50_minute, F to 85%"
    yield from _races("resnet-minute", says, minute, _FIVE, 5, "gpu", whole=True)
    reference_s = max(CAP_S, (60 * minutes - 3 * CAP_S - AROUND_S) // EVALUATED)  # beside the control, S and F
    for kind, task in (("resnet", "resnet50_timed"), ("gpt2", "gpt2_timed")):
        # An arm's seconds are capped so that a race fits a slice; what is not reached by then is a bound.
        caps = ("--cap", str(CAP_S), "--reference-cap", f"{reference_s:g}")
        adapts = "learning-rate,schedule" + (",optimizer" if kind == "gpt2" else "")  # Muon is of matrices alone
        freed = (f"{GPU_TASKS}:{task}", "--no-peers", "--adapt", adapts, *caps)
        yield from _races(f"{kind}-freed", f"{task}, S and F to targets", freed, _FIVE, minutes, "gpu", whole=True)
    for kind, task in (("resnet", "resnet50_timed"), ("gpt2", "gpt2_timed")):
        yield from _whole(kind, task, minutes)
    for kind, task in tasks.items():
        yield from timed[kind][0 if kind == "resnet7x7" else 2 :]
        muon = ",muon" if kind == "gpt2" else ""
        raced = (task, "--adapt", "none", "--against", f"strict,paper,strong{muon}")
        yield from _races(f"{kind}-recipes", f"{task}, S, P0 to P3, timed", raced, (2, 4, 6, 8), 4, "gpu", whole=False)
    for kind, task in (("resnet", "cifar10_resnet50"), ("gpt2", "wikitext2_gpt2")):
        ranks = (task, "--ranks", "2")
        yield _clocked(f"{kind}-phases-ranks", f"{task}, phases of S on 2 ranks", ranks, 6, "gpu", "2 gpus")
        says = f"{task}, races of each change"
        yield from _ablations(f"{kind}-ablate", says, (task,), "--whole", "0", minutes=4, needs=("gpu",))
        for folder, ranks, most in ((f"{kind}-scale", "1,2,4", "4 gpus"), (f"{kind}-scale2", "1,2", "2 gpus")):
            scale = ("scale", task, "--ranks", ranks, "--scaling", "weak", "--rounds")
            yield from _growing(
                folder,
                f"{task} on {ranks} ranks, rounds",
                _FIVE,
                lambda rounds, scale=scale: (*scale, str(rounds)),
                result=f"{folder}/scaling.json",
                minutes=6,
                needs=("gpu", most),
            )
    yield from _predictions()


def _timed(kind: str, task: str, planned: str) -> Iterator[Slice]:
    """Yield a plan of tier S and P0, timed; of images P0 in strict fp32 too, whose convolutions torch has in TF32."""
    peers = ("--no-peers",) if kind == "gpt2" else ("--against", "strict")
    how = (planned, "--adapt", "none", *peers)
    yield from _races(f"{kind}-timed", f"{task}, S and P0, timed", how, (5, 8), 3, "gpu", whole=False)


def _limited() -> Iterator[Slice]:
    """Yield P2 and its plan under limits on memory; what P2 takes itself, the first of them finds."""
    strong = ("wikitext2_gpt2", "--adapt", "none", "--against", "strong", "--memory")
    arm = "gpt2-small/arm-strong.json"
    limits = (("gpt2-small", "4.5GB", "4.5 GB", ""), ("gpt2-half", HALF + arm, "half of P2's memory", arm))
    for folder, limit, says, first in limits:
        needs = ("gpu", *filter(None, [first]))
        yield from _races(folder, f"GPT-2 within {says}", (*strong, limit), (3, 5), 5, *needs, whole=False)


def _whole(kind: str, task: str, minutes: float) -> Iterator[Slice]:
    """Yield what tables I to III are made of: the paper's recipe, and each of its components, raced to a target.

    All arms but the controls train for as long, so that a slice ends in its minutes. On the first race of components
    what each arm holds is counted too.
    """
    peers, plan = ("paper,strong,muon", "paper-gpt2") if kind == "gpt2" else ("paper,strong", "paper-resnet50")
    arms = 2 + peers.count(",") + 1  # the reference and S beside them
    cap_s = (60 * minutes - AROUND_S - 2 * CONTROL_S) // arms
    raced = (f"{GPU_TASKS}:{task}", "--adapt", "none", "--against", peers, "--cap", f"{cap_s:g}")
    says = f"{task}, S, P0 to P3 to targets"
    yield from _races(f"{kind}-whole", says, raced, _FIVE, minutes, "gpu", whole=True)
    changes = 4 if kind == "gpt2" else 3
    cap_s = (60 * minutes - AROUND_S - COUNTED_S - 2 * CONTROL_S) // (
        3 + 2 * changes
    )  # beside the loop twice and the plan
    of = (f"{GPU_TASKS}:{task}", "--plan", f"{PLANS}/{plan}.json")
    says = f"{task}, the paper's components to targets"
    yield from _ablations(f"{kind}-ablate-paper", says, of, "--cap", f"{cap_s:g}", minutes=minutes, needs=("gpu",))


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
