"""Build a model whose parameters have shapes but no memory, and whose buffers are real.

`torch.device("meta")` would put the buffers on meta as well, and those that are not in a checkpoint
(rotary inverse frequencies, embedding scales) could then never be filled. So each parameter is
moved to meta at the moment when its module registers it; everything else is computed as usual.
Weight initialization then runs on meta tensors, which is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters registered inside the context are on the meta device; buffers are not touched.

    A parameter that is already on meta is kept as the same object, so tied weights stay tied.
    Patches torch.nn.Module while it is open: not for use in several threads at once, does not nest.
    """
    original = nn.Module.register_parameter
    assert original.__module__ == "torch.nn.modules.module", "parameters_on_meta does not nest"

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, None if param is None else _to_meta(param))

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def _to_meta(param: nn.Parameter) -> nn.Parameter:
    """`param` without its data; attributes that libraries hang on parameters ride along."""
    if param.is_meta:
        return param
    meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    for name, value in vars(param).items():
        setattr(meta, name, value)
    return meta
