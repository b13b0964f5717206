"""The load generator: loads by a seed, percentiles by hand, and known delays that it recovers."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lowbit.evals.bench.checks import BAR, BAR_QUANTIZED, checked
from lowbit.evals.bench.conversations import draw_exchanges, plan_of, read_exchanges
from lowbit.evals.bench.drive import Answer, drive
from lowbit.evals.bench.latency import (
    SLO,
    Quantiles,
    Timeline,
    load_result,
    parse_seconds,
    phases,
    quantiles,
    spread,
)
from lowbit.evals.bench.load import (
    ClosedLoop,
    Job,
    Lengths,
    Load,
    LoadPlan,
    Poisson,
    arrival_times,
    draw_load,
)
from lowbit.evals.bench.plan import BenchPlan, check_plan, make_loads, parse_sweep, sweep_loads
from lowbit.evals.bench.served import Loads, Sides, measure_cells, measure_load
from lowbit.evals.bench.targets import UrlTarget
from lowbit.kernels.errors import UserError

TEXT = list(range(2000))
PLAN = LoadPlan(40, ClosedLoop(4), Lengths(10, 30), Lengths(2, 9), shared_prefix=6, seed=3)


def test_a_load_is_its_seeds_and_runs() -> None:
    one, again, other = (draw_load(PLAN, TEXT, run) for run in (1, 1, 2))
    assert one == again and one != other
    prompts, outputs = [len(j.prompt) for j in one.jobs], [j.output for j in one.jobs]
    assert min(prompts) >= 10 and max(prompts) <= 30 and len(set(prompts)) > 10
    assert set(outputs) == set(range(2, 10))
    assert len({j.prompt[:6] for j in one.jobs}) == 1, "the prefix is shared"
    assert len({j.prompt[:9] for j in one.jobs}) > 30, "what follows is not"
    assert one.jobs[0].prompt[:6] != other.jobs[0].prompt[:6]
    assert all(j.due is None for j in one.jobs)


def test_arrivals_are_a_poisson_process() -> None:
    times = arrival_times(Poisson(5.0), 4000, random.Random(1))
    known = [t for t in times if t is not None]
    gaps = [b - a for a, b in zip([0.0, *known], known, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05), "five a second"
    square = sum(g * g for g in gaps) / len(gaps)
    assert square == pytest.approx(2 * mean**2, rel=0.1), "of an exponential distribution"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClosedLoop(0), "at least 1, got 0"),
        (lambda: Poisson(0.0), "above 0 requests/s"),
        (lambda: Lengths.parse("9-3"), "got 9-3"),
        (lambda: Lengths.parse("many"), "512 or 256-1024: many"),
        (lambda: LoadPlan(1, ClosedLoop(1), Lengths(4, 9), Lengths(1, 1), 4), "shorter than every"),
        (lambda: draw_load(PLAN, TEXT[:20], 0), "has 20 tokens, too few for prompts of 30"),
        (lambda: SLO.parse("speed=3"), "--slo is ttft="),
        (lambda: parse_seconds("500"), "with its unit"),
        (lambda: parse_sweep("4"), "BATCHESxCONTEXTS"),
        (lambda: check_plan(BenchPlan(()), False), "nothing to run"),
        (lambda: check_plan(BenchPlan((ClosedLoop(1),)), True), "--explain explains"),
    ],
)
def test_what_cannot_be_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_conversations_of_three_kinds(tmp_path: Path) -> None:
    file = tmp_path / "shared.json"
    turns = [("system", "s"), ("human", "a b c d e"), ("gpt", "1 2 3 4 5 6"), ("human", "x")]
    chat = [{"from": who, "value": said} for who, said in turns]
    short = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "1 2 3 4"}]
    file.write_text(json.dumps([{"conversations": chat}, {"conversations": short}]))

    def encode(words: str) -> list[int]:
        return [len(w) for w in words.split()]

    found = read_exchanges(file, encode, 100)
    assert found == [((1, 1, 1, 1, 1), 6)], "one is too short"
    lines = tmp_path / "lines.jsonl"
    messages = [{"role": "user", "content": "aa b c d"}, {"role": "assistant", "content": "a " * 5}]
    entries = [{"messages": messages}, {"prompt": "a b c d e", "completion": "f g h i"}]
    lines.write_text("\n".join(map(json.dumps, entries)))
    both = read_exchanges(lines, encode, 100)
    assert both == [((2, 1, 1, 1), 5), ((1, 1, 1, 1, 1), 4)]
    plan = plan_of(both, PLAN)
    assert (plan.prompt, plan.output) == (Lengths(4, 5), Lengths(4, 5))
    load = draw_exchanges(plan, both, 1)
    assert len(load.jobs) == 40 and {j.output for j in load.jobs} == {4, 5}
    with pytest.raises(UserError, match="within 8"):
        read_exchanges(file, encode, 8)
    lines.write_text('{"text": "x"}')
    with pytest.raises(UserError, match="entry 1 is none of"):
        read_exchanges(lines, encode, 100)
    loads = make_loads(BenchPlan((ClosedLoop(2),), 3, lengths=file), TEXT, encode, 100, "it")
    assert loads[0].plan.source == "shared.json" and len(loads[0].make(1).jobs) == 3


def test_percentiles_by_hand() -> None:
    # nine gaps between ten values: 90% lies at place 8.1, 99% at 8.91
    found = quantiles([float(v) for v in (10, 1, 9, 2, 8, 3, 7, 4, 6, 5)])
    assert found == pytest.approx(Quantiles(5.5, 9.1, 9.91))
    assert quantiles([2.0]) == Quantiles(2.0, 2.0, 2.0) and quantiles([None]) is None
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_latencies_by_hand() -> None:
    first = Timeline(10.0, (10.5, 11.0, 12.5), 4, (1,) * 6)
    second = Timeline(11.0, (11.2,), 1, (1,) * 6)
    result = load_result([first, second], SLO(ttft=0.4, tpot=0.1))
    assert first.ttft == 0.5 and first.tpot == pytest.approx(2 / 3) and first.itl == [0.5, 1.5]
    assert second.tpot is None
    assert result.seconds == 2.5 and result.output_tokens == 5
    assert result.output_tokens_per_second == 2.0 and result.requests_per_second == 0.8
    assert result.goodput == pytest.approx(1 / 2.5), "the second alone keeps to it"
    assert result.ttft.p50 == pytest.approx(0.35) and result.itl == pytest.approx((1, 1.4, 1.49))
    assert load_result([first], SLO(tpot=0.7)).goodput == load_result([first]).requests_per_second
    assert load_result([first], SLO(e2e=2.4)).goodput == 0.0


def test_phases_by_hand() -> None:
    together = [
        Timeline(0.0, (1.0, 3.0, 4.0, 5.0), 4, (1,) * 50),
        Timeline(0.0, (2.0, 3.0, 4.0, 6.0), 4, (1,) * 50),
    ]
    found = phases(together)
    assert found.prefill == 50.0, "100 tokens until both have begun"
    assert found.decode == pytest.approx(5 / 3), "three and two, from then to where one ends"
    assert phases([Timeline(0.0, (2.0,), 1, (1,) * 8)]) == (4.0, None)


IN_FLIGHT = 0.02  # real seconds in which what was sent within this process arrives


class Instantly(selectors.SelectSelector):
    """Time that passes when everybody sleeps, and nothing is under way on a socket."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        arrived = super().select(IN_FLIGHT if timeout and len(self.get_map()) > 1 else 0)
        if not arrived:
            self.now += timeout or 0.0
        return arrived


def in_no_time(make: Callable[[Callable[[], float]], Any]) -> Any:
    """What a coroutine gives in a loop whose seconds pass at once. make: of the loop's clock."""
    selector = Instantly()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(make(loop.time))
    finally:
        loop.close()


class Delays:
    """Answers after known delays, `servers` requests at a time."""

    def __init__(self, ttft: float, tpot: float, servers: int = 999) -> None:
        self.ttft, self.tpot, self.servers = ttft, tpot, servers
        self.free: asyncio.Semaphore | None = None

    async def run(self, job: Job, heard: Callable[[], None]) -> Answer:
        self.free = self.free or asyncio.Semaphore(self.servers)
        async with self.free:
            await asyncio.sleep(self.ttft)
            heard()
            for _ in range(job.output - 1):
                await asyncio.sleep(self.tpot)
                heard()
        return Answer(job.output)


def jobs(count: int, output: int, every: float | None = None) -> tuple[Job, ...]:
    return tuple(Job((1, 2), output, None if every is None else every * i) for i in range(count))


def test_known_delays_are_recovered() -> None:
    load = Load(jobs(7, 5), ClosedLoop(3))
    found = in_no_time(lambda clock: drive(Delays(0.5, 0.25), load, clock))
    result = load_result(found)
    assert result.ttft == pytest.approx((0.5, 0.5, 0.5))
    assert result.tpot == pytest.approx((0.25,) * 3) and result.itl == pytest.approx((0.25,) * 3)
    assert result.seconds == pytest.approx(3 * 1.5), "7 requests by 3 clients: 3 rounds"


def test_who_comes_while_the_server_is_busy_has_waited() -> None:
    load = Load(jobs(4, 1, every=0.1), Poisson(10.0))
    found = in_no_time(lambda clock: drive(Delays(1.0, 0.0, servers=1), load, clock))
    assert [r.ttft for r in found] == pytest.approx([1.0, 1.9, 2.8, 3.7])


async def fake_server(log: list[dict[str, Any]], ttft: float, tpot: float) -> asyncio.Server:
    """Speaks OpenAI's interface, with known delays, and notes what it was asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            if head.startswith(b"GET"):
                body = b'{"data": [{"id": "fake"}]}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                continue
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            asked = json.loads(await reader.readexactly(length))
            log.append(asked)
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            for i in range(asked["max_tokens"]):
                await asyncio.sleep(tpot if i else ttft)
                last = i + 1 == asked["max_tokens"]
                choice = {"text": "é" if i else "", "finish_reason": "length" if last else None}
                writer.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                await writer.drain()
            usage = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
            writer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
            writer.close()
            return

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def test_a_servers_delays_are_recovered_to_5_percent() -> None:
    """Over real connections, in a loop whose seconds pass at once: however busy the machine is, the
    delays are those that the server was given."""
    log: list[dict[str, Any]] = []

    async def run(clock: Callable[[], float]) -> list[Timeline]:
        server = await fake_server(log, 0.12, 0.06)
        port = server.sockets[0].getsockname()[1]
        async with UrlTarget(f"http://127.0.0.1:{port}/v1/") as target:
            assert target.model == "fake"
            found = await drive(target, Load(jobs(4, 5), ClosedLoop(2)), clock)
        server.close()
        return found

    found = load_result(in_no_time(run))
    assert found.ttft == pytest.approx((0.12,) * 3, rel=0.05)
    assert found.tpot == pytest.approx((0.06,) * 3, rel=0.05)
    assert found.itl == pytest.approx((0.06,) * 3, rel=0.05)
    assert found.seconds == pytest.approx(2 * (0.12 + 4 * 0.06), rel=0.05), "two clients, four jobs"
    assert found.output_tokens == 20
    body = log[0]
    assert body["prompt"] == [1, 2] and body["model"] == "fake" and body["ignore_eos"] is True


def test_a_server_that_is_not_there_is_named() -> None:
    async def run() -> None:
        async with UrlTarget("http://127.0.0.1:9"):
            pass

    with pytest.raises(UserError, match=r"no server answers at http://127.0.0.1:9/models"):
        asyncio.run(run())


class Failing(Delays):
    """Fails one request, or gives it one token less."""

    def __init__(self, short: bool) -> None:
        super().__init__(0.0, 0.0)
        self.short, self.asked = short, 0

    async def run(self, job: Job, heard: Callable[[], None]) -> Answer:
        self.asked += 1
        if self.asked == 3 and not self.short:
            raise UserError("out of order")
        answer = await super().run(job, heard)
        return Answer(answer.tokens - (self.asked == 3))


@pytest.mark.parametrize(
    ("short", "why"),
    [(True, "request 3 gave 4 of 5 tokens"), (False, "request 3 failed: out of order")],
)
def test_a_failed_run_has_no_numbers(short: bool, why: str) -> None:
    plan = LoadPlan(4, ClosedLoop(1), Lengths(2, 2), Lengths(5, 5))
    targets = {"good": Delays(0.0, 0.0), "bad": Failing(short)}

    def check(load: Load, found: Any) -> Any:
        return checked(load.jobs, found, None, False)

    sides = Sides(targets, dict.fromkeys(targets, check))
    loads = Loads(plan, lambda run: draw_load(plan, TEXT, run))
    served, ratios = asyncio.run(measure_load(sides, loads, 2))
    good, bad = served
    assert good.check.failed is None and good.ttft is not None
    assert bad.check.failed == why and targets["bad"].asked == 4, "not asked again"
    assert bad[4:] == (None,) * len(bad[4:]), "no number of it is left"
    assert ratios == []
    cells = asyncio.run(measure_cells(sides, (loads, loads), 1))
    assert [c.check.failed is None for c in cells] == [True, True], "the fault was passing"


def test_paired_runs_give_ratios() -> None:
    targets = {"slow": Delays(0.02, 0.02), "fast": Delays(0.01, 0.01)}
    plan = LoadPlan(2, ClosedLoop(2), Lengths(2, 2), Lengths(4, 4))
    checkers = dict.fromkeys(targets, lambda load, run: checked(load.jobs, run, None, False))
    loads = Loads(plan, lambda run: draw_load(plan, TEXT, run))
    _, (ratio,) = in_no_time(
        lambda clock: measure_load(Sides(targets, checkers, clock=clock), loads, 3)
    )
    assert (ratio.variant, ratio.against) == ("fast", "slow")
    assert ratio.output_tokens_per_second == pytest.approx((2.0, 2.0, 2.0))
    assert ratio.ttft == pytest.approx((0.5, 0.5, 0.5)) and ratio.tpot.median == pytest.approx(0.5)


def test_a_sweep_has_a_load_for_each_phase() -> None:
    plan = BenchPlan((), sweep=parse_sweep("1,4x8,16"))
    loads = sweep_loads(plan, TEXT, "it")
    assert set(loads) == {(1, 8), (1, 16), (4, 8), (4, 16)}
    prefill, decode = (each.make(1) for each in loads[4, 16])
    assert [len(j.prompt) for j in prefill.jobs] == [16] * 4 and prefill.jobs[0].output == 1
    assert decode.jobs[0].output > 1 and decode.arrivals == ClosedLoop(4)
    assert (plan.at_once, plan.longest) == (4, 16 + decode.jobs[0].output)


def test_a_token_is_right_where_no_other_is_much_likelier() -> None:
    torch = pytest.importorskip("torch")

    def logits(ids: Any) -> Any:
        """Token t is followed by t + 1 with 10, by t + 2 with 9.9, by others with 0."""
        rows = torch.zeros(1, ids.shape[1], 50)
        for at, token in enumerate(ids[0].tolist()):
            rows[0, at, token + 1], rows[0, at, token + 2] = 10.0, 9.9
        return rows

    def run(answer: tuple[int, ...], quantized: bool = False) -> Any:
        job = Job((1, 2, 3), len(answer))
        times = tuple(float(i) for i in range(len(answer)))
        found = Timeline(0.0, times, len(answer), job.prompt, answer)
        return checked([job], [found], logits, quantized)

    assert run((4, 5, 6, 7)).agreement == 1.0 and run((4, 6, 7, 8)).failed is None, "a near-tie"
    wrong = run((4, 5, 6, 9, 10, 11, 12, 20))
    assert wrong.agreement == 6 / 8 and "75.0% of the tokens" in wrong.failed
    assert BAR_QUANTIZED == 0.75 and run((4, 5, 6, 9, 10, 11, 12, 20), True).failed is None
    assert wrong.bar == BAR and wrong.tokens == 8
