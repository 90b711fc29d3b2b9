"""Transforms: from the tensors a rank received to the tensor that overwrites its own.

A transform is a function of one :class:`GraftTransformInput`. A plan names it as a dotted path, as source text or as a
function (:class:`TransformSpec`); :func:`run_transform` calls it so that whatever it does, the target stays as it was.
"""

from __future__ import annotations

import hashlib
import importlib
import linecache
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from graftlab.errors import TransformError
from graftlab.exchange.base import Direction

SIGNATURE = "def transform(graft_input: gl.GraftTransformInput) -> torch.Tensor"


@dataclass(frozen=True)
class GraftTransformInput:
    """What a transform is given, on the receiving rank.

    ``received_list`` holds one tensor a sending rank, in rank order (``senders`` names the ranks), of whatever shape
    and dtype that rank had; ``received_extras_list`` runs parallel to it and holds what the sender passed as ``extras``
    (``None`` where it passed none). ``send_world_size`` counts all ranks of the sending side, those that sent nothing
    included. ``target`` is the receiver's own tensor. All of them are private copies when the transform is the user's;
    changing them in place is refused, because a result that was also written into an input cannot be told from a
    mistake.
    """

    tags: dict[str, Any]
    received_list: list[torch.Tensor]
    received_extras_list: list[Any]
    target: torch.Tensor
    direction: Direction = "b2t"
    recv_rank: int = 0
    recv_world_size: int = 1
    senders: list[int] = field(default_factory=list)
    send_world_size: int = 0


Transform = Callable[[GraftTransformInput], torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """The tensor a transform made, of the target's shape; ``aligned_by`` and ``cast`` say how it was brought to fit."""

    value: torch.Tensor
    aligned_by: str | None = None
    cast: str | None = None


@dataclass(frozen=True)
class TransformSpec:
    """A transform as it travels in a plan: ``text`` is a dotted path or source; ``blob`` a pickled function.

    Make one with :meth:`of`, which also loads it once, so that a transform that cannot be loaded is refused here and
    not on a rank.
    """

    kind: Literal["path", "source", "function"]
    text: str
    blob: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, transform: str | Transform | TransformSpec) -> TransformSpec:
        """From a dotted path (``"package.module.function"``), source text (with a ``def``) or a function.

        Raises :class:`TransformError` when it cannot be loaded, :class:`ShippingError` when it cannot be pickled.
        """
        spec = cls.draft(transform)
        spec.load()
        return spec

    @classmethod
    def draft(cls, transform: str | Transform | TransformSpec) -> TransformSpec:
        """Like :meth:`of`, but nothing of it is run here, not even to see whether it loads."""
        if isinstance(transform, TransformSpec):
            return transform
        if isinstance(transform, str):
            is_path = all(part.isidentifier() for part in transform.strip().replace(":", ".").split("."))
            return cls("path", transform.strip()) if is_path else cls("source", transform)
        if callable(transform):
            # Imported here because shipping is a matter of ranks; only a function needs it.
            from graftlab.ranks.shipping import pack_function

            name = getattr(transform, "__qualname__", type(transform).__name__)
            return cls("function", name, pack_function(transform, what=f"transform {name}"))
        raise TransformError(
            f"a transform is a dotted path, source text or a function, not {type(transform).__name__}; "
            f"its signature is `{SIGNATURE}`"
        )

    @property
    def label(self) -> str:
        if self.kind == "source":
            return f"source {hashlib.blake2b(self.text.encode(), digest_size=4).hexdigest()}"
        return self.text

    @property
    def filename(self) -> str:
        """What the source is called in tracebacks."""
        return f"<transform {self.label}>"

    def load(self) -> Transform:
        """The function itself. Raises :class:`TransformError`."""
        if self.kind == "path":
            return _load_path(self.text)
        if self.kind == "source":
            return _load_source(self.text, self.filename)
        from graftlab.ranks.shipping import unpack_function

        loaded: Transform = unpack_function(self.blob)
        return loaded


def _load_path(path: str) -> Transform:
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise TransformError(
            f"transform {path!r} is not a dotted path; write 'package.module.function', or pass the function itself"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise TransformError(f"transform {path!r}: module {module_name!r} cannot be imported: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise TransformError(f"transform {path!r}: module {module_name!r} has no function {attribute!r}")
    transform: Transform = function
    return transform


def _load_source(source: str, filename: str) -> Transform:
    try:
        # Without dont_inherit the user's code would be compiled under this module's own __future__ imports.
        code = compile(source, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise TransformError(f"the transform's source does not compile, line {line}: {error}") from error
    # With this entry a traceback shows the user's own lines although no such file exists.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    import graftlab

    namespace: dict[str, Any] = {"__name__": "graftlab_transform", "torch": torch, "gl": graftlab}
    namespace["GraftTransformInput"] = GraftTransformInput
    given = set(namespace)
    try:
        exec(code, namespace)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TransformError(f"the transform's source failed while it was loaded:\n{user_traceback(error)}") from error
    made = [value for name, value in namespace.items() if name not in given and isinstance(value, types.FunctionType)]
    function = namespace.get("transform") or (made[0] if len(made) == 1 else None)
    if not callable(function):
        raise TransformError(f"the transform's source defines no function named 'transform'; write `{SIGNATURE}: ...`")
    transform: Transform = function
    return transform


def default_transform(graft_input: GraftTransformInput) -> Outcome:
    """Pair by rank, or join and cut shards along the one dimension that differs.

    With S the senders' shape and T the receiver's: equal shapes take the sender with the receiver's rank (where the
    counts differ: rank modulo senders, as for replicated values). Otherwise exactly one dimension may differ, and

    - the senders' extents add up to T's: they are concatenated;
    - S's extent is T's times the receiving ranks: the receiver's slice is taken;
    - the senders' extents add up to T's times the receiving ranks: both.

    What a rank that sent nothing would have held is never made up from what others sent. Raises
    :class:`TransformError` with the shapes when none fits.
    """
    received, mine = graft_input.received_list, graft_input.target
    rank, receivers = graft_input.recv_rank, graft_input.recv_world_size
    senders = graft_input.senders or list(range(len(received)))
    count = graft_input.send_world_size or len(senders)
    complete = len(senders) == count
    partner = rank % count
    chosen = received[senders.index(partner)] if partner in senders else None
    if all(tensor.shape == mine.shape for tensor in received):
        if chosen is not None:
            return Outcome(chosen, None if count in (1, receivers) else f"sender {partner}")
        raise TransformError(
            f"the default transform takes that of rank {partner}, which sent none (senders {senders} of {count}): "
            f"if another will do, give the plan a transform: `{SIGNATURE}`"
        )
    dim = _differing_dim(received, mine)
    if dim is not None:
        extent, total = mine.shape[dim], sum(tensor.shape[dim] for tensor in received)
        if complete and count > 1 and total == extent:
            return Outcome(torch.cat(_like(received), dim), f"concat dim={dim}")
        if chosen is not None and chosen.shape[dim] == extent * receivers:
            return Outcome(chosen.narrow(dim, rank * extent, extent), f"slice dim={dim}")
        if complete and count > 1 and total == extent * receivers:
            joined = torch.cat(_like(received), dim)
            return Outcome(joined.narrow(dim, rank * extent, extent), f"concat, slice dim={dim}")
    raise TransformError(
        f"the default transform cannot make a tensor of shape {list(mine.shape)} (rank {rank} of {receivers}) "
        f"from {_shapes(received)} (senders {senders} of {count}); give the plan a transform: `{SIGNATURE}`"
    )


def _differing_dim(received: Sequence[torch.Tensor], mine: torch.Tensor) -> int | None:
    if any(tensor.dim() != mine.dim() for tensor in received):
        return None
    differing = {d for tensor in received for d in range(mine.dim()) if tensor.shape[d] != mine.shape[d]}
    return differing.pop() if len(differing) == 1 else None


def _like(received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Shards of one tensor have one dtype. Where they do not, torch.cat would refuse some pairs (the float8 ones).
    return [tensor.to(received[0].dtype) for tensor in received]


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


def run_transform(transform: Transform | None, graft_input: GraftTransformInput) -> Outcome:
    """Run the user's transform, or the default for None, and check what comes back.

    The user's runs on private copies, so the target is untouched whatever happens. Raises whatever the transform
    raises, and :class:`TransformError` when it mutated its input or returned something that is not a tensor of the
    target's shape. Another dtype or device is converted and noted in ``cast``.
    """
    with torch.no_grad():
        if transform is None:
            return _fitted(default_transform(graft_input), graft_input.target)
        target, received = graft_input.target, graft_input.received_list
        copies = [_private(tensor) for tensor in received]
        own = _private(target)
        value = transform(
            replace(
                graft_input,
                tags=dict(graft_input.tags),
                received_list=list(copies),
                received_extras_list=list(graft_input.received_extras_list),
                target=own,
                senders=list(graft_input.senders),
            )
        )
        for what, copy, original in [
            ("target", own, target),
            *(("received_list", *p) for p in zip(copies, received, strict=True)),
        ]:
            if copy.shape != original.shape or not _same_bytes(copy, original):
                raise TransformError(f"the transform changed its input `{what}` in place; clone() it before writing")
        if not isinstance(value, torch.Tensor):
            raise TransformError(
                f"the transform returned {type(value).__name__}; it must return a tensor of shape {list(target.shape)}"
            )
        return _fitted(Outcome(value.detach()), target)


def _private(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equality that NaNs pass too."""
    if one.dtype != other.dtype:
        return False
    first, second = (t.detach().resolve_conj().resolve_neg().contiguous().view(-1) for t in (one, other))
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _fitted(outcome: Outcome, target: torch.Tensor) -> Outcome:
    value = outcome.value
    if value.shape != target.shape:
        raise TransformError(
            f"the transform returned shape {list(value.shape)}; the target has shape {list(target.shape)} "
            f"and nothing is broadcast"
        )
    casts = []
    if value.dtype != target.dtype:
        if value.is_complex() and not target.is_complex():
            raise TransformError(
                f"the transform returned {dtype_name(value.dtype)}, but the target is {dtype_name(target.dtype)}: the "
                f"imaginary part would be lost; return .real or .abs()"
            )
        casts.append(f"{dtype_name(value.dtype)} -> {dtype_name(target.dtype)}")
    if value.device != target.device:
        # Senders on other devices arrive through host memory; only a user's choice of device is worth a note.
        if value.device.type != "cpu":
            casts.append(f"{value.device} -> {target.device}")
        value = value.to(target.device)
    return Outcome(value, outcome.aligned_by, ", ".join(casts) or None)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def user_traceback(error: BaseException) -> str:
    """The traceback from the first frame outside graftlab on: the user's own line comes first."""
    own = __name__.partition(".")[0]
    frames = _skip(error.__traceback__, own)
    # A decorator, torch.no_grad() say, may stand between graftlab and the user's function.
    frames = _skip(frames, own, "torch") or frames
    return "".join(traceback.format_exception(type(error), error, frames, chain=frames is not None)).rstrip()


def _skip(frames: types.TracebackType | None, *packages: str) -> types.TracebackType | None:
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] in packages:
        frames = frames.tb_next
    return frames
