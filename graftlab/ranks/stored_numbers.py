"""Numbers of 16 bits that a call reads and neither its models nor its arguments have, and rows of other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from graftlab.ranks.widening import ReadsOf16Bits, memory_of

# So many rows, or columns, of a tensor tell where it comes from; and so few numbers may be equal by chance.
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
    flat = tensor.detach().cpu()
    flat = flat[None] if flat.dim() < 2 else flat.flatten(0, -2)
    return [_some(each) for each in (flat, flat.T)]


def is_made_of(samples: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> bool:
    """Whether each row, or each column, of these samples is a row or a column of one of the tensors, or begins with one
    of a single dim. So it is of weights that are stored fused, transposed, or as they are. All are on the CPU.
    """
    every = [each for each in tensors if each.is_floating_point() and each.dim() and each.numel()]
    return any(len(rows) > 0 and all(_has(every, row) for row in rows) for rows in samples)


def _some(rows: torch.Tensor) -> torch.Tensor:
    places = torch.linspace(0, len(rows) - 1, min(len(rows), _SAMPLES), device="cpu").round().long()
    return rows[places]


def _has(tensors: Iterable[torch.Tensor], row: torch.Tensor) -> bool:
    for tensor in tensors:
        # The other side may have it in float32.
        each = tensor.to(row.dtype)
        whole = each[None] if each.dim() < 2 else each.flatten(0, -2)
        if each.dim() < 2 and _LEAST <= len(each) <= len(row) and torch.equal(each, row[: len(each)]):
            return True
        if len(row) >= _LEAST and any(
            lines.shape[1] == len(row) and bool((lines == row).all(1).any()) for lines in (whole, whole.T)
        ):
            return True
    return False
