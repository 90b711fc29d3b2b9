"""``record``: keep what this process's taps show, as one rank of a recording."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from graftlab.base.tags import is_no_tag, plain
from graftlab.base.world import Place
from graftlab.errors import LayoutError, RecordingError, SessionError, warn
from graftlab.filters.expressions import compile_filter
from graftlab.grafting import active
from graftlab.grafting.decisions import all_tags
from graftlab.grafting.tensors import plain_tensor
from graftlab.layouts import Layout, layout_of_dtensor, parse_layout
from graftlab.ranks.own_place import own_rank
from graftlab.recordings.layout import FORMAT, RankHeader, StoredLayout, rank_folder
from graftlab.recordings.writer import Taken, Writer
from graftlab.taps import calls
from graftlab.taps.extras import ExtrasWithLayout, resolved


class Recorder:
    """Stands before the taps of this process: records what the model has, then lets the plan do what it does."""

    def __init__(self, folder: Path, place: Place, filter_: str | None, inner: calls.RankTapHandler | None) -> None:
        self._folder = folder
        self._place = place
        self._filter = compile_filter(filter_)
        self._inner = inner
        self._lock = threading.Lock()
        self._step = 0
        self._matches = 0
        self._left_out: dict[str, None] = {}
        self._told = False
        header = RankHeader(FORMAT, place.side, place.rank, place.world_size)
        try:
            self._writer = Writer(rank_folder(folder, place.rank), header)
        except FileExistsError:
            raise RecordingError(
                f"{folder} has a recording of rank {place.rank} already; remove it, or record into another folder"
            ) from None
        except OSError as error:
            raise RecordingError(f"nothing can be recorded in {folder}: {error}") from error

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`."""
        self._record(name, value, extras, tags)
        return value if self._inner is None else self._inner.tap(name, value, extras, tags, replace)

    @property
    def moment(self) -> object:
        """Another value in each step, and in each run of a session."""
        return self._step, None if self._inner is None else self._inner.moment

    def step(self) -> None:
        """See :func:`graftlab.step`."""
        self._step += 1
        if self._inner is not None:
            self._inner.step()

    def close(self) -> None:
        """Write what is left. Warns where nothing was recorded, or the disk took not all of it."""
        self._writer.close(self._step + 1, list(self._left_out))
        self._tell_error()
        if not self._matches:
            warn(f"nothing was recorded in {self._folder}: no tap was reached that the filter matches")

    def _record(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any]) -> None:
        given = {**dict(calls.ambient.get()), **tags}
        own = {tag: plain(each) for tag, each in given.items() if not is_no_tag(tag, each)}
        full = all_tags(name, own, self._place, self._step)
        if not self._filter.matches(full):
            return
        if self._writer.error is not None:
            self._tell_error()
            return
        if full["recompute_status"] == "recompute":
            self._leave_out(f"tap {name!r} where a forward is computed again in the backward pass")
            return
        shown = value() if callable(value) and not isinstance(value, torch.Tensor) else value
        tensor = plain_tensor(shown)
        if isinstance(tensor, str):
            self._leave_out(f"tap {name!r}: {tensor}")
            return
        carried, tensors, lost = _split(resolved(extras))
        if lost:
            self._leave_out(f"extras of tap {name!r}: {lost}")
        self._matches += 1
        layout = self._layout(name, shown, extras.layout if isinstance(extras, ExtrasWithLayout) else None)
        self._writer.put(Taken(self._step, name, own, _copy(tensor), carried, tensors, lost, layout))

    def _layout(self, name: str, shown: Any, given: Any) -> StoredLayout | None:
        if isinstance(given, str):
            return StoredLayout(given)
        try:
            layout = given if isinstance(given, Layout) else layout_of_dtensor(shown)
            if layout is None:
                return None
            text, mesh = str(layout), list(layout.mesh.sizes)
            if parse_layout(text, mesh=dict(mesh)) == layout:
                return StoredLayout(text, mesh)
            why = f"{layout} cannot be written as text"
        except LayoutError as error:
            why = str(error)
        self._leave_out(f"the layout of tap {name!r}: {why}")
        return None

    def _leave_out(self, what: str) -> None:
        if what not in self._left_out:
            self._left_out[what] = None
            warn(f"not recorded: {what}")

    def _tell_error(self) -> None:
        if self._writer.error is not None and not self._told:
            self._told = True
            warn(f"the recording ended: {self._writer.error}; the job goes on")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain_one = tensor.detach().as_subclass(torch.Tensor)
    return plain_one.to("cpu", copy=True).contiguous()


def _split(extras: Any) -> tuple[Any, dict[str, torch.Tensor], str]:
    """Extras that are plain data, those that are tensors in a dict, and why the rest cannot be kept."""
    if extras is None:
        return None, {}, ""
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(extras, Mapping) and all(isinstance(name, str) for name in extras):
        tensors = {name: _copy(value) for name, value in extras.items() if isinstance(value, torch.Tensor)}
        extras = {name: value for name, value in extras.items() if name not in tensors}
    try:
        carried = msgspec.json.decode(msgspec.json.encode(extras))
    except (TypeError, ValueError, OverflowError) as error:
        return None, tensors, f"they are no plain data ({error})"
    if carried != extras:
        return None, tensors, "they come back as something else from JSON"
    return carried, tensors, ""


@contextmanager
def record(folder: str | Path, filter: str | None = "True") -> Iterator[None]:
    """Keep what the taps of this process show, inside of the ``with``, as one rank of a recording in ``folder``.

    Works in a session's rank and without a session; the rank and how many there are come from the session, else from
    the default process group, else from ``RANK`` and ``WORLD_SIZE``. ``filter`` is an expression over tags. The tensor
    is recorded as the model has it, before anything is grafted. A step is one of :func:`step`, from 0 on. A thread
    writes; taps wait for it where 256 MiB have gathered. Extras are kept where they are plain data, or a dict of such
    and tensors.

    Tensors are in safetensors files, with an index of JSON lines, so that they can be read without graftlab;
    :class:`Recording` makes a side of them. Where the disk is full, the recording ends and a :class:`GraftWarning` says
    so; the job goes on.

    Raises :class:`RecordingError` where the folder has a recording of this rank or cannot be written.

    >>> with gl.record(session.folder / "recorded"):
    ...     x = gl.tap("hidden", torch.ones(4), layer=3)
    >>> gl.Recording(session.folder / "recorded").frame[["name", "layer", "shape"]].values.tolist()
    [['hidden', 3, (4,)]]
    """
    before, here = calls.grafter(), calls.here()
    if isinstance(before, Recorder):
        raise RecordingError("a recording is going on in this process; one at a time")
    if before is not None and here is None:
        raise SessionError("this job will join a graft world at its first tap; call gl.attach() before gl.record()")
    recorder = Recorder(Path(folder).expanduser().absolute(), own_place(), filter, before)
    active.install_handler(recorder, here)
    try:
        yield
    finally:
        if before is None:
            calls.deactivate()
        else:
            active.install_handler(before, here)
        recorder.close()


def own_place() -> Place:
    """Where this process stands: in its session, or else in its job."""
    here = calls.here()
    if here is not None:
        return Place(here.side, here.rank, here.world_size, 0)
    rank, size, _ = own_rank()
    return Place("baseline", rank, size, 0)
