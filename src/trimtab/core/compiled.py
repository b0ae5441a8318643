"""How a plan has the model run: as it is, compiled, and of either its kernels recorded and launched whole."""

from __future__ import annotations

from trimtab.core.errors import FormatError, ValueGivenError

CUDA_GRAPHS, COMPILED_GRAPHS = "cuda_graphs", "compiled_cuda_graphs"
GRAPHS = (CUDA_GRAPHS, COMPILED_GRAPHS)
Compiled = bool | str


def is_recorded(value: object) -> bool:
    """Return whether kernels are recorded and launched whole."""
    return value in GRAPHS


def is_by_compiler(value: object) -> bool:
    """Return whether torch compiles the model."""
    return value is True or value == COMPILED_GRAPHS


def in_words(value: Compiled) -> str:
    """Return it for a list of settings; nothing for a model as it is."""
    words = ["compiled"] * is_by_compiler(value) + ["as CUDA graphs"] * is_recorded(value)
    return ", ".join(words)


def check_compiled(value: object, *, num_ranks: int) -> None:
    """Raise for what is no way to run a model, or none that the rest of a plan allows.

    Raises:
        FormatError: no such way. ValueGivenError: graphs on several ranks.
    """
    if isinstance(value, bool):
        return
    if value not in GRAPHS:
        ways = ", ".join(map(repr, GRAPHS))
        raise FormatError("plan.compiled", given=repr(value), expected=f"true, false, {ways}")
    if num_ranks > 1:
        raise ValueGivenError(
            "plan.compiled",
            given=f"{value!r} on {num_ranks} ranks",
            expected="one process: what ranks send between kernels is not recorded",
            way_out=f"compiled={is_by_compiler(value)} does without graphs.",
        )
