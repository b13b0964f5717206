"""The rates that the semantic cache is judged by are those of the cache itself."""

from __future__ import annotations

import pytest
import torch
from lowbit.evals.semantic_cache_bench import PAIR, added_rates, others, prompts, rates, table
from lowbit.runtime.server.semantic_cache import Answer, SemanticCache


def test_the_data_are_sixty_groups_of_texts_that_differ():
    groups = prompts()
    texts = [text for group in groups for text in group]
    assert len(groups) == 60 and len({text.casefold() for text in texts}) == len(texts) == 240
    assert all(text == text.strip() and len(text) < 100 for text in texts)


def test_rates_count_what_the_cache_answers():
    groups = prompts()[:20]
    generator = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(
        3 * torch.randn(20, 1, 8, generator=generator) + torch.randn(20, 4, 8, generator=generator),
        dim=2,
    )
    for threshold, told in zip(
        (0.3, 0.6, 0.8), rates(vectors, others(groups), (0.3, 0.6, 0.8)), strict=True
    ):
        cache, lonely = (SemanticCache(threshold, 99, 1 << 20, 60.0) for _ in range(2))
        for number, group in enumerate(groups):
            cache.add(b"c", group[0], vectors[number, 0], Answer(str(number), "stop", None, 1))
        found = {
            (number, kind): cache.near(b"c", group[kind], vectors[number, kind])
            for number, group in enumerate(groups)
            for kind in (1, 2, 3)
        }
        hits = {place: hit.answer.text for place, hit in found.items() if hit is not None}
        paraphrases = [(int(text), n) for (n, kind), text in hits.items() if kind < 3]
        right = sum(answered == n for answered, n in paraphrases)
        assert right > 0 and round(told.paraphrases * 40) == right
        assert round(told.wrong * 40) == len(paraphrases) - right
        assert round(told.near_misses * 20) == sum(kind == 3 for _, kind in hits)
        unrelated = 0
        for number, group in enumerate(groups):
            for other, more in enumerate(groups):
                if other != number:
                    lonely.add(b"c", more[0], vectors[other, 0], Answer("x", "stop", None, 1))
            unrelated += lonely.near(b"c", group[0], vectors[number, 0]) is not None
            lonely = SemanticCache(threshold, 99, 1 << 20, 60.0)
        assert round(told.unrelated * 20) == unrelated


def test_a_threshold_that_nothing_reaches_answers_nothing():
    vectors = torch.eye(8).view(2, 4, 8)
    never = torch.zeros(2, 4, 2, dtype=torch.bool)
    (told,) = rates(vectors, never, (0.5,))
    assert told[1:] == (0.0, 0.0, 0.0, 0.0)
    assert "| 0.50 | 0.0% | 0.0% | 0.0% | 25.0% | 0.0% |" in table("x", [told], [0.25])


def test_questions_with_words_added_are_counted_where_the_rule_lets_them():
    pairs = prompts("semantic_added.txt", PAIR)
    assert len(pairs) == 30 and len({text for pair in pairs for text in pair}) == 60
    vectors = torch.eye(30)[:, None].expand(30, PAIR, 30)
    never = others(pairs)
    assert added_rates(vectors, torch.zeros_like(never), (0.5,)) == [1.0]
    passed = 1 - float(torch.stack([never[i, 1, i] for i in range(30)]).float().mean())
    assert added_rates(vectors, never, (0.5,)) == [pytest.approx(passed)] and passed > 0.5
