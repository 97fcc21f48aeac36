"""The loss head's kernels against float64 and against the CPU's path. With TEST_DEVICE=cpu Triton interprets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.device import DEVICE, ON_CUDA, create
from support import tiny_models
from support.float64_reference import Reference
from tinsmith.backends.torch import TorchBackend
from tinsmith.backends.torch.matmul import add_matmul_
from tinsmith.types import LoraSpec
from unit.test_torch_backend import fb, make_passes, relative, run, sft

pytest.importorskip("triton")

from tinsmith.backends.torch.head_kernels import SECTION, TILE, Softmax

FINISHES = ((1.0, None), (0.125, None), (1.0, 30.0), (2.0, 5.0))


class HeadCase:
    """Random logits, and pairs: several of a row, rows without any, equal targets, the first and last of a row."""

    def __init__(self, vocab: int, scale: float = 4.0) -> None:
        generator = torch.Generator().manual_seed(vocab)
        self.vocab = vocab
        self.raw_CV = torch.randn(6, vocab, generator=generator) * scale
        counts_C = torch.tensor([1, 3, 0, 1, 0, 4])
        self.local_p = torch.arange(6).repeat_interleave(counts_C)
        self.target_p = torch.randint(vocab, (9,), generator=generator)
        self.target_p[:4] = torch.tensor([vocab - 1, 0, vocab // 2, vocab // 2])
        self.grad_p = torch.randn(9, generator=generator)
        self.grad_p[4] = 0.0
        self.starts_C = torch.cat([torch.zeros(1, dtype=torch.int64), counts_C.cumsum(0)])

    @property
    def cells_p(self) -> Tensor:
        return self.local_p * self.vocab + self.target_p

    def compute_reference(self, multiplier: float, softcap: float | None) -> tuple[Tensor, Tensor]:
        raw_CV = self.raw_CV.double().requires_grad_()
        logits_CV = raw_CV * multiplier
        if softcap is not None:
            logits_CV = softcap * torch.tanh(logits_CV / softcap)
        logprob_p = torch.log_softmax(logits_CV, -1)[self.local_p, self.target_p]
        logprob_p.backward(self.grad_p.double())
        assert raw_CV.grad is not None
        return logprob_p.detach(), raw_CV.grad

    def run_kernels(self, multiplier: float, softcap: float | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cells_p, starts_C, grad_p = (x.to(DEVICE) for x in (self.cells_p, self.starts_C, self.grad_p))
        softmax = Softmax.of(self.raw_CV.to(DEVICE), multiplier, softcap)
        logprob_p = softmax.logprobs(cells_p)
        return logprob_p.cpu(), softmax.gradient(cells_p, starts_C, grad_p, dtype).cpu()


@pytest.mark.parametrize(("multiplier", "softcap"), FINISHES)
@pytest.mark.parametrize("vocab", [5, 1000, TILE, SECTION + 1, 3 * SECTION - 48])
def test_they_are_the_softmax_in_float64(vocab: int, multiplier: float, softcap: float | None) -> None:
    case = HeadCase(vocab)
    logprob_p, grad_CV = case.compute_reference(multiplier, softcap)
    ours_p, ours_CV = case.run_kernels(multiplier, softcap, torch.float32)
    assert float((ours_p - logprob_p).abs().max()) < 5e-6
    assert float((ours_CV - grad_CV).abs().max()) < 5e-6
    assert not ours_CV[[2, 4]].any(), "rows without pairs"
    same_p, rounded_CV = case.run_kernels(multiplier, softcap, torch.bfloat16)
    assert torch.equal(same_p, ours_p)
    # The interpreter truncates where a device rounds.
    bound = 2**-8 if ON_CUDA else 2**-7
    assert ((rounded_CV.double() - ours_CV.double()).abs() <= bound * ours_CV.abs() + 1e-30).all()


def test_tiny_and_huge_logits() -> None:
    for scale in (1e-3, 1e4):
        case = HeadCase(300, scale)
        for multiplier, softcap in FINISHES:
            logprob_p, grad_CV = case.compute_reference(multiplier, softcap)
            ours_p, ours_CV = case.run_kernels(multiplier, softcap, torch.float32)
            torch.testing.assert_close(ours_p, logprob_p.float(), atol=5e-6, rtol=1e-6)
            torch.testing.assert_close(ours_CV, grad_CV.float(), atol=5e-6, rtol=1e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_a_row_depends_on_itself_alone() -> None:
    case = HeadCase(SECTION + 100)
    before_p, before_CV = case.run_kernels(1.0, None, torch.float32)
    single = Softmax.of(case.raw_CV[1:2].to(DEVICE), 1.0, None)
    own_p = single.logprobs(case.target_p[1:4].to(DEVICE))
    assert torch.equal(own_p.cpu(), before_p[1:4])
    case.raw_CV[0], case.raw_CV[3, 7] = float("nan"), float("inf")
    after_p, after_CV = case.run_kernels(1.0, None, torch.float32)
    assert after_p[[0, 4]].isnan().all()
    others_p, others_C = case.local_p % 3 != 0, [1, 2, 4, 5]
    assert torch.equal(after_p[others_p], before_p[others_p])
    assert torch.equal(after_CV[others_C], before_CV[others_C])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_a_section_without_any_finite_logit() -> None:
    case = HeadCase(2 * SECTION)
    case.raw_CV[:, :SECTION] = float("-inf")
    case.target_p = case.target_p % SECTION + SECTION
    logprob_p, grad_CV = case.compute_reference(1.0, None)
    ours_p, ours_CV = case.run_kernels(1.0, None, torch.float32)
    torch.testing.assert_close((ours_p, ours_CV), (logprob_p.float(), grad_CV.float()), atol=5e-6, rtol=0)


def test_parts_of_a_vocabulary_are_as_the_whole() -> None:
    """As tensor ranks have them: sums are gathered, log probabilities added."""
    case = HeadCase(1000)
    logprob_p, grad_CV = case.run_kernels(1.0, 30.0, torch.float32)
    halves = [Softmax.of(half.contiguous().to(DEVICE), 1.0, 30.0) for half in case.raw_CV.split(500, 1)]
    sums_CS = torch.cat([half.sums_CS for half in halves], 1)
    ours_p, ours = torch.zeros(9), []
    for index, half in enumerate(halves):
        softmax, is_own_p = half._replace(sums_CS=sums_CS), case.target_p // 500 == index
        cells_p = torch.where(is_own_p, case.local_p * 500 + case.target_p % 500, -1).to(DEVICE)
        ours_p += softmax.logprobs(cells_p).cpu()
        row_inputs = case.starts_C.to(DEVICE), case.grad_p.to(DEVICE)
        ours.append(softmax.gradient(cells_p, *row_inputs, torch.float32).cpu())
    torch.testing.assert_close((ours_p, torch.cat(ours, 1)), (logprob_p, grad_CV), atol=5e-6, rtol=0)


def test_an_adapters_logits_are_added_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, generator=generator).bfloat16() for size in ((40, 8), (8, 300)))
    out = torch.randn(40, 300, generator=generator)
    actual = out.to(DEVICE, copy=True)
    add_matmul_(actual, a.to(DEVICE), b.to(DEVICE), 0.5)
    expected = out.double() + 0.5 * (a.double() @ b.double())
    # A CPU rounds the product once.
    assert relative(actual.cpu(), expected) < (1e-6 if ON_CUDA else 2e-3)


@pytest.mark.skipif(not ON_CUDA, reason="a CPU has no graphs")
def test_a_cuda_graph_captures_them() -> None:
    case = HeadCase(1000)
    inputs = [x.to(DEVICE) for x in (case.raw_CV, case.cells_p, case.starts_C, case.grad_p)]

    def compute() -> tuple[Tensor, Tensor]:
        softmax = Softmax.of(inputs[0], 1.0, None)
        return softmax.logprobs(inputs[1]), softmax.gradient(inputs[1], inputs[2], inputs[3], torch.bfloat16)

    expected = compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.skipif(not ON_CUDA, reason="12 GiB, interpreted")
def test_more_logits_than_32_bits_can_count() -> None:
    num_rows, vocab = 8200, 2**18
    raw_CV = torch.zeros(num_rows, vocab, device=DEVICE)
    raw_CV[-1, -1] = 3.0
    cells_p = torch.tensor([num_rows * vocab - 1], device=DEVICE)
    starts_C = (torch.arange(num_rows + 1, device=DEVICE) == num_rows).long()
    softmax = Softmax.of(raw_CV, 1.0, None)
    expected = raw_CV[-1].double().log_softmax(-1)
    assert float((softmax.logprobs(cells_p)[0] - expected[-1]).abs()) < 5e-6
    grad_CV = softmax.gradient(cells_p, starts_C, torch.ones(1, device=DEVICE), torch.bfloat16)
    assert not grad_CV[:-1].any()
    assert float((grad_CV[-1].double() + expected.exp())[:-1].abs().max()) < 1e-7
    assert float(grad_CV[-1, -1]) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_a_backend_with_kernels_is_as_one_without(arch: str, tmp_path: Path) -> None:
    """All losses, several targets of a row, weights of zero, and a chunk that ends within a sequence."""
    shape = tiny_models.make(tmp_path / arch, arch)
    rng = np.random.default_rng(6)
    passes = make_passes(rng, Reference(str(shape.path))) if arch == "qwen3" else [fb("m0", [sft(rng, 20)])]
    runs = []
    for has_kernels in (False, True):
        backend = TorchBackend(shape, device=DEVICE, dtype="float32", logits_chunk=24)
        backend._trainer._head._has_kernels = has_kernels
        for index in range(len(passes)):
            create(backend, f"m{index}", LoraSpec(4, seed=index))
        results = run(backend, *passes)
        trained = [backend._models[f"m{index}"].gradient_P for index in range(len(passes))]
        runs.append((results, trained))
    (expected, expected_gradients), (ours, our_gradients) = runs
    for a, b in zip(ours, expected, strict=True):
        for actual, reference in zip(a.logprobs, b.logprobs, strict=True):
            np.testing.assert_allclose(actual, reference, atol=1e-5)
    for own_P, other_P in zip(our_gradients, expected_gradients, strict=True):
        assert own_P is not None and other_P is not None
        assert relative(own_P.cpu(), other_P.cpu().double()) < 1e-5
