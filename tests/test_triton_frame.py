"""The ground that all Triton kernels stand on: import, launch, record, checks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from lowbit.kernels.triton_ops.checks import check_tensor
from lowbit.kernels.triton_ops.device_math import dot
from lowbit.kernels.triton_ops.launch import Target, Warps, launch, launch_backend, recording
from lowbit.kernels.triton_ops.shim import decline_triton, jit, tl


@jit
def _multiply(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    rows = tl.arange(0, N)
    at = rows[:, None] * N + rows[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    acc = tl.zeros((N, N), tl.int32 if a.dtype.is_int() else tl.float32)
    tl.store(out_ptr + at, dot(a, b, acc))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_dot_multiplies_each_dtype(kernel_device, dtype):
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-9, 10, (32, 32), generator=g) for _ in range(2))
    out_dtype = torch.int32 if dtype == torch.int8 else torch.float32
    out = torch.zeros(32, 32, dtype=out_dtype, device=kernel_device)
    args = {
        "a_ptr": a.to(kernel_device, dtype),
        "b_ptr": b.to(kernel_device, dtype),
        "out_ptr": out,
    }
    launch(_multiply, (1,), args, {"N": 32}, Warps())
    assert torch.equal(out.cpu(), (a @ b).to(out_dtype))


def test_recorded_launches_do_not_run():
    at = torch.zeros(16, 16, device="meta")
    args = {"a_ptr": at, "b_ptr": at, "out_ptr": at}
    with recording(Target("hip", "gfx942")) as launches:
        assert launch_backend() == "hip"
        launch(_multiply, (1,), args, {"N": 16}, Warps(8, 2))
        launch(_multiply, (0, 3), args, {"N": 16}, Warps())
    assert launch_backend() != "hip"
    (only,) = launches
    assert only.kernel is _multiply and only.constants == {"N": 16} and only.warps == (8, 2)


def test_a_wrong_tensor_is_named():
    x = torch.zeros(4, 8)
    check_tensor("op", "x", x, (None, 8), [torch.float32], x.device, contiguous=True)
    with pytest.raises(ValueError, match=r"op: x has shape \(4, 8\), not \(any, 9\)"):
        check_tensor("op", "x", x, (None, 9), [torch.float32])
    with pytest.raises(ValueError, match=r"op: x has shape \(4, 8\), not \(4, 8, 1\)"):
        check_tensor("op", "x", x, (4, 8, 1), [torch.float32])
    with pytest.raises(ValueError, match="op: x is float32, not float16 or bfloat16"):
        check_tensor("op", "x", x, (4, 8), [torch.float16, torch.bfloat16])
    with pytest.raises(ValueError, match="op: x is on cpu, not meta"):
        check_tensor("op", "x", x, (4, 8), [torch.float32], torch.device("meta"))
    with pytest.raises(ValueError, match="the last axis of x must be contiguous"):
        check_tensor("op", "x", x.T, (8, 4), [torch.float32])
    with pytest.raises(ValueError, match=r"x must be contiguous, its strides are \(8, 1\)"):
        check_tensor("op", "x", x[:, :4], (4, 4), [torch.float32], contiguous=True)


def test_triton_is_declined_on_a_cpu():
    assert decline_triton("cpu") == "runs on cuda, not cpu"
    assert decline_triton("cuda:1") is None


def test_kernel_files_import_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from lowbit.kernels.triton_ops import device_math\n"
        "from lowbit.kernels.errors import UserError\n"
        "try: device_math.dot[(1,)]()\n"
        "except UserError as e: print(e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "kernel 'dot' needs Triton: pip install triton (Linux)\n"
