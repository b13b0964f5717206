"""AsyncEngine: streams that add up, requests that join and leave while it runs, and its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from lowbit.kernels.errors import UserError
from lowbit.runtime import (
    LLM,
    AsyncEngine,
    EngineDeadError,
    NotStarted,
    RequestFailed,
    SamplingParams,
)
from lowbit.runtime.paged_engine import PagedEngine

from .runtime_models import FAMILIES, save_tiny

PROMPTS = ["The cat", "x", "A longer prompt than the others, of more than two blocks.", "two words"]
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), FAMILIES["llama"]())


def with_engine(folder: Path, what: Callable[[AsyncEngine], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncEngine(folder, device="cpu", dtype="float32", **options) as engine:
            return await asyncio.wait_for(what(engine), 60)

    return asyncio.run(run())


async def whole(engine: AsyncEngine, prompt: Any, params: SamplingParams = GREEDY) -> Any:
    """The last output."""
    return [output async for output in engine.generate(prompt, params)][-1]


async def idle(engine: AsyncEngine) -> Any:
    """Its metrics, when nothing runs any more."""
    while True:
        told = await engine.metrics()
        if not told.running and not told.kv_usage:
            return told
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["paged", "contiguous"])
def test_requests_together_give_what_llm_gives(folder, kind):
    llm = LLM(folder, "cpu", "float32", engine=kind)
    expected = [o.outputs for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    async def together(engine: AsyncEngine) -> list[Any]:
        return await asyncio.gather(*(whole(engine, p) for p in PROMPTS))

    outs = with_engine(folder, together, engine=kind, max_num_seqs=2)
    assert [o.outputs for o in outs] == expected and all(o.finished for o in outs)
    assert all(o.metrics.ttft <= o.metrics.seconds for o in outs)


def test_deltas_add_up_and_outputs_grow(folder):
    params = SamplingParams(max_tokens=15, n=2, seed=3, logprobs=1, stop="qqq", ignore_eos=True)

    async def both(engine: AsyncEngine) -> Any:
        grown = [o async for o in engine.generate("hi", params)]
        deltas = [o async for o in engine.generate("hi", params, delta=True)]
        return grown, deltas

    grown, deltas = with_engine(folder, both)
    assert len(grown) == len(deltas) == 15 and [o.finished for o in grown] == [False] * 14 + [True]
    for i in range(2):
        final = grown[-1].outputs[i]
        parts = [o.outputs[i] for o in deltas]
        assert "".join(p.text for p in parts) == final.text
        assert sum((p.token_ids for p in parts), []) == final.token_ids
        assert sum((p.logprobs for p in parts), []) == final.logprobs
        lengths = [len(o.outputs[i].token_ids) for o in grown]
        assert lengths == list(range(1, 16))
    assert grown[-1].outputs[0].text != grown[-1].outputs[1].text


def test_a_request_joins_while_another_runs(folder):
    async def join(engine: AsyncEngine) -> tuple[int, Any]:
        long, seen = engine.generate("long", ENDLESS), 0
        async for _ in long:
            seen += 1
            if seen == 3:
                short = await whole(engine, "x")
                break
        told = await engine.metrics()
        await long.aclose()
        return told.running, short

    running, short = with_engine(folder, join)
    assert running == 1 and len(short.outputs[0].token_ids) == 20


@pytest.mark.parametrize("how", ["break", "cancel", "abort"])
def test_a_request_that_is_left_frees_its_blocks(folder, how):
    async def leave(engine: AsyncEngine) -> Any:
        outputs: list[Any] = []

        async def read() -> None:
            stream = engine.generate("some words", ENDLESS, request_id="mine")
            async for output in stream:
                outputs.append(output)
                if how == "break" and len(outputs) == 2:
                    await stream.aclose()

        task = asyncio.create_task(read())
        while len(outputs) < 2:
            await asyncio.sleep(0.001)
        if how == "cancel":
            task.cancel()
        elif how == "abort":
            await engine.abort("mine")
        await asyncio.wait([task], timeout=30)
        return outputs, await idle(engine), await whole(engine, "x")

    outputs, told, after = with_engine(folder, leave, enable_prefix_caching=False)
    assert (told.running, told.waiting, told.kv_usage) == (0, 0, 0)
    assert outputs[-1].finished == (how == "abort")
    if how == "abort":
        assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs) < 200 and len(after.outputs[0].token_ids) == 20


def test_what_cannot_run_is_refused_and_others_go_on(folder):
    async def refused(engine: AsyncEngine) -> None:
        running = asyncio.create_task(whole(engine, "x"))
        with pytest.raises(UserError, match="prompt is empty"):
            await whole(engine, "")
        with pytest.raises(UserError, match="256 tokens.*256"):
            await whole(engine, [1] * 256)
        with pytest.raises(UserError, match="can never fit"):
            await whole(engine, [1] * 200)
        assert len((await running).outputs[0].token_ids) == 20
        twice = engine.generate("x", ENDLESS, request_id="one")
        await anext(twice)
        with pytest.raises(UserError, match="request one is running already"):
            await anext(engine.generate("x", ENDLESS, request_id="one"))
        await twice.aclose()

    llm = LLM(folder, "cpu", "float32")
    assert isinstance(llm._engine, PagedEngine)
    block = sum(p.nbytes // len(p.codes) for pair in llm._engine._kv.pools for p in pair)
    with_engine(folder, refused, kv_memory=14 * block)


def test_chat_uses_the_template(folder):
    async def talk(engine: AsyncEngine) -> Any:
        message = [{"role": "user", "content": "hi"}]
        return [o async for o in engine.chat(message, GREEDY)][-1], await whole(
            engine, "[user]hi[assistant]"
        )

    chat, plain = with_engine(folder, talk)
    assert chat.prompt == "[user]hi[assistant]" and chat.outputs == plain.outputs


def test_death_reaches_everybody_who_waits(folder, monkeypatch):
    async def die(engine: AsyncEngine) -> None:
        running = [asyncio.create_task(whole(engine, p, ENDLESS)) for p in PROMPTS]
        await asyncio.sleep(0.05)

        def burst(*_: object) -> None:
            raise MemoryError("no room")

        monkeypatch.setattr(engine._engine, "step", burst)
        results = await asyncio.gather(*running, return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDeadError) and "MemoryError: no room" in str(result)
            assert isinstance(result.__cause__, MemoryError)
        assert engine.dead is not None
        with pytest.raises(EngineDeadError, match="no room"):
            await whole(engine, "x")
        with pytest.raises(EngineDeadError, match="no room"):
            await engine.metrics()

    with_engine(folder, die)


def test_the_last_output_alone_holds_everything(folder):
    params = SamplingParams(max_tokens=9, n=2, seed=1, logprobs=0, ignore_eos=True)

    async def both(engine: AsyncEngine) -> Any:
        alone = engine.run(await engine.request("hi", params), only_last=True)
        return [o async for o in alone], await whole(engine, "hi", params)

    alone, expected = with_engine(folder, both)
    assert [o.outputs for o in alone] == [expected.outputs] and alone[0].finished


def test_a_request_waits_for_its_turn_no_longer_than_it_may(folder):
    async def wait(engine: AsyncEngine) -> Any:
        first = engine.run(await engine.request("long", ENDLESS), start_within=30)
        await anext(first)
        second = engine.run(await engine.request("x", GREEDY, "late"), start_within=0.01)
        with pytest.raises(NotStarted, match="request late has waited 0.01 s"):
            await anext(second)
        await first.aclose()
        return await idle(engine)

    told = with_engine(folder, wait, max_num_seqs=1, enable_prefix_caching=False)
    assert (told.running, told.waiting) == (0, 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_its_end_is_told_once(folder, when):
    async def end(engine: AsyncEngine) -> list[Any]:
        told: list[Any] = []
        if when == "before":
            engine.at_end(told.append)
        await asyncio.to_thread(engine.shutdown)
        if when == "after":
            engine.at_end(told.append)
        return told

    (dead,) = with_engine(folder, end)
    assert isinstance(dead, EngineDeadError) and "shut down" in str(dead)


def test_half_a_character_is_refused(folder):
    async def ask(engine: AsyncEngine) -> None:
        with pytest.raises(UserError, match="position 1 it has one half of a surrogate pair"):
            await whole(engine, "x\ud800")

    with_engine(folder, ask)


def test_shutdown_ends_requests_and_the_thread(folder):
    async def close(engine: AsyncEngine) -> Any:
        running = asyncio.create_task(whole(engine, "x", ENDLESS))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.shutdown)
        out = await running
        with pytest.raises(EngineDeadError, match="shut down"):
            await whole(engine, "x")
        return out

    out = with_engine(folder, close)
    assert out.outputs[0].finish_reason == "abort" and len(out.outputs[0].token_ids) < 200
    assert "lowbit-engine" not in {t.name for t in threading.enumerate()}


def test_logits_that_are_not_finite_end_their_stream_alone(folder, monkeypatch):
    async def fail(engine: AsyncEngine) -> Any:
        paged = engine._engine
        assert isinstance(paged, PagedEngine)
        logits = paged._decoder.logits
        monkeypatch.setattr(
            paged._decoder, "logits", lambda hidden: logits(hidden).index_fill(0, _first(), nan)
        )
        with pytest.raises(RequestFailed, match="request bad: .*not finite") as failure:
            async for _ in engine.generate("x", GREEDY, request_id="bad"):
                pass
        monkeypatch.undo()
        assert failure.value.outputs[0].outputs[0].finish_reason == "error"
        return await whole(engine, "x")

    import torch

    nan = float("nan")

    def _first() -> torch.Tensor:
        return torch.tensor([0])

    assert len(with_engine(folder, fail).outputs[0].token_ids) == 20
