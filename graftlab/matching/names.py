"""What names reveal: layer numbers, shared words, and roles with customary names.

Names alone never make a pair that is grafted. They choose between partners with equal values, carry a rule to other
layers, and contradict values, which reveals a swapped weight.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_NUMBER = re.compile(r"\d+")
_PATH_NUMBER = re.compile(r"(?<![^\W_])\d+(?![^\W_])")
_WHOLE_PART = re.compile(r"(?<!\w)\d+(?!\w)")
# The placeholder for a number. Not ``#``, which occurs in names: the second call of ``attn`` in a step is ``attn#1``.
_ANY = "\0"
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# Different code bases' words for one part of a model. Only used to compare names, so a word may stand for several.
_SYNONYMS = {
    "attention": "attn",
    "attend": "attn",
    "query": "q",
    "key": "k",
    "value": "v",
    "wq": "q",
    "wk": "k",
    "wv": "v",
    "wo": "o",
    "layernorm": "norm",
    "rmsnorm": "norm",
    "ln": "norm",
    "ffn": "mlp",
    "feed": "mlp",
    "forward": "mlp",
    "feedforward": "mlp",
    "intermediate": "mlp",
    "blocks": "layers",
    "block": "layers",
    "layer": "layers",
    "h": "layers",
    "embed": "embedding",
    "embeddings": "embedding",
    "emb": "embedding",
    "wte": "embedding",
    "gamma": "weight",
    "beta": "bias",
    "proj": "projection",
    "linear": "projection",
    "dense": "projection",
    "fc": "projection",
}


def pattern_of(name: str) -> str:
    """The name with a placeholder for every number."""
    return _NUMBER.sub(_ANY, name)


@lru_cache(maxsize=65536)
def place_of(name: str) -> str:
    """The name with a placeholder for numbers that are parts of its path, such as a layer's, but not in ``norm1``."""
    return _PATH_NUMBER.sub(_ANY, name) if _PATH_NUMBER.search(name) else pattern_of(name)


def layers_of(name: str) -> str:
    """The name with a placeholder for layer numbers: whole parts of its path, or ends of all parts but the last.

    ``norm_1`` and ``norm_2`` of one layer are two taps.
    """
    if _WHOLE_PART.search(name):
        return _WHOLE_PART.sub(_ANY, name)
    path, dot, last = name.rpartition(".")
    return f"{_NUMBER.sub(_ANY, path)}{dot}{last}"


def numbers_of(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBER.findall(name))


def with_numbers(pattern: str, numbers: Sequence[int]) -> str:
    """The name of a pattern with these numbers in it."""
    left = iter(numbers)
    return re.sub(_ANY, lambda _: str(next(left)), pattern)


def layer_of(name: str) -> int | None:
    """The layer number in a name: the first number that is a part of its path."""
    found = _PATH_NUMBER.search(name)
    return int(found.group()) if found else None


def in_any_layer(name: str) -> str:
    """The name with a placeholder for its layer number alone, and not for what is counted within the layer."""
    return _PATH_NUMBER.sub(_ANY, name, count=1)


def path_numbers_of(name: str) -> tuple[int, ...]:
    """All numbers that are parts of a name's path: of layers, and of what is counted within them."""
    return tuple(int(number) for number in _PATH_NUMBER.findall(name))


@lru_cache(maxsize=8192)
def words_of(name: str) -> tuple[str, ...]:
    return tuple(_SYNONYMS.get(word.lower(), word.lower()) for word in _WORDS.findall(name))


@lru_cache(maxsize=65536)
def similarity(one: str, other: str) -> float:
    """The similarity of two names from 0 to 1: shared words, the last one counting double, and equal numbers."""
    mine, theirs = words_of(one), words_of(other)
    if not mine or not theirs:
        return 0.0
    shared = len(set(mine) & set(theirs)) + (mine[-1] == theirs[-1])
    total = len(set(mine) | set(theirs)) + 1
    numbers = numbers_of(one) == numbers_of(other)
    return 0.8 * shared / total + (0.2 if numbers else 0.0)


# ---- roles ----------------------------------------------------------------------------------------------------------

# The first match counts. Each place in a model has one role of a family.
_ROLES: list[tuple[str, str, re.Pattern[str]]] = [
    (family, role, re.compile(pattern, re.IGNORECASE))
    for family, role, pattern in (
        ("attention", "q", r"(^|[._])(q|query|wq|to_q|q_proj|q_lin|q_proj_weight)([._]|$)"),
        ("attention", "k", r"(^|[._])(k|key|wk|to_k|k_proj|k_lin|k_proj_weight)([._]|$)"),
        ("attention", "v", r"(^|[._])(v|value|wv|to_v|v_proj|v_lin|v_proj_weight)([._]|$)"),
        ("attention", "o", r"(^|[._])(o|o_proj|to_out|out_proj|o_lin)([._]|$)|att\w*\.(wo|c_proj)([._]|$)"),
        ("attention", "o", r"attention\.output\.dense([._]|$)"),
        ("mlp", "gate", r"(^|[._])(gate_proj|gate|w1|fc_1)([._]|$)"),
        ("mlp", "up", r"(^|[._])(up_proj|up|w3|fc_2)([._]|$)"),
        (
            "norm",
            "the norm of attention",
            r"(^|[._])(input_layernorm|attention_norm|attn_norm|ln_1|ln1|norm1|norm_1)([._]|$)",
        ),
        (
            "norm",
            "the norm of attention",
            r"layernorm_before|attention\.output\.layernorm|self_attn_layer_norm|sa_layer_norm",
        ),
        (
            "norm",
            "the norm of the MLP",
            r"(^|[._])(post_attention_layernorm|ffn_norm|mlp_norm|ln_2|ln2|norm2|norm_2)([._]|$)",
        ),
        ("norm", "the norm of the MLP", r"layernorm_after|(\d)\.output\.layernorm|final_layer_norm|output_layer_norm"),
        (
            "embedding",
            "the embedding of tokens",
            r"(^|[._])(wte|word_embeddings|embed_tokens|tok_embeddings|token_embedding)",
        ),
        (
            "embedding",
            "the embedding of positions",
            r"(^|[._])(wpe|position_embeddings|embed_positions|pos_embed|position_embedding)",
        ),
        ("embedding", "the embedding of segments", r"(^|[._])(token_type_embeddings|segment_embeddings)"),
    )
]
_BESIDE = {"w1": "w3", "w3": "w1", "fc_1": "proj", "fc_2": "proj"}
_NUMBERED_ROLE = re.compile(rf"(?<![^._])({'|'.join(_BESIDE)})(?![^._])", re.IGNORECASE)
_LAST = {
    "weight": "the weight",
    "gamma": "the weight",
    "scale": "the weight",
    "bias": "the bias",
    "beta": "the bias",
    "running_mean": "the running mean",
    "running_var": "the running variance",
    "moving_mean": "the running mean",
    "moving_variance": "the running variance",
}
STATISTICS = ("the running mean", "the running variance")
"""The roles of what a batch norm averages over batches."""
_SEPARATORS = re.compile("[./]")
# For fused tensors: the roles of the parts, in order.
_FUSED: list[tuple[re.Pattern[str], tuple[str, ...]]] = [
    (re.compile(pattern, re.IGNORECASE), roles)
    for pattern, roles in (
        (
            r"(^|[._])(in_proj_weight|in_proj_bias|qkv|qkv_proj|wqkv|c_attn|query_key_value|qkv_linear)([._]|$)",
            ("q", "k", "v"),
        ),
        (r"(^|[._])(kv_proj|wkv|key_value)([._]|$)", ("k", "v")),
        (r"(^|[._])(gate_up_proj|gate_up)([._]|$)", ("gate", "up")),
    )
]


@lru_cache(maxsize=8192)
def role_of(name: str, family: str | None = None) -> tuple[str, str] | None:
    """The family and role in a name, if its words are customary."""
    if fused_roles(name):
        return None
    for own, role, pattern in _ROLES:
        if (family is None or own == family) and (found := pattern.search(name)):
            if "." not in name and any(letter.isdigit() for letter in found.group()):
                # For example layer_norm_1 of an exported graph, which counts operations of one kind.
                return None
            # Code that norms before and after a block uses the same words for different roles.
            return None if own == "norm" and "feedforward" in name else (own, role)
    return None


def beside_numbered_role(name: str) -> str | None:
    """The name that must exist for a numbered one to have its role; None if this name has no number for its role.

    Without ``w3``, ``w1`` and ``w2`` are the two matrices of an MLP that has no gate.
    """
    found = _NUMBERED_ROLE.search(name)
    return f"{name[: found.start()]}{_BESIDE[found.group().lower()]}{name[found.end() :]}" if found else None


def fused_roles(name: str) -> tuple[str, ...]:
    """The roles in a fused tensor of this name, in order; empty for other names."""
    return next((roles for pattern, roles in _FUSED if pattern.search(name)), ())


def last_role(name: str) -> str | None:
    """The kind of parameter in a name: weight, bias or a running statistic; else None."""
    last = _SEPARATORS.split(name)[-1].lower()
    words = last.split("_")
    # In a name without modules, the kind follows the module: layer1_0_bn1_running_mean.
    for word in (last, "_".join(words[-2:]), words[-1]):
        if word in _LAST:
            return _LAST[word]
    return None


def module_of(name: str) -> str:
    """The module that a parameter's name is in."""
    return name.rpartition(".")[0]
