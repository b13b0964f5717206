"""The threads that run a tape, and compiled code that is kept on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from lowbit.kernels.compiled import decline_compiled
from torch import Tensor

from .tapes import needs_tape, shared_walker

pytestmark = needs_tape
if decline_compiled() is None:
    from lowbit.kernels.tape import program
    from lowbit.kernels.tape.team import Walker, alone, team_size


@pytest.fixture(autouse=True)
def few_walkers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "walker", shared_walker)


def of(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "team_size", lambda: threads)


def case(seed: int) -> tuple[Tensor, Tensor]:
    """Rows, and a weight."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5 + seed, 64, generator=g), torch.randn(100, 64, generator=g)


def test_teams_of_all_sizes_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = case(0)
    results = []
    for threads in (1, 2, 3):
        of(threads, monkeypatch)
        results += [program.run_floats(x, weight, None) for _ in range(3)]
    torch.testing.assert_close(results[0], x @ weight.T, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_team_wakes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    of(2, monkeypatch)
    for seed in range(4):
        x, weight = case(seed)
        torch.testing.assert_close(program.run_floats(x, weight, None), x @ weight.T)
        time.sleep(0.05)  # its threads look for a job for about a millisecond


def test_a_team_that_ran_several_tapes_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hand-over from one walker to another is one wake, and none is left over."""
    of(2, monkeypatch)
    served, made = [0], {}

    def counted(*kind: object) -> Walker:
        if kind not in made:
            walker = shared_walker(*kind)

            def serve(*args: int) -> int:
                served[0] += 1
                return walker.serve(*args)

            made[kind] = Walker(walker.walk, serve)
        return made[kind]

    monkeypatch.setattr(program, "walker", counted)
    program._tape_of.cache_clear()
    x, weight = case(0)
    for _ in range(150):
        program.run_floats(x, weight, None)
        program.run_floats(x, weight.bfloat16(), None)
    program._tape_of.cache_clear()
    assert len(made) == 2
    time.sleep(0.05)
    before = served[0]
    time.sleep(0.2)
    assert served[0] - before <= 1


def test_threads_that_run_tapes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one walker and of two: bfloat16 weights have another."""
    of(2, monkeypatch)
    wrong: list[int] = []

    def work(number: int) -> None:
        x, weight = case(number)
        dtype = torch.bfloat16 if number % 2 else torch.float32
        weight = weight.to(dtype)
        expected = x @ weight.float().T
        for _ in range(100):
            got = program.run_floats(x, weight, None)
            if not torch.allclose(got, expected, atol=1e-4):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_alone_leaves_torch_one_thread_and_gives_them_back() -> None:
    assert team_size() == 3
    with alone():
        assert (torch.get_num_threads(), team_size()) == (1, 3)
        with alone():
            assert (torch.get_num_threads(), team_size()) == (1, 3)
        assert (torch.get_num_threads(), team_size()) == (1, 3)
        with pytest.raises(KeyError), alone():
            raise KeyError
        assert (torch.get_num_threads(), team_size()) == (1, 3)
    with pytest.raises(KeyError), alone():
        raise KeyError
    assert (torch.get_num_threads(), team_size()) == (3, 3)


GATE = """
import os, sys
import numpy as np, torch
from lowbit.kernels.tape import disk, program
def gated():
    "Of a tape with one small op."
    x, y = torch.arange(-8.0, 8.0).view(2, 8), torch.full((2, 4), torch.nan)
    registers = np.zeros(program.Register.KINDS, np.int64)
    registers[program.Register.ROWS] = 2
    registers[program.Register.WIDE], registers[program.Register.INNER] = x.data_ptr(), y.data_ptr()
    tape = program.Tape("float32", [[program.Op.GATE, 4, 0]])
    tape.run(registers)
    g, u = x.chunk(2, 1)
    assert torch.allclose(y, torch.nn.functional.silu(g) * u), y
    return tape._walk
"""
COUNTED = (
    GATE
    + """
if len(sys.argv) > 1:
    disk._sources = lambda: sys.argv[1]
walker = gated()
for compiled in (walker.walk, walker.serve):
    print(sum(compiled.stats.cache_hits.values()), sum(compiled.stats.cache_misses.values()))
"""
)
FORKED = (
    GATE
    + """
torch.set_num_threads(2)
gated()
child = os.fork()
if child == 0:
    gated()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gated()
print("both")
"""
)


def script(text: str, kept: Path, *args: str) -> str:
    """What a program in a process of its own prints; it keeps compiled code in `kept`."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kept), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", text, *args], env=environment, text=True,
                          capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


def test_compiled_code_is_kept_for_the_next_process(kept: Path) -> None:
    """And not for one whose source is another."""
    assert script(COUNTED, kept) == "0 1\n0 1\n"
    assert script(COUNTED, kept) == "1 0\n1 0\n"
    assert script(COUNTED, kept, "another source") == "0 1\n0 1\n"
    assert script(COUNTED, kept) == "1 0\n1 0\n"


def test_a_forked_child_has_a_team_of_its_own(kept: Path) -> None:
    assert script(FORKED, kept) == "both\n"
