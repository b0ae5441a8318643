"""Expectation of trimtab's errors by their class, code and field: sentences may change, these may not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from trimtab.core.errors import TrimtabError


@contextlib.contextmanager
def raises(
    kind: type[Exception], *, code: str, field: str | None = None
) -> Iterator[pytest.ExceptionInfo[TrimtabError]]:
    """Fail unless an error of a class is raised.

    Args:
        code: `TrimtabError.code` of the error.
        field: `TrimtabError.field` of the error; None accepts every field.
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert isinstance(caught.value, TrimtabError)
    assert caught.value.code == code
    assert field is None or caught.value.field == field
