"""Bandwidth between a device and pinned host memory, measured by simulated copies."""

from __future__ import annotations

import pytest
from late_copies import LateCopies
from raising import raises

from trimtab.core.errors import ValueGivenError
from trimtab.core.hardware import HostLink
from trimtab.techniques.host_transfers import measure_host_link


def test_each_direction_is_timed_alone_after_a_first_copy():
    copies, timed = LateCopies(), []

    def seconds_of(copy):
        timed.append(copy)
        copy()
        return (0.5, 0.25)[len(timed) - 1]

    found = measure_host_link(copies, seconds_of, num_bytes=1000)
    assert found == HostLink(2000.0, 4000.0)
    assert len(timed) == 2


@pytest.mark.parametrize("name", ["to_host_bytes_s", "to_device_bytes_s"])
def test_a_bandwidth_is_positive(name):
    with raises(ValueGivenError, code="value.invalid", field=f"host_link.{name}"):
        HostLink(**{"to_host_bytes_s": 1.0, "to_device_bytes_s": 1.0} | {name: 0.0})
