"""Calls that take turns: order, results, errors and unwinding."""

from __future__ import annotations

import threading

import pytest
from lowbit.calib.pausable import PausableCall


def test_calls_go_on_where_they_stopped_one_at_a_time() -> None:
    log: list[str] = []

    def work(name: str) -> str:
        for step in range(3):
            log.append(f"{name}{step}")
            calls[name].pause()
        return name

    calls = {name: PausableCall(lambda name=name: work(name)) for name in "ab"}
    assert log == []  # nothing runs before its turn
    for _ in range(3):
        for call in calls.values():
            call.resume()
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert [call.finish() for call in calls.values()] == ["a", "b"]
    for call in calls.values():
        call.close()


def test_an_error_reaches_the_caller() -> None:
    def fail() -> None:
        raise KeyError("lost")

    call = PausableCall(fail)
    with pytest.raises(KeyError, match="lost"):
        call.resume()
    call.close()


@pytest.mark.parametrize("started", [False, True])
def test_closing_unwinds(started: bool) -> None:
    cleaned: list[bool] = []

    def work() -> None:
        try:
            call.pause()
        finally:
            cleaned.append(True)

    call: PausableCall[None] = PausableCall(work)
    if started:
        call.resume()
    call.close()
    assert cleaned == ([True] if started else [])
    call.close()  # once more does nothing


def test_a_call_pauses_in_any_depth_and_computes_in_the_callers_thread() -> None:
    threads: list[int] = []

    def work(depth: int) -> int:
        threads.append(threading.get_ident())
        if depth:
            return work(depth - 1)
        call.pause()
        return 7

    call = PausableCall(lambda: work(20))
    call.resume()
    assert call.finish() == 7
    assert set(threads) == {threading.get_ident()}


def test_only_a_running_call_pauses() -> None:
    call: PausableCall[None] = PausableCall(lambda: None)
    with pytest.raises(AssertionError, match="running"):
        call.pause()
