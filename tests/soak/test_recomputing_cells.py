"""Every cell of what recomputes."""

from __future__ import annotations

import pytest
from recomputing_cells import cells, check_cells


@pytest.mark.parametrize("cell", list(cells()), ids="-".join)
def test_a_cell_is_the_loop_that_keeps_all(tmp_path, cell):
    check_cells([cell], tmp_path)
