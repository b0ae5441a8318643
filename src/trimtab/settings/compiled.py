"""Execution mode of the model: eager, compiled as a whole or by block, captured as CUDA graphs, or both.

`planner.compile_policy` decides whether a mode saves more time than it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.choice import COMPILED_BLOCKS, GRAPHS, Compiled, Effect, Scalar, in_words, is_by_compiler, is_recorded
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.settings.base import LiveLoop, Setting, Undo

if TYPE_CHECKING:
    from trimtab.plans.plan import Plan


class CompiledModel(Setting):
    """How the model's forward and backward run."""

    name = "compiled"
    title = "compilation"
    default = False
    effect = Effect.ROUNDING
    summary = (
        "torch.compile of the model or of each kind of block, capture of forward and backward as CUDA graphs, or both."
    )
    values = "true, false, compiled_blocks, cuda_graphs or compiled_cuda_graphs"
    examples = (True, COMPILED_BLOCKS)
    is_searched = True
    value_type = bool | str

    def check(self, value: Scalar, plan: Plan) -> None:
        if isinstance(value, bool):
            return
        if value not in (COMPILED_BLOCKS, *GRAPHS):
            modes = ", ".join(map(repr, (COMPILED_BLOCKS, *GRAPHS)))
            raise FormatError(self.field, got=repr(value), expected=f"true, false, {modes}")
        if plan.num_ranks > 1 and is_recorded(value):
            raise ValueGivenError(
                self.field,
                got=f"{value!r} on {plan.num_ranks} ranks",
                expected=f"true, false or {COMPILED_BLOCKS!r} on several ranks",
                problem=f"plan.compiled={value!r} needs a single process, got {plan.num_ranks} ranks.",
                hint=f"Set compiled={is_by_compiler(value)}.",
            )

    def label(self, value: Scalar) -> str:
        return in_words(_mode(value))

    def phrase(self, value: Scalar) -> str:
        return f"the model {in_words(_mode(value)) or 'in eager mode'}"

    def require(self, loop: LiveLoop, value: Scalar) -> None:
        from trimtab.techniques.compiled_call import check_available, require_as_written, require_blocks

        require_as_written(_mode(value), loop.model)
        require_blocks(_mode(value), loop.model)
        check_available(_mode(value), loop.device)

    def apply(self, loop: LiveLoop, value: Scalar) -> Undo | None:
        from trimtab.techniques.compiled_call import CompiledCall

        loop.compiled_call = CompiledCall(loop.called, loop.note_forward, _mode(value))
        undo: Undo = loop.compiled_call.undo
        return undo


def _mode(value: Scalar) -> Compiled:
    return value if isinstance(value, str) else bool(value)
