"""How much of a comparison is run, as it was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.racing.peer_arms import PEERS, USUAL_PEERS

# What tier F may change where nothing else was asked for.
USUAL_ADAPT = ("learning_rate",)


@dataclass(frozen=True)
class Settings:
    """How much to run.

    Args:
        num_pairs: races, one per seed; 5 for a verdict, 8 for a claim.
        whole_pairs: how many of them run to the end of the budget (None: all); the others run a few steps an arm, which
            is enough for throughput and costs a tenth.
        quick: short arms, and no more pairs than fit about two minutes with the planning (one at the least).
        adapt: what a tier-F plan may change, which is then made and raced; (): none is. peers: whether other recipes
            take part. against: which, by name, each of which the task must have; None: the usual ones that it has.
        cap_s: training seconds after which an arm is censored. reference_cap_s: after which the reference is; None: as
            any other. What is to be many times as fast is not held up by what it is raced against, nor cut off with it.
    """

    num_pairs: int = 5
    whole_pairs: int | None = None
    quick: bool = False
    adapt: tuple[str, ...] = USUAL_ADAPT
    peers: bool = True
    cap_s: float = math.inf
    against: tuple[str, ...] | None = None
    reference_cap_s: float | None = None

    def __post_init__(self) -> None:
        checks.integer("pairs", self.num_pairs, high=1000)
        for name in self.against or ():
            checks.one_of("against", name, PEERS)
        if self.whole_pairs is not None:
            checks.integer("whole", self.whole_pairs, low=0, high=self.num_pairs)
        if self.quick and (self.whole_pairs != 0 or self.adapt or self.peers):
            raise ValueGivenError(
                "quick",
                given="whole pairs, tier F or peers with it",
                expected="throughput and memory of tier S alone",
                way_out="Leave out --quick, or --whole, --adapt and --peers.",
            )
        if not self.cap_s > 0:
            raise ValueGivenError("cap", given=f"{self.cap_s:g}", expected="seconds above zero")
        if self.reference_cap_s is not None and not self.reference_cap_s >= self.cap_s:
            given, expected = f"{self.reference_cap_s:g}", f"no less than --cap, {self.cap_s:g}"
            raise ValueGivenError("reference_cap", given=given, expected=expected)

    @property
    def raced(self) -> tuple[str, ...]:
        """The peers that take part."""
        asked = USUAL_PEERS if self.against is None else self.against
        return asked if self.peers else ()
