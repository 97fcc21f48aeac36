"""What the rows of a chunk read of each other in a gated delta rule: products of keys, and of queries, with earlier
keys, each faded by the gates between the two rows.

With b_i the sum of gates up to row i of a chunk, a pair of rows i >= j has sum_k x_ik k_jk exp(b_ik - b_jk), where x is
the key or the query of row i; pairs i < j have 0. `HeadPairs` has one gate for a head's row, so that a factor fades the
whole product. `ChannelPairs` has one for each channel of the key: factors must fade the channels before they are added
up. No exponent above 0 is taken, since exp(-b_j) alone overflows after few rows.

Letters: chunked tensors [.., R, C, K] of C rows; queries and keys have 1 for R, and sums of gates 1 or K for K.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Rows whose pairs are computed column by column; pairs of rows in different blocks are products of matrices."""


class HeadPairs:
    """`of_keys` and `of_queries` [.., R, C, C]."""

    def __init__(self, query: Tensor, key: Tensor, sums: Tensor) -> None:
        num_rows = key.shape[-2]
        later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=key.device).triu(1)
        self._query, self._key = query, key
        self._decays = (sums - sums.mT).masked_fill_(later, -torch.inf).exp_()
        self.of_keys, self.of_queries = (key @ key.mT) * self._decays, (query @ key.mT) * self._decays

    def backward(self, keys_grad: Tensor, queries_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and sums. Overwrites the gradients of the pairs."""
        log_grad = (keys_grad * self.of_keys).addcmul_(queries_grad, self.of_queries)
        sums_grad = log_grad.sum(-1, keepdim=True) - log_grad.sum(-2, keepdim=True).mT
        keys_grad = keys_grad.mul_(self._decays).sum(-3, keepdim=True)
        queries_grad = queries_grad.mul_(self._decays).sum(-3, keepdim=True)
        key_grad = (keys_grad + keys_grad.mT) @ self._key + queries_grad.mT @ self._query
        return queries_grad @ self._key, key_grad, sums_grad


class ChannelPairs:
    """The same with sums [.., R, C, K]. A block reads earlier blocks through the sums before its first row: both
    factors, from those to a row of the block and from an earlier row to those, are at most 1.
    """

    def __init__(self, query: Tensor, key: Tensor, sums: Tensor) -> None:
        shape = torch.broadcast_shapes(query.shape, sums.shape)
        self._query, self._key, self._sums = query.expand(shape), key.expand(shape), sums
        self._num_blocks = shape[-2] // BLOCK
        self.of_keys, self.of_queries = (sums.new_zeros(*shape[:-1], shape[-2]) for _ in range(2))
        sides = (self._key, self.of_keys), (self._query, self.of_queries)
        for block in range(1, self._num_blocks):
            rows, earlier, from_start, to_start = self._fade_to_earlier(block)
            right = self._key[..., earlier, :] * to_start
            for reader, pairs in sides:
                pairs[..., rows, earlier] = (reader[..., rows, :] * from_start) @ right.mT
        for column in range(BLOCK):
            right = self._fade_within(column).mul_(_by_block(self._key)[..., column, None, :])
            for reader, pairs in sides:
                _diagonal_blocks(pairs)[..., column:, column] = (_by_block(reader)[..., column:, :] * right).sum(-1)

    def backward(self, keys_grad: Tensor, queries_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and sums."""
        query_grad, key_grad, sums_grad = (torch.zeros_like(self._sums) for _ in range(3))
        sides = (self._key, keys_grad, key_grad), (self._query, queries_grad, query_grad)
        for block in range(1, self._num_blocks):
            rows, earlier, from_start, to_start = self._fade_to_earlier(block)
            right = self._key[..., earlier, :] * to_start
            right_grad = torch.zeros_like(right)
            for reader, pairs_grad, reader_grad in sides:
                grad, faded = pairs_grad[..., rows, earlier], reader[..., rows, :] * from_start
                right_grad += grad.mT @ faded
                faded_grad = grad @ right
                reader_grad[..., rows, :].addcmul_(faded_grad, from_start)
                sums_grad[..., rows, :].addcmul_(faded_grad, faded)
            key_grad[..., earlier, :].addcmul_(right_grad, to_start)
            sums_grad[..., earlier, :].addcmul_(right_grad, right, value=-1)
        for column in range(BLOCK):
            decays, right = self._fade_within(column), _by_block(self._key)[..., column, None, :]
            for reader, pairs_grad, reader_grad in sides:
                grad = _diagonal_blocks(pairs_grad)[..., column:, column, None] * decays
                _by_block(reader_grad)[..., column:, :].addcmul_(grad, right)
                right_grad = grad.mul_(_by_block(reader)[..., column:, :])
                _by_block(key_grad)[..., column, :] += right_grad.sum(-2)
                log_grad = right_grad.mul_(right)
                _by_block(sums_grad)[..., column:, :] += log_grad
                _by_block(sums_grad)[..., column, :] -= log_grad.sum(-2)
        return query_grad.sum(-3, keepdim=True), key_grad.sum(-3, keepdim=True), sums_grad

    def _fade_to_earlier(self, block: int) -> tuple[slice, slice, Tensor, Tensor]:
        """The rows of a block and of the blocks before it, and the factors from its start and to it."""
        first = block * BLOCK
        rows, earlier, start = slice(first, first + BLOCK), slice(0, first), self._sums[..., first - 1, None, :]
        return rows, earlier, (self._sums[..., rows, :] - start).exp_(), (start - self._sums[..., earlier, :]).exp_()

    def _fade_within(self, column: int) -> Tensor:
        """The factors of each block's rows from `column` on to that row."""
        sums = _by_block(self._sums)
        return (sums[..., column:, :] - sums[..., column, None, :]).exp_()


def _by_block(x: Tensor) -> Tensor:
    """[.., blocks, BLOCK, K] of [.., C, K]."""
    return x.unflatten(-2, (-1, BLOCK))


def _diagonal_blocks(pairs: Tensor) -> Tensor:
    """[.., blocks, BLOCK, BLOCK] of [.., C, C], of the same memory."""
    return pairs.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).diagonal(0, -4, -2).movedim(-1, -3)
