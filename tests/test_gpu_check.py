"""The GPU check without a GPU: its verdicts, its workers, what it leaves when it is stopped."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lowbit.evals import (
    gpu_check,
    gpu_decode,
    gpu_speed_attention,
    gpu_speed_decode,
    gpu_speed_linear,
)
from lowbit.evals.gpu_check import Report, table
from lowbit.evals.gpu_speed import Ceilings, Speed, each
from lowbit.evals.gpu_timer import copies_needed
from lowbit.evals.gpu_worker import checked_faults
from lowbit.evals.gpu_workers import Worker, do_all
from lowbit.kernels.cases import all_cases
from lowbit.kernels.cases.case import Case
from transformers import LlamaConfig

from .test_graphs import Again

CEILINGS = Ceilings(4e12, 7e14)
FACTS = {"device": "NVIDIA H200", "torch": "2.13.0", "triton": "3.7.1", "seed": 0}
SPEED = Speed("W4A16 8B", 16, "wna16", 1e-5, 4e-5, 36_000_000, 10**9)


def good_case() -> Case:
    return next(c for c in all_cases("small", "act_quant") if c.ci)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert "gpu_check needs a CUDA or ROCm GPU" in said.err and not said.out


def test_wrong_cases_are_found(kernel_device):
    case, device = good_case(), str(kernel_device)
    assert checked_faults(case, device, seed=3) == []

    def unwritten(o):
        codes, scales = case.run(o)
        scales[-1, -1] = float("nan")
        return codes, scales

    def by_batch(o):
        codes, scales = case.run(o)
        return codes, scales + 1e-6 * len(codes)

    def broken(o):
        raise RuntimeError("out of registers\nmore")

    faults = {
        name: checked_faults(dataclasses.replace(case, run=run), device, 0)
        for name, run in {"nan": unwritten, "batch": by_batch, "raises": broken}.items()
    }
    assert "relative error nan" in faults["nan"][0]
    assert len(faults["batch"]) >= 2 and "alone differ from the batch" in faults["batch"][0]
    assert faults["raises"] == ["RuntimeError: out of registers"]


def test_bars_of_speed():
    fast = Speed("W4A16 8B", 1, "wna16", 1e-5, 4e-5, 36_000_000, 10**9, 3.0, 0.8)
    assert fast.ratio == pytest.approx(4) and fast.faults(CEILINGS) == []
    slow = fast._replace(ours=2e-5)
    assert slow.faults(CEILINGS) == [
        "2.00x, under 3.0x", "45% of copy bandwidth, under 80%"
    ]  # fmt: skip
    assert fast.faults(None) == ["no copy bandwidth to compare with"]


def test_the_table_and_the_file_hold_every_row(tmp_path: Path):
    """The file is whole after each job; without ceilings, speeds are told all the same."""
    report = Report(FACTS, tmp_path / "gpu.json")
    speed = {"kind": "speed", "module": "linear", "name": "W4A16 8B"}
    report.add_row(speed, SPEED._asdict())
    report.add_row({"kind": "ceilings"}, CEILINGS._asdict())
    report.add_row(speed, SPEED._asdict())
    for name, faults in (("a right one", []), ("b", ["wrong"])):
        report.add_row({"kind": "case", "name": name}, {"case": name, "faults": faults})
    assert not (tmp_path / "gpu.json").exists()
    report.end_job({"kind": "case", "name": "c"}, "its process ended with -11")
    report.end_job({"kind": "warm", "module": "linear", "name": "W4A16 8B"}, "no answer in time")
    report.end_job(speed, "no answer in time")
    assert json.loads((tmp_path / "gpu.json").read_text()) == report.data
    assert report.is_wrong() and len(report.data["faults"]) == 1
    text = table(report.data)
    for said in ("NVIDIA H200", "triton 3.7.1", "copy 4.00 TB/s", "right", "wrong", "4.00x", "met",
                 "ended with -11", "speed W4A16 8B: no answer in time"):  # fmt: skip
        assert said in text, said


def test_a_size_that_fails_costs_its_own_row():
    def measure(size: int) -> Speed:
        if size % 2:
            raise ValueError("out of shared memory\nmore")
        return SPEED._replace(size=size)

    rows: list[int] = []
    with pytest.raises(RuntimeError) as e:
        for speed in each([2, 3, 4, 5], measure):
            rows.append(speed.size)
    assert rows == [2, 4] and str(e.value).startswith("3: ValueError: out of shared memory; 5: ")


def test_operands_together_exceed_the_cache():
    assert copies_needed(8 << 20) == 32 and copies_needed(1 << 40) == 2 and copies_needed(1) == 64


@pytest.mark.parametrize("module", [gpu_speed_linear, gpu_speed_attention])
def test_what_is_measured_has_names(module):
    names = module.names()
    assert len(set(names)) == len(names) >= 10
    assert all(module._asked(name) for name in names)


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    name = json.loads(line)["name"]
    print(json.dumps({"row": {"name": name, "pid": os.getpid()}}), flush=True)
    if name == "crashes":
        os.kill(os.getpid(), 11)
    if name == "hangs":
        time.sleep(600)
    print(json.dumps({"done": True, "fault": "bad" if name == "bad" else None,
                      "usable": name != "poisons"}), flush=True)
"""


def test_a_crash_a_hang_and_a_poisoned_device_cost_their_own_job_alone():
    """The rows before them are kept, and the jobs after them run, in another process."""
    names = ["a", "crashes", "b", "hangs", "c", "poisons", "d", "bad", "e"]
    rows: list[dict] = []
    ends: dict[str, str | None] = {}
    workers = [Worker([sys.executable, "-c", WORKER])]
    try:
        do_all(
            [{"name": name} for name in names], workers, time.monotonic() + 100, 5.0,
            lambda job, row: rows.append(row), lambda job, fault: ends.update({job["name"]: fault}),
        )  # fmt: skip
    finally:
        workers[0].close()
    assert [row["name"] for row in rows] == names
    assert ends == dict.fromkeys(names) | {
        "crashes": "its process ended with -11", "hangs": "no answer in time", "bad": "bad",
    }  # fmt: skip
    processes = {row["name"]: row["pid"] for row in rows}
    assert len(set(processes.values())) == 4
    assert processes["a"] == processes["crashes"] != processes["b"] == processes["hangs"]
    assert processes["c"] == processes["poisons"] != processes["d"] == processes["e"]


def test_several_workers_share_the_jobs_and_late_ones_are_left_out():
    workers = [Worker([sys.executable, "-c", WORKER]) for _ in range(3)]
    pids: set[int] = set()
    faults: list[str | None] = []
    try:
        for deadline in (time.monotonic() + 100, time.monotonic() - 1):
            do_all(
                [{"name": str(i)} for i in range(40)], workers, deadline, 60.0,
                lambda job, row: pids.add(row["pid"]), lambda job, fault: faults.append(fault),
            )  # fmt: skip
    finally:
        for worker in workers:
            worker.close()
    assert len(pids) == 3 and faults == [None] * 40 + ["left out: no time"] * 40


def test_the_worker_checks_a_case(kernel_device):
    """A process as gpu_check starts it, on what there is here: a small case, and a wrong name."""
    case, worker = good_case(), Worker()
    rows: list[dict] = []
    job = {"kind": "case", "size": "small", "name": case.name, "device": str(kernel_device),
           "seed": 1}  # fmt: skip
    try:
        end = time.monotonic() + 300
        assert worker.do(job, end, rows.append) is None
        assert worker.do({**job, "name": "none such"}, end, rows.append) == "KeyError: 'none such'"
    finally:
        worker.close()
    assert rows == [{"case": case.name, "faults": []}]


def test_the_whole_check_in_order(monkeypatch):
    """Ceilings, then cases and warm-ups by all workers, then speeds by one, each kind its share."""
    asked: list[tuple[str, str]] = []

    def do(self, job, deadline, on_row):
        asked.append((job["kind"], job.get("name", "")))
        if job["kind"] == "ceilings":
            on_row(CEILINGS._asdict())
        if job["kind"] == "case":
            on_row({"case": job["name"], "faults": []})
        if job["kind"] == "speed":
            on_row(SPEED._replace(what=job["name"])._asdict())

    monkeypatch.setattr(Worker, "do", do)
    report = Report(FACTS, None)
    gpu_check.run(report, [Worker(), Worker()], 60.0, "sm_90")
    kinds = [kind for kind, _ in asked]
    named = [
        *gpu_speed_linear.names(), *gpu_speed_attention.names(), *gpu_speed_decode.names()
    ]  # fmt: skip
    assert kinds[0] == "ceilings" and kinds[-len(named) :] == ["speed"] * len(named)
    assert [speed["what"] for speed in report.data["speeds"]] == named
    on_hopper = [c.name for c in all_cases("real") if not c.targets or "sm_90" in c.targets]
    assert sorted(row["case"] for row in report.data["cases"]) == sorted(on_hopper)
    assert not any(name.startswith("fp4_gemm") for name in on_hopper)
    assert not report.is_wrong()


def test_each_kind_of_speed_gets_its_share_of_the_time(monkeypatch):
    """A kind that would take for ever leaves the next one its half."""
    now, kinds = 0.0, list[str]()

    def do(self, job, deadline, on_row):
        nonlocal now
        now += 1.0 if job["kind"] == "speed" else 0.0
        kinds.append(job.get("module", ""))

    monkeypatch.setattr(Worker, "do", do)
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(gpu_check, "time", clock)
    monkeypatch.setattr("lowbit.evals.gpu_workers.time", clock)
    many = SimpleNamespace(names=lambda: [str(i) for i in range(99)])
    monkeypatch.setattr(
        gpu_check, "importlib", SimpleNamespace(import_module=lambda name, package: many)
    )
    gpu_check.run(Report(FACTS, None), [Worker()], 20.0, "sm_90")
    assert [kinds.count(module) - 99 for module in gpu_check.SPEEDS] == [7, 7, 7]


def test_without_transformers_no_decode_step_is_measured(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_speed_decode.names() == []


def test_decode_steps_and_engines_are_compared_before_they_are_timed(monkeypatch):
    """On a CPU, with a recorder that calls functions again."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    steps = gpu_decode.DecodeSteps(config, 8, 40, torch.device("cpu"), torch.float32, Again())
    speed = steps.speed("decode", 3)
    assert speed.size == 3 and speed.ours > 0 and speed.theirs > 0
    monkeypatch.setattr(steps, "_eager", lambda numbers: 1.1 * steps._replayed(numbers))
    with pytest.raises(RuntimeError, match="replayed logits differ by"):
        steps.speed("decode", 3)
    told = [speed.what for speed in gpu_decode.engine_speeds("cpu")]
    assert told == ["engine, graphs", "engine, planned ahead", "engine, graphs and planned ahead"]
