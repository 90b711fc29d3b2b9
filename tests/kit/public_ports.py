"""Pairs of public implementations of one model, with random weights and the right conversion written by hand.

timm, litgpt and open_clip are the extra ``pairs``; a pair whose package is not there cannot be made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kit.ports import Encoder, Port, State, encoder_from_bert, ported, shaken, token_ids

LAYERS, WIDTH, HEADS = 3, 48, 4


def declare_vision_operators() -> None:
    """Let torchvision load beside a torch that it was not built for, without its operators, which no model here calls.

    The package index has torchvision for Linux built for CUDA alone. Beside a CPU build of torch its library does not
    load, which it puts up with, but for two operators that it registers kernels for all the same.
    """
    if not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def layers_of(state: State, before: str) -> int:
    return 1 + max(int(name.removeprefix(before).split(".")[0]) for name in state if name.startswith(before))


def fused(state: State, names: list[str]) -> Tensor:
    return torch.cat([state[name] for name in names])


# ---- BERT: transformers, and torch.nn --------------------------------------------------------------------------------


def bert() -> Port:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=64,
        max_position_embeddings=40,
        attn_implementation="eager",
    )
    baseline = shaken(BertModel(config, add_pooling_layer=False), seed=1)
    ids = token_ids(config.vocab_size)
    return ported(baseline, Encoder(config), encoder_from_bert, lambda model: model(ids))


# ---- ViT: transformers, and timm -------------------------------------------------------------------------------------


def pixels(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def timm_from_vit(state: State) -> State:
    new = {
        "cls_token": state["vit.embeddings.cls_token"],
        "pos_embed": state["vit.embeddings.position_embeddings"],
    }
    for last in ("weight", "bias"):
        new[f"patch_embed.proj.{last}"] = state[f"vit.embeddings.patch_embeddings.projection.{last}"]
        new[f"norm.{last}"] = state[f"vit.layernorm.{last}"]
        new[f"head.{last}"] = state[f"classifier.{last}"]
        for n in range(LAYERS):
            names = vit_names(state, n)
            to = f"blocks.{n}."
            new[f"{to}norm1.{last}"] = state[f"{names['norm1']}.{last}"]
            new[f"{to}norm2.{last}"] = state[f"{names['norm2']}.{last}"]
            new[f"{to}attn.qkv.{last}"] = fused(state, [f"{names[one]}.{last}" for one in "qkv"])
            new[f"{to}attn.proj.{last}"] = state[f"{names['proj']}.{last}"]
            new[f"{to}mlp.fc1.{last}"] = state[f"{names['fc1']}.{last}"]
            new[f"{to}mlp.fc2.{last}"] = state[f"{names['fc2']}.{last}"]
    return new


def vit_names(state: State, n: int) -> dict[str, str]:
    """What transformers calls the parts of a layer, which its releases do not agree on."""
    old = f"vit.encoder.layer.{n}."
    if f"{old}attention.attention.query.weight" in state:
        inner = {"q": "attention.attention.query", "k": "attention.attention.key", "v": "attention.attention.value"}
        outer = {"proj": "attention.output.dense", "fc1": "intermediate.dense", "fc2": "output.dense"}
    else:
        old = f"vit.layers.{n}."
        inner = {name: f"attention.{name}_proj" for name in "qkv"}
        outer = {"proj": "attention.o_proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    norms = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
    return {name: old + path for name, path in (inner | outer | norms).items()}


def vit() -> Port:
    declare_vision_operators()
    from timm.models.vision_transformer import VisionTransformer
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        image_size=32,
        patch_size=8,
        layer_norm_eps=1e-6,
        num_labels=10,
        attn_implementation="eager",
    )
    baseline = shaken(ViTForImageClassification(config), seed=4)
    sizes = {"embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS, "num_classes": 10}
    target = VisionTransformer(img_size=32, patch_size=8, **sizes)
    images = pixels()
    return ported(baseline, target, timm_from_vit, lambda model: model(images))


# ---- Llama: transformers, and litgpt ---------------------------------------------------------------------------------


def litgpt_from_llama(state: State) -> State:
    new = {
        "transformer.wte.weight": state["model.embed_tokens.weight"],
        "transformer.ln_f.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    for n in range(LAYERS):
        old, to = f"model.layers.{n}.", f"transformer.h.{n}."
        new[f"{to}norm_1.weight"] = state[f"{old}input_layernorm.weight"]
        new[f"{to}norm_2.weight"] = state[f"{old}post_attention_layernorm.weight"]
        new[f"{to}attn.qkv.weight"] = fused(state, [f"{old}self_attn.{name}_proj.weight" for name in "qkv"])
        new[f"{to}attn.proj.weight"] = state[f"{old}self_attn.o_proj.weight"]
        new[f"{to}mlp.fc_1.weight"] = state[f"{old}mlp.gate_proj.weight"]
        new[f"{to}mlp.fc_2.weight"] = state[f"{old}mlp.up_proj.weight"]
        new[f"{to}mlp.proj.weight"] = state[f"{old}mlp.down_proj.weight"]
    return new


def llama() -> Port:
    from litgpt import GPT, Config
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=WIDTH,
        intermediate_size=80,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    baseline = shaken(LlamaForCausalLM(config), seed=5)
    target = GPT(
        Config(
            block_size=64,
            padded_vocab_size=96,
            n_layer=LAYERS,
            n_head=HEADS,
            n_query_groups=2,
            n_embd=WIDTH,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=1e-5,
            mlp_class_name="LLaMAMLP",
            intermediate_size=80,
        )
    )
    ids = token_ids(96)
    return ported(baseline, target, litgpt_from_llama, lambda model: model(ids))


# ---- CLIP: transformers, and open_clip -------------------------------------------------------------------------------


def open_clip_from_clip(state: State) -> State:
    new = {
        "positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        "token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
        "text_projection": state["text_projection.weight"].T,
        "logit_scale": state["logit_scale"],
        "visual.class_embedding": state["vision_model.embeddings.class_embedding"],
        "visual.positional_embedding": state["vision_model.embeddings.position_embedding.weight"],
        "visual.conv1.weight": state["vision_model.embeddings.patch_embedding.weight"],
        "visual.proj": state["visual_projection.weight"].T,
    }
    for last in ("weight", "bias"):
        new[f"ln_final.{last}"] = state[f"text_model.final_layer_norm.{last}"]
        new[f"visual.ln_pre.{last}"] = state[f"vision_model.pre_layrnorm.{last}"]
        new[f"visual.ln_post.{last}"] = state[f"vision_model.post_layernorm.{last}"]
        for tower, theirs in (("vision_model", "visual."), ("text_model", "")):
            for n in range(LAYERS):
                old, to = f"{tower}.encoder.layers.{n}.", f"{theirs}transformer.resblocks.{n}."
                qkv = [f"{old}self_attn.{name}_proj.{last}" for name in "qkv"]
                new[f"{to}attn.in_proj_{last}"] = fused(state, qkv)
                new[f"{to}attn.out_proj.{last}"] = state[f"{old}self_attn.out_proj.{last}"]
                new[f"{to}ln_1.{last}"] = state[f"{old}layer_norm1.{last}"]
                new[f"{to}ln_2.{last}"] = state[f"{old}layer_norm2.{last}"]
                new[f"{to}mlp.c_fc.{last}"] = state[f"{old}mlp.fc1.{last}"]
                new[f"{to}mlp.c_proj.{last}"] = state[f"{old}mlp.fc2.{last}"]
    return new


def clip() -> Port:
    declare_vision_operators()
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
    from transformers import CLIPConfig, CLIPModel

    shared: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
        "projection_dim": 32,
    }
    # The largest token ends a text for both.
    text = shared | {"vocab_size": 90, "max_position_embeddings": 12, "eos_token_id": 89, "bos_token_id": 88}
    vision = shared | {"image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=32, attn_implementation="eager")
    baseline = shaken(CLIPModel(config), seed=6)
    target = CLIP(
        32,
        CLIPVisionCfg(layers=LAYERS, width=WIDTH, head_width=WIDTH // HEADS, patch_size=8, image_size=32),
        CLIPTextCfg(context_length=12, vocab_size=90, width=WIDTH, heads=HEADS, layers=LAYERS),
    )
    ids = token_ids(88, tokens=12)
    ids[:, -1] = 89
    images = pixels()

    def run(model: nn.Module) -> Any:
        if isinstance(model, CLIP):
            return model(image=images, text=ids)
        return model(input_ids=ids, pixel_values=images)

    return ported(baseline, target, open_clip_from_clip, run)


# ---- ConvNeXt: transformers, and timm --------------------------------------------------------------------------------


CONVNEXT_NAMES = {
    "convnext.embeddings.patch_embeddings": "stem.0",
    "convnext.embeddings.layernorm": "stem.1",
    "convnext.encoder.": "",
    "layers.": "blocks.",
    "layer_scale_parameter": "gamma",
    "dwconv": "conv_dw",
    "convnext.layernorm": "head.norm",
    "layernorm": "norm",
    "pwconv1": "mlp.fc1",
    "pwconv2": "mlp.fc2",
    "downsampling_layer": "downsample",
    "classifier": "head.fc",
}


def renamed(state: State, names: dict[str, str]) -> State:
    new = {}
    for name, value in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        new[name] = value
    return new


def convnext() -> Port:
    """An image pyramid: each stage halves the image."""
    declare_vision_operators()
    from timm.models.convnext import ConvNeXt
    from transformers import ConvNextConfig, ConvNextForImageClassification

    widths, depths = [16, 24, 32, 40], [2, 2, 2, 2]
    config = ConvNextConfig(hidden_sizes=widths, depths=depths, num_labels=10, image_size=64, layer_norm_eps=1e-6)
    baseline = shaken(ConvNextForImageClassification(config), seed=7)
    target = ConvNeXt(num_classes=10, depths=tuple(depths), dims=tuple(widths))
    images = pixels(64)
    return ported(baseline, target, partial(renamed, names=CONVNEXT_NAMES), lambda model: model(images))
