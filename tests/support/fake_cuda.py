"""A simulated CUDA device without values: shapes, dtypes and devices of the branches that need a GPU. Inside
`fake_cuda` every tensor is fake. While `strict`, each operation that would make the host wait for the device is an
error: reading a value, a size that depends on values, a copy from memory that is not pinned. The one way to read is
`Tensor.cpu` and then `Tensor.numpy`, which is counted and gives ones, or zeros for whole numbers. A non-blocking copy
to the host must be awaited before (`Event`).

What needs values runs on the host with plain tensors (`_on_host`): image processors and custom losses.

Torch without CUDA has no device guard for it, so the guard of `meta`, which does nothing, is used; and its autograd
engine has no stream for it, so `_backward` walks the graph instead.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from support import tiny_models
from tinsmith.backends.full import FullBackend
from tinsmith.backends.full.base import FullBase
from tinsmith.backends.torch import (
    TorchBackend,
    attention,
    expert_kernels,
    fp8,
    layer_kernels,
    lora,
    loss,
    module_kernels,
    moe,
    recurrent,
    trainer,
    tree_attention,
    vision,
)
from tinsmith.backends.torch.attention import register_attention
from tinsmith.backends.torch.custom_loss import CustomRun
from tinsmith.backends.torch.loading import choose_attention
from tinsmith.backends.torch.model import BaseModel
from tinsmith.backends.torch.state_steps import StateSlots
from tinsmith.backends.torch.vision import Features, Vision
from tinsmith.plan import fused_layers
from tinsmith.samplers.local import engine, kv_cache, paged_attention, state_pool
from tinsmith.types import ModelShape

DEVICE = torch.device("cuda", 0)
FREE_BYTES = 2**31
CUDA_TYPE, META_TYPE = 1, 14
"""Numbers of device types in c10/core/DeviceType.h."""


class FakeDevice(TorchFunctionMode):
    """`reads` counts the waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.strict = False
        self.hooks: dict[tuple[Any, int], list[Callable[[Tensor], object]]] = {}
        self.callbacks: list[Callable[[], object]] = []
        """Of the next backward: those of its graph's tensors, and those at its end."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs_copy = dict(kwargs or {})
        if func is Tensor.numpy:
            return _numbers(*args)
        if func is Tensor.backward:
            with self:
                return self._backward(args[0], kwargs_copy["gradient"])
        if func is Tensor.register_hook and args[0].grad_fn is not None:
            self.hooks.setdefault((args[0].grad_fn, args[0].output_nr), []).append(args[1])
        if func in (Tensor.__float__, Tensor.__bool__) and args[0].device.type == "cpu":
            return 0.0 if func is Tensor.__float__ else True
        if func is Tensor.pin_memory:
            # Without its value, which fake tensors of one element would otherwise carry to the device.
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        if func is torch.empty:
            kwargs_copy.pop("pin_memory", None)
        if func in (torch.addmm, torch.baddbmm) and kwargs_copy.pop("out_dtype", None) is not None:
            # Their decompositions do not know this argument.
            product = (torch.mm if func is torch.addmm else torch.bmm)(*args[1:])
            assert kwargs_copy["out"].shape == product.shape and kwargs_copy["out"].dtype == torch.float32
            return kwargs_copy["out"]
        if func is Tensor.cpu:
            self.reads += 1
        if self.strict:
            self._check(func, args, kwargs_copy)
        return func(*args, **kwargs_copy)

    def _backward(self, x: Tensor, gradient: Tensor) -> None:
        _backward(x, gradient, self.hooks)
        self.hooks.clear()
        while self.callbacks:
            self.callbacks.pop(0)()

    @staticmethod
    def _check(func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in (torch.tensor, torch.as_tensor):
            assert "cuda" not in str(kwargs.get("device")), "a copy from memory that is not pinned"
        if func is Tensor.to and isinstance(args[0], Tensor):
            devices = [x for x in (*args[1:], kwargs.get("device")) if isinstance(x, torch.device | str)]
            moves = [x for x in devices if torch.device(x).type != args[0].device.type]
            assert not moves or kwargs.get("non_blocking"), "a copy that waits"
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            for key in args[1] if isinstance(args[1], tuple) else (args[1],):
                assert key is None or isinstance(key, slice | int | Tensor | type(Ellipsis)), "an index that is copied"
                if isinstance(key, Tensor):
                    assert key.device.type == args[0].device.type, "an index from the host: a copy that waits"
                    assert key.dtype != torch.bool, "a mask as an index: its size is read from the device"


class Event:
    """Replaces `torch.cuda.Event`: it is recorded, then awaited."""

    def __init__(self) -> None:
        self.is_recorded = False

    def record(self, stream: Stream | None = None) -> None:
        assert stream is not None, "recorded on the stream of this thread's current device"
        assert stream.device == DEVICE
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded


class Stream:
    """Replaces `torch.cuda.Stream`."""

    def __init__(self, device: torch.device | None = DEVICE, priority: int = 0) -> None:
        self.device = device

    def wait_stream(self, stream: Stream) -> None:
        assert stream.device == self.device

    def wait_event(self, event: Event) -> None:
        assert event.is_recorded

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The work queued on it is complete."""


def _numbers(x: Tensor) -> np.ndarray:
    assert x.device.type == "cpu", "Tensor.numpy of a tensor on the device"
    fill = np.ones if x.dtype.is_floating_point else np.zeros
    return fill(tuple(x.shape), str(x.dtype).removeprefix("torch."))


def _backward(
    x: Tensor, gradient: Tensor, hooks: Mapping[tuple[Any, int], Sequence[Callable[[Tensor], object]]]
) -> None:
    """Run autograd's graph in one thread: every node once, in topological order."""
    order: list[Any] = []

    def visit(node: Any) -> None:  # noqa: ANN401 - torch has no name for it
        if node is not None and node not in order:
            for other, _ in node.next_functions:
                visit(other)
            order.append(node)

    visit(x.grad_fn)
    pending: dict[Any, dict[int, Tensor]] = {x.grad_fn: {x.output_nr: gradient}}
    # So that a layer runs again once in a backward, not for each of its saved tensors.
    with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", lambda: id(pending)):
        for node in reversed(order):
            node_gradients = pending.pop(node, None)
            if node_gradients is None:
                continue
            if hasattr(node, "variable"):  # a leaf
                leaf = node.variable
                leaf.grad = node_gradients[0] if leaf.grad is None else leaf.grad.add_(node_gradients[0])
                continue
            for index, gradient_part in node_gradients.items():
                for hook in hooks.get((node, index), ()):
                    hook(gradient_part)
            outputs = (getattr(node, "apply", None) or node)(
                *(node_gradients.get(i) for i in range(max(node_gradients) + 1))
            )
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            edges = [pair for pair in node.next_functions if pair[0] is not None]
            needs_gradient = getattr(node, "needs_input_grad", [pair[0] is not None for pair in node.next_functions])
            # A Function of ours has gradients of arguments that are no tensors, too, and no edges for them.
            gradients = [
                gradient_part for gradient_part, is_needed in zip(outputs, needs_gradient, strict=False) if is_needed
            ]
            for (other, index), gradient_part in zip(edges, gradients, strict=True):
                if gradient_part is not None:
                    meta = other._input_metadata[index]
                    assert gradient_part.device == x.device, f"{node} gives a gradient on {gradient_part.device}"
                    gradient_part = gradient_part.sum_to_size(meta.shape).to(meta.dtype)
                    before = pending.setdefault(other, {})
                    before[index] = gradient_part if index not in before else before[index] + gradient_part


@contextmanager
def _guard() -> Iterator[None]:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (META_TYPE + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[CUDA_TYPE]
    assert guards[META_TYPE]
    guards[CUDA_TYPE] = guards[META_TYPE]
    try:
        yield
    finally:
        guards[CUDA_TYPE] = before


def _move(model: nn.Module) -> None:
    """Move parameters and buffers to the device; tied ones stay tied."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in cast("list[dict[str, Any]]", [module._parameters, module._buffers]):
            for name, value in tensors.items():
                if value is not None:
                    on_device = moved.setdefault(id(value), value.detach().to(DEVICE))
                    tensors[name] = (
                        nn.Parameter(on_device, requires_grad=False) if tensors is module._parameters else on_device
                    )
                    moved[id(value)] = tensors[name]


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with plain tensors, of zeros for those that are given."""

    def run(*args: Any) -> Any:  # noqa: ANN401
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*(torch.zeros(arg.shape) if isinstance(arg, Tensor) else arg for arg in args))

    return run


class _Softmax(NamedTuple):
    """In place of Triton's kernels, which need memory: what they give."""

    raw_CV: Tensor
    sums_CS: Tensor

    @classmethod
    def of(cls, raw_CV: Tensor, multiplier: float, softcap: float | None) -> _Softmax:
        assert raw_CV.dtype == torch.float32 and raw_CV.is_contiguous()
        return cls(raw_CV, raw_CV.new_empty(len(raw_CV), 1))

    def logprobs(self, cells_p: Tensor) -> Tensor:
        return self.raw_CV.view(-1)[cells_p]

    def gradient(self, cells_p: Tensor, starts_C: Tensor, grad_p: Tensor, dtype: torch.dtype) -> Tensor:
        assert len(starts_C) == len(self.raw_CV) + 1 and cells_p.shape == grad_p.shape
        assert {tensor.device for tensor in (cells_p, starts_C, grad_p)} == {self.raw_CV.device}
        return torch.empty_like(self.raw_CV, dtype=dtype)


def _qwen_features(tower: Any, pixels: Any, device: torch.device) -> Features:  # noqa: ANN401
    """What the tower gives. It reads its grid on the device, once for each image."""
    width, num_rows = tower.module.config.out_hidden_size, len(pixels.patches) // tower._processor.merge_size**2
    deeper = len(getattr(tower.module, "deepstack_merger_list", ()))
    first, *deeper_features = torch.empty(1 + deeper, num_rows, width, dtype=torch.bfloat16, device=device)
    return Features(first, tuple(deeper_features))


def _attend_pages(
    q_nHD: Tensor, store_PSGE: Tensor, table_nC: Tensor, keys_n: Tensor, *, key_dim: int, **options: object
) -> Tensor:
    """What the kernel takes and gives. A kernel cannot be launched with fake tensors."""
    assert {x.device for x in (q_nHD, store_PSGE, table_nC, keys_n)} == {DEVICE}
    assert table_nC.dtype == keys_n.dtype == torch.int32 and q_nHD.dtype == store_PSGE.dtype
    assert len(q_nHD) == len(table_nC) == len(keys_n) and q_nHD.shape[2] == key_dim < store_PSGE.shape[3]
    assert "scale" in options and q_nHD.shape[1] % store_PSGE.shape[2] == 0
    return q_nHD.new_empty(*q_nHD.shape[:2], store_PSGE.shape[3] - key_dim)


def _write_rows(store_PSGE: Tensor, slots_n: Tensor, k_nGD: Tensor, v_nGD: Tensor) -> None:
    assert {x.device for x in (store_PSGE, slots_n, k_nGD, v_nGD)} == {DEVICE}
    assert slots_n.dtype == torch.int64 and k_nGD.dtype == v_nGD.dtype == store_PSGE.dtype
    assert len(slots_n) == len(k_nGD) == len(v_nGD) and k_nGD.shape[2] + v_nGD.shape[2] == store_PSGE.shape[3]


def _step_convolution(
    hidden_states: Tensor,
    conv_state: StateSlots,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    num, channels, length = hidden_states.shape
    _check_slots(conv_state, num)
    assert length == 1 and conv_state.store_S.shape[1] == channels == len(weight)
    return hidden_states.new_empty(num, channels, 1)


def _step_gated_delta(
    query: Tensor, key: Tensor, value: Tensor, *, initial_state: StateSlots, **gates: object
) -> tuple[Tensor, StateSlots]:
    num, length, *dims = value.shape
    _check_slots(initial_state, num)
    assert query.shape == key.shape and length == 1
    assert initial_state.store_S.shape[1:] == (dims[0], key.shape[3], dims[1])
    return query.new_empty(value.shape), initial_state


def _quantise_rows(
    x_TI: Tensor, factors_EI: Tensor | None = None, expert_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    assert expert_T is None or (factors_EI is not None and expert_T.dtype == torch.int32 and len(expert_T) == len(x_TI))
    assert factors_EI is None or factors_EI.shape[1] == x_TI.shape[1]
    return x_TI.new_empty(x_TI.shape, dtype=fp8.E4M3), x_TI.new_empty(len(x_TI), 1, dtype=torch.float32)


def _check_slots(slots: StateSlots, num: int) -> None:
    assert {x.device for x in (slots.store_S, slots.read_n, slots.write_n)} == {DEVICE}
    assert slots.read_n.dtype == slots.write_n.dtype == torch.int64
    assert len(slots.read_n) == len(slots.write_n) == num


@contextmanager
def fake_cuda(*, pages: bool = True, grouped: bool = True) -> Iterator[FakeDevice]:
    """`pages`: with kernels that read pages and slots; `grouped`: with grouped products, as compute capability 9.0 has
    them.
    """
    kernels = SimpleNamespace(paged_attention=_attend_pages, write_rows=_write_rows) if pages else None
    steps = SimpleNamespace(step_convolution=_step_convolution, step_gated_delta=_step_gated_delta) if pages else None
    with ExitStack() as stack:
        for holder, name, value in (
            (torch.cuda, "mem_get_info", (FREE_BYTES, FREE_BYTES)),
            (torch.cuda, "memory_reserved", 0),
            (torch.cuda, "memory_allocated", 0),
            (torch.cuda, "synchronize", None),
            (torch.cuda, "get_device_capability", (9, 0)),
            (expert_kernels, "_launch", None),
            (layer_kernels, "_launch", None),
            (moe, "has_grouped_mm", grouped),
            (loss, "head_kernels", SimpleNamespace(Softmax=_Softmax)),
            (engine.LocalSampler, "_make_graphs", None),
            (kv_cache, "page_kernels", kernels),
            (paged_attention, "page_kernels", kernels),
            (state_pool, "step_kernels", steps),
            (trainer, "compute_metrics", {}),  # computed on the host, from values
            (tree_attention, "check_parts", True),  # compares values, once for each process
            (attention, "check_sinks", True),  # likewise
        ):
            stack.enter_context(mock.patch.object(holder, name, lambda *_, value=value, **__: value))
        for kind, name in ((CustomRun, "weights"), (CustomRun, "finish"), (vision._QwenTower, "read")):
            stack.enter_context(mock.patch.object(kind, name, _on_host(getattr(kind, name))))
        for holder, name in (
            (module_kernels, "find_norm_form"),
            (module_kernels, "find_mlp_form"),
            (module_kernels, "find_rotation_kinds"),
            (moe, "find_activation"),
            (recurrent, "equals_gated_delta"),  # whose answer lasts
            (fused_layers, "_is_silu"),
            (fused_layers, "_rotates_halves"),
        ):
            stack.enter_context(mock.patch.object(holder, name, _on_host(getattr(holder, name))))  # they compare values
        stack.enter_context(mock.patch.object(vision._QwenTower, "features", _qwen_features))
        stack.enter_context(mock.patch.object(fp8, "quantise_rows", _quantise_rows))
        stack.enter_context(mock.patch.object(torch.cuda, "Event", Event))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", Stream))
        lora.anchor.cache_clear()  # a fake tensor belongs to one mode
        stack.callback(lora.anchor.cache_clear)
        stack.enter_context(_guard())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # fake tensors cannot be distinguished by storage address
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(FakeDevice())


def load(kind: type[BaseModel], shape: ModelShape, dtype: torch.dtype, *options: str, on_device: bool = True) -> Any:  # noqa: ANN401
    """A base model of random weights, without its checks."""
    register_attention()
    config = AutoConfig.from_pretrained(shape.path)
    auto = AutoModelForImageTextToText if shape.vision else AutoModelForCausalLM
    with no_init_weights():  # one that draws until all numbers are near zero would never end
        model = auto.from_config(
            config, dtype=dtype, attn_implementation=choose_attention(config), experts_implementation="eager"
        )
    if on_device:
        _move(model)
    images = Vision.load(model, shape) if shape.vision else None
    return kind(model, tiny_models.tokenizer(), shape, *options, vision=images)  # pyright: ignore[reportCallIssue]


class FakeCudaBackend(TorchBackend):
    """A backend with its weights on the fake device, in bfloat16. Create it within `fake_cuda`."""

    def _load_base(self, shape: ModelShape, *, device: str, dtype: str, recompute: str, quantize: str) -> BaseModel:
        base = load(BaseModel, shape, torch.bfloat16, recompute, quantize)
        if base._fused is not None:
            base._fused.prepare()
        else:
            module_kernels.join_gated_products(base.swapped)
        return base


class FakeCudaFullBackend(FullBackend):
    """The same with all weights trained, in float32."""

    def _load_base(self, shape: ModelShape, *, device: str, dtype: str, recompute: str, quantize: str) -> FullBase:
        return load(FullBase, shape, torch.float32, recompute, quantize)
