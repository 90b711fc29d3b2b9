"""Sketches of the tensors on one side's ranks, which allow comparing ranks without sending tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graftlab.base.tags import plain
from graftlab.grafting.tap_records import CountingHandler
from graftlab.layouts.on_ranks import rank_layout
from graftlab.layouts.replicas import SKETCH, Replicas, TapSketch, replicas_of
from graftlab.layouts.sketching import signed_sums
from graftlab.taps.calls import here
from graftlab.taps.extras import ExtrasWithLayout
from graftlab.taps.routing import handled_by


def sketch_taps(call: Callable[[], Any]) -> tuple[list[TapSketch], list[str]]:
    """Run ``call`` on this rank; return sketches of its taps, in execution order, and the taps without a tensor."""
    sketcher = _Sketcher()
    with handled_by(sketcher):
        call()
    return sketcher.shown, list(sketcher.skipped)


class _Sketcher(CountingHandler):
    takes_data = True

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[TapSketch] = []
        self._declared: Replicas | None = None

    def tap(self, name: str, value: Any, extras: Any, tags: Any, replace: bool = False) -> Any:
        shown = value() if callable(value) and not isinstance(value, torch.Tensor) else value
        given = extras.layout if isinstance(extras, ExtrasWithLayout) else None
        place = here()
        read = rank_layout(shown, given, *((1, 0) if place is None else (place.world_size, place.rank)))
        self._declared = None if read is None or read.unknown else replicas_of(read.layout)
        super().tap(name, shown, extras, tags, replace)
        return value

    def take(self, place: Any, tags: dict[str, Any], own: torch.Tensor) -> None:
        sketch, norm, nonfinite = sketched(own)
        self.shown.append(
            TapSketch(
                place[0],
                {tag: plain(value) for tag, value in tags.items()},
                place,
                tuple(own.shape),
                str(own.dtype).removeprefix("torch."),
                sketch,
                norm,
                nonfinite,
                self._declared,
            )
        )


def sketched(tensor: torch.Tensor) -> tuple[bytes, float, int]:
    """Return a tensor's sketch, its norm, and the number of non-finite elements, which count as zero in both."""
    flat = tensor.detach().flatten()
    flat = torch.view_as_real(flat.resolve_conj()).flatten() if flat.is_complex() else flat
    wide = flat.to("cpu").double()
    finite = wide.isfinite()
    nonfinite = int(wide.numel() - finite.sum())
    wide = torch.where(finite, wide, 0.0)
    return signed_sums(wide, SKETCH).numpy().tobytes(), float(wide.norm()), nonfinite
