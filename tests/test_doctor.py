"""`quantize doctor`: the machine, and who would run a checkpoint's ops on which device."""

from __future__ import annotations

import json


def test_it_names_versions_and_devices(command):
    outcome = command("doctor", "--json")
    assert outcome.code == 0, outcome.stderr
    facts = json.loads(outcome.stdout)
    assert {"torch", "triton", "gpu", "cpu", "threads"} == set(facts["machine"])
    assert facts["ops"] == []


def test_it_says_which_kernels_run_a_checkpoint(command, shallow_packed):
    rows = {}
    for device in ("cpu", "cuda"):
        outcome = command("doctor", "--ops", shallow_packed, "--device", device, "--json")
        assert outcome.code == 0, outcome.stderr
        rows[device] = json.loads(outcome.stdout)["ops"]
    linears = [r for r in rows["cuda"] if "_proj " in r["op"]]
    assert linears and all(r["kernel"] == "wna16" for r in linears)
    assert all("runs on cpu, not cuda" in str(r["declined"].values()) for r in linears)
    on_cpu = [r for r in rows["cpu"] if "_proj " in r["op"]]
    assert all(r["kernel"] not in ("", "wna16") for r in on_cpu)
    assert sum(r["count"] for r in linears) == 14  # 7 linears in each of 2 layers
    others = {r["op"].partition(" ")[0]: r for r in rows["cuda"] if "_proj " not in r["op"]}
    assert {op: (r["count"], r["kernel"]) for op, r in others.items()} == {
        "attention,": (2, "triton"), "rotate": (2, "triton"), "rms_norm": (4, "triton"),
        "gated_mul": (2, "triton"),
    }  # fmt: skip
    assert {r["kernel"] for r in rows["cpu"] if "_proj " not in r["op"]} == {
        "sdpa_cpu", "torch_cpu"
    }  # fmt: skip


def test_the_table_holds_kernels_and_reasons(command, shallow_packed):
    outcome = command("doctor", "--ops", shallow_packed, "--device", "cuda")
    assert outcome.code == 0, outcome.stderr
    assert "wna16" in outcome.stdout and "passed over" in outcome.stdout


def test_bad_questions_are_refused(command, tiny, shallow_packed):
    for arguments, said in [
        (("--ops", tiny), "no quantized linears"),
        (("--ops", shallow_packed, "--device", "tpu"), "must be auto, cpu or cuda, not 'tpu'"),
        (("--ops", shallow_packed, "--dtype", "int8"), "must be bfloat16, float16 or float32"),
    ]:
        outcome = command("doctor", *arguments)
        assert outcome.code == 2 and said in " ".join(outcome.stderr.split()), outcome.stderr
