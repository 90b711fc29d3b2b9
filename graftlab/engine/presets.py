"""Models by name, so that a server and a replay of its recorded requests build the same one."""

from __future__ import annotations

from dataclasses import replace

import torch

from graftlab.models import ModelConfig, Transformer

PRESETS = {
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=128,
        max_positions=512,
    ),
    "small": ModelConfig(
        vocab_size=256,
        hidden_size=256,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=704,
        max_positions=2048,
    ),
}
"""For text as bytes: a token each."""

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(
    preset: str = "tiny",
    *,
    seed: int = 0,
    sliding_window: int | None = None,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
) -> Transformer:
    """The model of a name in `PRESETS`, with random weights that depend only on `seed`, ready for inference.

    `sliding_window` is in tokens, None for no window. Raises `ValueError` for a name that is not there.
    """
    if preset not in PRESETS:
        raise ValueError(f"there is no model {preset!r}; the models are {', '.join(PRESETS)}")
    if dtype not in DTYPES:
        raise ValueError(f"there is no dtype {dtype!r}; the dtypes are {', '.join(DTYPES)}")
    model = Transformer(replace(PRESETS[preset], sliding_window=sliding_window), seed)
    return model.to(device, DTYPES[dtype]).requires_grad_(False).eval()
