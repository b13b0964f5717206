"""A damaged checkpoint is refused by whoever reads it, by name, before it is believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .command import Asked, Commands
from .damage import DOWN, Damage, group, lost, quantization, stored, weights
from .models import change_json, copied

# seen from the headers, so by inspect as well -> damage, parts of the message
BAD_HEADERS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "another method": (quantization(lambda q: q.update(quant_method="gptq")), ("'gptq'",)),
    "no object": (
        lambda f: change_json(f / "config.json", lambda c: c.update(quantization_config="int4")),
        ("quantization_config", "int4"),
    ),
    "no groups": (quantization(lambda q: q.update(config_groups={})), ("no config_group",)),
    "groups are a list": (quantization(lambda q: q.update(config_groups=[])), ("config_groups",)),
    "group of nothing": (group(weights=None), ("config_groups",)),
    "unknown format": (group(format="zip-quantized"), ("zip-quantized", "pack-quantized")),
    "bad pattern": (group(targets=["re:["]), ("config_groups",)),
    "targets nothing": (group(targets=["nonsuch"]), ("weight_scale", "config_group")),
    "bits are no number": (weights(num_bits="four"), ("config_groups", "four")),
    "too many bits": (weights(num_bits=17), ("17",)),
    "unknown strategy": (weights(strategy="star"), ("'star'",)),
    "group of no columns": (weights(group_size=0), ("group_size", "0")),
    "no scale": (lost("weight_scale"), (DOWN, "weight_scale")),
}
# seen when weights are read
BAD_TENSORS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "other bits": (weights(num_bits=3), ("weight_packed", "3 bits", "damaged")),
    "other groups": (weights(group_size=16), ("weight_scale", "groups take", "damaged")),
    "zero-points missing": (weights(symmetric=False), ("weight_zero_point",)),
    "no codes": (lost("weight_packed"), (DOWN,)),
    "codes cut": (stored("weight_packed", lambda t: t[:5]), (DOWN, "(5, 12)", "damaged")),
    "codes of floats": (stored("weight_packed", lambda t: t.float()), (DOWN, "float32", "damaged")),
    "scale is NaN": (stored("weight_scale", lambda t: t * float("nan")), (DOWN, "finite")),
    "scale cut": (stored("weight_scale", lambda t: t[:, :1]), (DOWN, "(64, 1)", "damaged")),
    "shape of one number": (stored("weight_shape", lambda t: t[:1]), (DOWN, "[64]", "damaged")),
    "shape turned": (stored("weight_shape", lambda t: t.flip(0)), (DOWN, "96 x 64", "damaged")),
    "shape below zero": (stored("weight_shape", lambda t: -t), (DOWN, "-64", "damaged")),
}


@pytest.mark.parametrize("damage", [*BAD_HEADERS, *BAD_TENSORS])
def test_damaged_checkpoints(
    damage: str,
    asked: dict[str, Asked],
    shallow_packed: Path,
    command: Commands,
    tmp_path: Path,
) -> None:
    folder = copied(shallow_packed, tmp_path / "model")
    apply, parts = (BAD_HEADERS | BAD_TENSORS)[damage]
    apply(folder)
    readers = ["generate", "export", *(["inspect"] if damage in BAD_HEADERS else [])]
    for name in readers:
        command(*asked[name](folder)).refuses(*parts)
