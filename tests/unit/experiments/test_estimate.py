"""Estimates without a run: peaks are the measured ones, and an unknown name is refused with the known names."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types

import pytest
import torch
from raising import raises

from trimtab.core.errors import DependencyError, FormatError, ModelError, ValueGivenError
from trimtab.core.hardware import DeviceSpec
from trimtab.experiments import estimate as estimates
from trimtab.experiments.estimate import Estimate, estimate
from trimtab.state.peak_memory import peak_bytes

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 128, "n_layer": 3, "n_head": 4}
GPT2 |= {"vocab_size": 500, "n_positions": 128}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 344}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 128, "num_hidden_layers": 3}
BERT |= {"num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 500, "max_position_embeddings": 128}
CLASSIFIER = BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 128, "image_size": 64}
VIT |= {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512, "patch_size": 8}
CPU = DeviceSpec("this CPU", "cpu", 10**12, {"fp32": 1e11}, 1e10, "made up")


def folder(tmp_path, config: dict):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def estimated(name: str, device: str = "RTX 4090", **options) -> Estimate:
    return estimate(name, device, progress=lambda *_: None, **options)


def measured(config: dict, rows: int, length: int, optimizer: str) -> int:
    """Return the counted peak of a step of the real model."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    config.use_cache = False
    model = getattr(transformers, config.architectures[0])(config).train()
    labels = torch.zeros(rows, dtype=torch.long)
    if config.model_type == "vit":
        batch = {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": labels}
    else:
        ids = torch.randint(0, config.vocab_size, (rows, length))
        is_class = "Sequence" in config.architectures[0]
        batch = {"input_ids": ids, "labels": labels if is_class else ids.clone()}
    made = torch.optim.AdamW(model.parameters())
    if optimizer == "sgd":
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(**batch).loss.backward()
        made.step()
        made.zero_grad(set_to_none=True)

    def live() -> list[torch.Tensor]:
        states = [value for state in made.state.values() for value in state.values()]
        tensors = [value for value in states if isinstance(value, torch.Tensor)]
        return [*model.parameters(), *model.buffers(), *batch.values(), *tensors]

    step()
    return peak_bytes(step, torch.device("cpu"), live)


LOOPS = {
    "gpt2": (GPT2, 8, 64, "adamw"),
    "gpt2 with one sample": (GPT2, 1, 32, "adamw"),
    "llama": (LLAMA, 8, 64, "adamw"),
    "llama with sgd": (LLAMA, 4, 128, "sgd"),
    "bert": (BERT, 8, 64, "adamw"),
    "bert classifier": (CLASSIFIER, 12, 128, "adamw"),
    "vit": (VIT, 8, 0, "adamw"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_peak_is_the_measured_one(name, tmp_path, monkeypatch):
    config, rows, length, optimizer = LOOPS[name]
    monkeypatch.setattr(estimates, "device_spec", lambda _: CPU)
    given = {"batch_size": rows, "length": length or None, "optimizer": optimizer}
    (found,) = estimated(folder(tmp_path, config), "cpu", **given).devices
    counted = measured(config, rows, length, optimizer)
    assert found.plain.peak_bytes == pytest.approx(counted, rel=0.01)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> str:
    return folder(tmp_path_factory.mktemp("gpt2"), GPT2)


@pytest.fixture(scope="module")
def ample(gpt2) -> Estimate:
    return estimated(gpt2, batch_size=16, length=128)


@pytest.mark.slow
def test_the_plain_loop_fits_up_to_the_largest_batch_that_is_named(gpt2, ample):
    (found,) = estimated(gpt2, batch_size=16, length=128, memory=ample.devices[0].plain.peak_bytes // 2).devices
    assert not found.plain_fits
    assert 0 < found.largest_batch < 16
    for rows, fits in ((found.largest_batch, True), (found.largest_batch + 1, False)):
        (again,) = estimated(gpt2, batch_size=rows, length=128, memory=found.limit_bytes).devices
        assert again.plain_fits is fits


@pytest.mark.slow
def test_the_settings_fit_the_limit_and_a_smaller_limit_gives_no_faster_step(gpt2, ample):
    (free,) = ample.devices
    assert free.plain_fits
    assert free.best is not None
    assert free.best.step_s <= free.plain.step_s
    steps = [free.best.step_s]
    for share in (0.6, 0.3):
        limit = int(share * free.best.peak_bytes)
        (found,) = estimated(gpt2, batch_size=16, length=128, memory=limit).devices
        assert found.best is not None
        assert (1 + found.margin) * found.best.peak_bytes <= limit + 1
        assert found.best.micro_batch < 16 or found.best.recompute
        steps.append(found.best.step_s)
    assert steps == sorted(steps)


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_settings_and_no_micro_batch_are_shown(gpt2):
    found = estimated(gpt2, batch_size=16, length=128, memory="1MiB")
    (on,) = found.devices
    assert (on.best, on.plain_fits, on.largest_micro_batch) == (None, False, 0)
    assert on.nearest is not None
    assert on.nearest.peak_bytes > 2**20
    assert "does not fit" in str(found)
    assert all(len(line) <= 60 for line in str(found).splitlines()[2:-1])


@pytest.mark.slow
def test_all_known_devices_are_a_row_each_of_a_narrow_table(tmp_path):
    found = estimated(folder(tmp_path, GPT2 | {"n_embd": 1024, "n_layer": 2}), "all", batch_size=64, length=128)
    assert len({each.device for each in found.devices}) == len(found.devices) >= 14
    lines = str(found).splitlines()
    assert len(lines) <= 20
    assert all(len(line) <= 80 for line in lines)
    by_name = {each.device: each for each in found.devices}
    assert {each.plain.peak_bytes for each in found.devices} == {found.devices[0].plain.peak_bytes}
    assert by_name["H100"].plain.step_s < by_name["T4"].plain.step_s
    assert by_name["A10"].best.precision == "bf16"
    assert by_name["T4"].best.precision == "fp16"  # a T4 has no bf16


@pytest.mark.slow
def test_a_task_has_its_own_batch_and_optimizer(tmp_path, monkeypatch):
    found = estimated("source_gpt")
    assert "AdamW" in found.step
    assert found.devices[0].plain.peak_bytes > 0
    for option in ({"length": 8}, {"optimizer": "sgd"}):
        with raises(ValueGivenError, code="option.conflict"):
            estimated("source_gpt", **option)


class TinyNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(images)).mean((2, 3)))


@pytest.mark.slow
def test_a_torchvision_model_is_traced_and_its_batch_normalisation_is_not_split(monkeypatch):
    models = types.SimpleNamespace(list_models=lambda module: ["tiny_net"], get_model=lambda name, weights: TinyNet())
    torchvision = types.ModuleType("torchvision")
    torchvision.models, torchvision.__version__ = models, "0"
    torchvision.__spec__ = importlib.machinery.ModuleSpec("torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    found = estimated("tiny_net", batch_size=32, image_size=64)
    assert found.num_parameters == sum(each.numel() for each in TinyNet().parameters())
    (free,) = found.devices
    assert free.best.micro_batch == 32
    (small,) = estimated("tiny_net", batch_size=32, image_size=64, memory=free.best.peak_bytes // 2).devices
    assert small.best is None or small.best.micro_batch == 32
    assert 0 < small.largest_micro_batch < 32


REFUSED = {
    "an unknown model": ("gpt22", {}, "model.unknown", "gpt2?"),
    "an unknown device": ("gpt2", {"device": "RTX 4091"}, "value.invalid", "RTX 4090?"),
    "more tokens than positions": ("gpt2", {"length": 2000}, "length.above_positions", "1024"),
    "pixels of a text": ("gpt2", {"image_size": 32}, "option.conflict", "--image-size"),
    "tokens of an image": ("vit", {"length": 32}, "option.conflict", "--length"),
    "an unknown optimizer": ("gpt2", {"optimizer": "adam"}, "value.invalid", "adamw"),
    "an invalid limit": ("gpt2", {"memory": "much"}, "value.invalid", "--memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_before_a_trace(case):
    name, options, code, word = REFUSED[case]
    with raises(ValueGivenError, code=code) as caught:
        estimated(name, **options)
    assert word in str(caught.value)


def test_every_known_device_is_named_to_who_names_another():
    with raises(ValueGivenError, code="value.invalid", field="device") as caught:
        estimated("gpt2", "Frobnicator 9000")
    assert all(name in str(caught.value) for name in ("RTX 4090", "A100 80GB", "T4", "H200"))


def test_a_model_without_a_known_loss_is_refused():
    with raises(ModelError, code="model.no_loss"):
        estimated("sam")


def test_a_folder_without_a_model_type_is_refused(tmp_path):
    with raises(FormatError, code="model.config_invalid"):
        estimated(folder(tmp_path, {"hidden_size": 8}))


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises(DependencyError, code="dependency.missing") as caught:
        estimated("gpt2")
    assert "trimtab[transformers]" in str(caught.value)
