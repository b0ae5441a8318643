"""Exception classes.

    TrimtabError
    ├── UsageError            invalid argument; no state was modified
    │   ├── ValueGivenError   a number, name or option is out of range      (also a ValueError)
    │   ├── ModelError        the model cannot be trained
    │   ├── OptimizerError    the optimizer does not belong to the model
    │   ├── BatchError        a batch cannot be counted, split or moved
    │   ├── LossError         the loss function's result is not a loss
    │   ├── LoopError         a step of the loop was called out of order    (also a RuntimeError)
    │   └── FormatError       a file or mapping does not match its schema   (also a ValueError)
    │       ├── DamagedError  a file was changed or truncated
    │       ├── InUseError    another run holds an output
    │       └── RecordExistsError  the file of a new record exists already       (also a FileExistsError)
    ├── InfeasibleError       no plan meets the budget; names the nearest one
    ├── MemoryLimitError      memory ran out and no smaller micro-batch helps   (also a MemoryError)
    ├── NonFiniteError        gradients stay NaN or infinite                    (also an ArithmeticError)
    ├── RankError             another rank of the job ended or does not respond (also a RuntimeError)
    ├── SaveError             a checkpoint could not be written; older ones are intact (also an OSError)
    ├── DataMissingError      a public data set is not on this machine; explains how to get it
    └── DependencyError       an optional package is missing; names the extra   (also an ImportError)

Every message names the value found, the expected value and a remedy.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar


class TrimtabError(Exception):
    """Base class of all exceptions that trimtab raises on purpose.

    The message is "<field>: got <got>; expected <expected>. <hint>", or "<problem> <hint>" for errors that a wrong
    value does not explain.

    Args:
        field: name of the argument, field or file.
        got: description of the value found.
        expected: description of a valid value.
        problem: full sentence that replaces the comparison of `got` with `expected` in the message.
        hint: full sentence with a remedy.
        code: stable identifier of the cause, such as "batch.sizes_differ", for programs and tests; by default the
            code of the class.
    """

    default_code: ClassVar[str] = "error"

    def __init__(
        self, field: str, *, got: str = "", expected: str = "", problem: str = "", hint: str = "", code: str = ""
    ) -> None:
        self.code = code or self.default_code
        self.field = field
        self.got = got
        self.expected = expected
        self.problem = problem
        self.hint = hint
        message = problem or f"{field}: got {got}; expected {expected}."
        super().__init__(f"{message} {hint}" if hint else message)

    @property
    def reason(self) -> str:
        """The cause as a clause for another sentence: `problem` without its period, otherwise `got`."""
        return self.problem.removesuffix(".") or self.got

    def __reduce__(self) -> tuple[Any, ...]:  # Pickles with keyword arguments, so that an error can cross processes.
        texts = {"got": self.got, "expected": self.expected, "problem": self.problem, "hint": self.hint}
        named = functools.partial(type(self), **texts, code=self.code)
        return named, (self.field,), self.__dict__


class UsageError(TrimtabError):
    """Invalid argument. No state was modified."""

    default_code = "usage.invalid"


class ValueGivenError(UsageError, ValueError):
    """A number, name or option is out of range."""

    default_code = "value.invalid"


class ModelError(UsageError):
    """The model cannot be trained."""

    default_code = "model.unsupported"


class OptimizerError(UsageError):
    """The optimizer does not belong to the model, or does not support the request."""

    default_code = "optimizer.unsupported"


class BatchError(UsageError):
    """A batch cannot be counted, split or moved."""

    default_code = "batch.invalid"


class LossError(UsageError):
    """The loss function's result is not a loss."""

    default_code = "loss.invalid"


class LoopError(UsageError, RuntimeError):
    """A step of the loop was called out of order."""

    default_code = "loop.out_of_order"


class FormatError(UsageError, ValueError):
    """A file or mapping does not match its schema."""

    default_code = "format.invalid"


class DamagedError(FormatError):
    """A file was changed or truncated, is missing, or is unexpected."""

    default_code = "format.damaged"


class InUseError(FormatError):
    """Another run holds an output. `pid` is its process id; None if unknown."""

    default_code = "file.in_use"

    pid: int | None = None


class RecordExistsError(FormatError, FileExistsError):
    """The file of a new record exists already."""

    default_code = "record.exists"


class InfeasibleError(TrimtabError):
    """No plan meets the budget."""

    default_code = "plan.infeasible"


class MemoryLimitError(TrimtabError, MemoryError):
    """Memory ran out, and no smaller micro-batch helps."""

    default_code = "memory.exhausted"


class NonFiniteError(TrimtabError, ArithmeticError):
    """Gradients stay NaN or infinite."""

    default_code = "training.nonfinite"


class RankError(TrimtabError, RuntimeError):
    """Another rank of the job ended or does not respond.

    Attributes:
        is_echo: True if this rank only repeats another rank's error.
        ranks: ranks that ended or do not respond; empty if unknown.
        cause: class name of the error that ended the first of `ranks`; "" if unknown.
    """

    default_code = "rank.failed"

    is_echo = False
    ranks: tuple[int, ...] = ()
    cause = ""

    def echoed(self) -> RankError:
        """Mark the error as a repetition of another rank's error, and return it."""
        self.is_echo = True
        return self


class SaveError(TrimtabError, OSError):
    """A checkpoint could not be written or deleted; existing checkpoints are intact."""

    default_code = "checkpoint.not_saved"


class DataMissingError(TrimtabError):
    """A public data set is not on this machine."""

    default_code = "data.missing"


class DependencyError(TrimtabError, ImportError):
    """An optional package is missing."""

    default_code = "dependency.missing"
