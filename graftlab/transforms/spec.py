"""A transform as a plan holds it, and how it becomes a function on a rank."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from graftlab.base.sources import install_source, parse
from graftlab.errors import TransformError, warn
from graftlab.transforms.inputs import SIGNATURE, GraftTransformInput, Outcome, Transform
from graftlab.transforms.running import user_traceback


@dataclass(frozen=True)
class TransformSpec:
    """A transform as it travels in a plan: ``text`` is a dotted path or source; ``blob`` a pickled function.

    ``where`` is a filter over the tags of the taps that it is for, compared ones included; None means those that the
    plan grafts. Make one with :meth:`of`, which also loads it once, so that a transform that cannot be loaded is
    refused here and not on a rank.

    >>> gl.transforms.TransformSpec.of(("layer == 3", "graftlab.transforms.align_by_request")).described
    'graftlab.transforms.align_by_request where layer == 3'
    """

    kind: Literal["path", "source", "function"]
    text: str
    blob: bytes = field(default=b"", repr=False)
    where: str | None = None

    @classmethod
    def of(cls, transform: OneTransform) -> TransformSpec:
        """From a dotted path (``"package.module.function"``), source text (with a ``def``) or a function.

        Each of these may come with the filter that says where it applies: ``(filter, transform)``. Raises
        :class:`TransformError` when it cannot be loaded, :class:`ShippingError` when it cannot be pickled.
        """
        spec = cls.draft(transform)
        function = spec._load()
        if adapted(function, spec.label) is not function:
            warn(
                f"transform {spec.label} has the old signature (received_list, target), which will go; write "
                f"`{SIGNATURE}`, with graft_input.received_list and graft_input.target"
            )
        return spec

    @classmethod
    def draft(cls, transform: OneTransform) -> TransformSpec:
        """Like :meth:`of`, but nothing of it is run here, not even to see whether it loads."""
        if isinstance(transform, tuple):
            return cls._with_filter(transform)
        if isinstance(transform, TransformSpec):
            return transform
        if isinstance(transform, str):
            is_path = all(part.isidentifier() for part in transform.strip().replace(":", ".").split("."))
            return cls("path", transform.strip()) if is_path else cls("source", transform)
        if callable(transform):
            # Imported here because shipping is a matter of ranks; only a function needs it.
            from graftlab.base.shipping import pack_function

            name = getattr(transform, "__qualname__", type(transform).__name__)
            return cls("function", name, pack_function(transform, what=f"transform {name}"))
        raise TransformError(
            f"a transform is a dotted path, source text or a function, not {type(transform).__name__}; "
            f"its signature is `{SIGNATURE}`"
        )

    @classmethod
    def _with_filter(cls, pair: tuple[Any, ...]) -> TransformSpec:
        if len(pair) != 2 or not isinstance(pair[0], str) or isinstance(pair[1], tuple):
            raise TransformError(
                f"a transform with the taps that it is for is (filter, transform), e.g. (\"name == 'qkv'\", f), "
                f"and several are a list of such pairs, not {pair!r}"
            )
        where, transform = pair
        if not where.strip():
            raise TransformError(
                "the filter of a transform is blank, which matches no tap; write 'True' for all taps, or give the "
                "transform without a filter for those that the plan grafts"
            )
        return replace(cls.draft(transform), where=where)

    @property
    def label(self) -> str:
        if self.kind == "source":
            # Versions of one text have one function's name, and a reader of rows is to see that they are two.
            digest = hashlib.blake2b(self.text.encode(), digest_size=3).hexdigest()
            return f"{_function_in(self.text)} (text {digest})"
        return self.text

    @property
    def described(self) -> str:
        """The label, with the filter if it has one."""
        return self.label if self.where is None else f"{self.label} where {self.where}"

    @property
    def filename(self) -> str:
        """What the source is called in tracebacks."""
        return f"<transform {self.label}>"

    def load(self) -> Transform:
        """The function itself, of one argument. Raises :class:`TransformError`."""
        return adapted(self._load(), self.label)

    def _load(self) -> Callable[..., Any]:
        if self.kind == "path":
            return _load_path(self.text)
        if self.kind == "source":
            return _load_source(self.text, self.filename)
        from graftlab.base.shipping import unpack_function

        return unpack_function(self.blob)


OneTransform = str | Transform | TransformSpec | tuple[str, "str | Transform | TransformSpec"]
"""What :meth:`TransformSpec.of` takes."""

AnyTransform = OneTransform | Sequence[OneTransform] | None
"""What a plan takes: one, a list of which the first that is for a tap applies there, or None for the default."""

Specs = TransformSpec | tuple[TransformSpec, ...] | None
"""What a plan makes of that."""


def each_of(specs: Specs) -> tuple[TransformSpec, ...]:
    """The transforms of a plan, in the order in which they are looked through."""
    return () if specs is None else specs if isinstance(specs, tuple) else (specs,)


def specs_of(transform: AnyTransform, make: Callable[[OneTransform], TransformSpec] = TransformSpec.of) -> Specs:
    """What somebody gave as a plan's transform, as the plan holds it; raises as ``make`` does."""
    if transform is None or isinstance(transform, TransformSpec):
        return transform
    if isinstance(transform, tuple) and transform and all(isinstance(each, TransformSpec) for each in transform):
        return transform
    if isinstance(transform, list):
        specs = tuple(each if isinstance(each, TransformSpec) else make(each) for each in transform)
        return specs if len(specs) > 1 else specs[0] if specs else None
    return make(transform)  # type: ignore[arg-type]


def adapted(function: Callable[..., Any], label: str) -> Transform:
    """A transform that calls this function: itself, or for one of ``(received_list, target)`` what calls it so.

    Raises :class:`TransformError` for one that takes neither.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin need not tell; its first call will.
        return function
    if _takes(signature, 1):
        return function
    if not _takes(signature, 2):
        raise TransformError(
            f"transform {label} takes {signature}, and is called with one argument; write `{SIGNATURE}`"
        )

    @functools.wraps(function)
    def of_old_signature(graft_input: GraftTransformInput) -> torch.Tensor | Outcome:
        made: torch.Tensor | Outcome = function(graft_input.received_list, graft_input.target)
        return made

    return of_old_signature


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _load_path(path: str) -> Callable[..., Any]:
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
    loaded: Callable[..., Any] = function
    return loaded


@functools.lru_cache(maxsize=256)
def _function_in(source: str) -> str:
    """What the source calls the function that is the transform, without running it."""
    try:
        made = [node.name for node in parse(source).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        made = []
    return made[0] if len(made) == 1 else "transform"


def _load_source(source: str, filename: str) -> Callable[..., Any]:
    try:
        # Without dont_inherit the user's code would be compiled under this module's own __future__ imports.
        code = compile(source, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        # As text it names the file and the line once more.
        where, why = (f", line {error.lineno}", error.msg) if isinstance(error, SyntaxError) else ("", error)
        raise TransformError(f"the transform's source does not compile{where}: {why}") from error
    # With this entry a traceback shows the user's own lines although no such file exists.
    install_source(filename, source)
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
    loaded: Callable[..., Any] = function
    return loaded
