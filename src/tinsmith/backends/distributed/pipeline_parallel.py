"""Pipeline parallelism: a rank has some consecutive layers of the decoder, a stage, and micro-batches go from stage to
stage.

`Stage` turns a rank's copy of the decoder into its stage: the family's forward still runs, but the layers of other
stages are empty and return their input, the stage's first layer takes its input from the previous stage, and its last
layer's output is sent to the next stage. The first stage embeds tokens; the last stage has the unembedding. Ranks of a
tensor or context group have the same layers, and each exchanges messages with the same rank of the neighbouring stages.

`Schedule` runs a step in the order 1F1B: a stage keeps the activations of at most as many micro-batches as there are
stages from it on. `build_ticks` aligns the actions of all stages: an action's input was sent in an earlier tick. All
ranks pack the same micro-batches, so they know the size of each message. At a pause all messages have arrived: samples
may be drawn in between, and an abandoned step leaves no message behind.

With expert parallelism, every rank of a stage performs every action, with one row in place of an empty micro-batch. An
action waits only for messages that were sent in earlier ticks and for the same action of other ranks of its stage, so
all actions of a tick end if those of earlier ticks do: sends and exchanges cannot wait for each other in a circle.

Shapes: T rows of a micro-batch, D hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import cache, partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tinsmith.backends.distributed.collectives import Ranks
from tinsmith.backends.torch.lora import MultiLoRALinear
from tinsmith.backends.torch.moe import MultiLoRAExperts
from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import count_parameters, decoder_layers, find_indivisible_reason
from tinsmith.plan.memory import split_layers


class Action(NamedTuple):
    """The forward or the backward of a micro-batch."""

    is_forward: bool
    micro_batch: int


def order_1f1b(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """The stage's actions: warm-up forwards, one for each later stage; then a forward and a backward alternately; then
    the remaining backwards.
    """
    num_warmup = min(num_stages - 1 - stage, num_micro_batches)
    steady = [
        (Action(True, num_warmup + index), Action(False, index)) for index in range(num_micro_batches - num_warmup)
    ]
    return [
        *(Action(True, index) for index in range(num_warmup)),
        *(action for pair in steady for action in pair),
        *(Action(False, index) for index in range(num_micro_batches - num_warmup, num_micro_batches)),
    ]


@cache
def build_ticks(num_stages: int, num_micro_batches: int) -> tuple[tuple[Action | None, ...], ...]:
    """Each stage's actions by tick; None where the stage waits for another one."""
    pending = [deque(order_1f1b(stage, num_stages, num_micro_batches)) for stage in range(num_stages)]
    completed: set[tuple[int, Action]] = set()
    programs: list[list[Action | None]] = [[] for _ in range(num_stages)]
    while any(pending):
        started = []
        for stage, actions in enumerate(pending):
            action = actions[0] if actions else None
            if action is not None:
                source = stage - 1 if action.is_forward else stage + 1
                if source in range(num_stages) and (source, action) not in completed:
                    action = None
            programs[stage].append(actions.popleft() if action is not None else None)
            started.append((stage, action))
        completed.update(started)
    return tuple(map(tuple, programs))


class _Boundary(NamedTuple):
    """The output of a layer: its dtype and width, and the number of values if it is a tuple."""

    dtype: torch.dtype
    width: int
    num_values: int | None


class Stage:
    """A rank's stage of a decoder on the host. `stage_input` and the result of `run` are the two ends of the last
    call's graph.
    """

    def __init__(
        self, layers: Sequence[nn.Module], stage_layers: range, ranks: Ranks, boundaries: Sequence[_Boundary]
    ) -> None:
        self.layers = stage_layers
        self.is_first, self.is_last = stage_layers.start == 0, stage_layers.stop == len(layers)
        self.stage_input: Tensor | None = None
        self.early_rows: Tensor | None = None
        """The next call's input, if it was received early."""
        self._stage_output: Tensor | None = None
        self._boundaries = boundaries
        self.ranks = ranks
        self.sends: deque[tuple[dist.Work, Tensor]] = deque()
        for index, layer in enumerate(layers):
            if index not in stage_layers:
                drop_parameters(*layer.modules())
                layer._modules.clear()
                layer.forward = partial(_pass_on, boundaries[index].num_values)
        if not self.is_first:
            first = layers[stage_layers.start]
            first.forward = partial(self._run_first_layer, first.forward)
        if not self.is_last:
            last = layers[stage_layers.stop - 1]
            last.forward = partial(self._run_last_layer, last.forward)

    def _run_first_layer(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        assert self.stage_input is not None
        rows_1TD = self.stage_input[None]
        if args:
            return forward(rows_1TD, *args[1:], **kwargs)
        return forward(**{**kwargs, "hidden_states": rows_1TD})

    def _run_last_layer(
        self, forward: Callable[..., Tensor | tuple[Tensor, ...]], *args: object, **kwargs: object
    ) -> object:
        output = forward(*args, **kwargs)
        self._stage_output = (output if isinstance(output, Tensor) else output[0])[0]
        return output

    def run(self, forward: Callable[[], Tensor], num_rows: int, *, is_probe: bool) -> Tensor:
        """Run the decoder over the previous stage's output and send its output to the next stage. Returns [T, D]: the
        last stage's hidden states, or the output that was sent. With `is_probe` no messages are exchanged.
        """
        if not self.is_first:
            input_TD = self.buffer(num_rows, self.layers.start - 1)
            if is_probe:
                input_TD.zero_()
            else:
                input_TD = self.ranks.receive(input_TD, forward=True) if self.early_rows is None else self.early_rows
            self.early_rows = None
            self.stage_input = input_TD.requires_grad_() if torch.is_grad_enabled() else input_TD
        hidden_TD = forward()
        if self.is_last:
            return hidden_TD
        output_TD, self._stage_output = self._stage_output, None
        assert output_TD is not None
        if is_probe:
            return hidden_TD
        self.send(output_TD.detach(), forward=True)
        return output_TD if torch.is_grad_enabled() else hidden_TD

    def buffer(self, num_rows: int, layer: int) -> Tensor:
        """An empty [T, D] for the output of a layer, or its gradient."""
        boundary = self._boundaries[layer]
        return torch.empty(num_rows, boundary.width, dtype=boundary.dtype, device=self.ranks.device)

    def send(self, x_TD: Tensor, *, forward: bool) -> None:
        while self.sends and self.sends[0][0].is_completed():
            self.ranks.finish(self.sends.popleft()[0])
        x_TD = x_TD.contiguous()
        self.sends.append((self.ranks.send(x_TD, forward=forward), x_TD))

    def finish_sends(self) -> None:
        while self.sends:
            self.ranks.finish(self.sends.popleft()[0])


def _pass_on(num_values: int | None, *args: Tensor, **kwargs: Tensor) -> Tensor | tuple[Tensor | None, ...]:
    rows_1TD = args[0] if args else kwargs["hidden_states"]
    return rows_1TD if num_values is None else (rows_1TD, *[None] * (num_values - 1))


def drop_parameters(*modules: nn.Module) -> None:
    """Drop the parameters and buffers of these modules; other modules that share them keep them."""
    for module in modules:
        module._parameters.clear()
        module._buffers.clear()


def check_stages(name: str, config: PreTrainedConfig, stages: int) -> None:
    """Raises SettingsError if the model's layers cannot be on different ranks."""
    reason = None
    if (layers := cast(int, config.num_hidden_layers)) < stages:
        reason = f"has {layers} layers; set it to {layers} or less"
    elif indivisible_reason := find_indivisible_reason(config):
        reason = f"{indivisible_reason}; use tensor_parallel or shard_base"
    if reason is not None:
        raise SettingsError(f"pipeline_parallel is {stages}, and {name} {reason}")


def find_layers(decoder: nn.Module, name: str) -> list[nn.Module]:
    """The decoder's layers, in order. Raises SettingsError if the family does not mark them."""
    if not (layers := decoder_layers(decoder)):
        raise SettingsError(
            f"pipeline_parallel is set, and {name} does not mark which of its modules are layers; use data_parallel"
        )
    return layers


def record_boundaries(
    layers: Sequence[nn.Module], run: Callable[[], object], num_rows: int, name: str
) -> list[_Boundary]:
    """The output of each layer when `run` runs the unsharded model over `num_rows` tokens. Raises SettingsError if it
    is not one row of hidden states per token.
    """
    boundaries: list[_Boundary] = []

    def record(layer: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        rows, *extra_values = (output,) if isinstance(output, Tensor) else output
        if rows.dim() != 3 or rows.shape[:2] != (1, num_rows) or any(value is not None for value in extra_values):
            raise SettingsError(
                f"pipeline_parallel is set, and layers of {name} pass on more than a row of hidden states per token; "
                "use tensor_parallel or shard_base"
            )
        boundaries.append(_Boundary(rows.dtype, rows.shape[2], None if isinstance(output, Tensor) else len(output)))

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return boundaries


def find_stage_layers(
    layers: Sequence[nn.Module], embedding_elements: int, unembedding_elements: int, ranks: Ranks
) -> range:
    """The layers of this rank's stage, by the plan's rule: embeddings count with the first layer, the unembedding with
    the last.
    """
    sizes = [_count_weights(layer) for layer in layers]
    sizes[0] += embedding_elements
    sizes[-1] += unembedding_elements
    counts = split_layers(tuple(sizes), ranks.degrees.pipeline)
    first = sum(counts[: ranks.stage])
    return range(first, first + counts[ranks.stage])


def _count_weights(layer: nn.Module) -> int:
    """Elements of a layer's parameters, and of the matrices that it stores as codes."""
    modules = [module for module in layer.modules() if isinstance(module, MultiLoRALinear | MultiLoRAExperts)]
    return count_parameters(layer) + sum(codes.num_weights for module in modules for codes in module.list_codes())


class StageRows(NamedTuple):
    """A micro-batch of a schedule: the number of this rank's rows, 0 if it is empty, and whether it has a backward."""

    num_rows: int
    train: bool


class Schedule:
    """One step's micro-batches on this rank. `forward` runs the decoder over the micro-batch of an index; on the last
    stage `head` returns the gradient of its hidden states, or scores them if it has no backward.
    """

    def __init__(
        self,
        stage: Stage,
        batches: Sequence[StageRows],
        forward: Callable[[int], Tensor],
        head: Callable[[int, Tensor], Tensor | None],
    ) -> None:
        self._stage, self._ranks = stage, stage.ranks
        self._batches = batches
        self._forward, self._head = forward, head
        self._in_flight: dict[int, tuple[Tensor | None, Tensor]] = {}
        """Input and output of the stage, by micro-batch, between its forward and its backward."""
        self._early_rows: deque[Tensor] = deque()
        self._early_gradients: dict[int, Tensor] = {}
        """Received early: rows from the previous stage, and gradients from the next."""

    def run(self) -> Generator[None, None, None]:
        """Pauses each time after as many ticks as take about as long as one micro-batch on one process."""
        num_stages, stage = self._ranks.degrees.pipeline, self._ranks.stage
        programs = build_ticks(num_stages, len(self._batches))
        for tick, action in enumerate(programs[stage], 1):
            if action is not None and self._batches[action.micro_batch].num_rows:
                self._perform(action)
            if tick % (2 * num_stages) == 0 and tick < len(programs[stage]):
                if not self._stage.is_first:
                    self._receive_rows(programs[stage - 1][:tick], programs[stage][:tick])
                if not self._stage.is_last:
                    self._receive_gradients(programs[stage + 1][:tick], programs[stage][:tick])
                self._stage.finish_sends()
                yield
        self._stage.finish_sends()

    def _perform(self, action: Action) -> None:
        index, train = action.micro_batch, self._batches[action.micro_batch].train
        if action.is_forward:
            self._stage.early_rows = self._early_rows.popleft() if self._early_rows else None
            hidden_TD = self._forward(index)
            if train:
                self._in_flight[index] = self._stage.stage_input, hidden_TD
            elif self._stage.is_last:
                self._head(index, hidden_TD)
            self._stage.stage_input = None
        elif train:
            self._differentiate(index, *self._in_flight.pop(index))

    def _differentiate(self, index: int, input_TD: Tensor | None, output_TD: Tensor) -> None:
        if self._stage.is_last:
            grad_TD = self._head(index, output_TD.detach())
            assert grad_TD is not None
        else:
            is_early = index in self._early_gradients
            grad_TD = self._early_gradients.pop(index) if is_early else self._receive_gradient(index)
        # Without a grad_fn no layer up to here has an adapter, so there is nothing to differentiate.
        if output_TD.requires_grad:
            output_TD.backward(grad_TD)
        if input_TD is not None:
            grad = torch.zeros_like(input_TD) if input_TD.grad is None else input_TD.grad
            self._stage.send(grad, forward=False)

    def _receive_gradient(self, index: int) -> Tensor:
        buffer_TD = self._stage.buffer(self._batches[index].num_rows, self._stage.layers.stop - 1)
        return self._ranks.receive(buffer_TD, forward=False)

    def _receive_rows(self, sender_actions: Sequence[Action | None], local_actions: Sequence[Action | None]) -> None:
        """Receive the rows of forwards that the previous stage has performed and this one has not."""
        unprocessed = [action for action in sender_actions if action is not None and action not in local_actions]
        micro_batches = [action.micro_batch for action in unprocessed if action.is_forward]
        waiting = [index for index in micro_batches if self._batches[index].num_rows]
        for index in waiting[len(self._early_rows) :]:
            buffer_TD = self._stage.buffer(self._batches[index].num_rows, self._stage.layers.start - 1)
            self._early_rows.append(self._ranks.receive(buffer_TD, forward=True))

    def _receive_gradients(
        self, sender_actions: Sequence[Action | None], local_actions: Sequence[Action | None]
    ) -> None:
        """Receive the gradients of backwards that the next stage has performed and this one has not."""
        for action in sender_actions:
            if action is None or action.is_forward or action in local_actions:
                continue
            index, batch = action.micro_batch, self._batches[action.micro_batch]
            if batch.train and batch.num_rows and index not in self._early_gradients:
                self._early_gradients[index] = self._receive_gradient(index)
