"""What is packed into one piece of memory comes out as it was, whatever it is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lowbit.runtime.transfers import ALIGNMENT, Incoming, Layout, Outgoing, Part, pack

CPU = torch.device("cpu")
DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple)
parts = st.lists(st.builds(Part, SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=6)


def some(part: Part, seed: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 9, part.shape, generator=draws).to(part.dtype)


@settings(deadline=None, max_examples=60)
@given(parts=parts)
def test_tensors_come_out_of_one_piece_as_they_went_in(parts: list[Part]) -> None:
    tensors = [some(part, seed) for seed, part in enumerate(parts)]
    layout, packed = pack(tensors)
    views = layout.views(packed)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor) and view.dtype == tensor.dtype
        assert (view.data_ptr() - packed.data_ptr()) % ALIGNMENT == 0 or not view.numel()
    assert Incoming(views).read() == [tensor.tolist() for tensor in tensors]


@settings(deadline=None, max_examples=60)
@given(parts=parts)
def test_numbers_go_out_into_memory_of_the_callers_or_of_their_own(parts: list[Part]) -> None:
    layout = Layout(parts)
    tensors = [some(part, seed) for seed, part in enumerate(parts)]
    for memory in (None, torch.full((layout.nbytes + 64,), 7, dtype=torch.uint8)):
        out = Outgoing(layout, CPU)
        for array, tensor in zip(out.arrays, tensors, strict=True):
            array[:] = tensor.numpy()
        sent = out.send(memory)
        assert all(torch.equal(a, b) for a, b in zip(sent, tensors, strict=True))
        if memory is not None:
            assert bool((memory[layout.nbytes :] == 7).all())
            inside = range(memory.data_ptr(), memory.data_ptr() + layout.nbytes)
            assert all(t.data_ptr() in inside for t in sent if t.numel())
