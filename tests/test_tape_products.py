"""Products of a tape: packed weights against the definition in float64, floats against torch, and
rows that have the same bits whatever stands beside them."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.compiled import decline_compiled
from lowbit.kernels.elements import int_elements
from lowbit.kernels.linear_int16 import INT8_TOKENS, INT16_CPU
from lowbit.kernels.linear_ops import LinearOperands, LinearProblem, linear_reference
from torch import Tensor

from .tapes import needs_tape, shared_walker

pytestmark = needs_tape
if decline_compiled() is None:
    from lowbit.kernels.tape import program

ROWS = (1, 2, 3, 4, 5, 6, 7, 16, 49, 97)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def few_walkers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "walker", shared_walker)


def problem(**changes: object) -> LinearProblem:
    plain = LinearProblem(4, 64, True, 128, 48, torch.float32, "cpu", taped=True)
    return plain._replace(**changes)


def random_weight(p: LinearProblem, seed: int = 0) -> LinearOperands:
    g = torch.Generator().manual_seed(seed)
    elements = int_elements(p.num_bits)
    low, high = int(elements.lowest), int(elements.highest) + 1
    groups = -(-p.in_features // p.group_size)

    def draw(*shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.int8)

    scale = torch.rand(p.out_features, groups, generator=g) * 0.1 + 0.01
    zero = None if p.symmetric else draw(p.out_features, groups)
    return LinearOperands(draw(p.out_features, p.in_features), scale, zero)


def normal(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Packed:
    """The linear of a problem, as the kernel runs it and as it is defined."""

    def __init__(self, p: LinearProblem, operands: LinearOperands | None = None) -> None:
        assert INT16_CPU.decline(p) is None
        self.problem, self.operands = p, operands or random_weight(p)
        self._tensors = INT16_CPU.pack(self.operands, p)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return INT16_CPU.run(x, self._tensors, bias, self.problem)

    def error(self, x: Tensor, bias: Tensor | None = None) -> float:
        """The largest error over the largest output."""
        p, wide = (
            self.problem._replace(dtype=torch.float64),
            None if bias is None else bias.double(),
        )
        expected = linear_reference(x.double(), self.operands, wide, p)
        y = self(x, bias)
        assert y.shape == expected.shape and y.dtype == x.dtype
        return float((y - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize(
    ("group", "columns", "outputs"),
    [(32, 128, 48), (64, 200, 40), (128, 256, 16), (256, 600, 7), (256, 512, 33), (8, 40, 16),
     (24, 72, 17), (200, 200, 48), (36, 36, 5), (576, 576, 100), (1, 8, 16)],
)  # fmt: skip
def test_packed_product_is_the_definition(
    group: int, columns: int, outputs: int, bits: int, symmetric: bool
) -> None:
    """Of groups and of whole rows, some of which groups do not fill, and tiles not full."""
    p = problem(num_bits=bits, symmetric=symmetric, group_size=group, in_features=columns,
                out_features=outputs)  # fmt: skip
    if group == 1:
        assert "groups of a multiple of 8 columns" in (INT16_CPU.decline(p) or "")
        return
    packed, bias = Packed(p), normal(outputs, seed=1)
    for rows in ROWS:
        assert packed.error(normal(rows, columns, seed=rows), bias) < 2e-4, rows
    assert packed.error(normal(2, 3, columns)) < 2e-4
    assert packed(torch.empty(0, columns)).shape == (0, outputs)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_sums_of_the_largest_numbers_do_not_overflow(bits: int, symmetric: bool) -> None:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    for code, point in ((low, high), (high, low)):
        p = problem(num_bits=bits, symmetric=symmetric, group_size=128, in_features=256)
        codes = torch.full((48, 256), code, dtype=torch.int8)
        zero = None if symmetric else torch.full((48, 2), point, dtype=torch.int8)
        packed = Packed(p, LinearOperands(codes, torch.ones(48, 2), zero))
        for rows in (1, 4, 13):
            assert packed.error(torch.ones(rows, 256)) < 1e-6
            assert packed.error(-torch.ones(rows, 256)) < 1e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_outputs_have_the_dtype_of_inputs(dtype: torch.dtype) -> None:
    x, bias = normal(5, 128).to(dtype), normal(48).to(dtype)
    assert Packed(problem(dtype=dtype)).error(x, bias) < 2e-4 + torch.finfo(dtype).eps


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-34])
def test_inputs_of_any_size(size: float) -> None:
    packed, x = Packed(problem()), normal(7, 128)
    once, sized = packed(x), packed(x * size)
    limit = 2e-4 if size > 1e-32 else 0.3  # codes of a group are those of 1e-30 at least
    assert ((sized.double() / size - once).abs() < limit * once.abs().max()).all()
    assert not packed(torch.zeros(7, 128)).any()


def check_rows(run, x: Tensor) -> None:
    """The rows of run(x) are those of its parts, bit for bit."""
    whole = run(x)
    assert whole.isfinite().all()
    for i in range(len(x)):
        assert torch.equal(run(x[i : i + 1])[0], whole[i]), i
    for rows in (slice(1, 3), slice(3, 6), slice(10, 14), slice(2, 51), slice(1, len(x))):
        assert torch.equal(run(x[rows]), whole[rows]), rows


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_row_has_the_same_bits_in_every_batch(bits: int, symmetric: bool) -> None:
    p = problem(num_bits=bits, symmetric=symmetric, in_features=320, out_features=40)
    check_rows(Packed(p), normal(97, 320))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_of_floats_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    weight = normal(37, 72).to(dtype)
    check_rows(lambda x: program.run_floats(x, weight, None), normal(97, 72))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    packed, weight = Packed(problem()), normal(37, 128)
    for run in (packed, lambda x: program.run_floats(x, weight, None)):
        for rows in (3, 13):
            x = normal(rows, 128)
            before = run(x)
            x[1, 70] = value
            got = run(x)
            assert not got[1].isfinite().any()
            others = torch.arange(rows) != 1
            assert torch.equal(got[others], before[others])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("columns", "outputs"), [(8, 1), (24, 16), (64, 17), (200, 40)])
def test_product_with_floats(columns: int, outputs: int, dtype: torch.dtype) -> None:
    weight, bias = normal(outputs, columns, seed=1).to(dtype), normal(outputs, seed=2)
    for rows in (0, *ROWS):
        x = normal(rows, columns, seed=rows)
        for added in (None, bias):
            y = program.run_floats(x, weight, added)
            expected = x.double() @ weight.double().T + (0 if added is None else added.double())
            torch.testing.assert_close(y.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": torch.float64}, "computes in float32, not float64"),
        ({"kind": "float"}, "holds whole numbers"),
        ({"taped": False}, "layers that run as a tape"),
        ({"group_size": 20}, "a multiple of 8 columns, over 128 of it, not 20"),
        ({"group_size": 192, "in_features": 384}, "not 192"),
        ({"device": "cuda"}, "runs on cpu, not cuda"),
    ],
    ids=str,
)
def test_what_it_declines(changes: dict[str, object], why: str) -> None:
    assert why in (INT16_CPU.decline(problem(**changes)) or "")


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": INT8_TOKENS}, {"num_bits": 2, "symmetric": False},
     {"group_size": 256, "in_features": 512, "batch_invariant": True}],
    ids=str,
)  # fmt: skip
def test_what_it_takes(changes: dict[str, object]) -> None:
    assert INT16_CPU.decline(problem(**changes)) is None
