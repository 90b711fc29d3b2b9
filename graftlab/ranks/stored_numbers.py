"""Numbers of 16 bits that a call reads and neither its models nor its arguments have, and rows of other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from graftlab.ranks.widening import PLAIN, ReadsOf16Bits, memory_of

# The rows, or columns, of a tensor that tell where it comes from; and the least numbers that are not equal by chance.
_SAMPLES, _LEAST = 8, 4


def stored_in_16_bits(call: Callable[[], object], known: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of 16 bits that ``call`` reads as code holds them, as in a closure, and that are not ``known``.

    Their keys say their dtype and shape, because they have no name.
    """
    with ReadsOf16Bits() as reads:
        call()
    memory = memory_of(known)
    found: dict[str, torch.Tensor] = {}
    for each in reads.stored:
        if memory_of([each]).isdisjoint(memory):
            words = f"a {str(each.dtype).removeprefix('torch.')}{[*each.shape]} of no module or argument"
            found[words if words not in found else f"{words} ({len(found) + 1})"] = each
    return found


def samples_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Some rows of a tensor, and some columns, of the shapes ``[n, length]``: by these :func:`is_made_of` knows it."""
    numbers = tensor.detach().cpu()
    flat = numbers.flatten(0, -2) if numbers.dim() > 1 else numbers.reshape(1, -1)
    return [_some(each) for each in (flat, flat.T)]


def is_made_of(samples: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> bool:
    """Whether each row, or each column, of these samples is a row or a column of one of the tensors, or begins with one
    of a single dim. So it is of weights that are stored fused, transposed, or as they are.

    Sparse tensors, and those of classes that are not torch's, are left out.
    """
    plain = [each for each in tensors if type(each) in PLAIN and each.layout == torch.strided]
    every = [each.detach() for each in plain if each.is_floating_point() and each.dim() and each.numel()]
    return any(len(rows) > 0 and not len(_left_by(every, rows)) for rows in samples)


def _some(rows: torch.Tensor) -> torch.Tensor:
    places = torch.linspace(0, len(rows) - 1, min(len(rows), _SAMPLES), device="cpu").round().long()
    return rows[places]


def _left_by(tensors: Iterable[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Those of these rows that none of the tensors has."""
    for tensor in tensors:
        length = rows.shape[1]
        if tensor.dim() > 1:
            whole = tensor.flatten(0, -2)
            found = [each for each in (whole, whole.T) if each.shape[1] == length >= _LEAST]
        else:
            found = [tensor[None]] if _LEAST <= len(tensor) <= length else []
        for lines in found:
            # The other side may have it in float32, and on another device.
            own = lines.to(rows.dtype)
            beginnings = rows[:, : lines.shape[1]].to(own.device)
            has = [bool((own == each).all(1).any()) for each in beginnings]
            rows = rows[~torch.tensor(has, dtype=torch.bool, device="cpu")]
    return rows
