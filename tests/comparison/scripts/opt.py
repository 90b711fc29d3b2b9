"""A small OPT with random weights, which the installed release of transformers computes."""

import torch
from transformers import OPTConfig, OPTForCausalLM

torch.set_num_threads(1)
torch.manual_seed(0)
config = OPTConfig(
    vocab_size=100,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    init_std=0.5,
)
model = OPTForCausalLM(config).eval()
ids = torch.randint(4, 100, (2, 10))
with torch.no_grad():
    print(model(ids).logits.mean())
