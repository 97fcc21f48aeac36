"""Pipeline parallelism: a rank has some consecutive layers of the decoder, a stage, and micro-batches go from stage to
stage.

`Stage` turns a rank's copy of the decoder into its stage: the family's own forward still runs, but the layers of other
stages are empty and pass on what they receive, the first own layer takes its input from the stage before, and the last
one's output goes to the next stage. The first stage embeds tokens; the last one has the unembedding. Ranks of a tensor
or context group have the same layers, and each talks to the rank at its own place in the neighbouring stages.

`Schedule` runs a step in the order 1F1B: a stage keeps the activations of at most as many micro-batches as there are
stages from it on. `ticks` aligns the actions of all stages: an action's input was sent in an earlier tick. Every rank
packs alike, so it knows the size of each message. At a pause all messages have arrived: samples may be drawn in
between, and an abandoned step leaves nothing behind.

Where experts are spread, every rank of a stage performs every action, with one row in place of an empty micro-batch. An
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

from tinsmith.backends.distributed.ranks import Ranks
from tinsmith.errors import SettingsError
from tinsmith.plan.architecture import count_parameters, decoder_layers, find_indivisible_reason
from tinsmith.plan.memory import split_layers


class Action(NamedTuple):
    """The forward or the backward of a micro-batch."""

    is_forward: bool
    micro_batch: int


def order_1f1b(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """One forward for each stage after this one, then a forward and a backward in turns, then the other backwards."""
    first = min(stages - 1 - stage, micro_batches)
    turns = [(Action(True, first + number), Action(False, number)) for number in range(micro_batches - first)]
    return [
        *(Action(True, number) for number in range(first)),
        *(action for turn in turns for action in turn),
        *(Action(False, number) for number in range(micro_batches - first, micro_batches)),
    ]


@cache
def ticks(stages: int, micro_batches: int) -> tuple[tuple[Action | None, ...], ...]:
    """Each stage's actions, all of one length; None where it waits for others."""
    left = [deque(order_1f1b(stage, stages, micro_batches)) for stage in range(stages)]
    done: set[tuple[int, Action]] = set()
    found: list[list[Action | None]] = [[] for _ in range(stages)]
    while any(left):
        now = []
        for stage, actions in enumerate(left):
            action = actions[0] if actions else None
            if action is not None:
                source = stage - 1 if action.is_forward else stage + 1
                if source in range(stages) and (source, action) not in done:
                    action = None
            found[stage].append(actions.popleft() if action is not None else None)
            now.append((stage, action))
        done.update(now)
    return tuple(map(tuple, found))


class _Boundary(NamedTuple):
    """What a layer of the whole model returns: its dtype and width, and how many values, if it is a tuple."""

    dtype: torch.dtype
    width: int
    num_values: int | None


class Stage:
    """Use `of`, on a decoder on the host. `entering` and the result of `run` are the ends of the last call's graph."""

    def __init__(self, layers: Sequence[nn.Module], own: range, ranks: Ranks, boundaries: Sequence[_Boundary]) -> None:
        self.layers = own
        self.is_first, self.is_last = own.start == 0, own.stop == len(layers)
        self.entering: Tensor | None = None
        self.arrived: Tensor | None = None
        """The next call's rows, if they were received early."""
        self._leaving: Tensor | None = None
        self._boundaries = boundaries
        self.ranks = ranks
        self.sends: deque[tuple[dist.Work, Tensor]] = deque()
        for index, layer in enumerate(layers):
            if index not in own:
                empty(*layer.modules())
                layer._modules.clear()
                layer.forward = partial(_pass_on, boundaries[index].num_values)
        if not self.is_first:
            layers[own.start].forward = partial(self._enter, layers[own.start].forward)
        if not self.is_last:
            layers[own.stop - 1].forward = partial(self._leave, layers[own.stop - 1].forward)

    def _enter(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        assert self.entering is not None
        rows_1TD = self.entering[None]
        if args:
            return forward(rows_1TD, *args[1:], **kwargs)
        return forward(**{**kwargs, "hidden_states": rows_1TD})

    def _leave(self, forward: Callable[..., Tensor | tuple[Tensor, ...]], *args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        self._leaving = (output if isinstance(output, Tensor) else output[0])[0]
        return output

    def run(self, forward: Callable[[], Tensor], num_rows: int, *, alone: bool) -> Tensor:
        """Run the decoder over the rows of the stage before, and send its rows to the next stage. [T, D]: the last
        stage's hidden states, or the rows that were sent. `alone`: exchange nothing, for a forward that only probes.
        """
        if not self.is_first:
            rows_TD = self.buffer(num_rows, self.layers.start - 1)
            if alone:
                rows_TD.zero_()
            else:
                rows_TD = self.ranks.receive(rows_TD, forward=True) if self.arrived is None else self.arrived
            self.arrived = None
            self.entering = rows_TD.requires_grad_() if torch.is_grad_enabled() else rows_TD
        hidden_TD = forward()
        if self.is_last:
            return hidden_TD
        leaving_TD, self._leaving = self._leaving, None
        assert leaving_TD is not None
        if alone:
            return hidden_TD
        self.send(leaving_TD.detach(), forward=True)
        return leaving_TD if torch.is_grad_enabled() else hidden_TD

    def buffer(self, num_rows: int, layer: int) -> Tensor:
        """[T, D]: for the output of a layer, or its gradient."""
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


def empty(*modules: nn.Module) -> None:
    """Drop the modules' own weights; others that share them keep them."""
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


def layers_of(decoder: nn.Module, name: str) -> list[nn.Module]:
    """The decoder's layers, in order. Raises SettingsError if it does not mark them."""
    if not (layers := decoder_layers(decoder)):
        raise SettingsError(
            f"pipeline_parallel is set, and {name} does not mark which of its modules are layers; use data_parallel"
        )
    return layers


def boundaries_of(layers: Sequence[nn.Module], run: Callable[[], object], num_rows: int, name: str) -> list[_Boundary]:
    """What each layer returns when `run` makes a forward of the whole model over these rows. Raises SettingsError if
    that is not one row of hidden states per token.
    """
    found: list[_Boundary] = []

    def note(layer: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        rows, *others = (output,) if isinstance(output, Tensor) else output
        if rows.dim() != 3 or rows.shape[:2] != (1, num_rows) or any(other is not None for other in others):
            raise SettingsError(
                f"pipeline_parallel is set, and layers of {name} pass on more than a row of hidden states per token; "
                "use tensor_parallel or shard_base"
            )
        found.append(_Boundary(rows.dtype, rows.shape[2], None if isinstance(output, Tensor) else len(output)))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def own_layers(layers: Sequence[nn.Module], embedding: int, unembedding: int, ranks: Ranks) -> range:
    """This rank's layers, by the plan's rule; the last arguments are the numbers of the ends."""
    sizes = [count_parameters(layer) for layer in layers]
    sizes[0] += embedding
    sizes[-1] += unembedding
    counts = split_layers(tuple(sizes), ranks.degrees.pipeline)
    first = sum(counts[: ranks.stage])
    return range(first, first + counts[ranks.stage])


class StageRows(NamedTuple):
    """A micro-batch as a schedule sees it: this rank's rows of it, 0 if it is empty, and whether it has a backward."""

    num_rows: int
    train: bool


class Schedule:
    """One step's micro-batches on this rank. `forward` runs the decoder over one of them, by number; on the last stage
    `head` turns its hidden states into their gradient, or scores them if they need none.
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
        self._flights: dict[int, tuple[Tensor | None, Tensor]] = {}
        """By micro-batch between its forward and its backward: what entered, and what left."""
        self._arrived: deque[Tensor] = deque()
        self._gradients: dict[int, Tensor] = {}
        """What arrived early from the stage before, and from the one after."""

    def run(self) -> Generator[None, None, None]:
        """Pauses once in as many ticks as take about as long as one micro-batch takes one process."""
        num_stages, stage = self._ranks.degrees.pipeline, self._ranks.stage
        order = ticks(num_stages, len(self._batches))
        for tick, action in enumerate(order[stage], 1):
            if action is not None and self._batches[action.micro_batch].num_rows:
                self._perform(action)
            if tick % (2 * num_stages) == 0 and tick < len(order[stage]):
                if not self._stage.is_first:
                    self._receive_rows(order[stage - 1][:tick], order[stage][:tick])
                if not self._stage.is_last:
                    self._receive_gradients(order[stage + 1][:tick], order[stage][:tick])
                self._stage.finish_sends()
                yield
        self._stage.finish_sends()

    def _perform(self, action: Action) -> None:
        number, train = action.micro_batch, self._batches[action.micro_batch].train
        if action.is_forward:
            self._stage.arrived = self._arrived.popleft() if self._arrived else None
            hidden_TD = self._forward(number)
            if train:
                self._flights[number] = self._stage.entering, hidden_TD
            elif self._stage.is_last:
                self._head(number, hidden_TD)
            self._stage.entering = None
        elif train:
            self._differentiate(number, *self._flights.pop(number))

    def _differentiate(self, number: int, entering_TD: Tensor | None, leaving_TD: Tensor) -> None:
        if self._stage.is_last:
            grad_TD = self._head(number, leaving_TD.detach())
            assert grad_TD is not None
        else:
            grad_TD = self._gradients.pop(number) if number in self._gradients else self._receive_gradient(number)
        # Without a grad_fn no adapter up to here takes part, so there is nothing to differentiate.
        if leaving_TD.requires_grad:
            leaving_TD.backward(grad_TD)
        if entering_TD is not None:
            grad = torch.zeros_like(entering_TD) if entering_TD.grad is None else entering_TD.grad
            self._stage.send(grad, forward=False)

    def _receive_gradient(self, number: int) -> Tensor:
        buffer_TD = self._stage.buffer(self._batches[number].num_rows, self._stage.layers.stop - 1)
        return self._ranks.receive(buffer_TD, forward=False)

    def _receive_rows(self, sent: Sequence[Action | None], done: Sequence[Action | None]) -> None:
        """Receive the rows of forwards that the stage before has done and this one has not."""
        numbers = [each.micro_batch for each in sent if each is not None and each.is_forward and each not in done]
        waiting = [number for number in numbers if self._batches[number].num_rows]
        for number in waiting[len(self._arrived) :]:
            buffer_TD = self._stage.buffer(self._batches[number].num_rows, self._stage.layers.start - 1)
            self._arrived.append(self._ranks.receive(buffer_TD, forward=True))

    def _receive_gradients(self, sent: Sequence[Action | None], done: Sequence[Action | None]) -> None:
        """Receive the gradients of backwards that the stage after has done and this one has not."""
        for action in sent:
            if action is None or action.is_forward or action in done:
                continue
            number, batch = action.micro_batch, self._batches[action.micro_batch]
            if batch.train and batch.num_rows and number not in self._gradients:
                self._gradients[number] = self._receive_gradient(number)
