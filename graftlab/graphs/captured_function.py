"""Taps in a captured function, where no host code runs at replay.

A tap that a plan has matched is captured as kernels, which copy its value into a static slot. The function continues
with the slot's graft if a switch is on, and otherwise with the value. After a replay the host passes the slots'
contents to the grafter, in the order in which the function reaches its taps, and the grafter does what the plan asks.
If a tap is grafted with a switch, the replay is repeated with the switch on, because everything after the tap depends
on it. If it is grafted with a break in the graph, the host grafts in the middle of a single replay. Either way, rows,
transforms and waits are those of a function that is not captured.

A tap that no plan has matched yet adds no kernel. The first plan that matches it makes the function be captured again,
once. No other edit does, except that a grafted tap may need a break. Ranks of one side that compute together must
capture and replay equally often, so each does so for the taps that the plan matches on any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graftlab.base.tags import TagItems, is_no_tag, plain
from graftlab.base.tensor_bytes import copyable
from graftlab.errors import GraphError
from graftlab.grafting import active
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.overwrite import may_overlap
from graftlab.graphs.capture import Capturer, Graph, Outputs
from graftlab.graphs.slots import FillContext
from graftlab.graphs.static_extras import StaticExtras
from graftlab.graphs.tap_sites import (
    Identity,
    Site,
    Slot,
    TapDecision,
    WantedTaps,
    copy_bits,
    cut,
    decide,
    new_slot,
    rows_of,
    write_through,
)
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.extras import carried
from graftlab.taps.routing import handled_by


class _SilentTaps:
    """Ignores all taps, while the function is captured or replayed."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        return value


_SILENT_TAPS = _SilentTaps()


class CapturedFunction:
    """A captured function, its graph, and its taps in the order in which it reaches them.

    ``padded`` has the sizes that it is captured for. A tensor with as many rows as padded tokens or padded requests,
    unless it is a parameter, is assumed to hold a row for each of them. Its tap shows only the batch's own rows, and so
    do tensors in the extras. A tap that the plan uses has two buffers as large as its value, and one for each tensor in
    its extras; see :class:`StaticExtras`. In a graph on a GPU, a tensor on the host keeps its value from the capture.
    Outside a session taps add nothing.
    """

    def __init__(self, padded: FillContext, wanted: WantedTaps, capturer: Capturer) -> None:
        self.sites: list[Site] = []
        # By the place of the site, only of sites with kernels that have extras.
        self._extras: dict[int, StaticExtras] = {}
        self._padded, self._wanted, self._capturer = padded, wanted, capturer
        self._graph: Graph | None = None
        # Set during the runs for a capture. The first of these runs finds the taps.
        self._capturing = self._is_known = False
        self._runs = 0
        self._next = self._next_host_part = 0
        # Where the graph breaks for the host: before which site, and under which tags.
        self._host_parts: list[tuple[int, TagItems]] = []
        # Set during a replay: the sites whose values are final after it, and how many of them the grafter has already.
        self._window: tuple[int, int] | None = None
        self._handed_over = 0
        self._outer: TagItems = ()
        self._ctx = padded
        # The host's results of this batch's replays, except the last, which is not repeated.
        self._host_results: dict[int, Tensor] = {}
        self._decisions: list[TapDecision] = []
        self._decided_in: tuple[object, TagItems] | None = None

    @property
    def broken_at(self) -> frozenset[int]:
        """The places of the sites where the graph is broken."""
        return frozenset(index for index, site in enumerate(self.sites) if site.breaks)

    # ---- capture ------------------------------------------------------------------------------------------------

    def capture(self, function: Callable[[], Outputs]) -> None:
        """Capture it; see :meth:`Capturer.capture`. Its taps make no rows during the capture."""

        def run_through() -> Outputs:
            self._next = self._next_host_part = 0
            # Only tags that are set inside belong to its taps: the tags around it may differ at each replay.
            with handled_by(self), _ambient(()):
                outputs = function()
            if self._is_known and self._next < len(self.sites):
                raise self._error(f"ran past {self._next} taps this time")
            self._is_known = True
            self._runs += 1
            return outputs

        self._capturing, self._outer = True, ambient.get()
        try:
            self._graph = self._capturer.capture(run_through)
            if self._runs == 1 and any(extras.plain for extras in self._extras.values()):
                # Only a second run shows whether the extras that are not tensors are always the same.
                run_through()
        finally:
            self._capturing = False

    def release(self) -> None:
        """Let go of the graph and all memory for its taps, which refer to each other."""
        self._graph = None
        self.sites.clear()
        self._extras.clear()
        self._host_parts.clear()

    def on_host(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function for inside of the captured one that runs on the host; see :meth:`Capturer.on_host`.

        Taps in it are reached for real, once for each batch.
        """

        def run(*args: object) -> Tensor:
            number, self._next_host_part = self._next_host_part, self._next_host_part + 1
            if self._capturing:
                if not self._is_known:
                    self._host_parts.append((self._next, ambient.get()))
                with handled_by(_SILENT_TAPS):
                    return function(*args)
            if number in self._host_results:
                return self._host_results[number].clone()
            place, inner = self._host_parts[number]
            first, last = self._window or (0, len(self.sites))
            if not first <= place <= last:
                with handled_by(_SILENT_TAPS):
                    return function(*args)
            self._hand_over(place)
            with handled_by(None), _ambient(_merged(self._outer, inner)):
                result = function(*args)
            if last < len(self.sites):
                self._host_results[number] = result.clone()
            return result

        return self._capturer.on_host(run)

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """Handle a tap inside the function, during a capture or a replay that runs the function again."""
        index, self._next = self._next, self._next + 1
        if not self._is_known:
            self.sites.append(self._new_site(name, value, extras, tags))
        if index >= len(self.sites) or self.sites[index].name != name:
            raise self._error(f"reached tap {name!r} as number {index + 1} this time")
        site = self.sites[index]
        if site.is_left_out:
            return value
        shown, own = self._tensor_in(name, value)
        if own is None or (site.slot is not None and site.slot.value.shape != own.shape):
            raise self._error(f"had a different value at tap {name!r} this time: {_described(shown)}")
        if index in self._extras:
            self._extras[index].update(carried(), extras)
        takes_another = own is value and (replace or may_overlap(own))
        if site.breaks:
            broken = copy_bits(torch.empty_like(own), own) if takes_another else own
            chosen = self._capturer.on_host(partial(self._at_break, index))(broken)
        else:
            slot = _slot_of(site)
            copy_bits(slot.value, own)
            chosen = torch.where(slot.switch, copyable(slot.graft), copyable(own)).view(own.dtype)
        if takes_another:
            if not replace:
                write_through(own, chosen)
            return chosen if chosen.stride() == own.stride() else copy_bits(torch.empty_like(own), chosen)
        # An expanded tensor that cannot be replaced keeps its own value.
        if chosen is not own and not may_overlap(own):
            copy_bits(own, chosen)
        return value

    def _error(self, what: str) -> GraphError:
        return GraphError(
            f"a captured function {what}; when it ran first, its taps were {[site.name for site in self.sites]}. It "
            "must reach the same taps, with values of the same shapes, each time that it runs"
        )

    def _tensor_in(self, name: str, value: Any) -> tuple[Any, Tensor | None]:
        """A tap's value as it is shown, and the tensor behind it; None if no tensor can be sent."""
        shown = value() if callable(value) and not isinstance(value, Tensor) else value
        return shown, _grafter().tensor_of(name, shown)

    def _new_site(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any]) -> Site:
        grafter = _grafter()
        inner = {**dict(ambient.get()), **tags}
        # The grafter leaves out values that cannot be tags, and warns.
        identity = (name, *sorted((key, plain(each)) for key, each in inner.items() if not is_no_tag(key, each)))
        site = Site(name, inner, identity)
        with _ambient(self._outer):
            decision = decide(grafter, site)
        if decision.is_wanted:
            self._wanted.identities.add(identity)
        if identity not in self._wanted.identities:
            return site
        shown, own = self._tensor_in(name, value)
        if own is None:
            site.is_unfit, site.stand_in = True, shown
            return site
        site.rows = rows_of(own, self._padded)
        if extras is not None or carried():
            self._extras[len(self.sites)] = self._new_extras(identity, name, extras, own)
        if self._wanted.grafts == "breaks" and decision.is_received:
            site.breaks = True
        else:
            site.slot = new_slot(own, site.rows is not None)
        return site

    def _new_extras(self, identity: Identity, name: str, extras: Any, own: Tensor) -> StaticExtras:
        new = StaticExtras(name, carried(), extras, own, self._padded)
        # Of an earlier capture of the same sizes.
        before = self._wanted.plain_extras.setdefault((identity, len(self.sites), self._padded), new.plain)
        new.compare(before)
        return new

    # ---- replay -------------------------------------------------------------------------------------------------

    def suits(self) -> bool:
        """Whether it was captured with all taps and breaks that the plan in force needs."""
        grafter = active.grafter()
        if grafter is None or grafter.decision_epoch is None:
            return True
        decisions = self._decide(grafter)
        pairs = list(zip(self.sites, decisions, strict=True))
        self._wanted.identities |= {site.identity for site, each in pairs if each.is_wanted}
        fit = [(site, each) for site, each in pairs if not site.is_unfit]
        if any(site.is_left_out and site.identity in self._wanted.identities for site, _ in fit):
            return False
        return self._wanted.grafts == "switches" or all(site.breaks == each.is_received for site, each in fit)

    def replay(self, prepare: Callable[[], object], ctx: FillContext) -> tuple[Outputs, int]:
        """The outputs, and how many replays it took. `prepare` is called before each; `ctx` has the batch's sizes."""
        graph, grafter = self._graph, active.grafter()
        assert graph is not None, "a function must be captured before it is replayed"
        self._outer = ambient.get()
        self._ctx = ctx

        def once() -> Outputs:
            self._next_host_part = 0
            prepare()
            return graph.replay()

        if grafter is None or grafter.decision_epoch is None:
            return once(), 1
        switched = [
            index
            for index, (site, decision) in enumerate(zip(self.sites, self._decide(grafter), strict=True))
            if site.slot is not None and decision.is_received
        ]
        self._handed_over = 0
        try:
            for index in switched:
                self._window = (self._handed_over, index)
                once()
                self._hand_over(index)
                self._graft(index)
                self._handed_over = index + 1
            self._window = (self._handed_over, len(self.sites))
            outputs = once()
            self._hand_over(len(self.sites))
        finally:
            self._window = None
            self._host_results.clear()
            for index in switched:
                _slot_of(self.sites[index]).switch.fill_(False)
        return outputs, len(switched) + 1

    def _decide(self, grafter: Grafter) -> list[TapDecision]:
        """The plan's decisions for all sites, computed again only when they may have changed."""
        decision_epoch, outer = grafter.decision_epoch, ambient.get()
        if (
            self._decided_in is None
            or self._decided_in[0] is not decision_epoch
            or not _are_equal(self._decided_in[1], outer)
        ):
            self._decisions = [decide(grafter, site) for site in self.sites]
            self._decided_in = (decision_epoch, outer)
        return self._decisions

    def _hand_over(self, until: int) -> None:
        """Give the grafter the values of the sites before this one, which are final."""
        if self._window is None:
            return
        for index in range(self._handed_over, until):
            site = self.sites[index]
            if self._decisions[index].action is not None:
                self._tap(index, site.stand_in if site.slot is None else self._head(site, site.slot.value))
        self._handed_over = until

    def _graft(self, index: int) -> None:
        """Graft the site, with its own value if nothing arrives: the number of replays depends only on the plan."""
        site = self.sites[index]
        slot, action = _slot_of(site), self._decisions[index].action
        if action is not None:
            result = self._tap(index, self._head(site, slot.value))
            if action.graft:
                copy_bits(self._head(site, slot.graft), result)
                self._head(site, slot.switch).fill_(True)

    def _at_break(self, index: int, own: Tensor) -> Tensor:
        if self._capturing or self._window is None:
            return own
        self._hand_over(index)
        site = self.sites[index]
        head = self._head(site, own)
        if self._decisions[index].action is not None:
            result = self._tap(index, head)
            if result is not head:
                copy_bits(head, result)
        self._handed_over = index + 1
        return own

    def _tap(self, index: int, shown: Any) -> Any:
        """Reach a tap for real, on the host."""
        site, extras = self.sites[index], self._extras.get(index)
        with handled_by(None), _ambient(self._outer):
            # Called only if the plan uses the tap.
            given = None if extras is None else partial(extras.given, self._ctx)
            return _grafter().tap(site.name, shown, given, site.tags)

    def _head(self, site: Site, tensor: Tensor) -> Tensor:
        return cut(tensor, site.rows, self._ctx)


def _grafter() -> Grafter:
    grafter = active.grafter()
    assert grafter is not None, "taps arrive here only inside a session"
    return grafter


def _slot_of(site: Site) -> Slot:
    assert site.slot is not None
    return site.slot


def _are_equal(one: TagItems, other: TagItems) -> bool:
    try:
        return one == other
    except Exception:  # tags may be arrays, and comparing those gives no single bool
        return False


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _merged(outer: TagItems, inner: TagItems) -> TagItems:
    return tuple({**dict(outer), **dict(inner)}.items())


@contextlib.contextmanager
def _ambient(tags: TagItems) -> Iterator[None]:
    before = ambient.set(tags)
    try:
        yield
    finally:
        ambient.reset(before)
