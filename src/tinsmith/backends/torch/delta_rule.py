"""The gated delta rule over whole sequences, in chunks: values, last states and gradients, in torch's operators on any
device.

The state S [K, V] of a head takes one row after the other, with its gate g <= 0, of the head or of each of K channels,
and its strength beta:

    S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  out = K^-0.5 q^T S

The chunked form is that of Yang et al., "Gated Delta Networks" (arXiv 2412.06464), with gates of channels as in "Kimi
Linear" (arXiv 2510.26692). What the rows of a chunk add to the state solves one triangular system for all chunks at
once, so that only the states between chunks are computed one after the other. Results equal those of the functions of
transformers' modeling files that this one replaces, but for the order of sums. The cost differs: their backward writes
a gradient as long as the sequence for each chunk, and saves some twenty tensors of that length, or [C, C, K] for each
chunk with gates of channels. Here backward takes each chunk once and saves the inputs alone; the rest is computed
again. A few heads are computed at a time (`MAX_CELLS`), which bounds the memory of both.

Sums are in float32, or in float64 if the inputs are. Knows no layer, cache or plan.

Letters: n sequences of L rows, N chunks of C rows, G key heads, each of R value heads, K key dim, V value dim. Chunked
tensors are [N, n, G, R, C, ..], where queries and keys have 1 for R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tinsmith.backends.torch.delta_pairs import ChannelPairs, HeadPairs
from tinsmith.runtime.devices import is_on_host

CHUNK = 64

MAX_CELLS, MAX_DEVICE_CELLS = 1 << 14, 1 << 18
"""Rows of value heads that are computed at a time on a host and on another device, each with about 6 KB in forward and
12 KB in backward.
"""

PROBE_DIM = 4

L2_EPS = 1e-6
"""As transformers normalises queries and keys."""


def run_gated_delta(  # noqa: PLR0913 - the arguments of the function that it replaces
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """[n, L, G R, V] of queries and keys [n, L, G, K], values [n, L, G R, V], gates [n, L, G R] or, for each channel,
    [n, L, G R, K], and strengths [n, L, G R]; and the states [n, G R, K, V] after the last rows, or None. The names are
    those of the functions in modeling files, which ignore other `options`, too. Raises ValueError for packed rows.
    """
    if cu_seqlens is not None:
        raise ValueError("sequences must be rows of a batch, not packed by cu_seqlens")
    num, _, num_groups, key_dim = key.shape
    value, g, beta = (x.unflatten(2, (num_groups, -1)) for x in (value, g, beta))
    num_shared, value_dim = value.shape[3:]
    dtype = torch.promote_types(query.dtype, torch.float32)
    if initial_state is None:
        state = value.new_zeros(num, num_groups, num_shared, key_dim, value_dim, dtype=dtype)
    else:
        state = initial_state.to(dtype).unflatten(1, (num_groups, -1))
    rows = query[:, :, :, None], key[:, :, :, None], value, g[..., None] if g.ndim == 4 else g, beta[..., None]
    out, state = _ChunkedDelta.apply(state, use_qk_l2norm_in_kernel, *rows)
    return out.flatten(2, 3), state.flatten(1, 2) if output_final_state else None


@cache  # all layers of a class call the same function
def equals_gated_delta(function: Callable[..., object]) -> bool:
    """Whether a function of a modeling file returns what `run_gated_delta` does on random numbers on the host, with a
    gate for each head or one for each channel.
    """
    return _equals_gated_delta(function, ()) or _equals_gated_delta(function, (PROBE_DIM,))


def _equals_gated_delta(function: Callable[..., object], gate_shape: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(1)
    rows, num_heads = (1, CHUNK + 1), 2
    query, key, value = (torch.randn(*rows, num_heads, PROBE_DIM, generator=generator) for _ in range(3))
    g, beta = (torch.randn(*rows, num_heads, *shape, generator=generator) for shape in (gate_shape, ()))
    state = torch.randn(1, num_heads, PROBE_DIM, PROBE_DIM, generator=generator)
    inputs = query, key, value, -g.abs(), beta.sigmoid()
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = cast(tuple[Tensor, Tensor], run_gated_delta(*inputs, **options))
    try:
        results = cast(tuple[Tensor, Tensor], function(*inputs, **options))
        return all(torch.allclose(x, y, 1e-4, 1e-5) for x, y in zip(results, expected, strict=True))
    except (TypeError, ValueError, RuntimeError):  # it takes or returns other things
        return False


class _ChunkedDelta(torch.autograd.Function):
    """Of states [n, G, R, K, V], and the rows' queries and keys [n, L, G, 1, K], values [n, L, G, R, V], gates
    [n, L, G, R, 1 or K] and strengths [n, L, G, R, 1].
    """

    @staticmethod
    def forward(ctx, state: Tensor, normalises: bool, *rows: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(state, *rows)
        ctx.normalises = normalises
        ctx.set_materialize_grads(False)
        out, last_state = rows[0].new_empty(rows[2].shape), torch.empty_like(state)
        for part in _list_parts(rows[2]):
            chunks = _Chunks([part.rows(x) for x in rows], normalises)
            states, values = chunks.scan(part.states(state))
            part.rows(out).copy_(_join(chunks.outputs(states, values), out.shape[1]))
            part.states(last_state).copy_(states[-1])
        return out, last_state

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx, out_grad: Tensor | None, last_grad: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        state, *rows = ctx.saved_tensors
        out_grad = torch.zeros_like(rows[2]) if out_grad is None else out_grad
        last_grad = torch.zeros_like(state) if last_grad is None else last_grad
        row_grads, state_grad = [torch.empty_like(x) for x in rows], torch.empty_like(state)
        for part in _list_parts(rows[2]):
            chunks = _Chunks([part.rows(x) for x in rows], ctx.normalises)
            chunked_grad = _split(part.rows(out_grad), state.dtype)
            part_grads, first_grad = chunks.backward(chunked_grad, part.states(last_grad), part.states(state))
            for row_grad, part_grad in zip(row_grads, part_grads, strict=True):
                part.rows(row_grad).copy_(_join(part_grad, row_grad.shape[1]))
            part.states(state_grad).copy_(first_grad)
        return state_grad, None, *row_grads


class _Part(NamedTuple):
    """Some sequences, and some of their key heads."""

    sequences: slice
    heads: slice

    def rows(self, x_nLG: Tensor) -> Tensor:
        return x_nLG[self.sequences, :, self.heads]

    def states(self, x_nG: Tensor) -> Tensor:
        return x_nG[self.sequences, self.heads]


def _list_parts(value: Tensor) -> Iterator[_Part]:
    num, length, num_groups, num_shared, _ = value.shape
    max_cells = MAX_CELLS if is_on_host(value) else MAX_DEVICE_CELLS
    max_heads = max_cells // (length * num_shared)
    num_heads = min(max(max_heads, 1), num_groups)
    num_sequences = max(max_heads // num_heads, 1) if num_heads == num_groups else 1
    for sequence in range(0, num, num_sequences):
        for head in range(0, num_groups, num_heads):
            yield _Part(slice(sequence, sequence + num_sequences), slice(head, head + num_heads))


def _split(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, n, G, R, C, ..] from [n, L, G, R, ..], in memory of its own; rows beyond L are 0."""
    num_missing = -x.shape[1] % CHUNK
    x = pad(x, (0, 0, 0, 0, 0, 0, 0, num_missing)) if num_missing else x
    x = x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 4, 2, 5)
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def _join(x: Tensor, length: int) -> Tensor:
    """[n, L, G, R, ..] from [N, n, G, R, C, ..]."""
    return x.permute(1, 0, 4, 2, 3, 5).flatten(1, 2)[:, :length]


class _Chunks:
    """The chunks of some heads: what does not depend on the states before them.

    `over_chunk` [.., 1 or K, 1] is what a chunk leaves of a state. `solved` [.., C, V + K] are the values that rows add
    to a state of zeros, beside the keys with which they read the state before the chunk.
    """

    def __init__(self, rows: list[Tensor], normalises: bool) -> None:
        dtype = torch.promote_types(rows[0].dtype, torch.float32)
        query, key, self._value, g, self._beta = (_split(x, dtype) for x in rows)
        self._scale = query.shape[-1] ** -0.5
        self._query_norm, self._key_norm = (_inverse_norm(x) if normalises else None for x in (query, key))
        self._query = query.mul_(self._scale if self._query_norm is None else self._query_norm * self._scale)
        self._key = key if self._key_norm is None else key.mul_(self._key_norm)

        sums = g.cumsum(-2)
        self._has_head_gates = sums.shape[-1] == 1
        self._pairs = (HeadPairs if self._has_head_gates else ChannelPairs)(self._query, self._key, sums)
        self._from_start, self._to_end = sums.exp(), (sums[..., -1:, :] - sums).exp_()
        self.over_chunk = self._from_start[..., -1:, :].mT
        self._start_queries, self._end_keys = self._query * self._from_start, self._key * self._to_end
        self._start_keys = self._key * self._from_start

        self._system = self._pairs.of_keys * self._beta
        right = torch.cat([self._value, self._start_keys], -1).mul_(self._beta)
        self._solved = torch.linalg.solve_triangular(self._system, right, upper=False, unitriangular=True)

    def scan(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The states [N + 1, n, G, R, K, V] between chunks, and the values [N, n, G, R, C, V] that rows add."""
        solved, num_chunks, value_dim = self._solved, len(self._solved), state.shape[-1]
        states = solved.new_empty(num_chunks + 1, *state.shape)
        values = solved.new_empty(*solved.shape[:-1], value_dim)
        states[0] = state
        flat_states, flat_values, flat_keys = (x.flatten(1, 3) for x in (states, values, self._end_keys))
        added, read_keys = solved.flatten(1, 3).split([value_dim, solved.shape[-1] - value_dim], -1)
        for chunk in range(num_chunks):
            torch.baddbmm(added[chunk], read_keys[chunk], flat_states[chunk], alpha=-1, out=flat_values[chunk])
            torch.mul(states[chunk], self.over_chunk[chunk], out=states[chunk + 1])
            flat_states[chunk + 1].baddbmm_(flat_keys[chunk].mT, flat_values[chunk])
        return states, values

    def outputs(self, states: Tensor, values: Tensor) -> Tensor:
        """[N, n, G, R, C, V]"""
        return (self._start_queries @ states[:-1]).add_(self._pairs.of_queries @ values)

    def backward(self, out_grad: Tensor, last_grad: Tensor, state: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradients of queries, keys, values, gates and strengths, chunked, and of the states before them."""
        states, values = self.scan(state)
        state_grads, value_grads = self._scan_back(out_grad, last_grad)
        before, after_grads = states[:-1], state_grads[1:]
        solved_grad = torch.cat([value_grads, (value_grads @ before.mT).neg_()], -1)
        right_grad = torch.linalg.solve_triangular(self._system.mT, solved_grad, upper=True, unitriangular=True)
        system_grad = (right_grad @ self._solved.mT).neg_().tril_(-1)
        beta_grad = (system_grad * self._pairs.of_keys).sum(-1, keepdim=True)
        query_pairs_grad = (out_grad @ values.mT).tril_()
        query_grad, key_grad, sums_grad = self._pairs.backward(system_grad.mul_(self._beta), query_pairs_grad)

        value_grad, start_key_grad = right_grad.split([values.shape[-1], self._key.shape[-1]], -1)
        beta_grad += (value_grad * self._value).sum(-1, keepdim=True)
        beta_grad += (start_key_grad * self._start_keys).sum(-1, keepdim=True)
        value_grad, start_key_grad = value_grad * self._beta, start_key_grad * self._beta
        start_query_grad, end_key_grad = out_grad @ before.mT, values @ after_grads.mT
        query_grad += (start_query_grad * self._from_start).sum(3, keepdim=True)
        key_grad += (start_key_grad * self._from_start).addcmul_(end_key_grad, self._to_end).sum(3, keepdim=True)
        query_grad, key_grad = self._through_norms(query_grad, key_grad)

        sums_grad += self._sum_channels(
            start_key_grad.mul_(self._start_keys).addcmul_(start_query_grad, self._start_queries)
        )
        end_grad = self._sum_channels(end_key_grad.mul_(self._end_keys))
        sums_grad -= end_grad
        over_grad = self._sum_channels((after_grads * before).sum(-1, keepdim=True).mul_(self.over_chunk).mT)
        sums_grad[..., -1:, :] += end_grad.sum(-2, keepdim=True) + over_grad
        gate_grad = sums_grad.flip(-2).cumsum(-2).flip(-2)
        return [query_grad, key_grad, value_grad, gate_grad, beta_grad], state_grads[0]

    def _scan_back(self, out_grad: Tensor, last_grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what `scan` returns."""
        state_grads = last_grad.new_empty(len(out_grad) + 1, *last_grad.shape)
        state_grads[-1] = last_grad
        torch.matmul(self._start_queries.mT, out_grad, out=state_grads[:-1])
        value_grads = self._pairs.of_queries.mT @ out_grad
        flat_states, flat_values, flat_keys = (x.flatten(1, 3) for x in (state_grads, value_grads, self._end_keys))
        read_keys = self._solved.flatten(1, 3)[..., last_grad.shape[-1] :]
        for chunk in reversed(range(len(out_grad))):
            flat_values[chunk].baddbmm_(flat_keys[chunk], flat_states[chunk + 1])
            state_grads[chunk].addcmul_(state_grads[chunk + 1], self.over_chunk[chunk])
            flat_states[chunk].baddbmm_(read_keys[chunk].mT, flat_values[chunk], alpha=-1)
        return state_grads, value_grads

    def _sum_channels(self, x: Tensor) -> Tensor:
        """The gradient of sums of gates, from that of each channel's."""
        return x.sum(-1, keepdim=True) if self._has_head_gates else x

    def _through_norms(self, query_grad: Tensor, key_grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of queries and keys before they are normalised and scaled."""
        query_grad = query_grad.mul_(self._scale)
        if self._query_norm is None or self._key_norm is None:
            return query_grad, key_grad
        unit_query = self._query / self._scale
        query_grad -= unit_query * (unit_query * query_grad).sum(-1, keepdim=True)
        key_grad -= self._key * (self._key * key_grad).sum(-1, keepdim=True)
        return query_grad.mul_(self._query_norm), key_grad.mul_(self._key_norm)


def _inverse_norm(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()
