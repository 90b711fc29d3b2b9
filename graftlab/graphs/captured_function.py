"""Taps inside of a captured function, where no host code runs at replay.

A tap that some plan has wanted is captured as kernels: its value is copied into a static slot, and what goes on is the
slot's graft where a gate is open, and the value where not. All that the plan says of it happens on the host, through
the grafter and in the order in which the function reaches its taps, on what the slots hold after a replay. At a tap
that is grafted here, with a gate, the same replay is done once more with the gate open, since whatever comes later
depends on it; with a break, which is captured for it, the host does it in the middle of the one replay. Either way
rows, transforms and waits are those of a function that is not captured.

A tap that no plan has wanted yet leaves no kernel behind. The first plan that wants it has the function captured anew,
once; no other edit does, but that breaks are where the plan grafts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from graftlab import taps
from graftlab.errors import GraphError
from graftlab.grafter import Grafter, Tags
from graftlab.graphs.capture import Capturer, Graph, Outputs
from graftlab.graphs.slots import FillContext
from graftlab.overwrite import may_overlap
from graftlab.plan import Verdict
from graftlab.rows import plain

Grafts = Literal["gates", "breaks"]
"""How a graft gets into a captured function: past a gate at its tap, or in a break of the graph there."""

Identity = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Slot:
    """Static memory of a tap. ``gate`` is bool, and of one row each where rows of the value are padding."""

    value: Tensor
    graft: Tensor
    gate: Tensor


@dataclass(eq=False)
class Site:
    """One tap of the captured function, with the tags that are set inside of it.

    Where the value was no tensor that can travel, ``is_unfit``, and the grafter is told of ``stand_in`` instead.
    """

    name: str
    tags: dict[str, Any]
    extras: Any
    identity: Identity
    slot: Slot | None = None
    breaks: bool = False
    is_unfit: bool = False
    stand_in: Any = None

    @property
    def is_left_out(self) -> bool:
        """Whether it leaves no kernel behind."""
        return self.slot is None and not self.breaks


@dataclass
class TapChoice:
    """What the graphs of one runner have in common: how they graft, and which taps were ever wanted."""

    grafts: Grafts
    wanted: set[Identity] = field(default_factory=set)


class _Mute:
    """Takes what taps show where they are not reached for real."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        return value


_MUTE = _Mute()


class CapturedFunction:
    """A captured function, its graph, and its taps in the order in which it reaches them.

    ``padded`` has the sizes that it is captured for. The extras of a tap are those of the capture: put static buffers
    into them, or nothing that changes. A tap outside of a session is nothing at all.
    """

    def __init__(self, padded: FillContext, choice: TapChoice, capturer: Capturer) -> None:
        self.sites: list[Site] = []
        self._padded, self._choice, self._capturer = padded, choice, capturer
        self._graph: Graph | None = None
        # While it is run to be captured. Of these runs the first tells which taps there are.
        self._capturing = self._is_known = False
        self._next = self._next_host_part = 0
        # Where the host runs in between: before which site, and with which tags.
        self._host_parts: list[tuple[int, Tags]] = []
        # While it is replayed: the sites whose values this replay makes final, and up to where they were handed over.
        self._window: tuple[int, int] | None = None
        self._handed_over = 0
        self._outer: Tags = ()
        self._ctx = padded
        self._verdicts: list[Verdict | None] = []
        self._verdicts_of: tuple[object, Tags] | None = None

    @property
    def broken_at(self) -> frozenset[int]:
        """The places of the sites where the graph is broken."""
        return frozenset(index for index, site in enumerate(self.sites) if site.breaks)

    # ---- capture ------------------------------------------------------------------------------------------------

    def capture(self, function: Callable[[], Outputs]) -> None:
        """Capture it; see :meth:`Capturer.capture`. Its taps show nothing meanwhile."""

        def run_through() -> Outputs:
            self._next = self._next_host_part = 0
            # Only the tags that are set inside belong to its taps: those around it may be others at each replay.
            with taps.taken_by(self), _ambient(()):
                outputs = function()
            self._is_known = True
            return outputs

        self._capturing = True
        try:
            self._graph = self._capturer.capture(run_through)
        finally:
            self._capturing = False

    def on_host(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function for inside of the captured one that runs on the host; see :meth:`Capturer.on_host`.

        Taps in it are reached for real, once for each batch.
        """

        def run(*args: object) -> Tensor:
            number, self._next_host_part = self._next_host_part, self._next_host_part + 1
            if self._capturing:
                if not self._is_known:
                    self._host_parts.append((self._next, taps.ambient.get()))
                with taps.taken_by(_MUTE):
                    return function(*args)
            place, inner = self._host_parts[number]
            if self._window is not None and not self._window[0] <= place <= self._window[1]:
                with taps.taken_by(_MUTE):
                    return function(*args)
            self._hand_over(place)
            with taps.taken_by(None), _ambient(_merged(self._outer, inner)):
                return function(*args)

        return self._capturer.on_host(run)

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """What a tap does inside of the function, while it is captured and wherever a replay runs it again."""
        index, self._next = self._next, self._next + 1
        if not self._is_known:
            self.sites.append(self._new_site(name, value, extras, tags))
        if index >= len(self.sites) or self.sites[index].name != name:
            raise GraphError(
                f"tap {name!r} is number {index + 1} of a captured function, which had "
                f"{[site.name for site in self.sites]} when it ran first; it must reach the same taps each time"
            )
        site = self.sites[index]
        if site.is_left_out:
            return value
        shown = value() if callable(value) and not isinstance(value, Tensor) else value
        own = _grafter().tensor_of(name, shown)
        assert own is not None, "the first run had a tensor here"
        takes_another = own is value and (replace or may_overlap(own))
        if site.breaks:
            own = own.clone() if takes_another else own
            at_break = self._capturer.on_host(partial(self._at_break, index))
            return at_break(own) if own is value or takes_another else self._into(at_break(own), own, value)
        slot = site.slot
        assert slot is not None
        slot.value.copy_(own)
        chosen = torch.where(slot.gate, _selectable(slot.graft), _selectable(own)).view(own.dtype)
        return chosen if takes_another else self._into(chosen, own, value)

    def _into(self, chosen: Tensor, own: Tensor, value: Any) -> Any:
        # A tensor that holds one number for several places, and cannot be replaced, keeps its own.
        if chosen is not own and not may_overlap(own):
            own.copy_(chosen)
        return value

    def _new_site(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any]) -> Site:
        grafter = _grafter()
        inner = {**dict(taps.ambient.get()), **tags}
        identity = (name, *sorted((key, plain(each)) for key, each in inner.items()))
        site = Site(name, inner, extras, identity)
        verdict = grafter.verdict(name, inner)
        if _is_wanted(verdict):
            self._choice.wanted.add(identity)
        if identity not in self._choice.wanted:
            return site
        shown = value() if callable(value) and not isinstance(value, Tensor) else value
        own = grafter.tensor_of(name, shown)
        if own is None:
            site.is_unfit, site.stand_in = True, shown
        elif self._choice.grafts == "breaks" and _is_received(grafter, verdict):
            site.breaks = True
        else:
            site.slot = self._new_slot(own)
        return site

    def _new_slot(self, own: Tensor) -> Slot:
        rows = own.shape[:1] if self._rows_of(own, self._padded) is not None else [1] * own.dim()
        # Outside inference mode, where a tensor that was made inside it could not be written.
        with torch.inference_mode(False), torch.no_grad():
            return Slot(
                torch.empty(own.shape, dtype=own.dtype, device=own.device),
                torch.zeros(own.shape, dtype=own.dtype, device=own.device),
                torch.zeros([*rows, *[1] * (own.dim() - len(rows))], dtype=torch.bool, device=own.device),
            )

    # ---- replay -------------------------------------------------------------------------------------------------

    def suits(self) -> bool:
        """Whether it was captured with all that the plan in force wants of it."""
        grafter = taps.grafter()
        if grafter is None or grafter.era is None:
            return True
        verdicts = self._judge(grafter)
        self._choice.wanted |= {
            site.identity for site, verdict in zip(self.sites, verdicts, strict=True) if _is_wanted(verdict)
        }
        for site, verdict in zip(self.sites, verdicts, strict=True):
            if site.identity in self._choice.wanted and site.is_left_out and not site.is_unfit:
                return False
            if self._choice.grafts == "breaks" and site.breaks != _is_received(grafter, verdict) and not site.is_unfit:
                return False
        return True

    def replay(self, prepare: Callable[[], object], ctx: FillContext) -> tuple[Outputs, int]:
        """The outputs, and how many replays it took. `prepare` is called before each; `ctx` has the batch's sizes."""
        graph, grafter = self._graph, taps.grafter()
        assert graph is not None, "captured before it is replayed"
        self._outer = taps.ambient.get()
        self._ctx = ctx

        def once() -> Outputs:
            self._next_host_part = 0
            prepare()
            return graph.replay()

        if grafter is None or grafter.era is None:
            return once(), 1
        gated = [
            index
            for index, (site, verdict) in enumerate(zip(self.sites, self._judge(grafter), strict=True))
            if site.slot is not None and _is_received(grafter, verdict)
        ]
        self._handed_over = 0
        try:
            for index in gated:
                self._window = (self._handed_over, index)
                once()
                self._hand_over(index)
                self._graft(grafter, self.sites[index])
                self._handed_over = index + 1
            self._window = (self._handed_over, len(self.sites))
            outputs = once()
            self._hand_over(len(self.sites))
        finally:
            self._window = None
            for index in gated:
                _slot_of(self.sites[index]).gate.fill_(False)
        return outputs, len(gated) + 1

    def _judge(self, grafter: Grafter) -> list[Verdict | None]:
        """The plan's verdicts on all sites, asked for again only when they may have changed."""
        now = (grafter.era, taps.ambient.get())
        known = self._verdicts_of
        if known is None or known[0] is not now[0] or known[1] != now[1]:
            self._verdicts = [grafter.verdict(site.name, site.tags) for site in self.sites]
            self._verdicts_of = now
        return self._verdicts

    def _hand_over(self, until: int) -> None:
        """Give the grafter the values of the sites before this one, which are final."""
        if self._window is None:
            return
        grafter = _grafter()
        with _ambient(self._outer):
            for index in range(self._handed_over, until):
                site, verdict = self.sites[index], self._verdicts[index]
                if verdict is not None:
                    shown = site.stand_in if site.slot is None else self._head(site.slot.value)
                    grafter.tap(site.name, shown, site.extras, site.tags)
        self._handed_over = until

    def _graft(self, grafter: Grafter, site: Site) -> None:
        slot = _slot_of(site)
        with _ambient(self._outer):
            # Where nothing came, it is the value itself, so that the number of replays is the plan's alone: ranks
            # that compute together must replay together.
            result = grafter.tap(site.name, self._head(slot.value), site.extras, site.tags)
        self._head(slot.graft).copy_(result)
        self._head(slot.gate).fill_(True)

    def _at_break(self, index: int, own: Tensor) -> Tensor:
        if self._capturing or self._window is None:
            return own
        self._hand_over(index)
        site, head = self.sites[index], self._head(own)
        with _ambient(self._outer):
            result = _grafter().tap(site.name, head, site.extras, site.tags)
        if result is not head:
            head.copy_(result)
        self._handed_over = index + 1
        return own

    def _head(self, tensor: Tensor) -> Tensor:
        """The batch's own rows, without the padding after them."""
        count = self._rows_of(tensor, self._ctx)
        return tensor if count is None else tensor[:count]

    def _rows_of(self, tensor: Tensor, ctx: FillContext) -> int | None:
        """How many rows of a tensor of the captured function are the batch's; None where it has neither's number."""
        if not tensor.dim():
            return None
        if tensor.shape[0] == self._padded.padded_num_tokens:
            return ctx.raw_num_tokens
        return ctx.raw_bs if tensor.shape[0] == self._padded.padded_bs else None


def _grafter() -> Grafter:
    grafter = taps.grafter()
    assert grafter is not None, "taps come here only inside of a session"
    return grafter


def _slot_of(site: Site) -> Slot:
    assert site.slot is not None
    return site.slot


def _is_wanted(verdict: Verdict | None) -> bool:
    return verdict is not None and (verdict.direction is not None or verdict.overlap)


def _is_received(grafter: Grafter, verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.graft and not grafter.sends(verdict)


def _selectable(tensor: Tensor) -> Tensor:
    # Of the dtypes of one byte some are bits that torch does not select from; any copy of the bits is as good.
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _merged(outer: Tags, inner: Tags) -> Tags:
    return tuple({**dict(outer), **dict(inner)}.items())


@contextlib.contextmanager
def _ambient(tags: Tags) -> Iterator[None]:
    before = taps.ambient.set(tags)
    try:
        yield
    finally:
        taps.ambient.reset(before)
