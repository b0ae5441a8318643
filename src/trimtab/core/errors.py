"""What can go wrong, as types.

    TrimtabError
    ├── UsageError            something given at the door does not fit; nothing was changed
    │   ├── ValueGivenError   a number, name or option is out of range      (also a ValueError)
    │   ├── ModelError        the model cannot be trained as it is
    │   ├── OptimizerError    the optimizer does not belong to the model
    │   ├── BatchError        a batch cannot be counted, split or moved
    │   ├── LossError         the loss function's result is not a loss
    │   ├── LoopError         a step of the loop was called out of order    (also a RuntimeError)
    │   └── FormatError       a file or mapping is not what its schema says (also a ValueError)
    │       ├── DamagedError  a file is not as it was written
    │       ├── InUseError    another run holds an output
    │       └── RecordExistsError  a file is where a record was to be made       (also a FileExistsError)
    ├── InfeasibleError       no plan meets the budget; names the nearest that exists
    ├── MemoryLimitError      memory ran out where no smaller micro-batch helps (also a MemoryError)
    ├── NonFiniteError        gradients are no numbers, and stay so             (also an ArithmeticError)
    ├── RankError             another rank of the job ended, or does not answer (also a RuntimeError)
    ├── SaveError             a checkpoint could not be written; what was there still is (also an OSError)
    ├── DataMissingError      a public data set is not on this machine; says how to get it
    └── DependencyError       an optional package is missing; names the extra   (also an ImportError)

Every message says what was given, what was expected and the way out.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar


class TrimtabError(Exception):
    """Base of all errors raised on purpose.

    Args:
        field: name of the argument, field or file the error is about.
        given: what was found, in words.
        expected: what would have been right.
        way_out: what to do about it.
        code: stable identifier of the cause, such as "batch.sizes_differ", for programs and tests. If none is passed,
            the class's own: with `field` it names the cause.
    """

    default_code: ClassVar[str] = "error"

    def __init__(self, field: str, *, given: str, expected: str, way_out: str = "", code: str = "") -> None:
        self.code = code or self.default_code
        self.field = field
        self.given = given
        self.expected = expected
        self.way_out = way_out
        message = f"{field}: given {given}; expected {expected}."
        super().__init__(f"{message} {way_out}" if way_out else message)

    def __reduce__(self) -> tuple[Any, ...]:  # so that an error survives the way back from a worker process
        texts = {"given": self.given, "expected": self.expected, "way_out": self.way_out}
        named = functools.partial(type(self), **texts, code=self.code)
        return named, (self.field,), self.__dict__


class UsageError(TrimtabError):
    """Something given at the door does not fit; nothing was changed."""

    default_code = "usage.invalid"


class ValueGivenError(UsageError, ValueError):
    """A number, name or option is out of range."""

    default_code = "value.invalid"


class ModelError(UsageError):
    """The model cannot be trained as it is."""

    default_code = "model.unsupported"


class OptimizerError(UsageError):
    """The optimizer does not belong to the model, or cannot do what is asked."""

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
    """A file or mapping is not what its schema says."""

    default_code = "format.invalid"


class DamagedError(FormatError):
    """A file is not as it was written: cut short, changed, missing, or one too many."""

    default_code = "format.damaged"


class InUseError(FormatError):
    """Another run holds an output. `pid`: of its process; None if unknown."""

    default_code = "file.in_use"

    pid: int | None = None


class RecordExistsError(FormatError, FileExistsError):
    """A file is there where a new record was to be."""

    default_code = "record.exists"


class InfeasibleError(TrimtabError):
    """No plan meets the budget."""

    default_code = "plan.infeasible"


class MemoryLimitError(TrimtabError, MemoryError):
    """Memory ran out where no smaller micro-batch helps."""

    default_code = "memory.exhausted"


class NonFiniteError(TrimtabError, ArithmeticError):
    """Gradients are no numbers, and stay so."""

    default_code = "training.nonfinite"


class RankError(TrimtabError, RuntimeError):
    """Another rank of the job ended, or does not answer. `is_echo`: whether another rank says the same."""

    default_code = "rank.failed"

    is_echo = False

    def echoed(self) -> RankError:
        """Return the error as one that another rank says."""
        self.is_echo = True
        return self


class SaveError(TrimtabError, OSError):
    """A checkpoint could not be written or deleted; those that were there still are."""

    default_code = "checkpoint.not_saved"


class DataMissingError(TrimtabError):
    """A public data set is not on this machine."""

    default_code = "data.missing"


class DependencyError(TrimtabError, ImportError):
    """An optional package is missing."""

    default_code = "dependency.missing"
