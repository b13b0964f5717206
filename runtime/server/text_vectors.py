"""Texts as vectors of length one, to be compared by their cosine: the served model's own, or those
of a sentence-transformers model, which was trained for it.

Mean hidden states of a causal model all point the same way: any two texts have a cosine of 0.7 to
0.95. So the mean over a fixed set of texts is taken off them first, which puts texts that have
nothing in common about 0, whatever the model, and in every process at the same value.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...kernels.errors import UserError
from ..embeddings import mean_pooled

if TYPE_CHECKING:
    from ..async_engine import AsyncEngine
    from ..llm import LLM

CENTRE_TEXTS = (
    "What is the largest lake in Africa?",
    "How do I tie a bow tie?",
    "Write a short poem about the autumn wind.",
    "My order has not arrived yet. Can you check where it is?",
    "Explain the theory of evolution to a child.",
    "def add(a, b): return a + b",
    "Which of these two phones has the better camera?",
    "Give me five names for a coffee shop.",
    "The meeting was moved to Thursday at half past nine.",
    "Is it normal that my knee hurts after running?",
    "Translate the following sentence into Italian.",
    "Why did the Roman Empire fall?",
    "SELECT name FROM customers WHERE country = 'PE';",
    "Please make this paragraph shorter and friendlier.",
    "What should I cook tonight with rice and beans?",
    "When does the library close?",
    "Compare renting a house with buying one.",
    "The cat slept on the warm stones until the rain came.",
    "Solve for x: 3x + 5 = 20.",
    "How can I learn to play the piano as an adult?",
    "Who won the football world cup in 1998?",
    "Fix the bug in this function, it returns None.",
    "I feel sad today and do not know why.",
    "List the steps of photosynthesis.",
    "Can I change the address of my account?",
    "Wie komme ich am schnellsten zum Bahnhof?",
    "¿Cuál es la receta de la tortilla de patatas?",
    "Quelle est la différence entre un alligator et un crocodile ?",
    "Draft an email that declines an invitation.",
    "What does the word 'ephemeral' mean?",
    "Plan a trip of three days through Scotland.",
    "How much water should a person drink in a day?",
)


class TextVectors(Protocol):
    async def of(self, text: str, engine: AsyncEngine) -> Tensor:
        """float32 [dimensions] of length one, on the CPU."""
        ...


def make_vectors(llm: LLM, name: str | None) -> TextVectors:
    """name: of a sentence-transformers model, a folder or a Hub id; None: the model's own. To be
    called while nothing runs. UserError where there are none."""
    return OwnVectors(llm) if name is None else SentenceVectors(name, str(llm.device))


def sentence_transformers() -> Any:
    """The package. UserError where it is missing."""
    try:
        return importlib.import_module("sentence_transformers")
    except ImportError as e:
        raise UserError(
            f"--semantic-cache-model needs the package sentence_transformers ({e}): pip install "
            "'lowbit[semantic]', or leave the option out for the model's own vectors"
        ) from e


def centred(vector: Tensor, centre: Tensor) -> Tensor:
    """vector, of length one, seen from `centre`, both float32 [hidden size]; of length one."""
    return torch.nn.functional.normalize(vector - centre, dim=0)


class OwnVectors:
    """The mean of the last hidden states of `llm`, from the centre of CENTRE_TEXTS."""

    def __init__(self, llm: LLM) -> None:
        if llm.tokenizer is None:
            raise UserError(
                "a semantic cache needs a tokenizer, and the model folder has none: leave "
                "--semantic-cache out"
            )
        tokens = [list(llm.tokenizer(text)["input_ids"]) for text in CENTRE_TEXTS]
        self._centre = torch.stack([mean_pooled(llm.model, t, llm.device) for t in tokens]).mean(0)

    async def of(self, text: str, engine: AsyncEngine) -> Tensor:
        return centred(await engine.embed(await engine.tokenize(text)), self._centre)


class SentenceVectors:
    """Of the sentence-transformers model `name`."""

    def __init__(self, name: str, device: str) -> None:
        package = sentence_transformers()
        try:
            self._model: Any = package.SentenceTransformer(
                name, device=device, model_kwargs={"use_safetensors": True}
            )
        except (OSError, ValueError) as e:
            raise UserError(
                f"the sentence-transformers model '{name}' cannot be loaded: {e}; name a folder "
                "with safetensors, or a model of the Hub"
            ) from e
        self._one_at_a_time = threading.Lock()

    async def of(self, text: str, engine: AsyncEngine) -> Tensor:
        return await asyncio.to_thread(self.encode, text)

    def encode(self, text: str) -> Tensor:
        with self._one_at_a_time:
            made = self._model.encode(
                text, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
            )
        return made.float().cpu()
