"""What a rank reports of the call that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from graftlab.diffs.results import is_written, with_tensors


@dataclass(frozen=True)
class CallDescription:
    """A rank's report of its held call.

    ``number`` counts the calls of models from 1. ``taps`` are the names of its taps, in execution order. ``plain`` has
    the tensors that the call returns and writes without taps, by their paths, ``tapped`` the same with taps.
    ``not_repeated`` describes results that differ in a replay without taps; ``not_compared`` describes written state
    that repetitions do not compare.
    """

    model: str
    number: int
    needs_backward: bool
    taps: tuple[str, ...]
    plain: dict[str, torch.Tensor]
    tapped: dict[str, torch.Tensor]
    not_repeated: tuple[str, ...] = ()
    others: Mapping[str, int] = field(default_factory=dict)
    """How often models of other classes were called so far, by class."""
    buffers: tuple[str, ...] = ()
    """The names of the model's buffers, which its calls may write."""
    fails_when_repeated: str | None = None
    """The exception of a repetition, if the first call returns."""
    whole_numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The integers among the arguments, such as tokens, by their paths."""
    untapped_numbers: tuple[str, ...] = ()
    """Those of ``whole_numbers`` that no tap shows: numbers, and tensors in objects that are no containers."""
    raises: str | None = None
    """The exception of the call itself; then only the taps before it are described."""
    not_compared: tuple[str, ...] = ()
    writes_weights: bool = False
    """Whether the call changes weights, which repetitions do not put back."""
    trained: tuple[str, ...] = ()
    """The names of the model's weights that need gradients."""
    in_training: tuple[str, ...] = ()
    """The dropouts and batch norms in training mode, by name."""
    is_training: bool = False
    """Whether the model itself is in training mode."""
    weights: int = 0
    """How many numbers the model's weights have."""
    part_of: str = ""
    """The model called earlier by the script that has this one as a module, as an engine's head; blank if none has."""
    values: tuple[str, ...] = ()
    """Those of ``taps`` that show what modules return, without weights, inputs and gradients."""

    @property
    def returned(self) -> dict[str, torch.Tensor]:
        """The tensors that the call returns without taps, without those that it writes."""
        return with_tensors(self.plain, {path: each for path, each in self.plain.items() if not is_written(path)})
