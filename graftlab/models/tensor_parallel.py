"""The same transformer split over the ranks of a process group, in the column/row scheme of Megatron-LM.

Where the shards begin, whole activations pass unchanged and their gradients are summed over the group; where
they end, partial outputs are summed and their gradients pass unchanged (f and g of Shoeybi et al. 2019). The
collectives of torch.distributed.nn sum both ways, which is right when every rank has a different loss; here
all ranks have the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from graftlab.models.transformer import MLP, Attention, Linear, ModelConfig, Transformer


class _Enter(torch.autograd.Function):
    """f: the input as it is; its gradient summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    """g: the input summed over the group; its gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """The ranks' equally shaped inputs side by side in the last dimension; the gradient is one's own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.rank, ctx.ranks = dist.get_rank(group), dist.get_world_size(group)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(ctx.ranks)]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.ranks, dim=-1)[ctx.rank].contiguous(), None


class _SharedRows(torch.autograd.Function):
    """Rows from `start` on of a weight of `size` rows that other ranks may hold too: sums their gradients.

    Each rank adds its rows to a whole gradient, so the model's own group is enough and no subgroup is made.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, start: int, size: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.start, ctx.size, ctx.group = start, size, group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows = slice(ctx.start, ctx.start + grad.shape[0])
        whole = grad.new_zeros(ctx.size, *grad.shape[1:])
        whole[rows] = grad
        dist.all_reduce(whole, group=ctx.group)
        return whole[rows].clone(), None, None, None


def _apply(function: type[torch.autograd.Function], *args: object) -> Tensor:
    call: Callable[..., Tensor] = function.apply  # torch leaves it untyped
    return call(*args)


def _summed(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    # all_reduce works in place, and the caller may still use x.
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


class ColumnParallelLinear(Linear):
    """Output rows [start, stop) of a linear layer: [..., in] in, this rank's [..., stop - start] out.

    `shared` says that other ranks hold some of these rows too.
    """

    def __init__(
        self, full: Linear, start: int, stop: int, group: dist.ProcessGroup | None, shared: bool = False
    ) -> None:
        super().__init__(full.in_features, stop - start)
        self.weight = nn.Parameter(full.weight.detach()[start:stop].clone())
        self.start, self.full_size, self.group, self.shared = start, full.out_features, group, shared

    def forward(self, input: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.shared:
            weight = _apply(_SharedRows, weight, self.start, self.full_size, self.group)
        return F.linear(_apply(_Enter, input, self.group), weight)


class RowParallelLinear(Linear):
    """Input columns [start, stop) of a linear layer: this rank's [..., stop - start] in, [..., out] out."""

    def __init__(self, full: Linear, start: int, stop: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(stop - start, full.out_features)
        self.weight = nn.Parameter(full.weight.detach()[:, start:stop].clone())
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        return _apply(_Leave, F.linear(input, self.weight), self.group)


class VocabParallelHead(Linear):
    """The output layer over a slice of the vocabulary, gathered: [..., in] in, [..., vocabulary] out.

    The slices are equal except the last ones, which are short where the vocabulary does not divide. A `tied`
    head keeps the embedding's whole weight and uses its own rows of it.
    """

    def __init__(self, full: Linear, group: dist.ProcessGroup | None, tied: bool) -> None:
        super().__init__(full.in_features, full.out_features)
        self.step = -(-full.out_features // dist.get_world_size(group))
        start = dist.get_rank(group) * self.step
        self.rows = slice(start, start + self.step)
        self.group, self.tied = group, tied
        self.weight = full.weight if tied else nn.Parameter(full.weight.detach()[self.rows].clone())

    def forward(self, input: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.tied:
            weight = _apply(_Enter, weight, self.group)[self.rows]
        logits = F.linear(_apply(_Enter, input, self.group), weight)
        # all_gather wants equal shapes, so short slices are padded, and the padding is cut off at the end.
        logits = F.pad(logits, (0, self.step - weight.shape[0]))
        return _apply(_Gather, logits, self.group)[..., : self.out_features].contiguous()


class TensorParallelTransformer(Transformer):
    """`Transformer` over the ranks of `group` (default: the default process group); every rank must call it.

    Each rank builds the full weights from `seed` and keeps its part, so the model agrees with
    ``Transformer(config, seed)`` up to the order of summation, in its logits and, given the same loss on all
    ranks, in its gradients. Embedding and norms are whole on every rank, like what goes between the layers.
    Taps are those of `Transformer`; ``q``, ``k`` and ``v`` show this rank's heads only, the others are whole.
    With more ranks than key/value heads, each rank holds the one that its query heads read: rank r has number
    ``r // (ranks / num_kv_heads)``.

    Raises `ValueError` where heads or MLP cannot be split evenly, `RuntimeError` without a process group.
    """

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup | None = None, seed: int = 0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "TensorParallelTransformer needs a process group; call torch.distributed.init_process_group first"
            )
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise RuntimeError("TensorParallelTransformer was called on a rank that is not in its process group")
        _require_even_split(config, ranks)
        super().__init__(config, seed)
        self.group = group
        heads = _rows(config.num_heads, rank, ranks, config.head_dim)
        kv_heads = _rows(config.num_kv_heads, rank, ranks, config.head_dim)
        shared = config.num_kv_heads < ranks
        inner = _rows(config.intermediate_size, rank, ranks)
        for module in list(self.modules()):
            if isinstance(module, Attention):
                module.q_proj = ColumnParallelLinear(module.q_proj, *heads, group)
                module.k_proj = ColumnParallelLinear(module.k_proj, *kv_heads, group, shared=shared)
                module.v_proj = ColumnParallelLinear(module.v_proj, *kv_heads, group, shared=shared)
                module.o_proj = RowParallelLinear(module.o_proj, *heads, group)
            elif isinstance(module, MLP):
                module.gate_proj = ColumnParallelLinear(module.gate_proj, *inner, group)
                module.up_proj = ColumnParallelLinear(module.up_proj, *inner, group)
                module.down_proj = RowParallelLinear(module.down_proj, *inner, group)
        self.lm_head = VocabParallelHead(self.lm_head, group, config.tie_embeddings)


def _require_even_split(config: ModelConfig, ranks: int) -> None:
    for name in ("num_heads", "intermediate_size"):
        if getattr(config, name) % ranks:
            raise ValueError(
                f"{name}={getattr(config, name)} cannot be split over {ranks} tensor-parallel ranks; "
                "use a number of ranks that divides it"
            )
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        raise ValueError(
            f"num_kv_heads={config.num_kv_heads} can neither be split nor replicated over {ranks} "
            "tensor-parallel ranks; use a number of ranks that divides it or is a multiple of it"
        )


def _rows(count: int, rank: int, ranks: int, width: int = 1) -> tuple[int, int]:
    """Start and stop of this rank's rows of `count` units, `width` rows each; too few units are shared."""
    start = rank * count // ranks
    stop = max(start + 1, (rank + 1) * count // ranks)
    return start * width, stop * width
