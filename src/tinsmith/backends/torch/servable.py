"""Whether a model can be served exactly from packed rows; error messages say why not.

A model is refused at start rather than served almost right. Most checks use its configuration; the rest run one token.
Every layer must attend exactly once, through our attention, with the window of its configuration, since the comparison
with the model's own forward at load is too short to reach beyond a window. A stateful layer must be a mixer that
`recurrent` supports. Knows no adapter and no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from tinsmith.backends.torch.attention import CHUNKED, INDEXED, Window
from tinsmith.errors import SettingsError
from tinsmith.plan.mixers import is_mixer
from tinsmith.plan.versions import (
    TESTED,
    install_command,
    list_installed_versions,
    list_mixer_libraries,
    list_untested_versions,
)
from tinsmith.types import ModelShape


class ReleaseError(RuntimeError):
    """The installed releases do not compute what a model's own forward does, or in a way that is not understood."""


FULL, SLIDING = "full_attention", "sliding_attention"

STATEFUL = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of stateful layers; 'hybrid' ones attend, too."""

TOKENWISE = frozenset({"mlp", "moe"})
"""Kinds of layers that compute each token separately."""


def check_config(config: PreTrainedConfig, context: int) -> None:
    """Raises SettingsError if a configuration rules out sequences of up to `context` tokens."""
    text = config.get_text_config()
    name = f"{config.model_type!r}"
    if config.is_encoder_decoder:
        raise SettingsError(f"{name} is an encoder-decoder; only decoder-only models are supported")
    other = sorted({str(kind) for kind in _kinds(text)} - {FULL, SLIDING, INDEXED, CHUNKED} - STATEFUL - TOKENWISE)
    if other:
        raise SettingsError(
            f"{name} has layers of kind {', '.join(other)}; in every layer a token must attend to all tokens before "
            "it, to a window or a chunk of them, or the layer must keep a state"
        )
    if INDEXED in _kinds(text) and context > text.index_topk:
        raise SettingsError(
            f"{name} attends to the {text.index_topk} tokens that an indexer selects (index_topk), and the context is "
            f"{context}; only sequences of up to {text.index_topk} tokens are served, in which it selects all"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    for rope_config in (candidate for candidate in (rope, *rope.values()) if isinstance(candidate, dict)):
        kind, max_length = rope_config.get("rope_type"), None
        if kind == "dynamic":
            max_length = text.max_position_embeddings
        elif kind == "longrope":
            max_length = rope_config.get("original_max_position_embeddings")
        if max_length is not None and context > max_length:
            # Cached keys would be those of a shorter sequence, and one tenant would change another's numbers.
            raise SettingsError(
                f"RoPE of type {kind!r} changes for sequences of more than {max_length} tokens, and the context is "
                f"{context}; only sequences within that length are served"
            )


def check_stateful_layers(config: PreTrainedConfig, model: nn.Module) -> None:
    """Raises SettingsError if stateful layers are of an unsupported kind."""
    text = config.get_text_config()
    kinds = sorted({kind for kind in _kinds(text) if kind in STATEFUL})
    if sum(kind in STATEFUL for kind in _kinds(text)) > sum(map(is_mixer, model.modules())):
        raise SettingsError(f"{config.model_type!r} has layers of kind {', '.join(kinds)} whose state is not supported")


def check_layers(
    name: str,
    config: PreTrainedConfig,
    windows_by_layer: Mapping[int, Sequence[Window | None]],
    states_by_layer: Mapping[int, Sequence[object]] | None = None,
) -> None:
    """Raises SettingsError unless each layer attended as configured. `states_by_layer`: the states that layers keep."""
    kinds = _kinds(config)
    window = cast("int | None", getattr(config, "sliding_window", None))
    for layer in range(cast(int, config.num_hidden_layers)):
        windows = windows_by_layer.get(layer, ())
        if kinds and kinds[layer] in STATEFUL | TOKENWISE:
            _check_stateful(name, layer, kinds[layer], len((states_by_layer or {}).get(layer, ())), len(windows))
            continue
        if len(windows) != 1:
            times = "does not attend" if not windows else f"attends {len(windows)} times"
            raise SettingsError(
                f"{name} cannot be served: layer {layer} {times} through our attention; it must attend exactly once"
            )
        sliding = kinds[layer] == SLIDING if kinds else window is not None
        expected = Window(window) if sliding and window is not None else None
        if kinds and kinds[layer] == CHUNKED:
            expected = Window(cast(int, config.attention_chunk_size), chunked=True)
        if windows[0] != expected:
            raise SettingsError(
                f"{name} cannot be served: layer {layer} attends to a window of {windows[0]}, and its configuration "
                f"says {expected}"
            )


def _check_stateful(name: str, layer: int, kind: str, num_states: int, num_attentions: int) -> None:
    if num_states != (kind in STATEFUL):
        raise SettingsError(f"{name} cannot be served: layer {layer} of kind {kind} keeps a state {num_states} times")
    if num_attentions != (kind == "hybrid"):
        raise SettingsError(f"{name} cannot be served: layer {layer} of kind {kind} attends {num_attentions} times")


def check_parameters(name: str, decoder: nn.Module, experts: Iterable[nn.Module]) -> None:
    """Raises SettingsError if there are experts that cannot carry adapters."""
    mixers = [module for module in decoder.modules() if is_mixer(module)]
    known_ids = {id(parameter) for module in [*experts, *mixers] for parameter in module.parameters()}
    for path, parameter in decoder.named_parameters():
        if parameter.dim() > 2 and id(parameter) not in known_ids:
            raise SettingsError(
                f"{name} cannot be served: {path} holds stacked matrices, such as experts, in a form that cannot carry "
                "adapters here"
            )


@contextmanager
def raise_settings_errors(shape: ModelShape) -> Iterator[None]:
    """Turn errors into SettingsError, since a retry would not help; out-of-memory errors pass unchanged. Where the
    installed releases may be the cause, the error names them and those that were tested.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except ReleaseError as error:
        raise SettingsError(f"{shape.name} ({shape.arch}) cannot be served: {error}; {name_releases()}") from error
    except Exception as error:
        is_refusal = isinstance(error, SettingsError)
        if is_refusal and not list_untested_versions():
            raise
        reason = str(error)
        if not is_refusal:
            reason = f"{shape.name} ({shape.arch}) cannot be served: {type(error).__name__}: {error}"
        raise SettingsError(f"{reason}; {name_releases()}" if list_untested_versions() else reason) from error


def name_releases() -> str:
    """The installed releases, the tested ones, and the command that installs those."""
    installed = [*map(str, list_installed_versions()), *list_mixer_libraries()]
    tested = " and ".join(map(str, TESTED))
    return f"installed are {' and '.join(installed)}, and tested are {tested}: {install_command()}"


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])
