"""Whether a model can be served from packed rows, and if not, why, in words.

A model is refused at start rather than served nearly right. Its configuration tells most. The rest is seen when a
token goes through it: every layer has to attend exactly once, through our attention, and with the window that its
configuration speaks of, since what lies beyond a window is too far for the comparison with the model's own forward
at load; a layer that keeps a state has to be a mixer that `recurrent` knows. Knows no adapter and no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from tinsmith.errors import SettingsError
from tinsmith.plan.mixers import is_mixer
from tinsmith.types import ModelShape

FULL, SLIDING = "full_attention", "sliding_attention"

STATEFUL = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers that keep a state; 'hybrid' ones attend, too."""

ALONE = frozenset({"mlp", "moe"})
"""Kinds of layers in which no token meets another."""


def check_config(config: PreTrainedConfig, context: int) -> None:
    """Raises SettingsError on what a configuration rules out for sequences of up to `context` tokens."""
    text = config.get_text_config()
    name = f"{config.model_type!r}"
    if config.is_encoder_decoder:
        raise SettingsError(f"{name} is an encoder and a decoder; only models that are one decoder are served")
    other = sorted({str(kind) for kind in _kinds(text)} - {FULL, SLIDING} - STATEFUL - ALONE)
    if other:
        raise SettingsError(
            f"{name} has layers of kind {', '.join(other)}; in every layer a token must attend to all tokens before "
            "it, or to a window of them, or the layer must keep a state"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for own in (each for each in (rope, *rope.values()) if isinstance(each, dict)):
        kind, most = own.get("rope_type"), None
        if kind == "dynamic":
            most = text.max_position_embeddings
        elif kind == "longrope":
            most = own.get("original_max_position_embeddings")
        if most is not None and context > most:
            # Keys that are cached would be those of a shorter sequence, and one tenant would change another's numbers.
            raise SettingsError(
                f"RoPE of type {kind!r} changes for sequences of more than {most} tokens, and the context is "
                f"{context}; only sequences within that length are served"
            )


def check_mixers(config: PreTrainedConfig, model: nn.Module) -> None:
    """Raises SettingsError if layers keep a state in a form that is not known here."""
    text = config.get_text_config()
    kinds = sorted({kind for kind in _kinds(text) if kind in STATEFUL})
    if sum(kind in STATEFUL for kind in _kinds(text)) > sum(map(is_mixer, model.modules())):
        raise SettingsError(
            f"{config.model_type!r} has layers of kind {', '.join(kinds)} whose state is not one that is known here"
        )


def check_layers(
    name: str,
    config: PreTrainedConfig,
    seen: Mapping[int, Sequence[int | None]],
    kept: Mapping[int, Sequence[object]] | None = None,
) -> None:
    """Raises SettingsError unless each layer asked for what its configuration says. `kept`: the states, by layer."""
    kinds = _kinds(config)
    window = cast("int | None", getattr(config, "sliding_window", None))
    for layer in range(cast(int, config.num_hidden_layers)):
        asked = seen.get(layer, ())
        if kinds and kinds[layer] in STATEFUL | ALONE:
            _check_stateful(name, layer, kinds[layer], len((kept or {}).get(layer, ())), len(asked))
            continue
        if len(asked) != 1:
            times = "does not attend" if not asked else f"attends {len(asked)} times"
            raise SettingsError(
                f"{name} cannot be served: layer {layer} {times} through our attention; it has to, once"
            )
        sliding = kinds[layer] == SLIDING if kinds else window is not None
        if asked[0] != (window if sliding else None):
            raise SettingsError(
                f"{name} cannot be served: layer {layer} attends to a window of {asked[0]}, and its configuration "
                f"says {window if sliding else None}"
            )


def _check_stateful(name: str, layer: int, kind: str, num_kept: int, num_asked: int) -> None:
    if num_kept != (kind in STATEFUL):
        raise SettingsError(f"{name} cannot be served: layer {layer} of kind {kind} keeps a state {num_kept} times")
    if num_asked != (kind == "hybrid"):
        raise SettingsError(f"{name} cannot be served: layer {layer} of kind {kind} attends {num_asked} times")


def check_parameters(name: str, decoder: nn.Module, experts: Iterable[nn.Module]) -> None:
    """Raises SettingsError if there are experts that cannot carry adapters."""
    mixers = [module for module in decoder.modules() if is_mixer(module)]
    known = {id(parameter) for module in [*experts, *mixers] for parameter in module.parameters()}
    for path, parameter in decoder.named_parameters():
        if parameter.dim() > 2 and id(parameter) not in known:
            raise SettingsError(
                f"{name} cannot be served: {path} holds many matrices, such as experts', in a form that cannot carry "
                "adapters here"
            )


@contextmanager
def refusing(shape: ModelShape) -> Iterator[None]:
    """What goes wrong becomes a SettingsError, since trying again would not help; want of memory stays as it is."""
    try:
        yield
    except (SettingsError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SettingsError(f"{shape.name} ({shape.arch}) cannot be served: {type(error).__name__}: {error}") from error


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])
