"""P0 in strict fp32: TF32 off everywhere while it lives, the modes put back, the maths the reference's."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from recipe_tasks import CPU, batches, cross_entropy, make_task, weights

from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.comparison.compare import StrictLoop
from trimtab.state.process_state import ProcessState, fp32_places


def modes() -> list[str]:
    return [place.fp32_precision for place in fp32_places()]


@pytest.fixture
def rounding():
    """A process that lets everything round."""
    before = ProcessState.capture()
    for place in fp32_places():
        place.fp32_precision = "tf32"
    yield ["tf32"] * len(fp32_places())
    before.restore()


def test_tf32_is_off_everywhere_in_a_step_and_back_after(rounding):
    seen = []

    def noting(model, batch):
        seen.append(modes())
        return cross_entropy(model, batch)

    task = make_task(loss_fn=noting)
    loop = StrictLoop(task, CPU)
    loop.step(batches(task))
    loop.close()
    assert seen == [["ieee"] * 6]
    assert modes() == rounding


def test_a_mode_that_is_right_already_is_left_to_follow_the_one_above_it():
    above, before = torch.backends.fp32_precision, ProcessState.capture()
    try:
        torch.backends.fp32_precision = "ieee"
        StrictLoop(make_task(), CPU).close()
        torch.backends.fp32_precision = "tf32"
        assert modes() == ["tf32"] * 6
    finally:
        torch.backends.fp32_precision = above
        before.restore()


def test_by_default_a_convolution_on_cuda_may_round():
    """Why there are two: as torch is found, its convolutions are not strict."""
    conv = torch.backends.cudnn.conv
    loop = ReferenceLoop(make_task(), CPU)
    assert conv.fp32_precision == "tf32"
    strict = StrictLoop(make_task(), CPU)
    assert conv.fp32_precision == "ieee"
    strict.close()
    loop.close()
    assert conv.fp32_precision == "tf32"


def test_a_strict_loop_put_aside_leaves_no_mode_to_another(rounding):
    """As a race does with its arms."""
    outside = ProcessState.capture()
    loop = StrictLoop(make_task(), CPU)
    inside = ProcessState.capture()
    outside.restore()
    assert modes() == rounding
    inside.restore()
    assert modes() == ["ieee"] * 6
    loop.close()
    assert modes() == rounding


@pytest.mark.parametrize("kind", ["mlp", "gpt", "resnet"])
def test_it_trains_as_the_reference_does_where_nothing_rounds(kind):
    task, found = make_task(kind), []
    for make in (ReferenceLoop, StrictLoop):
        torch.manual_seed(3)
        loop, data = make(task, CPU), batches(task)
        for _ in range(5):
            loop.step(data)
        loop.close()
        found.append(weights(loop.model))
    assert torch.equal(*found)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_only_fp32_can_be_strict(precision):
    before = modes()
    with raises(ValueGivenError, code="value.invalid", field="task.reference.precision"):
        StrictLoop(make_task(reference=Reference(precision)), CPU)
    assert modes() == before
