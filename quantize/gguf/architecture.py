"""What a GGUF architecture is made of: its settings, its tensors, and what its graph assumes.

llama.cpp computes a model by its architecture's name, so a file must say in that architecture's own
keys and tensor names what a Hugging Face folder says in config.json and module names. An
`Architecture` declares both sides once, for export and import; the instances are in
architectures.py. Names of settings are those that Llama's config has, whatever a model's own config
calls them (`config_names`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A key of the file ("attention.head_count", below the architecture's name), the setting that
    it holds, and whether as uint32 or float32. optional: left out where config.json has none."""

    key: str
    name: str
    kind: type[int] | type[float] = int
    optional: bool = False


class Slot(NamedTuple):
    """Where a module's tensors go: GGUF's name, and the dimensions of the weight, rows first.

    expert: the module is one of each expert; their weights are stacked. heads: the setting that
    counts the heads whose rows are interleaved (names.py). transposed: stored as [in, out].
    """

    name: str
    shape: tuple[str, ...]
    expert: bool = False
    heads: str | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    `name`: general.architecture. `classes`: Hugging Face's classes that it computes; `model_type`:
    of the first. `outer`, `layer`: module -> Slot, outside of and inside the decoder layers, which
    are `layers`.N. `settings`: beside rope's. `fixed`: what config.json must say, for the graph
    does nothing else. `defaults`: of settings that config.json may leave out. `norm_offset`: what
    the graph's norms have that the model's add themselves. `ropes`: types of rope scaling that it
    computes. `theta_key`, `rope_dimensions`: whether the keys of rope's base and dimensions are
    written; `partial_rope`: whether a part of each head may be rotated. `window`: whether the graph
    knows the sliding window; `window_period`: one in so many layers attends to everything.
    `bias_settings`: config.json's words for biases that a model may
    have or not. `always_output`: llama.cpp wants an output tensor even where the model ties it to
    the embedding. `big_layers`: the number of layers of the one size of model in which llama.cpp
    scales queries by hidden_size / heads.
    """

    name: str
    classes: tuple[str, ...]
    model_type: str
    outer: Mapping[str, Slot]
    layer: Mapping[str, Slot]
    settings: tuple[Setting, ...]
    layers: str = "model.layers"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    config_names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    ropes: tuple[str, ...] = ("default", "linear", "yarn")
    theta_key: bool = True
    rope_dimensions: bool = False
    partial_rope: bool = False
    window: bool = False
    window_period: int = 0
    bias_settings: tuple[str, ...] = ()
    always_output: bool = False
    big_layers: int = 0

    @property
    def own_head_dim(self) -> bool:
        """Whether a file can say another head_dim than hidden_size / num_attention_heads."""
        return any(s.name == "head_dim" for s in self.settings)

    def config_name(self, name: str) -> str:
        """What this model's config.json calls the setting `name`."""
        return self.config_names.get(name, name)
