"""The pure parts of a plan: who runs what and why not, cuts, time and memory from made-up rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lowbit.calib.shards import TensorInfo
from lowbit.quantize.linear_plan import Plan, PlannedLinear
from lowbit.quantize.passes.settings import GPTQSettings
from lowbit.quantize.planning.memory import ModelBytes, estimate_memory
from lowbit.quantize.planning.parallel import Heads, cut_refusal, fused_rows, is_expert, role_of
from lowbit.quantize.planning.rates import Rates, Solver
from lowbit.quantize.planning.resume import work_of_rest
from lowbit.quantize.planning.runtimes import (
    EngineLinear,
    llama_cpp_answer,
    lowbit_answer,
    vllm_answer,
)
from lowbit.quantize.planning.timing import TimeEstimate, estimate_time, solve_seconds
from lowbit.quantize.planning.work import Problem, Work, expert_share, problems_of
from lowbit.quantize.recipe import Calibration, Execution, Recipe, Transform, WeightPass
from lowbit.quantize.spec import scheme_from_name

HEADS = Heads(32, 8)
CPU = torch.device("cpu")


def engine(columns: int, rows: int, scheme: str, group_size: int | None = None) -> EngineLinear:
    return EngineLinear(columns, rows, scheme_from_name(scheme, group_size), "column")


@pytest.mark.parametrize(
    ("linear", "kernel", "reason"),
    [
        (engine(4096, 4096, "W4A16"), "Machete", None),
        (engine(4096, 4096, "W4A16", 64), "Machete", "takes groups of 128 or one a row, not 64"),
        (engine(4096, 4096, "W4A16", 64), "Marlin", None),
        (engine(4096, 4096, "W4A16", 16), "Marlin", "takes groups of 32, 64 or 128 or one a row"),
        (engine(576, 576, "W4A16", 64), "Marlin", "in_features must be a multiple of 128, not 576"),
        (engine(4096, 96, "W4A16"), "Marlin", "out_features must be a multiple of 64, not 96"),
        (engine(4096, 4096, "W3A16"), "Marlin", "takes 4 or 8-bit codes, not 3-bit"),
        (engine(4096, 4096, "W4A16_ASYM"), "Marlin", None),
        (engine(4096, 4096, "W4A16_ASYM"), "CPU W4A16", None),
        (engine(4096, 4096, "W8A16"), "CPU W4A16", "takes 4-bit codes, not 8-bit"),
        (engine(4096, 4096, "W4A16"), "CPU W4A16", None),
        (engine(4096, 4104, "W8A8"), "CUTLASS INT8", "out_features must be a multiple of 16"),
        (engine(4096, 4096, "W8A8"), "CPU INT8", None),
        (engine(4096, 4096, "W4A8"), "CPU W4A8", None),
        (engine(4096, 4096, "FP8_DYNAMIC"), "CUTLASS FP8", None),
        (engine(4096, 4096, "FP8_DYNAMIC"), "CPU FP8", None),
        (engine(4096, 4096, "FP8"), "CPU FP8", "inputs quantized to FP8 a token at a time"),
        (engine(4096, 4096, "FP8_DYNAMIC"), "block-scaled FP8", "takes scales of blocks"),
        (engine(4096, 4000, "FP8_BLOCK"), "block-scaled", "out_features must be a multiple of 128"),
        (engine(4096, 4096, "MXFP8"), "CUTLASS FP8", "takes float scales, not powers of two"),
        (engine(4096, 4096, "MXFP8"), "MXFP8", None),
        (engine(4096, 4096, "NVFP4"), "NVFP4", None),
        (engine(4096, 4096, "NVFP4A16"), "NVFP4", "takes inputs quantized to 4 bits"),
        (engine(4096, 4096, "NVFP4A16"), "Marlin FP4", None),
    ],
)
def test_vllm_kernels_say_what_they_take(
    linear: EngineLinear, kernel: str, reason: str | None
) -> None:
    answer = vllm_answer(linear)
    runs = [name for name in answer.runs if name.startswith(kernel)]
    declined = [why for name, why in answer.declined.items() if name.startswith(kernel)]
    assert len(runs) == (reason is None) and len(declined) == (reason is not None), answer
    assert reason is None or reason in declined[0]


def test_experts_are_asked_as_one_kernel() -> None:
    up = engine(2048, 768, "W4A16")._replace(expert=True)
    down = engine(768, 2048, "W4A16")._replace(expert=True, role="row")
    assert vllm_answer(up).runs == vllm_answer(down).runs == ("Marlin MoE (sm_75 and later)",)
    narrow = vllm_answer(down._replace(columns=704)).declined
    assert "in_features must be a multiple of 128, not 704" in next(iter(narrow.values()))


def test_llama_cpp_wants_rows_of_whole_blocks() -> None:
    assert "Q4_K" in llama_cpp_answer((10, 512)).runs
    odd = llama_cpp_answer((10, 576))
    assert odd.declined["Q4_K"] == "576 columns are no multiple of 256"
    assert odd.runs == ("Q8_0", "Q4_0") and "Q4_K becomes Q5_0" in odd.note
    assert llama_cpp_answer((10, 40)).runs == ("F16",)


def test_our_own_kernels_are_asked_themselves() -> None:
    scheme = scheme_from_name("W4A16", 64)
    answer = lowbit_answer("q_proj", scheme, (64, 128), torch.float32, CPU)
    assert answer.runs == ("dequant",)
    assert answer.declined["int4pack_cpu"] == "computes in bfloat16, not float32"


@pytest.mark.parametrize(
    ("module", "shape", "scheme", "devices", "reason"),
    [
        ("q_proj", (4096, 4096), "W4A16", 8, None),
        ("q_proj", (4096, 4096), None, 3, "32 heads do not divide among 3 devices"),
        ("k_proj", (1024, 4096), "W4A16", 16, None),  # fewer heads than devices are repeated
        ("k_proj", (1024, 4096), None, 3, "8 key/value heads do not divide among 3 devices"),
        ("gate_proj", (1001, 4096), None, 2, "1001 output rows do not divide among 2 devices"),
        ("gate_proj", (1000, 4096), "FP8_BLOCK", 2, "500 output rows a device cut blocks of 128"),
        ("up_proj", (40, 64), "W4A16_ASYM", 2, "20 zero-points a device of 4 bits cut a packed"),
        ("down_proj", (64, 1536), "W4A16", 8, "192 input columns a device cut groups of 128"),
        ("down_proj", (64, 1536), "W4A16", 4, None),
        ("down_proj", (64, 1536), None, 8, None),
        ("o_proj", (64, 384), "FP8_BLOCK", 2, "192 input columns a device cut blocks of 128"),
        ("w2", (64, 36), "W8A16", 4, "9 codes a device of 8 bits cut a packed word"),
        ("w2", (64, 36), "W8A8", 4, None),  # a byte each
        ("router", (7, 7), None, 2, None),  # not cut
    ],
)
def test_cuts_go_through_nothing(
    module: str, shape: tuple[int, int], scheme: str | None, devices: int, reason: str | None
) -> None:
    stored = None if scheme is None else scheme_from_name(scheme)
    found = cut_refusal(f"model.layers.0.{module}", shape, stored, HEADS, devices)
    assert (found is None) == (reason is None), found
    assert reason is None or reason in str(found)


def test_roles_experts_and_fused_rows_are_told_by_names() -> None:
    assert [role_of(f"x.{n}") for n in ("q_proj", "down_proj", "kv_a_proj_with_mqa")] == [
        "column", "row", "whole",
    ]  # fmt: skip
    assert is_expert("model.layers.0.mlp.experts.3.up_proj")
    assert not is_expert("model.layers.0.mlp.up_proj")
    rows = fused_rows(
        {"a.q_proj": (4, 8), "a.k_proj": (2, 8), "a.v_proj": (2, 8), "a.o_proj": (8, 8)}
    )
    assert rows == {"a.q_proj": 8, "a.k_proj": 8, "a.v_proj": 8, "a.o_proj": 8}


PASS = WeightPass(gptq=GPTQSettings())
PROBLEM = Problem(1000, 2000, PASS, PASS.layer_scheme, 1.0, 10)
REFINED = PROBLEM._replace(taken_by=WeightPass(gptq=GPTQSettings(refine_rounds=4)))
ROUNDED = PROBLEM._replace(taken_by=WeightPass(method="rtn"))
WORK = Work(
    problems=(PROBLEM,),
    recipe=Recipe(calibration=Calibration(samples=8, seq_len=100)),
    rows=8,
    seq_len=100,
    kinds={"layers.0": 10},
    layer_weights=20_000_000,
    hidden=1000,
    bytes_before=40_000_000,
    bytes_after=10_000_000,
    quantized_bytes=10_000_000,
)
RATES = Rates(
    rows={"layers.0": 0.01},
    gram={1000: 1e-9},
    solvers={p.kind: Solver(1000, 2.0, 1.0, 1000, 0.5) for p in (PROBLEM, REFINED)},
    rounding={ROUNDED.kind: 1e-8},
    scan=0.0, product=1e-11, balance=1e-9, rounded_input=0.0,
    read=1e-9, write=2e-9, digest=1e-9,
)  # fmt: skip


def parts(work: Work = WORK, rates: Rates = RATES) -> dict[str, float]:
    return estimate_time(work, rates).parts


def with_recipe(work: Work, **changes: object) -> Work:
    return replace(work, recipe=replace(work.recipe, **changes))


def test_time_is_work_times_rates() -> None:
    found = parts()
    assert found["forward passes"] == pytest.approx((8 + 1) * 10 * 0.01)  # and a row for inputs
    assert found["statistics"] == pytest.approx(10 * 800 * 1000**2 * 1e-9)
    energy = 2000 * 1000**2 * 1e-11
    assert found["gptq"] == pytest.approx(10 * (2.0 + 0.5 + energy))
    assert found["reading"] == pytest.approx(0.04)
    assert found["writing"] == pytest.approx(20e6 * 2e-9 + 10e6 * 1e-9)
    assert estimate_time(WORK, RATES, begun=7.0).seconds == pytest.approx(7 + sum(found.values()))


def test_more_rows_passes_and_transforms_take_longer() -> None:
    plain = parts()
    more = parts(replace(WORK, rows=16))
    assert more["statistics"] == pytest.approx(2 * plain["statistics"])
    assert more["gptq"] == plain["gptq"]  # does not hang on the rows
    parallel = with_recipe(WORK, execution=Execution(order="parallel"))
    assert parts(parallel)["forward passes"] > 1.8 * plain["forward passes"]
    smoothed = with_recipe(WORK, passes=(Transform(), PASS))
    assert parts(smoothed)["awq"] > 0
    assert parts(smoothed)["statistics"] == pytest.approx(2 * plain["statistics"])
    again = replace(WORK, problems=(REFINED,))
    assert parts(again)["gptq"] == pytest.approx(plain["gptq"] + 10 * 4 * 1.0)


def test_a_wider_problem_is_extrapolated_by_its_laws() -> None:
    timed = Solver(500, 2.0, 0.0, 500, 0.5)
    narrow = solve_seconds(PROBLEM._replace(columns=500), timed, 0.0)
    wide = solve_seconds(PROBLEM, timed, 0.0)
    assert narrow == pytest.approx(2.5)
    assert wide == pytest.approx(2 * 2.0 + 8 * 0.5)  # columns, and their third power
    square = solve_seconds(PROBLEM, timed, 4e-9) - 2000 * 1000**2 * 4e-9  # without its energy
    updates = 2000 * 4e-9 / 2
    assert square == pytest.approx(2 * (2.0 - updates * 500**2) + updates * 1000**2 + 8 * 0.5)


def test_streamed_weights_are_rounded_read_and_written_once() -> None:
    recipe = Recipe(passes=(ROUNDED.taken_by,))
    work = replace(WORK, rows=0, streamed=True, problems=(ROUNDED,), recipe=recipe)
    found = parts(work)
    assert found["rounding"] == pytest.approx(10 * 2_000_000 * 1e-8)
    assert found["writing"] == pytest.approx(10e6 * (2e-9 + 1e-9))
    assert "forward passes" not in found


def test_experts_see_their_share_of_the_tokens() -> None:
    assert expert_share({"num_experts_per_tok": 2, "num_local_experts": 8}) == 0.25
    assert expert_share({"text_config": {"num_experts_per_tok": 4, "num_experts": 64}}) == 1 / 16
    assert expert_share({"hidden_size": 64}) == 1.0
    some = replace(WORK, problems=(PROBLEM._replace(share=0.25),))
    assert parts(some)["statistics"] == pytest.approx(parts()["statistics"] / 4)


def test_an_estimate_is_the_sum_of_its_parts() -> None:
    assert TimeEstimate({"a": 1.0, "b": 2.5}).seconds == 3.5


MODEL = ModelBytes(layer=80_000_000, outside=12_000_000, head=0, itemsize=4)


def test_memory_is_that_of_the_worst_moment() -> None:
    found = estimate_memory(WORK, MODEL, held=1000, on_device=False)
    assert found.device == 0 and found.host == 1000 + sum(found.parts.values())
    assert found.parts["layer"] == 80_000_000 and found.parts["mapped files"] == 40_000_000
    assert found.parts["statistics"] == 4 * 1000**2
    deep = replace(WORK, kinds={"layers.0": 100}, problems=(PROBLEM._replace(count=100),))
    assert estimate_memory(deep, MODEL, 1000, False) == found  # no matter how deep
    more = estimate_memory(replace(WORK, rows=80), MODEL, 1000, False)
    assert more.parts["hidden states"] == 10 * found.parts["hidden states"]
    parallel = with_recipe(WORK, execution=Execution(order="parallel"))
    assert estimate_memory(parallel, MODEL, 1000, False).host < found.host


def test_batches_that_wait_take_the_sum_of_their_stops_on_the_heap_alone() -> None:
    wide = PROBLEM._replace(columns=3000)
    two = replace(WORK, problems=(PROBLEM, wide))
    on_heap = estimate_memory(two, MODEL, 0, False).parts["waiting batches"]
    assert on_heap == 800 * (1000 + 2000 + 3000 + 2000) * 4
    large = replace(two, rows=160, recipe=replace(WORK.recipe, execution=Execution(batch_size=160)))
    handed_back = estimate_memory(large, MODEL, 0, False).parts["waiting batches"]
    assert handed_back == 16_000 * (3000 + 2000) * 4


def test_a_device_holds_what_a_cpu_run_would() -> None:
    cpu = estimate_memory(WORK, MODEL, held=0, on_device=False)
    cuda = estimate_memory(WORK, MODEL, held=0, on_device=True)
    assert cuda.device == cpu.host - sum(cpu.parts[n] for n in ("libraries", "mapped files"))
    assert cuda.host >= MODEL.outside


def test_streaming_holds_chunks_whatever_the_model() -> None:
    streamed = replace(WORK, streamed=True, rows=0)
    large = estimate_memory(replace(streamed, bytes_before=10**9), MODEL, 0, False)
    larger = estimate_memory(replace(streamed, bytes_before=10**12), MODEL, 0, False)
    assert large == larger


def test_a_run_that_goes_on_has_the_rest_to_do() -> None:
    names = [f"layers.{i}.{leaf}" for i in range(4) for leaf in ("q_proj", "down_proj")]
    linears = {n: PlannedLinear(PASS, PASS.layer_scheme, (128, 128)) for n in names}
    plan, kinds = Plan(linears, [], []), {"layers.0": [f"layers.{i}" for i in range(4)]}
    problems = problems_of(plan, {}, False)
    whole = replace(WORK, problems=problems, kinds={"layers.0": 4})
    info = {f"{n}.weight": TensorInfo("f", (128, 128), torch.float32) for n in names}
    left = work_of_rest(whole, plan, {}, info, kinds, {"layers.0", "layers.1", "layers.2"})
    assert [p.count for p in left.problems] == [p.count // 4 for p in problems]
    assert (left.kinds, left.restored) == ({"layers.0": 1}, {"layers.0": 3})
    assert left.quantized_bytes == whole.quantized_bytes // 4
    assert left.bytes_after == whole.bytes_after  # all of it is put together at the end
    solvers = {p.kind: Solver(128, 2.0, 1.0, 128, 0.5) for p in problems}
    rates = RATES._replace(gram={128: 1e-9}, solvers=solvers)
    before, after = parts(whole, rates), parts(left, rates)
    assert after["gptq"] == before["gptq"] / 4
    assert after["finished layers"] == pytest.approx(8 * 3 * 0.01)
    streamed = replace(whole, streamed=True, rows=0)
    done = {f"{n}.weight" for n in names[:6]}
    rest = work_of_rest(streamed, plan, {}, info, {}, done)
    assert rest.bytes_after == whole.bytes_after // 4
    assert sum(p.count for p in rest.problems) == sum(p.count for p in problems) // 4
