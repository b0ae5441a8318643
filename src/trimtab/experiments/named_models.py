"""Models by name with an example batch, without weights: Transformers configurations, timm and torchvision models.

Parameters and batches are fake tensors: shape and dtype without memory.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from trimtab.core.errors import DependencyError, FormatError, ModelError, ValueGivenError
from trimtab.measure.fake_tensors import FakeTensors
from trimtab.tasks import BUILT_IN
from trimtab.training.run import LossFn

_USUAL_LENGTH, _USUAL_PIXELS = 1024, 224
# Names of the configuration value that limits the positions, by model family.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
# Endings of Transformers classes whose forward returns a loss, with the kind of batch that the forward needs.
_HEADS = {
    "ForCausalLM": "tokens",
    "LMHeadModel": "tokens",
    "ForMaskedLM": "tokens",
    "ForConditionalGeneration": "tokens",
    "ForTokenClassification": "token labels",
    "ForSequenceClassification": "labels",
    "ForQuestionAnswering": "spans",
    "ForImageClassification": "images",
}
# Tables of Transformers from model types to classes, in the order of preference: bert and bart are in several.
_TABLES = ("IMAGE_CLASSIFICATION", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")


@dataclass(frozen=True)
class NamedModel:
    """A model on fake tensors with an example batch.

    Args:
        source: origin of the configuration, for the report.
        sample: size of a sample, such as "1024 tokens".
    """

    model: nn.Module
    loss_fn: LossFn
    batch: Any
    source: str
    sample: str


@dataclass(frozen=True)
class SampleSize:
    """Size of an example batch: samples, and tokens or pixels of a sample; None for the model's own."""

    rows: int
    length: int | None = None
    image_size: int | None = None

    def refuse(self, option: str, why: str) -> None:
        """Raise `ValueGivenError` if the option, `--length` or `--image-size`, was passed to a model without it."""
        if getattr(self, option.removeprefix("--").replace("-", "_")) is not None:
            raise ValueGivenError(
                option, problem=f"{option} has no effect: {why}.", hint=f"Remove {option}.", code="option.conflict"
            )


def named_model(name: str, size: SampleSize) -> NamedModel:
    """Return a model by the name of a Transformers configuration (see `_config`), or of a timm or torchvision model.

    Raises:
        DependencyError: transformers is not installed, and neither timm nor torchvision has the name.
        ValueGivenError: an unknown name, or a sample size that the model does not support.
        ModelError: the model has no loss that is known here.
    """
    try:
        config, source = _config(name)
    except (DependencyError, ValueGivenError):
        if (model := _vision_model(name)) is None:
            raise
        return _classifier(*model, size)
    return _of_config(config, source, size)


def _config(name: str) -> tuple[Any, str]:
    """Return a Transformers configuration and its origin: a file or folder, a cached hub name, or a model type."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise DependencyError(
            "transformers",
            problem=f"The package transformers, which has the configuration of {name}, cannot be imported: {error}.",
            hint="Run `pip install 'trimtab[transformers]'`, or name a task or function such as train.py:setup.",
        ) from error
    path = Path(name)
    if path.exists():
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=False), path.resolve().name
        except (OSError, ValueError) as error:
            raise FormatError(
                name,
                problem=f"{name} has no configuration that Transformers can read: {' '.join(str(error).split())[:200]}",
                hint="Pass a folder with a config.json that names a model_type, or this file.",
                code="model.config_invalid",
            ) from error
    with contextlib.suppress(OSError, ValueError):
        cached = AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        return cached, f"{name} in the cache of the hub"
    if name in CONFIG_MAPPING:
        return CONFIG_MAPPING[name](), f"default configuration of the type {name}"
    near = difflib.get_close_matches(name, [*CONFIG_MAPPING, *BUILT_IN], n=1)
    raise ValueGivenError(
        "model",
        problem=f"No configuration of a model {name!r:.80} is on this machine.",
        hint=(f"Did you mean {near[0]}? " if near else "")
        + "Pass a model type of Transformers, such as gpt2, llama, bert or vit, the folder of a config.json, or a name "
        "of the Hugging Face hub after `hf download NAME config.json`.",
        code="model.unknown",
    )


def _of_config(config: Any, source: str, size: SampleSize) -> NamedModel:
    config.use_cache = False  # a cache of keys and values is used only for generation
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    made, kind = _class_of(config)
    batch: dict[str, Tensor]
    if kind == "images":
        size.refuse("--length", f"{made.__name__} takes images")
        batch, sample = _images(config, size)
    else:
        size.refuse("--image-size", f"{made.__name__} takes tokens")
        batch, sample = _tokens(config, kind, size)
    with torch.device("meta"):
        model = made(config).float().train()
    return NamedModel(_on_fake_cpu(model), _own_loss, batch, f"{made.__name__} ({source})", sample)


def _own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    from transformers import masking_utils

    # The function reads from values if samples are packed texts. For fake tensors, which have no values, Transformers
    # assumes so and builds a mask, with which attention takes more memory.
    name = "find_packed_sequence_indices"
    unpacked: Any = contextlib.nullcontext()
    if hasattr(masking_utils, name):
        unpacked = mock.patch.object(masking_utils, name, return_value=None)
    with unpacked:
        loss: Tensor = model(**batch).loss
    return loss


def _class_of(config: Any) -> tuple[Any, str]:
    """Return the model class and the kind of batch: by the configuration's architectures, else by its model type."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = list(config.architectures or ())
    for table in _TABLES:
        listed: Any = getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").get(config.model_type, ())
        names += [listed] if isinstance(listed, str) else listed
    for name in names:
        kind = next((kind for ending, kind in _HEADS.items() if name.endswith(ending)), None)
        if kind is not None and hasattr(transformers, name):
            return getattr(transformers, name), kind
    raise ModelError(
        "model",
        got=f"a model of the type {config.model_type}",
        expected="a model with a loss that is known here",
        problem=f"No loss is known for models of the type {config.model_type} "
        f"({', '.join(config.architectures or ['no architecture'])}).",
        hint=f"Estimates know the classes {', '.join(_HEADS)}. For another loss, pass a function: train.py:setup.",
        code="model.no_loss",
    )


def _tokens(config: Any, kind: str, size: SampleSize) -> tuple[dict[str, Tensor], str]:
    text = config.get_text_config()
    limit = next((int(n) for name in _POSITIONS if (n := getattr(text, name, None)) and n > 0), None)
    length = size.length or min(limit or _USUAL_LENGTH, _USUAL_LENGTH)
    if limit is not None and length > limit:
        raise ValueGivenError(
            "--length",
            got=f"{length} tokens",
            expected=f"at most {limit}, the positions of the model",
            hint="Pass a shorter length.",
            code="length.above_positions",
        )
    num_labels, rows = getattr(config, "num_labels", 2), size.rows
    with FakeTensors():
        ids, one = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        if kind == "labels":
            if getattr(config, "pad_token_id", None) is None:
                config.pad_token_id = 0  # the last token of a sample is found by its padding
            more = {"labels": one if num_labels > 1 else one.float()}
        else:
            more = {"start_positions": one, "end_positions": one} if kind == "spans" else {"labels": ids.clone()}
    return {"input_ids": ids, **more}, f"{length} tokens"


def _images(config: Any, size: SampleSize) -> tuple[dict[str, Tensor], str]:
    own = getattr(config, "image_size", None) or _USUAL_PIXELS
    height, width = (own, own) if isinstance(own, int) else own
    if size.image_size is not None:
        height = width = size.image_size
        if hasattr(config, "image_size"):  # the number of position embeddings follows it
            config.image_size = size.image_size
    with FakeTensors():
        images = torch.zeros(size.rows, getattr(config, "num_channels", 3), height, width)
        labels = torch.zeros(size.rows, dtype=torch.long if config.num_labels > 1 else torch.float)
    return {"pixel_values": images, "labels": labels}, f"{height} x {width} pixels"


def _vision_model(name: str) -> tuple[nn.Module, str] | None:
    """Return a timm or torchvision model without weights, if one of these packages is installed and has the name."""
    with torch.device("meta"):
        if importlib.util.find_spec("timm"):
            import timm

            if timm.is_model(name):
                return timm.create_model(name, pretrained=False).train(), f"{name} (timm {timm.__version__})"
        if importlib.util.find_spec("torchvision"):
            import torchvision

            if name in torchvision.models.list_models(module=torchvision.models):
                model = torchvision.models.get_model(name, weights=None).train()
                return model, f"{name} (torchvision {torchvision.__version__})"
    return None


def _classifier(model: nn.Module, source: str, size: SampleSize) -> NamedModel:
    size.refuse("--length", "the model takes images")
    own: Sequence[int] = getattr(model, "default_cfg", {}).get("input_size", (3, _USUAL_PIXELS, _USUAL_PIXELS))
    pixels = size.image_size or own[-1]
    with FakeTensors():
        batch = torch.zeros(size.rows, own[0], pixels, pixels), torch.zeros(size.rows, dtype=torch.long)
    return NamedModel(_on_fake_cpu(model), _cross_entropy, batch, source, f"{pixels} x {pixels} pixels")


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(batch[0])
    # Some classifiers of torchvision return an auxiliary output too, in training mode.
    return nn.functional.cross_entropy(logits if isinstance(logits, Tensor) else logits[0], batch[1])


def _on_fake_cpu(model: nn.Module) -> nn.Module:
    """Replace parameters and buffers on the meta device by fake CPU tensors, shared tensors by shared ones.

    Models are built on the meta device, which Transformers supports; but the meta device has no CPU kernels, which
    differ in memory.
    """
    made: dict[int, Tensor] = {}
    meta: list[Tensor] = []  # kept, so that an id is not used twice
    with FakeTensors():
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, value in held.items():
                    if value is None or not value.is_meta:
                        continue
                    if id(value) not in made:
                        fake = torch.empty(value.shape, dtype=value.dtype)
                        is_parameter = isinstance(value, nn.Parameter)
                        made[id(value)] = nn.Parameter(fake, value.requires_grad) if is_parameter else fake
                        meta.append(value)
                    held[name] = made[id(value)]  # type: ignore[assignment]
    return model
