"""The check of the installed releases at start: a layer whose state is lost, wrong or exchanged in an unknown way is
refused, and so is a model whose sampled tokens differ. The error names the installed and the tested releases.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from support.families import FAMILIES, Family, build, make
from tinsmith.backends.torch import attention, model, recurrent, servable, start_check
from tinsmith.backends.torch.attention import LayerSlots, MixerState
from tinsmith.backends.torch.lora import ForwardContext
from tinsmith.backends.torch.lora_batch import LoRABatch
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.recurrent import LayerCache, SequenceMixer, SlotCache, cache_argument, wrap_mixers
from tinsmith.backends.torch.servable import ReleaseError
from tinsmith.errors import SettingsError
from tinsmith.plan import versions
from tinsmith.plan.versions import TESTED, InstalledVersion

torch.set_num_threads(1)

STATEFUL = [family for family in FAMILIES if family.states]
TITLE = attrgetter("title")
(DELTA,) = (family for family in FAMILIES if family.model_type == "qwen3_5_text")
(DENSE,) = (family for family in FAMILIES if family.model_type == "qwen3")

NAMES_RELEASES = re.compile(
    r"; installed are torch \S+ and transformers \S+, and tested are torch \S+ to \S+ and transformers \S+ to \S+: "
    r"pip install 'torch>=[\d.]+,<[\d.]+' 'transformers>=[\d.]+,<[\d.]+'$"
)


def load(family: Family, directory: Path, dtype: str = "float32") -> BaseModel:
    return BaseModel.load(make(directory, family), device="cpu", dtype=dtype)


def refuse(family: Family, directory: Path, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as refused:
        load(family, directory)
    text = str(refused.value)
    assert NAMES_RELEASES.search(text) and "\n" not in text, text


def replace_part(change: Callable[[str, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Change each part of a state that a layer gives back."""
    update_conv, update_recurrent = LayerCache.update_conv_state, LayerCache.update_recurrent_state

    def change_conv(self: LayerCache, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        returned = update_conv(self, *args, **kwargs)
        assert self.state.conv is not None
        self.state = MixerState(change("conv", self.state.conv), self.state.recurrent)
        return returned

    def change_recurrent(self: LayerCache, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        update_recurrent(self, change("recurrent", states), *args, **kwargs)
        return states

    def change_linear(self: LayerCache, layer_idx: int, states: Tensor) -> None:
        change_recurrent(self, states, layer_idx)

    monkeypatch.setattr(LayerCache, "update_conv_state", change_conv)
    monkeypatch.setattr(LayerCache, "update_recurrent_state", change_recurrent)
    monkeypatch.setattr(LayerCache, "set_linear_cache", change_linear)


def forget(part: str, name: str, state: Tensor) -> Tensor:
    return torch.zeros_like(state) if name == part else state


def swap_sequences(name: str, state: Tensor) -> Tensor:
    return state.flip(0)


def has_part(family: Family, part: str) -> bool:
    """Short convolutions have no recurrent state, and lightning attention no convolution."""
    return part != ("recurrent" if family.model_type.startswith("lfm2") else "conv" * (family.model_type == "minimax"))


# `make test` does the first of them; `make test-extended` does all.
FAMILIES = [
    pytest.param(family, marks=[pytest.mark.extended] if index > 1 else [], id=TITLE(family))
    for index, family in enumerate(STATEFUL)
]


@pytest.mark.parametrize("part", ["conv", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_whose_state_is_lost_does_not_start(
    family: Family, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_part(family, part):
        replace_part(partial(forget, part), monkeypatch)
        refuse(family, tmp_path, "in pieces differs from the model's own forward")
    else:
        load(family, tmp_path)


class SampledModel:
    """Gives the reference's rows but for those that are named, which get a distance."""

    device, dtype, rounds_to_8_bits = torch.device("cpu"), torch.bfloat16, False

    def __init__(self, distance_by_row: dict[int, float], *, may_change_rows: bool) -> None:
        self._rows_TV = torch.randn(start_check.TOKENS, 40, generator=torch.Generator().manual_seed(0))
        self._distance_by_row, self.may_change_rows = distance_by_row, may_change_rows

    def reference_logits(self, *, input_ids: Tensor) -> Tensor:
        return self._rows_TV

    def forward_modules(self, tokens_T: Tensor, positions_T: Tensor, plan: object, lora_batch: LoRABatch) -> Tensor:
        plan._recurrence = SimpleNamespace(final_states=[None])  # pyright: ignore[reportAttributeAccessIssue]
        return positions_T[:, None]

    def logits(self, hidden_TD: Tensor, lora_batch: LoRABatch) -> Tensor:
        rows = hidden_TD[:, 0]
        distance_T = torch.tensor([self._distance_by_row.get(int(row), 0.01) for row in rows])
        return self._rows_TV[rows] * (1 + distance_T[:, None])


@pytest.mark.parametrize(
    ("distance_by_row", "may_change_rows", "reason"),
    [
        ({1: 0.5}, True, None),
        ({1: 0.5}, False, "a prompt differs"),
        ({4: 0.5}, True, None),
        ({4: 0.5, 5: 0.5}, True, "a sampled token differs"),
        ({0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}, True, "a prompt differs"),
    ],
)
def test_one_row_of_a_mixture_may_differ_and_a_lost_state_is_found(
    distance_by_row: dict[int, float], may_change_rows: bool, reason: str | None
) -> None:
    sampled = SampledModel(distance_by_row, may_change_rows=may_change_rows)
    if reason is None:
        start_check.check_sampling(sampled, 300)
        return
    with pytest.raises(ReleaseError, match=reason):
        start_check.check_sampling(sampled, 300)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_whose_sequences_exchange_states_does_not_start(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_part(swap_sequences, monkeypatch)
    refuse(family, tmp_path, "in pieces differs from the model's own forward")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_whose_cache_has_another_argument_does_not_start(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "cache_argument", lambda name, forward: "renamed")
    refuse(family, tmp_path, r"layer \d+ \(\w+\) does not use the cache that it gets|unexpected keyword argument")


def test_a_layer_that_asks_its_cache_for_more_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(LayerCache, "get_conv_state")
    monkeypatch.delattr(LayerCache, "layers")
    refuse(DELTA, tmp_path, r"a layer asks its cache for '(get_conv_state|layers)', which is not supported")


def test_a_mutated_gradient_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = attention.PackedCausal.mix

    def detached(self: attention.PackedCausal, mixer: SequenceMixer, x_TD: Tensor) -> Tensor:
        y_TD = mix(self, mixer, x_TD)
        return 0.5 * y_TD + 0.5 * y_TD.detach()

    monkeypatch.setattr(attention.PackedCausal, "mix", detached)
    refuse(DELTA, tmp_path, "gradients of two sequences in one row of Qwen3_5GatedDeltaNet differ")


@pytest.mark.parametrize("family", [param for param in FAMILIES if param.values[0].model_type != "minimax"])
def test_a_family_with_states_starts_in_bfloat16(family: Family, tmp_path: Path) -> None:
    """Lightning attention of random weights is too sensitive to rounding."""
    load(family, tmp_path, "bfloat16")


def use_untested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    untested = [InstalledVersion("99.0.0", TESTED[1])]
    for module in (model, servable, versions):
        monkeypatch.setattr(module, "list_untested_versions", lambda: untested)
    monkeypatch.setattr(servable, "list_installed_versions", lambda: [InstalledVersion("2.13.0", TESTED[0]), *untested])


def show_first_token_only(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
    mask = attention.visibility_mask(*args, **kwargs)
    mask[..., 1:-1] = float("-inf")
    return mask


def test_an_untested_release_is_checked_for_a_dense_model_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_check, "visibility_mask", show_first_token_only)
    load(DENSE, tmp_path / "tested")
    use_untested_release(monkeypatch)
    refuse(DENSE, tmp_path / "untested", "a prompt differs from the model's own forward .* and transformers 99.0.0")


def test_an_untested_release_that_computes_the_same_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_untested_release(monkeypatch)
    load(DENSE, tmp_path / "dense")
    load(DELTA, tmp_path / "delta")


def test_another_refusal_under_an_untested_release_names_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    use_untested_release(monkeypatch)
    shape = model.ModelShape("tiny/x", "/nowhere", 300, 256, "XForCausalLM")
    for error in (SettingsError("a reason"), KeyError("a reason")):
        with pytest.raises(SettingsError, match="a reason") as refused, servable.raise_settings_errors(shape):
            raise error
        assert NAMES_RELEASES.search(str(refused.value))


# How one layer exchanges its state.


class Exchange(nn.Module):
    """A layer that adds up its inputs; `behave` says how it uses its cache."""

    layer_idx = 0

    def __init__(self, behave: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.behave = behave

    def forward(self, hidden_states: Tensor, other: Cache | None = None, attention_mask: None = None) -> Tensor:
        if other is not None:
            self.behave(other, hidden_states)
        return hidden_states


def read_nothing(cache: Any, x_nLD: Tensor) -> None:  # noqa: ANN401
    pass


def only_read(cache: Any, x_nLD: Tensor) -> None:  # noqa: ANN401
    cache.get_recurrent_state(0)


def only_write(cache: Any, x_nLD: Tensor) -> None:  # noqa: ANN401
    cache.update_recurrent_state(x_nLD, 0)


def read_second_state(cache: Any, x_nLD: Tensor) -> None:  # noqa: ANN401
    cache.get_recurrent_state(0, state_idx=1)


def read_conv_only(cache: Any, x_nLD: Tensor) -> None:  # noqa: ANN401
    cache.get_conv_state(0)
    cache.update_conv_state(x_nLD.mT, 0, conv_kernel_size=2)


BEGIN = None
CONTINUE = MixerState(torch.ones(1, 4, 2), torch.ones(1, 4))


@pytest.mark.parametrize(
    ("behave", "state", "reason"),
    [
        (read_nothing, BEGIN, "does not use the cache that it gets"),
        (only_read, BEGIN, "leaves no state in the cache that it gets"),
        (read_conv_only, CONTINUE, "continues without its recurrent state"),
        (only_read, CONTINUE, "continues without its conv state"),
        (read_second_state, BEGIN, "keeps more than one state"),
    ],
)
def test_an_exchange_that_is_not_understood_is_an_error(
    behave: Callable[[Any, Tensor], None], state: MixerState | None, reason: str
) -> None:
    context = ForwardContext()
    context.lora_batch = LoRABatch.of_base(3)
    mixer = SequenceMixer(Exchange(behave), context)
    with pytest.raises(ReleaseError, match=reason):
        mixer(torch.ones(1, 3, 4), (0,), state, keep=True)


def test_the_argument_of_the_cache_is_that_with_its_type() -> None:
    assert cache_argument("Exchange", Exchange(only_read).forward) == "other"

    def without(hidden_states: Tensor, cache: None = None) -> None: ...

    with pytest.raises(ReleaseError, match=r"without takes 0 caches among its arguments \(hidden_states, cache\)"):
        cache_argument("without", without)


def test_layers_read_states_by_layer_and_index_too() -> None:
    cache: Any = LayerCache(CONTINUE)
    assert cache.has_previous_state(0) and not LayerCache(None).has_previous_state(0)
    assert cache.layers[0].conv_states[0] is CONTINUE.conv
    assert cache.layers[0].recurrent_states[0] is CONTINUE.recurrent
    assert not cache.layers[0].record_past
    with pytest.raises(ReleaseError, match="keeps more than one state"):
        cache.layers[0].conv_states[1]


def test_the_installed_cache_has_the_methods_that_layers_use() -> None:
    """A parameter that transformers adds to one of these methods has to be understood."""
    for name in ("update_conv_state", "update_recurrent_state"):
        ours = inspect.signature(getattr(LayerCache, name)).parameters
        theirs = inspect.signature(getattr(Cache, name)).parameters
        assert {key for key in theirs if key not in ("self", "kwargs")} <= {*ours, "conv_states", "recurrent_states"}


def test_a_layer_that_continues_in_slots_reads_and_gives_back_each_part() -> None:
    stores = MixerState(torch.arange(12.0).view(3, 4), torch.zeros(3, 5))
    slots = LayerSlots(stores, torch.tensor([1]), torch.tensor([2]), ModuleType("kernels"))
    gathered, fused = (SlotCache(slots, frozenset(parts)) for parts in ((), MixerState._fields))
    faults = []
    for cache in (gathered, fused):
        for read in (cache.begin, partial(cache.get_conv_state, 0), partial(cache.get_recurrent_state, 0)):
            read()
            faults.append(cache.find_fault(MixerState(None, None), 1))
    without = [f"continues without its {part} state" for part in MixerState._fields]
    assert faults == [*without, None, without[0], *["does not give its conv state back"] * 2]
    conv = gathered.get_conv_state(0)
    assert conv is not None and gathered.has_previous_state(0)
    conv += 1
    gathered.store()
    assert stores.conv is not None and stores.conv[1:].tolist() == [[4, 5, 6, 7], [5, 6, 7, 8]]


def test_layers_get_slots_for_the_parts_that_functions_of_their_file_step() -> None:
    """Qwen3.5 has both; Kimi has another gate; MiniMax computes its state in its forward."""
    parts = []
    for family in ("qwen3_5_text", "kimi_linear", "minimax"):
        decoder = build(next(other for other in STATEFUL if other.model_type == family)).get_decoder()
        parts.append(sorted(wrap_mixers(decoder, ForwardContext())[0]._fused_parts))
    assert parts == [["conv", "recurrent"], ["conv"], []]
