"""Settings that a plan applies: TF32 flags, the channels_last layout that oneDNN corrupts, chunks of the loss head."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from small_loops import sgd
from torch import nn

import trimtab
from trimtab.core.errors import ModelError
from trimtab.losses import Summed
from trimtab.nn import LossHead
from trimtab.settings.loss_chunk import count_head_tokens, loss_heads
from trimtab.state.process_state import ProcessState
from trimtab.techniques.memory_format import channels_last_hazard
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
    plain = ProcessState.capture()
    undo = tf32.hold()
    held = ProcessState.capture()
    plain.restore()
    assert told() == before
    held.restore()
    assert told()[:5] == ("high", True, True, "tf32", "tf32")
    undo()
    assert told() == before


def convolution(channels: int, *, kernel: int = 1, stride: int = 2) -> nn.Sequential:
    conv = nn.Conv2d(channels, 8, kernel, stride=stride, padding=kernel // 2)
    return nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(2))


def test_only_strided_1x1_convolutions_over_few_channels_are_a_hazard() -> None:
    assert "4 input channels" in channels_last_hazard(convolution(4))
    for safe in (convolution(16), convolution(1), convolution(4, kernel=3), convolution(4, stride=1)):
        assert channels_last_hazard(safe) == ""


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.usefixtures("brief_trials")
def test_a_plan_by_hand_is_refused_and_planning_does_not_try_it() -> None:
    torch.manual_seed(0)
    model = convolution(4)
    batch = torch.randn(8, 4, 6, 6), torch.randint(0, 2, (8,))
    model(batch[0])
    optimizer = sgd(model)
    with raises(ModelError, code="memory_layout.unsafe", field="plan.memory_layout"):
        trimtab.start(model, optimizer, trimtab.Plan.fixed(8, memory_layout="channels_last"))
    profile = trimtab.profile(model, optimizer, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batch)
    assert all(trial.candidate.memory_layout == "keep" for trial in profile.trials)
    assert profile.loop.layout_hazard


class TwoHeads(nn.Module):
    """Shares its body; one head has chunks of its own already."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.first = LossHead(8, 16)
        self.second = LossHead(8, 32, chunk_rows=3)

    def forward(self, x, targets):
        features = self.body(x)
        first, second = self.first.loss(features, targets), self.second.loss(features, targets)
        return first[0] + second[0], first[1]


def loop():
    torch.manual_seed(0)
    model = TwoHeads()
    return model, sgd(model), (torch.randn(8, 4), torch.randint(16, (8,)))


def loss_fn(model, batch):
    return Summed(*model(*batch))


def test_heads_are_chunked_only_while_a_run_with_chunks_is_open():
    model, optimizer, batch = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8, loss_chunk=2)) as run:
        assert [head.chunk_rows for head in loss_heads(model)] == [2, 2]
        run.train_step(run.window(batch), loss_fn)
    assert (model.first.chunk_rows, model.second.chunk_rows) == (None, 3)
    model, optimizer, _ = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8)):
        assert (model.first.chunk_rows, model.second.chunk_rows) == (None, 3)
    model, optimizer, _ = loop()
    plan = trimtab.Plan.fixed(8, loss_chunk=2, memory_layout="channels_last", precision="tf32")
    with pytest.raises(trimtab.errors.TrimtabError):
        trimtab.start(model, optimizer, plan)  # tf32 on a CPU
    assert (model.first.chunk_rows, model.second.chunk_rows) == (None, 3)


def test_a_model_without_a_head_is_refused():
    model = nn.Linear(4, 2)
    with raises(ModelError, code="loss_chunk.no_head", field="plan.loss_chunk"):
        trimtab.start(model, sgd(model), trimtab.Plan.fixed(8, loss_chunk=2))


def test_tokens_of_shared_heads_are_counted_once_and_nothing_stays():
    model, _, _ = loop()
    model.again = model.first
    assert loss_heads(model) == (model.first, model.second)
    model, _, batch = loop()
    with count_head_tokens(model) as seen:
        watched_loss = loss_fn(model, batch)
        loss_fn(model, batch)
    assert seen == {model.first: 16, model.second: 16}
    assert "loss" not in vars(model.first)
    assert torch.equal(watched_loss.loss_sum, loss_fn(model, batch).loss_sum)
    model, _, _ = loop()
    with pytest.raises(RuntimeError, match="mine"), count_head_tokens(model):
        raise RuntimeError("mine")
    assert "loss" not in vars(model.first)
