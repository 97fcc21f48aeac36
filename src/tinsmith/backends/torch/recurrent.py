"""Layers with a state instead of keys and values: gated delta nets, state space models, short convolutions.

`SequenceMixer` turns rows into sequences for such a layer. It runs transformers' own module over a batch of n sequences
of equal length, so that neither the recurrent state nor the convolution's state passes between sequences, and exchanges
states through the interface of transformers' caches. A plan (`attention.AttentionPlan.mix`) decides which rows form a
batch: training pads sequences of similar length on the right, where nothing is kept; sampling takes pieces of equal
length with the states before them. The module's projections carry adapters as usual, with the LoRA batch of the call's
rows.

The module chooses its kernels: transformers uses `flash-linear-attention`, `mamba-ssm` and `causal-conv1d` where
installed, and plain torch elsewhere, but for the gated delta rule, which is computed by `delta_rule` then. A step of
one row for each sequence takes states in slots (`SlotCache`) and, on a GPU, fused kernels (`state_steps`). Knows no
plan, request or tenant.

Shapes: n sequences, L rows of each, T rows of a call, D hidden size, C channels and K taps of a convolution.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from tinsmith.backends.torch.attention import LayerSlots, MixerState
from tinsmith.backends.torch.delta_rule import equals_gated_delta, run_gated_delta
from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.servable import ReleaseError
from tinsmith.backends.torch.state_steps import CONV, RECURRENT, StateSlots, list_called_globals, wrap_steps
from tinsmith.plan.mixers import ROW_BY_ROW, is_mixer, is_whole
from tinsmith.plan.versions import list_mixer_libraries
from tinsmith.runtime.devices import is_on_host

STATELESS = MixerState(None, None)

State: TypeAlias = "MixerState | LayerSlots | LayerCache"


def wrap_mixers(decoder: nn.Module, context: ForwardContext) -> list[SequenceMixer]:
    """Make every mixer of a decoder follow the plan of the current call; without a plan the module is unchanged."""
    mixers = []
    for module in decoder.modules():
        if is_mixer(module):
            _keep_host_functions(sys.modules[type(module).__module__])
            _replace_delta_rule(module)
            mixers.append(SequenceMixer(module, context, wrap_steps(module)))
            module.forward = mixers[-1].forward_by_plan
    return mixers


def _keep_host_functions(modeling: ModuleType) -> None:
    """Let functions that transformers takes from fla or mamba-ssm, where these are installed, compute tensors on a CPU
    in plain torch: the libraries' kernels are for GPUs, and would fail.
    """
    if not list_mixer_libraries():
        return
    for name, chosen in list(vars(modeling).items()):
        plain = getattr(chosen, "__wrapped__", None)
        if isinstance(chosen, FunctionType) and plain is not None and chosen.__module__ == modeling.__name__:
            setattr(modeling, name, partial(_by_device, chosen, plain))


def _by_device(chosen: Callable[..., object], plain: Callable[..., object], *args: object, **kwargs: object) -> object:
    first = args[0] if args else next(iter(kwargs.values()))
    return (plain if isinstance(first, Tensor) and is_on_host(first) else chosen)(*args, **kwargs)


def _replace_delta_rule(module: nn.Module) -> None:
    """Let a layer compute whole sequences by `run_gated_delta` where its own function in torch does the same on random
    numbers. A library's kernel still takes the tensors of a GPU.
    """
    modeling = sys.modules[type(module).__module__]
    for name in list_called_globals(type(module).forward):
        function = getattr(modeling, name)
        chosen, plain = function.args if isinstance(function, partial) else (None, function)
        if "chunk" in name and "delta" in name and plain is not run_gated_delta and equals_gated_delta(plain):
            setattr(modeling, name, partial(_by_device, chosen, run_gated_delta) if chosen else run_gated_delta)


class SequenceMixer:
    """One layer's mixer over n sequences of L rows; see `attention.Mixer`. Raises ReleaseError if the module does not
    exchange its state through the cache that it gets. `fused_parts`: those of its state that kernels step in slots.
    """

    def __init__(self, module: nn.Module, context: ForwardContext, fused_parts: frozenset[str] = frozenset()) -> None:
        self.layer = cast(int, module.layer_idx)
        self._forward: Callable[..., Tensor | tuple[Tensor, ...]] = module.forward
        self.name = type(module).__name__
        self.is_whole = is_whole(module)
        self.state_like = STATELESS
        """One sequence's state without its values, known after a call with `keep`."""
        self._fused_parts = fused_parts
        self._is_stepwise = self.name in ROW_BY_ROW
        self._context = context
        self._cache_argument = cache_argument(self.name, self._forward)
        takes_positions = "position_embeddings" in inspect.signature(self._forward).parameters
        self._required: dict[str, None] = {"position_embeddings": None} if takes_positions else {}

    def __call__(
        self, x_nLD: Tensor, starts: tuple[int, ...], state: State | None = None, *, keep: bool = False
    ) -> tuple[Tensor, MixerState | None]:
        """`state` may be a cache that takes care of its states itself."""
        if isinstance(state, LayerSlots):
            slot_cache = SlotCache(state, self._fused_parts)
            y_n1D = self._run_part(x_nLD, starts, slot_cache)
            slot_cache.store()
            return y_n1D, None
        cache = state if isinstance(state, LayerCache) else LayerCache(state) if keep or state is not None else None
        parts_nLD = x_nLD.split(1, 1) if self._is_stepwise and state is not None else [x_nLD]
        outputs = [self._run_part(x, starts, cache) for x in parts_nLD]
        y_nLD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if keep and cache is not None and self.state_like is STATELESS:
            self.state_like = MixerState(*(x if x is None else x[:1].to("meta") for x in cache.state))
        return y_nLD, cache.state if cache is not None else None

    def reference_output(self, x_LD: Tensor) -> Tensor:
        """[L, D]: transformers' module over one sequence, without a cache or a plan."""
        out = self._forward(hidden_states=x_LD[None], attention_mask=None, **self._required)
        return (out if isinstance(out, Tensor) else out[0])[0]

    def _run_part(self, x_nLD: Tensor, starts: tuple[int, ...], cache: LayerCache | None) -> Tensor:
        lora_batch = self._context.lora_batch
        assert lora_batch is not None
        self._context.lora_batch = lora_batch.for_sequences(starts, x_nLD.shape[1])
        try:
            out = self._call(x_nLD, cache)
        finally:
            self._context.lora_batch = lora_batch
        return out if isinstance(out, Tensor) else out[0]

    def _call(self, x_nLD: Tensor, cache: LayerCache | None) -> Tensor | tuple[Tensor, ...]:
        if cache is None:
            return self._forward(hidden_states=x_nLD, attention_mask=None, **self._required)
        before = cache.begin()
        arguments = {self._cache_argument: cache, **self._required}
        out = self._forward(hidden_states=x_nLD, attention_mask=None, **arguments)
        if fault := cache.find_fault(before, num_rows=x_nLD.shape[1]):
            raise ReleaseError(f"layer {self.layer} ({self.name}) {fault}")
        return out

    def forward_by_plan(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        """Replaces the module's forward: [1, T, D] in and out, batched by the plan of the current call."""
        plan = self._context.plan
        if plan is None:
            return self._forward(hidden_states, *args, **kwargs)
        y_1TD = plan.mix(self, hidden_states[0])[None]
        return (y_1TD, y_1TD.new_empty(0)) if self._required else y_1TD


def cache_argument(name: str, forward: Callable[..., object]) -> str:
    """The parameter of a layer's forward that takes transformers' cache, by its annotation: its name differs between
    layers and releases, and a layer that collects other keywords would ignore a wrong name.
    """
    parameters = inspect.signature(forward).parameters
    names = [key for key, parameter in parameters.items() if "Cache" in str(parameter.annotation)]
    if len(names) != 1:
        raise ReleaseError(f"{name} takes {len(names)} caches among its arguments ({', '.join(parameters)})")
    return names[0]


class LayerCache:
    """transformers' cache as one layer sees it. Tensors passed in may be overwritten. Layers update the convolution's
    state between their projections and the recurrence, and the recurrent state before what follows it.

    It has the methods with which layers exchange states in every supported release: `get_conv_state`,
    `get_recurrent_state` and `is_recording_past`, or `has_previous_state` and `layers`, and `get_linear_cache` and
    `set_linear_cache`. Anything else that a layer asks for is an error, also where it only looks whether it is there.
    """

    def __init__(self, state: MixerState | None) -> None:
        self.state = state or STATELESS
        self._read: set[str] = set()
        self._updated: set[str] = set()

    def begin(self) -> MixerState:
        """The state before a call of the layer."""
        self._read.clear()
        self._updated.clear()
        return self.state

    def find_fault(self, before: MixerState, num_rows: int) -> str | None:
        """Why the exchange in a call of the layer is not understood, or None. A layer that continues must ask for each
        part of its state, and must give each part back, except that a single row may change it in place.
        """
        if not self._read | self._updated:
            return "does not use the cache that it gets"
        if not any(part is not None for part in self.state):
            return "leaves no state in the cache that it gets"
        for part in MixerState._fields:
            is_before, is_after = (getattr(state, part) is not None for state in (before, self.state))
            if is_before and not is_after:
                return f"loses its {part} state"
            if is_before and part not in self._read | self._updated:
                return f"continues without its {part} state"
            if is_after and part not in self._updated and not (is_before and num_rows == 1):
                return f"does not give its {part} state back"
        return None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._refuse_further_states(state_idx)
        self._read.add(CONV)
        return self.state.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._refuse_further_states(state_idx)
        self._read.add(RECURRENT)
        return self.state.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        self._refuse_further_states(state_idx)
        return any(part is not None for part in self.state)

    @property
    def layers(self) -> _StatesByLayer:
        return _StatesByLayer(self)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """[n, C, K + L] or, for sequences that begin, [n, C, L]: the convolution's input."""
        self._refuse_further_states(state_idx)
        self._updated.add(CONV)
        before = self.state.conv
        input_nCL = conv_states if before is None else torch.cat([before, conv_states], -1)
        last_nCK = input_nCL[..., -conv_kernel_size:]
        missing = conv_kernel_size - last_nCK.shape[-1]
        last_nCK = nn.functional.pad(last_nCK, (missing, 0)) if missing else last_nCK.contiguous()
        self.state = MixerState(last_nCK, self.state.recurrent)
        return input_nCL

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._refuse_further_states(state_idx)
        self._updated.add(RECURRENT)
        self.state = MixerState(self.state.conv, recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        self._read.add(RECURRENT)
        return self.state.recurrent

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self._updated.add(RECURRENT)
        self.state = MixerState(None, linear_cache)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ReleaseError(f"a layer asks its cache for {name!r}, which is not supported")

    def _refuse_further_states(self, state_idx: int) -> None:
        if state_idx:
            raise ReleaseError(f"a layer keeps more than one state (it asks for number {state_idx})")


class SlotCache(LayerCache):
    """The cache of one row for each of n sequences whose states are in slots. A layer gets the `fused_parts` of its
    state as `StateSlots`, for its own functions; the others are gathered, and written by `store`.
    """

    def __init__(self, slots: LayerSlots, fused_parts: frozenset[str]) -> None:
        super().__init__(None)
        self._fused_parts = frozenset[str]() if slots.kernels is None else fused_parts
        self._slots = {
            part: StateSlots(store, slots.read_n, slots.write_n, slots.kernels)
            for part, store in zip(MixerState._fields, slots.stores, strict=True)
            if store is not None
        }

    def store(self) -> None:
        """Write what no kernel has written."""
        for part, slots in self._slots.items():
            if not slots.is_stepped:
                slots.scatter(getattr(self.state, part))

    def find_fault(self, before: MixerState, num_rows: int) -> str | None:
        for part in MixerState._fields:
            is_gathered = getattr(self.state, part) is not None
            if part not in self._slots:
                if is_gathered:
                    return f"begins a {part} state while it continues"
            elif part not in self._read | self._updated:
                return f"continues without its {part} state"
            elif not (is_gathered or self._slots[part].is_stepped):
                return f"does not give its {part} state back"
        return None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._refuse_further_states(state_idx)
        self._read.add(CONV)
        return self._part(CONV)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._refuse_further_states(state_idx)
        self._read.add(RECURRENT)
        return self._part(RECURRENT)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        self._read.add(RECURRENT)
        return self._gather(RECURRENT)

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        self._refuse_further_states(state_idx)
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        self._gather(CONV)
        return super().update_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size=conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        super().update_recurrent_state(recurrent_states, layer_idx, state_idx)
        if self._is_stepped(RECURRENT):  # the function returned the slots
            self.state = MixerState(self.state.conv, None)
        return recurrent_states

    def _is_stepped(self, part: str) -> bool:
        return part in self._slots and self._slots[part].is_stepped

    def _part(self, part: str) -> Tensor | None:
        """What the layer passes to its function: slots are no tensor, and nothing else may be done with them."""
        return cast(Tensor, self._slots[part]) if part in self._fused_parts else self._gather(part)

    def _gather(self, part: str) -> Tensor | None:
        if part in self._slots and getattr(self.state, part) is None:
            self.state = self.state._replace(**{part: self._slots[part].gather()})
        return getattr(self.state, part)


class _StatesByLayer:
    """`cache.layers[layer].conv_states[0]` and `.recurrent_states[0]`: how layers read states where the cache has no
    methods for it. Every layer is the one whose cache it is.
    """

    record_past = False

    def __init__(self, cache: LayerCache) -> None:
        self._cache = cache

    def __getitem__(self, layer_idx: int) -> _StatesByLayer:
        return self

    @property
    def conv_states(self) -> _StateByIndex:
        return _StateByIndex(self._cache.get_conv_state)

    @property
    def recurrent_states(self) -> _StateByIndex:
        return _StateByIndex(self._cache.get_recurrent_state)


class _StateByIndex:
    def __init__(self, get_state: Callable[[int, int], Tensor | None]) -> None:
        self._get_state = get_state

    def __getitem__(self, state_idx: int) -> Tensor | None:
        return self._get_state(0, state_idx)
