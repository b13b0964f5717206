"""Models built without memory for their parameters compute what ordinary ones do."""

from __future__ import annotations

import pytest
import torch
from lowbit.kernels.meta import parameters_on_meta
from torch import nn
from transformers import AutoModelForCausalLM

from .runtime_models import FAMILIES, VOCAB


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_on_meta_and_buffers_are_real(family):
    config = FAMILIES[family]()
    torch.manual_seed(0)
    ordinary = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = torch.get_rng_state()
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.is_meta for p in model.parameters())
    expected = dict(ordinary.named_buffers())
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name]), name

    model.load_state_dict(ordinary.state_dict(), assign=True)
    model.tie_weights()
    tokens = torch.randint(0, VOCAB, (2, 20))
    assert torch.equal(model(tokens).logits, ordinary(tokens).logits)


def test_tied_weights_stay_one_parameter():
    config = FAMILIES["llama"]()
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_attributes_of_parameters_and_the_class_are_kept():
    original = nn.Module.register_parameter
    with parameters_on_meta():
        module = nn.Module()
        weight = nn.Parameter(torch.ones(3), requires_grad=False)
        weight.no_decay = True
        module.weight = weight
        module.bias = None
        module.register_parameter("absent", None)
        with pytest.raises(AssertionError, match="nest"), parameters_on_meta():
            pass
    assert nn.Module.register_parameter is original
    assert module.weight.is_meta and module.weight.no_decay and not module.weight.requires_grad
    assert module.absent is None
