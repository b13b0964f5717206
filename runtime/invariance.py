"""Whether a model's rows have the same bits in every batch, tried out before it serves.

What makes them so is one form for every product (kernels/row_tiles.py, `LinearProblem`'s
`batch_invariant`) and attention in chunks of a fixed size (kernels/attention_chunks.py). What a
library does within such a product, and what a model's own module does beside them, is not ours: so
the same tokens are run whole beside another prompt, and cut in pieces alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.errors import UserError
from ..kernels.row_tiles import row_tiles
from ..quantize.checkpoint.kv_config import KVStorage
from .kv_pools import layer_pools
from .loader import LoadedModel
from .models.choice import AnyDecoder
from .models.decoder import KVPools
from .scheduling.config import BLOCK_SIZE
from .step_inputs import step_inputs

PIECES = (5, 1, 1, 11, 2, 3)  # of a prompt, how it is cut
BESIDE = 40  # tokens of the prompt that runs beside it


def check_invariance(decoder: AnyDecoder, loaded: LoadedModel, kv: KVStorage | None) -> None:
    """UserError where a token's logits are not the same whatever runs beside it."""
    length = sum(PIECES)
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (length + BESIDE,), generator=draws).tolist()
    prompt, beside = ids[:length], ids[length:]
    whole = _Trial(decoder, loaded, kv).logits([beside, prompt], [0, 0])[BESIDE:]
    alone = _Trial(decoder, loaded, kv)
    starts = [0, *itertools.accumulate(PIECES)]
    cut = [alone.logits([prompt[a:b]], [a]) for a, b in itertools.pairwise(starts)]
    if not torch.equal(torch.cat(cut), whole):
        worst = (torch.cat(cut).float() - whole.float()).abs().max()
        raise UserError(
            "batch_invariant: this model's logits depend on what runs beside a request, by up to "
            f"{float(worst):.1e}, with {loaded.dtype} on {loaded.device} and "
            f"{torch.get_num_threads()} threads; take another dtype, or leave batch_invariant out"
        )


class _Trial:
    """Prompts over blocks of their own, in steps."""

    def __init__(self, decoder: AnyDecoder, loaded: LoadedModel, kv: KVStorage | None) -> None:
        self._decoder, self._device = decoder, loaded.device
        self._blocks = -(
            -max(BESIDE, sum(PIECES)) // BLOCK_SIZE
        )  # of a prompt; block 0 is nobody's
        self._pools: list[KVPools] = [
            layer_pools(
                index, layer, 1 + 2 * self._blocks, BLOCK_SIZE, kv, loaded.dtype, loaded.device
            )
            for index, layer in enumerate(decoder.layers)
        ]

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """[tokens, vocabulary] of the next tokens of one or two prompts, the first of which are at
        `starts`."""
        lengths = [len(prompt) for prompt in prompts]
        ends = [start + n for start, n in zip(starts, lengths, strict=True)]
        positions = [p for a, b in zip(starts, ends, strict=True) for p in range(a, b)]
        firsts = [1 + self._blocks * i for i in range(len(prompts))]
        slots = [
            first * BLOCK_SIZE + p
            for first, a, b in zip(firsts, starts, ends, strict=True)
            for p in range(a, b)
        ]
        tables = [list(range(first, first + self._blocks)) for first in firsts]
        kinds = len(self._decoder.windows)
        step = step_inputs(
            list(itertools.chain.from_iterable(prompts)), positions, [slots] * kinds, lengths, ends,
            [tables] * kinds, self._device, batch_invariant=True,
        )  # fmt: skip
        with row_tiles(True):
            hidden = self._decoder(step.token_ids, self._pools, step.batches, step.new)
            return self._decoder.logits(hidden)
