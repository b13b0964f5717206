"""Which programs can run a quantized linear, by shape and scheme, and why one cannot.

Our own kernels are asked themselves. What vLLM's kernels take is written down from its sources of
mid 2026 (kernels/linear, quantization/utils/marlin_utils.py and machete_utils.py): types, group
sizes and the shapes that they divide into tiles. Newer releases pad odd shapes for Marlin. What
llama.cpp takes follows from the size of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.compiled import prefers_compiled
from ...kernels.errors import UserError
from ...kernels.linear_ops import choose_linear
from ..gguf.mix import CODECS, fitting
from ..linear_problem import linear_problem
from ..spec import Block, Channel, Group, LayerScheme, TensorWise, Token
from .parallel import Role

BLOCK_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0")


class Answer(NamedTuple):
    """runs: what runs the linear, in order of preference; declined: what does not -> why.
    note: what else the user should know, "" for nothing."""

    runs: tuple[str, ...]
    declined: dict[str, str]
    note: str = ""


class EngineLinear(NamedTuple):
    """A linear as an engine runs it: fused with its peers, cut by its role.

    columns, rows: in_features, and out_features of all that is fused. expert: run in one kernel
    with a layer's other experts.
    """

    columns: int
    rows: int
    scheme: LayerScheme
    role: Role
    expert: bool = False

    @property
    def group_size(self) -> int | None:
        """Columns that share a scale, -1 for a whole row; None for a tensor or blocks."""
        match self.scheme.weights.granularity:
            case Group(size):
                return size
            case Channel():
                return -1
        return None


TAPED = frozenset(
    ["gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"]
)
"""Model types whose layers lowbit's runtime runs as one tape on some CPUs (runtime/models)."""


def runs_as_tape(model_type: str, device: torch.device) -> bool:
    """Whether it does on this machine."""
    return device.type == "cpu" and model_type in TAPED and prefers_compiled()


def lowbit_answer(
    module: str,
    scheme: LayerScheme,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    taped: bool = False,
) -> Answer:
    """The kernel of lowbit's runtime that takes a linear [out, in] with activations of `dtype`.
    taped: of a model that `runs_as_tape`."""
    try:
        problem = linear_problem(module, scheme, shape, dtype, device)
        choice = choose_linear(problem._replace(taped=taped))
    except UserError as e:
        return Answer((), {"linear": str(e)})
    return Answer((choice.candidate.name,), choice.declined, choice.candidate.note)


def llama_cpp_answer(shape: tuple[int, int]) -> Answer:
    """The block types of llama.cpp that rows of this length fill whole, and for the others what
    llama-quantize takes in their place."""
    columns = shape[1]
    chosen = {name: fitting(name, columns) for name in BLOCK_TYPES}
    whole = tuple(name for name, choice in chosen.items() if choice.codec.name == name)
    declined = {
        name: f"{columns} columns are no multiple of {CODECS[name].block}"
        for name in BLOCK_TYPES
        if name not in whole
    }
    note = ", ".join(f"{name} becomes {chosen[name].codec.name}" for name in declined)
    return Answer(whole or ("F16",), declined, note)


def vllm_answer(linear: EngineLinear) -> Answer:
    """The kernels of vLLM that take the linear."""
    kernels = VLLM_KERNELS[_kind(linear)]
    answers = {name: decline(linear) for name, decline in kernels.items()}
    return Answer(
        tuple(name for name, why in answers.items() if why is None),
        {name: why for name, why in answers.items() if why is not None},
    )


def _kind(linear: EngineLinear) -> str:
    weights, inputs = linear.scheme.weights, linear.scheme.input_activations
    if weights.type == "float":
        return f"float{weights.num_bits}"
    if inputs is None:
        return "packed experts" if linear.expert else "packed"
    return "int8" if weights.num_bits == 8 else "int4 times int8"


def _machete(x: EngineLinear) -> str | None:
    return (
        _bits(x, (4, 8), (4, 8))
        or _groups(x, (-1, 128))
        or _multiples(x, columns=64, rows=128)
    )  # fmt: skip


def _marlin(x: EngineLinear) -> str | None:
    return (
        _bits(x, (4, 8), (4,))
        or _groups(x, (-1, 32, 64, 128))
        or _multiples(x, columns=128, rows=64)
    )


def _marlin_experts(x: EngineLinear) -> str | None:
    size = x.group_size or -1
    inner = max(64, size)  # what an expert's intermediate size is cut into
    tiles = {"columns": 128, "rows": inner} if x.role == "column" else {}
    tiles = tiles or {"columns": inner, "rows": 128}
    return _bits(x, (4, 8), (4,)) or _groups(x, (-1, 32, 64, 128)) or _multiples(x, **tiles)


def _cpu_packed(x: EngineLinear) -> str | None:
    return _bits(x, (4,), (4,)) or _even_groups(x) or _multiples(x, columns=32, rows=32)


def _cutlass_int8(x: EngineLinear) -> str | None:
    return _weights_of(x, (Channel, TensorWise)) or _multiples(x, columns=16, rows=16)


def _cpu_int8(x: EngineLinear) -> str | None:
    return _weights_of(x, (Channel, TensorWise))


def _arm_int4(x: EngineLinear) -> str | None:
    return _bits(x, (4,), ())


def _cpu_fp8(x: EngineLinear) -> str | None:
    inputs = x.scheme.input_activations
    if inputs is None or not isinstance(inputs.granularity, Token):
        return "takes inputs quantized to FP8 a token at a time"
    return _weights_of(x, (Channel, TensorWise))


def _cutlass_fp8(x: EngineLinear) -> str | None:
    inputs = x.scheme.input_activations
    if inputs is None:
        return "takes inputs quantized to FP8"
    if x.scheme.weights.scale_dtype != "model":
        return "takes float scales, not powers of two"
    if isinstance(x.scheme.weights.granularity, Block):
        return "takes one scale a row or a tensor, not blocks"
    if not isinstance(inputs.granularity, Token | TensorWise):
        return "takes one scale a token or a tensor for inputs"
    return _multiples(x, columns=16, rows=16)


def _block_fp8(x: EngineLinear) -> str | None:
    match x.scheme.weights.granularity:
        case Block(tall, wide):
            return _multiples(x, columns=wide, rows=tall)
    return "takes scales of blocks"


def _marlin_fp8(x: EngineLinear) -> str | None:
    if x.scheme.weights.scale_dtype != "model":
        return "takes float scales, not powers of two"
    return _multiples(x, columns=128, rows=64)


def _mx_fp8(x: EngineLinear) -> str | None:
    if x.scheme.weights.scale_dtype != "e8m0":
        return "takes scales that are powers of two (MXFP8)"
    return _multiples(x, columns=128, rows=128)


def _fp4_tensor_cores(x: EngineLinear) -> str | None:
    if x.scheme.input_activations is None:
        return "takes inputs quantized to 4 bits"
    if x.scheme.weights.scale_dtype != "e4m3":
        return "takes NVFP4, not MXFP4"
    return _multiples(x, columns=32, rows=32)


def _marlin_fp4(x: EngineLinear) -> str | None:
    return _multiples(x, columns=128, rows=64)


Decline = Callable[[EngineLinear], str | None]
VLLM_KERNELS: dict[str, dict[str, Decline]] = {
    "packed": {
        "Machete (sm_90)": _machete, "Marlin (sm_75 and later)": _marlin,
        "CPU W4A16": _cpu_packed,
    },
    "packed experts": {"Marlin MoE (sm_75 and later)": _marlin_experts},
    "int8": {"CUTLASS INT8 (sm_75 and later)": _cutlass_int8, "CPU INT8": _cpu_int8},
    "int4 times int8": {"CPU W4A8 (Arm)": _arm_int4},
    "float8": {
        "CUTLASS FP8 (sm_89 and later)": _cutlass_fp8, "CPU FP8": _cpu_fp8,
        "block-scaled FP8 (sm_89 and later)": _block_fp8,
        "Marlin FP8, weights alone (sm_75 and later)": _marlin_fp8,
        "MXFP8 (sm_100)": _mx_fp8,
    },
    "float4": {
        "NVFP4 (sm_100)": _fp4_tensor_cores,
        "Marlin FP4, weights alone (sm_75 and later)": _marlin_fp4,
    },
}  # fmt: skip


def _bits(x: EngineLinear, symmetric: tuple[int, ...], asymmetric: tuple[int, ...]) -> str | None:
    """A reason where codes are of another width than those taken with or without zero-points."""
    spec = x.scheme.weights
    taken = symmetric if spec.symmetric else asymmetric
    if spec.num_bits in taken:
        return None
    if not taken:
        return "has no zero-points"
    kind = "" if spec.symmetric else " with zero-points"
    return f"takes {_either(taken)}-bit codes{kind}, not {spec.num_bits}-bit"


def _groups(x: EngineLinear, taken: tuple[int, ...]) -> str | None:
    if x.group_size in taken:
        return None
    named = _either(tuple(s for s in taken if s > 0))
    return f"takes groups of {named} or one a row, not {x.group_size}"


def _even_groups(x: EngineLinear) -> str | None:
    size = x.group_size
    return None if size is None or size == -1 or size % 2 == 0 else f"takes no groups of {size}"


def _weights_of(x: EngineLinear, taken: tuple[type, ...]) -> str | None:
    if isinstance(x.scheme.weights.granularity, taken):
        return None
    return f"takes one scale a row or a tensor, not {x.scheme.weights.granularity}"


def _multiples(x: EngineLinear, columns: int, rows: int) -> str | None:
    if x.columns % columns:
        return f"in_features must be a multiple of {columns}, not {x.columns}"
    if x.rows % rows:
        return f"out_features must be a multiple of {rows}, not {x.rows}"
    return None


def _either(values: tuple[int, ...]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last
