"""TF32 for as long as a run is open: torch's older and newer flags say the same, and stand afterwards as before."""

from __future__ import annotations

import pytest
import torch

from trimtab.state.process_state import ProcessState
from trimtab.techniques.mixed_precision import tf32


def told() -> tuple[object, ...]:
    """Return what is read by whoever asks torch: the older flags raise where the newer ones say another thing."""
    places = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    older = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return *older, *(place.fp32_precision for place in places)


@pytest.fixture(params=[True, False], ids=["convolutions in TF32", "convolutions in fp32"])
def before(request):
    torch.backends.cudnn.allow_tf32 = request.param
    yield told()
    torch.backends.cudnn.allow_tf32 = True  # torch's own default


def test_older_and_newer_flags_agree_while_it_is_held_and_stand_afterwards(before):
    undo = tf32.hold()
    assert told()[:5] == ("high", True, True, "tf32", "tf32")
    undo()
    assert told() == before


def test_where_the_newer_flags_were_set_before_they_alone_are_set(before):
    place = torch.backends.cuda.matmul
    place.fp32_precision = "tf32"
    try:
        undo = tf32.hold()
        assert (place.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == ("tf32", "tf32")
        undo()
        assert place.fp32_precision == "tf32"
    finally:
        place.fp32_precision = "none"
    assert told() == before


def test_a_loop_in_turn_with_one_in_tf32_has_its_own_modes(before):
    """As arms of a race do: each goes on in its state, whatever the other holds."""
    plain = ProcessState.capture()
    undo = tf32.hold()
    held = ProcessState.capture()
    plain.restore()
    assert told() == before
    held.restore()
    assert told()[:5] == ("high", True, True, "tf32", "tf32")
    undo()
    assert told() == before
