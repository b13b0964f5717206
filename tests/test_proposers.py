"""What is proposed, and when: texts that repeat, trajectories, and steps that tell what pays."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from lowbit.runtime.request import Continuation, Request
from lowbit.runtime.sampling.params import SamplingParams
from lowbit.runtime.speculation.governor import PATIENCE, TRIAL, Governor
from lowbit.runtime.speculation.lookahead import Lookahead
from lowbit.runtime.speculation.prompt_lookup import PromptLookup
from lowbit.runtime.speculation.proposer import Drafting, Verified


def continuation() -> Continuation:
    request = Request(None, [1], SamplingParams(), 10, frozenset(), None)
    return request.continuations[0]


def asked(one: Continuation, tokens: list[int], most: int = 4) -> list[Drafting]:
    return [Drafting(one, array("i", tokens), most)]


def test_the_longest_run_that_stood_before_is_gone_on_from_at_its_last_place() -> None:
    lookup = PromptLookup(4)
    text = [1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 60, 61, 62, 63, 9, 8]
    one = continuation()
    assert lookup.propose(asked(one, [*text, 3, 4]))[0].tokens == [60, 61, 62, 63]
    assert lookup.propose(asked(one, [*text, 3, 4, 7, 2, 3, 4]))[0].tokens == [50, 51, 52, 9]
    assert lookup.propose(asked(one, [*text, 3, 4, 7, 2, 3, 4, 77]))[0].tokens == []


def test_a_loop_is_gone_on_with_behind_the_end() -> None:
    lookup = PromptLookup(8)
    tokens = [9, 1, 2, 3, 1, 2, 3]
    assert lookup.propose(asked(continuation(), tokens, 8))[0].tokens == [1, 2, 3, 1, 2, 3, 1, 2]
    assert lookup.propose(asked(continuation(), tokens, 2))[0].tokens == [1, 2]


def test_the_index_of_a_growing_text_is_that_of_the_whole() -> None:
    """Found by looking through all of it, with tokens drawn from three."""
    tokens = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    lookup, one = PromptLookup(4), continuation()
    for end in range(1, 200, 3):
        text = tokens[:end]
        want: list[int] = []
        for size in (4, 3, 2):
            places = [i for i in range(end - size) if text[i : i + size] == text[end - size :]]
            if places and size < end:
                place = places[-1] + size
                want = [text[place + i % (end - place)] for i in range(4)]
                break
        assert lookup.propose(asked(one, text))[0].tokens == want


def said_after(token: int) -> int:
    """A model whose next token depends on the last alone."""
    return (token * 7 + 3) % 31


def decode(lookahead: Lookahead, tokens: list[int], steps: int) -> list[int]:
    """Accepted proposals of each step of `said_after`."""
    one, accepted = continuation(), []
    for _ in range(steps):
        guesses = lookahead.propose(asked(one, tokens, lookahead.most))[0].tokens
        assert len(guesses) == lookahead.most
        chain = [tokens[-1], *guesses]
        said = [said_after(t) for t in chain]
        right = next((i for i, t in enumerate(guesses) if t != said[i]), len(guesses))
        logits = torch.zeros(len(chain), 31)
        logits[range(len(chain)), said] = 1.0
        tokens += said[: right + 1]
        lookahead.observe([Verified(one, chain, logits, right)])
        accepted.append(right)
    return accepted


def test_trajectories_become_right_guesses() -> None:
    """What the model said behind wrong guesses comes behind the same tokens later; of the pairs of
    tokens that come none stood in the text before."""
    tokens = [30, 4, 9, 14, 22, 5]
    accepted = decode(Lookahead(6), tokens, 6)
    new = tokens[6:]
    assert all(said_after(a) == b for a, b in zip(tokens[5:], new, strict=False))
    assert sum(accepted) > 2 and len(new) == 6 + sum(accepted) == len(set(new))


def rates(governor: Governor, steps: int, plain: float, proposing: float) -> list[bool]:
    """What it wants for 4 sequences in each of `steps`, which take 1 second each and give so many
    tokens."""
    wanted = []
    for _ in range(steps):
        on = governor.wants(4)
        governor.record(4, 1.0, round(proposing if on else plain))
        wanted.append(on)
    return wanted


def test_proposals_stop_where_they_lose_and_come_back_where_they_win() -> None:
    governor = Governor()
    wanted = rates(governor, 2000, plain=40, proposing=30)
    assert wanted[: 2 * TRIAL] == [True] * TRIAL + [False] * TRIAL
    assert sum(wanted[2 * TRIAL :]) < 0.03 * len(wanted) and not governor.is_on
    speeds = governor.speeds()
    assert speeds == pytest.approx((4, 40, 30)) and speeds.speedup == pytest.approx(0.75)
    wanted = rates(governor, 6000, plain=40, proposing=60)
    assert wanted[-1] and governor.speeds().speedup == pytest.approx(1.5)


def test_proposals_that_win_are_compared_now_and_then() -> None:
    governor = Governor()
    wanted = rates(governor, 3000, plain=40, proposing=60)
    assert sum(not w for w in wanted) < 0.03 * len(wanted)
    assert not all(wanted[2 * TRIAL + PATIENCE + TRIAL : -PATIENCE])


def test_batches_of_other_sizes_are_measured_by_themselves() -> None:
    governor = Governor()
    rates(governor, 500, plain=40, proposing=30)
    assert not governor.wants(3) and governor.wants(1) and governor.wants(16)
    one: Any = governor.record(1, 0.01, 3)
    assert one is None and governor.speeds() == (1, None, None) and governor.is_trying
