"""Execution modes of a model: eager or compiled, each also as CUDA graphs."""

from __future__ import annotations

from trimtab.core.errors import FormatError, ValueGivenError

CUDA_GRAPHS, COMPILED_GRAPHS = "cuda_graphs", "compiled_cuda_graphs"
GRAPHS = (CUDA_GRAPHS, COMPILED_GRAPHS)
Compiled = bool | str


def is_recorded(value: object) -> bool:
    """Return True if kernels are captured and replayed as CUDA graphs."""
    return value in GRAPHS


def is_by_compiler(value: object) -> bool:
    """Return True if `torch.compile` compiles the model."""
    return value is True or value == COMPILED_GRAPHS


def in_words(value: Compiled) -> str:
    """Return the mode as text for a list of settings; "" for eager."""
    words = ["compiled"] * is_by_compiler(value) + ["with CUDA graphs"] * is_recorded(value)
    return ", ".join(words)


def check_compiled(value: object, *, num_ranks: int) -> None:
    """Raise unless a value is a valid execution mode for the number of ranks.

    Raises:
        FormatError: an unknown mode.
        ValueGivenError: CUDA graphs on several ranks.
    """
    if isinstance(value, bool):
        return
    if value not in GRAPHS:
        ways = ", ".join(map(repr, GRAPHS))
        raise FormatError("plan.compiled", got=repr(value), expected=f"true, false, {ways}")
    if num_ranks > 1:
        raise ValueGivenError(
            "plan.compiled",
            got=f"{value!r} on {num_ranks} ranks",
            expected="true or false on several ranks",
            problem=f"plan.compiled={value!r} needs a single process, got {num_ranks} ranks: communication between "
            "ranks is not captured in CUDA graphs.",
            hint=f"Set compiled={is_by_compiler(value)}, which uses no CUDA graphs.",
        )
