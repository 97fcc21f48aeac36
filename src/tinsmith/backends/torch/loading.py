"""A model's modules from the files of a Hugging Face directory: its class, its dtype, its dequantised weights.

Stored weights may be quantised (`quantization_config`). Those of gpt-oss (mxfp4) and of DeepSeek, Qwen and others
(block-wise fp8) are dequantised while they are read, since LoRA and its gradients need linears; `quantization` may
quantise them again. transformers would keep modules of its own where a GPU has kernels for them. Other formats are
refused: their codes without their scales would be wrong weights.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from tinsmith.backends.torch.attention import ATTENTION_NAME
from tinsmith.backends.torch.servable import check_config
from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import decoder_of
from tinsmith.types import VISION_TYPES, ModelShape
from tinsmith.wire.adapter_files import PLAIN, WRAPPED

DEQUANTISED = frozenset({"mxfp4", "fp8"})
"""Stored formats that transformers dequantises."""

TEXT_KEYS = {r"^language_model\.": "", rf"^{re.escape(WRAPPED)}": PLAIN}
"""Maps weight names in files of a wrapper, including older ones, to those of its text model."""


def load_model(shape: ModelShape, dtype: torch.dtype, safe: dict[str, bool]) -> PreTrainedModel:
    """The model. Of a wrapper around a text model, only the text model if transformers has a class for it and images
    are not served. Raises SettingsError if a weight is missing from the files: it would be random.
    """
    config = AutoConfig.from_pretrained(shape.path, **safe)
    check_config(config, shape.max_context_length)
    _dequantise(config, shape)
    text_options: dict[str, Any] = {}
    auto, text = AutoModelForCausalLM, config.get_text_config()
    # transformers lists the wrapper of Gemma 3 among the causal language models, too.
    is_text_model = type(config) in AutoModelForCausalLM._model_mapping and config.model_type not in VISION_TYPES
    if not is_text_model:
        if text is not config and type(text) in AutoModelForCausalLM._model_mapping and shape.vision is None:
            text_options = {"key_mapping": TEXT_KEYS}
        elif config.model_type in VISION_TYPES:
            auto = AutoModelForImageTextToText
        else:
            raise SettingsError(f"{config.model_type!r} has no causal language model in transformers")
    loaded = auto.from_pretrained(
        shape.path,
        config=text if text_options else config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME if text_options else choose_attention(config),
        experts_implementation="eager",
        use_safetensors=True,
        output_loading_info=True,
        **text_options,
        **safe,
    )
    model, loading = cast("tuple[PreTrainedModel, dict[str, list[str]]]", loaded)
    if absent := sorted(loading["missing_keys"]):
        raise SettingsError(
            f"{shape.path} lacks {len(absent)} weights of {type(model).__name__}, such as {absent[0]}; the files are "
            "not those of this architecture"
        )
    if auto is AutoModelForImageTextToText and shape.vision is None:
        # Keep the wrapper without its tower, so that weight names stay the same.
        del model.model.visual
    return model


def _dequantise(config: PreTrainedConfig, shape: ModelShape) -> None:
    """Have transformers dequantise the stored weights. Raises SettingsError for a format in which it cannot."""
    text = config.get_text_config()
    # A text model that is loaded without its wrapper must be told what only the wrapper says.
    quantisation = next(filter(None, (getattr(part, "quantization_config", None) for part in (config, text))), None)
    if quantisation is None:
        return
    stored = quantisation if isinstance(quantisation, Mapping) else quantisation.to_dict()
    if (method := stored.get("quant_method")) not in DEQUANTISED:
        raise SettingsError(
            f"{shape.path} holds weights in {method} (quantization_config), of which "
            f"{' and '.join(sorted(DEQUANTISED))} alone are read; serve the model that they were made from, with "
            "--quantize"
        )
    for part in (config, text):
        part.quantization_config = {**stored, "dequantize": True}


def move_unquantised(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """The model with all but its layers' matrices on the device: their codes are made there one after the other."""
    matrices = {id(weight) for weight in decoder_of(model).parameters() if weight.dim() > 1}
    # transformers takes the first parameter's device for the model's.
    matrices -= {id(next(model.parameters())), id(cast("nn.Embedding", model.get_input_embeddings()).weight)}
    move_tensors(model, torch.device(device), lambda weight: id(weight) not in matrices)
    return model


def move_tensors(model: nn.Module, device: torch.device, is_moved: Callable[[Tensor], bool] = lambda _: True) -> None:
    for parameter in model.parameters():
        if parameter.device != device and is_moved(parameter):
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def fix_rotations(decoder: nn.Module) -> None:
    """Rotate without transformers' update of the frequencies of long sequences, which reads positions from the device
    in every forward. `check_config` bounds the context so that the update would change nothing.
    """
    for module in decoder.modules():
        update = type(module).forward
        if hasattr(module, "rope_type") and (rotate := inspect.unwrap(update)) is not update:
            module.forward = partial(rotate, module)


def choose_attention(config: PreTrainedConfig) -> str | dict[str, str]:
    """Our attention for the text model; a vision tower keeps transformers' own, since it is not causal."""
    if "vision_config" not in config.sub_configs:
        return ATTENTION_NAME
    return {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}
