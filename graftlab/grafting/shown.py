"""What a rank says of the tensor that it sends, beside the extras: its layout there, and the tap's own name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graftlab.errors import LayoutError
from graftlab.layouts import Partial, RankLayout


@dataclass(frozen=True)
class Shown:
    """Travels in place of the extras where there is more to say than those."""

    extras: Any
    layout: RankLayout | None = None
    name: str | None = None


def whole_of_partial(shown: Any, own: torch.Tensor, layout: RankLayout, world_size: int) -> torch.Tensor:
    """What a rank holds once the partial sums are taken, by a collective in which every rank of the mesh takes part.

    Raises :class:`LayoutError` where it is not clear in which group they are to be taken.
    """
    if hasattr(shown, "placements"):
        from torch.distributed.tensor import Replicate as Whole

        placements = [Whole() if type(p).__name__ == "Partial" else p for p in shown.placements]
        with torch.no_grad():
            local: Any = shown.detach().redistribute(placements=placements).to_local()
        whole: torch.Tensor = local.wait() if hasattr(local, "trigger_wait") else local
        return whole
    wide = [name for name, size in layout.layout.mesh.sizes if size > 1]
    partial = [step for step in layout.layout.steps if isinstance(step, Partial) and step.mesh in wide]
    if len(wide) != 1 or layout.layout.mesh.size != world_size or partial[0].op != "sum":
        raise LayoutError(
            f"{layout.layout}: the sums cannot be taken on the receiving side, because the layout does not say in "
            "which process group; make the tensor a DTensor, or compare it t2b, where it is sent"
        )
    total = own.detach().clone()
    torch.distributed.all_reduce(total)
    return total
