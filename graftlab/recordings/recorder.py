"""``record``: record the taps of this process, as one rank of a recording."""

from __future__ import annotations

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
from graftlab.layouts import Layout, Mesh, layout_of_dtensor, parse_layout, rank_layout
from graftlab.ranks.holding import repeat_call
from graftlab.ranks.own_place import own_rank
from graftlab.recordings.file_format import FORMAT, RankHeader, StoredLayout, rank_folder
from graftlab.recordings.writer import PendingTap, RecordingWriter
from graftlab.taps import calls
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.extras import ExtrasWithLayout, resolved


class TapRecorder:
    """A tap handler that records each tensor as the model has it, and then calls the previous handler."""

    def __init__(self, folder: Path, place: Place, filter_: str | None, inner: calls.RankTapHandler | None) -> None:
        self._folder = folder
        self._place = place
        self._filter = compile_filter(filter_)
        self._inner = inner
        self._step = 0
        self._matches = 0
        self._left_out: dict[str, None] = {}
        self._told = False
        header = RankHeader(FORMAT, place.side, place.rank, place.world_size)
        try:
            self._writer = RecordingWriter(rank_folder(folder, place.rank), header)
        except FileExistsError:
            raise RecordingError(
                f"{folder} already has a recording of rank {place.rank}; remove it, or record to a different folder"
            ) from None
        except OSError as error:
            raise RecordingError(f"cannot record to {folder}: {error}") from error

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`."""
        self._record(name, value, extras, tags)
        return value if self._inner is None else self._inner.tap(name, value, extras, tags, replace)

    @property
    def moment(self) -> object:
        """A value that differs in each step, and in each run of a session."""
        return self._step, None if self._inner is None else self._inner.moment

    def may_take(self, path: str) -> bool:
        """Whether taps whose names begin with ``path`` may be recorded, or have an effect in the session."""
        return self._filter.may_match(path) or (self._inner is not None and self._inner.may_take(path))

    def step(self) -> None:
        """See :func:`graftlab.step`."""
        self._step += 1
        if self._inner is not None:
            self._inner.step()

    def close(self) -> None:
        """Write the rest. Warns if no tap was recorded, or if writing failed."""
        self._writer.close(self._step + 1, list(self._left_out))
        self._warn_of_error()
        if not self._matches:
            warn(
                f"nothing was recorded in {self._folder}: the filter matched no tap that was reached. Outside a "
                "session, call gl.watch inside gl.record"
            )

    def _record(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any]) -> None:
        given = {**dict(ambient.get()), **tags}
        own = {tag: plain(each) for tag, each in given.items() if not is_no_tag(tag, each)}
        full = all_tags(name, own, self._place, self._step)
        if not self._filter.matches(full):
            return
        if self._writer.error is not None:
            self._warn_of_error()
            return
        if full["recompute_status"] == "recompute":
            self._leave_out(f"tap {name!r} where the backward pass recomputes the forward pass")
            return
        if unwritable := _unwritable(name, own):
            self._leave_out(f"tap {name!r}: {unwritable}")
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
        self._writer.put(PendingTap(self._step, name, own, _copy(tensor), carried, tensors, lost, layout))

    def _layout(self, name: str, shown: Any, given: Any) -> StoredLayout | None:
        if isinstance(given, str):
            return StoredLayout(given, self._known_mesh(given))
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

    def _known_mesh(self, text: str) -> list[tuple[str, int]] | None:
        """Return the sizes of the axes that a layout names, which a later reader cannot find; None if one does not."""
        try:
            layout = rank_layout(None, text, self._place.world_size, self._place.rank)
        except LayoutError:
            # It is refused where the recording is compared.
            return None
        mesh = Mesh() if layout is None else layout.layout.mesh
        in_order = mesh.ranks == tuple(range(self._place.world_size))
        return list(mesh.sizes) if len(mesh.sizes) > 1 and in_order else None

    def _leave_out(self, what: str) -> None:
        if what not in self._left_out:
            self._left_out[what] = None
            warn(f"not recorded: {what}")

    def _warn_of_error(self) -> None:
        if self._writer.error is not None and not self._told:
            self._told = True
            warn(f"the recording ended: {self._writer.error}; the job continues")


def _unwritable(name: str, tags: Mapping[str, Any]) -> str:
    """Why the index cannot have a tap of this name and these tags; blank if it can."""
    try:
        msgspec.json.encode((name, tags))
    except (ValueError, TypeError, OverflowError) as error:  # such as half a surrogate pair
        return f"its name or a tag cannot be written as JSON ({error})"
    return ""


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain_one = tensor.detach().as_subclass(torch.Tensor)
    return plain_one.to("cpu", copy=True).contiguous()


def _split(extras: Any) -> tuple[Any, dict[str, torch.Tensor], str]:
    """Split extras into plain data and tensors of a dict, with the reason if the rest cannot be recorded."""
    if extras is None:
        return None, {}, ""
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(extras, Mapping) and all(isinstance(name, str) for name in extras):
        tensors = {name: _copy(value) for name, value in extras.items() if isinstance(value, torch.Tensor)}
        extras = {name: value for name, value in extras.items() if name not in tensors}
    try:
        carried = msgspec.json.decode(msgspec.json.encode(extras))
    except (TypeError, ValueError, OverflowError) as error:
        return None, tensors, f"they are not plain data ({error})"
    if carried != extras:
        return None, tensors, "JSON does not return them unchanged"
    return carried, tensors, ""


@contextmanager
def record(folder: str | Path, filter: str | None = "True") -> Iterator[None]:
    """Record the taps of this process within the ``with``, as one rank of a recording in ``folder``.

    It works in a session's rank and without a session. The rank and the world size come from the session, else from
    the default process group, else from ``RANK`` and ``WORLD_SIZE``. ``filter`` is an expression over tags. A tensor
    is recorded as the model has it, before a graft. Steps are those of :func:`step`, from 0. A thread writes; taps wait
    for it when 256 MiB are waiting. Extras are recorded if they are plain data, or a dict of plain data and tensors.

    Tensors are in safetensors files, with an index of JSON lines, so that they can be read without graftlab;
    :class:`Recording` uses them as a side. When the disk is full, the recording ends with a :class:`GraftWarning`, and
    the job continues.

    Raises :class:`RecordingError` when the folder already has a recording of this rank, or cannot be written.

    >>> with gl.record(session.folder / "recorded"):
    ...     x = gl.tap("hidden", torch.ones(4), layer=3)
    >>> gl.Recording(session.folder / "recorded").frame[["name", "layer", "shape"]].values.tolist()
    [['hidden', 3, (4,)]]
    """
    before, here = calls.grafter(), calls.here()
    if isinstance(before, TapRecorder):
        raise RecordingError("this process is already recording; end that recording first")
    if before is not None and here is None:
        raise SessionError("this job joins a graft world at its first tap; call gl.attach() before gl.record()")
    recorder = TapRecorder(Path(folder).expanduser().absolute(), own_place(), filter, before)
    active.install_handler(recorder, here)
    try:
        yield
    finally:
        if before is None:
            calls.deactivate()
        else:
            active.install_handler(before, here)
        recorder.close()


def record_held_call(folder: str) -> None:
    """Repeat the call that this rank holds, and record its taps without the weights; sent to a rank by its name."""
    with record(folder, "kind != 'param'"):
        repeat_call()


def own_place() -> Place:
    """Return this process's place in its session, or else in its job."""
    here = calls.here()
    if here is not None:
        return Place(here.side, here.rank, here.world_size, 0)
    rank, size, _ = own_rank()
    return Place("baseline", rank, size, 0)
