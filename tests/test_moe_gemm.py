"""Packed experts: the definition against each token's own products, kernels against it."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.linear_ops import LinearOperands, LinearProblem, dense_weight
from lowbit.kernels.moe_ops import ExpertsProblem, choose_moe, moe_gemm_reference, moe_kernels
from lowbit.kernels.moe_triton import pack_experts
from lowbit.kernels.triton_ops.launch import Warps
from lowbit.kernels.triton_ops.moe_gemm import ExpertTiles, default_tiles, moe_gemm, sort_pairs
from lowbit.kernels.wna16_layout import WNA16Format

from .far_apart import far_apart

pytestmark = pytest.mark.usefixtures("nan_outputs")


class Experts:
    """Random experts, tokens and the experts that each goes to; expert 1 gets none."""

    def __init__(
        self, bits: int = 4, group: int = 32, symmetric: bool = True, tokens: int = 7,
        top_k: int = 2, columns: int = 96, out: int = 70, experts: int = 4,
        dtype: torch.dtype = torch.float16, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(bits + columns)
        half = 1 << (bits - 1)
        self.fmt = WNA16Format(bits, 0 if group == columns else group, not symmetric)
        linear = LinearProblem(bits, group, symmetric, columns, out, dtype, "cpu")
        self.problem = ExpertsProblem(linear, experts)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-half, half, shape, generator=g, dtype=torch.int8)

        groups = columns // group
        self.operands = [
            LinearOperands(
                integers(out, columns),
                (torch.rand(out, groups, generator=g) * 0.02 + 0.01).half(),
                None if symmetric else integers(out, groups),
            )
            for _ in range(experts)
        ]
        self.x = torch.randn(tokens, columns, generator=g).to(device, dtype)
        shares = torch.rand(tokens, experts, generator=g)
        shares[:, 1] = -1
        self.ids = shares.topk(top_k).indices.to(device)
        self.words, self.scale = (t.to(device) for t in pack_experts(self.operands, self.problem))

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        return moe_gemm_reference(x.double().cpu(), self.operands, self.ids.cpu(), self.problem)


def check(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 6e-4) -> None:
    assert got.shape == expected.shape
    error = (got.double().cpu() - expected).norm()
    assert error <= tolerance * expected.norm(), error


def test_the_definition_is_each_tokens_own_product():
    e = Experts(dtype=torch.float32)
    y = moe_gemm_reference(e.x, e.operands, e.ids, e.problem)
    for token in range(7):
        for k in range(2):
            weight = dense_weight(e.operands[e.ids[token, k]], e.problem.linear, torch.float32)
            torch.testing.assert_close(y[2 * token + k], weight @ e.x[token])


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"),
    [(4, 32, True), (4, 96, True), (4, 32, False), (3, 32, False), (2, 96, False), (8, 96, True)],
)
def test_the_grouped_kernel(bits, group, symmetric, kernel_device):
    e = Experts(bits, group, symmetric, device=kernel_device)
    check(moe_gemm(e.x, e.words, e.scale, e.ids, e.fmt), e.expected(e.x))


@pytest.mark.parametrize(
    ("tokens", "top_k", "block_m"), [(1, 1, 16), (40, 3, 16), (33, 2, 32), (0, 2, 16)]
)
def test_tokens_and_tiles(tokens, top_k, block_m, kernel_device):
    e = Experts(tokens=tokens, top_k=top_k, device=kernel_device)
    tiles = ExpertTiles(block_m, 32, Warps())
    check(moe_gemm(e.x, e.words, e.scale, e.ids, e.fmt, tiles), e.expected(e.x))


def test_pairs_with_rows_of_their_own(kernel_device):
    e = Experts(device=kernel_device)
    wide = torch.randn(14, 130, device=kernel_device).half()
    check(moe_gemm(wide[:, :96], e.words, e.scale, e.ids, e.fmt), e.expected(wide[:, :96]))


def test_rows_beyond_two_billion_elements(kernel_device):
    e = Experts(device=kernel_device)
    near = moe_gemm(e.x, e.words, e.scale, e.ids, e.fmt)
    assert torch.equal(moe_gemm(far_apart(e.x), e.words, e.scale, e.ids, e.fmt), near)


def test_a_row_is_the_same_bits_in_any_batch(kernel_device):
    e = Experts(tokens=20, device=kernel_device)
    tiles = ExpertTiles(16, 32, Warps())
    together = moe_gemm(e.x, e.words, e.scale, e.ids, e.fmt, tiles)
    alone = moe_gemm(e.x[9:10], e.words, e.scale, e.ids[9:10], e.fmt, tiles)
    assert torch.equal(alone, together[18:20])


def test_a_batch_invariant_problem_has_one_form(kernel_device):
    """Where a batch of many tokens would take larger tiles."""
    e = Experts(tokens=40, device=kernel_device)
    assert default_tiles(80, 4) != default_tiles(2, 4)
    linear = e.problem.linear._replace(batch_invariant=True)
    kernel, problem = moe_kernels()[0], e.problem._replace(linear=linear)
    tensors = (e.words, e.scale)
    together = kernel.run(e.x, tensors, e.ids, problem)
    alone = kernel.run(e.x[9:10], tensors, e.ids[9:10], problem)
    assert torch.equal(alone, together[18:20])
    assert torch.equal(together, moe_gemm(e.x, *tensors, e.ids, e.fmt, default_tiles(2, 4)))


@pytest.mark.parametrize("block", [1, 4, 16])
def test_tiles_hold_the_pairs_of_one_expert(block):
    ids = torch.randint(0, 5, (30, 2), generator=torch.Generator().manual_seed(0))
    order = sort_pairs(ids, 5, block)
    kept = order.pairs[order.pairs >= 0].long()
    assert kept.sort().values.equal(torch.arange(60))
    expert = order.experts.repeat_interleave(block)[order.pairs >= 0]
    assert expert.equal(ids.flatten()[kept].int())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_expert_by_expert_on_a_cpu(dtype):
    e = Experts(dtype=dtype)
    choice = choose_moe(e.problem)
    assert choice.candidate.name == "expert_by_expert"
    assert choice.declined == {"grouped": "runs on cuda, not cpu"}
    tensors = choice.candidate.pack(e.operands, e.problem)
    y = choice.candidate.run(e.x, tensors, e.ids, e.problem)
    check(y, e.expected(e.x), 6e-3 if dtype == torch.bfloat16 else 1e-6)


def test_who_runs_on_a_gpu():
    e = Experts()
    linear = e.problem.linear._replace(device="cuda")
    assert choose_moe(e.problem._replace(linear=linear)).candidate is moe_kernels()[0]
    five = e.problem._replace(linear=linear._replace(num_bits=5))
    assert choose_moe(five).declined == {"grouped": "holds 2-, 3-, 4- or 8-bit codes, not 5-bit"}


def test_what_does_not_fit_is_named(kernel_device):
    e = Experts(device=kernel_device)
    with pytest.raises(ValueError, match=r"x has 5 rows, not 7 \(tokens\) or 14 \(pairs\)"):
        moe_gemm(e.x[:5], e.words, e.scale, e.ids, e.fmt)
    with pytest.raises(ValueError, match="words has shape"):
        moe_gemm(e.x, e.words[0], e.scale, e.ids, e.fmt)
    with pytest.raises(ValueError, match=r"scale has shape \(3, 4, 70\), not \(4, 4, 70\)"):
        moe_gemm(e.x, e.words, e.scale[:3], e.ids, e.fmt)
    with pytest.raises(ValueError, match="expert_ids is int32, not int64"):
        moe_gemm(e.x, e.words, e.scale, e.ids.int(), e.fmt)
