"""A transform as a plan stores it, and its loading as a function on a rank."""

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

    ``where`` is a filter for the taps to which it applies, including compared ones; None means the taps that the plan
    grafts. Make one with :meth:`of`, which also loads it once, so that a transform that cannot be loaded is refused
    here and not on a rank.

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

        Each may be combined with a filter for the taps to which it applies: ``(filter, transform)``. Raises
        :class:`TransformError` if it cannot be loaded, :class:`ShippingError` if it cannot be pickled.
        """
        spec = cls.draft(transform)
        function = spec._load()
        if adapted(function, spec.label) is not function:
            warn(
                f"transform {spec.label} has the old signature (received_list, target), which will be removed; write "
                f"`{SIGNATURE}`, with graft_input.received_list and graft_input.target"
            )
        return spec

    @classmethod
    def draft(cls, transform: OneTransform) -> TransformSpec:
        """Like :meth:`of`, but without running any of its code, not even to check whether it loads."""
        if isinstance(transform, tuple):
            return cls._with_filter(transform)
        if isinstance(transform, TransformSpec):
            return transform
        if isinstance(transform, str):
            is_path = all(part.isidentifier() for part in transform.strip().replace(":", ".").split("."))
            return cls("path", transform.strip()) if is_path else cls("source", transform)
        if callable(transform):
            # Imported here because only a function needs it.
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
                f"a transform for certain taps is (filter, transform), e.g. (\"name == 'qkv'\", f), "
                f"and several are a list of such pairs, not {pair!r}"
            )
        where, transform = pair
        if not where.strip():
            raise TransformError(
                "the filter of a transform is blank, which matches no tap; write 'True' for all taps, or give the "
                "transform without a filter for the taps that the plan grafts"
            )
        return replace(cls.draft(transform), where=where)

    @property
    def label(self) -> str:
        if self.kind == "source":
            # Two versions of one text have the same function name; the digest distinguishes them in rows.
            digest = hashlib.blake2b(self.text.encode(), digest_size=3).hexdigest()
            return f"{_function_in(self.text)} (text {digest})"
        return self.text

    @property
    def described(self) -> str:
        """The label, followed by the filter, if any."""
        return self.label if self.where is None else f"{self.label} where {self.where}"

    @property
    def filename(self) -> str:
        """The source's name in tracebacks."""
        return f"<transform {self.label}>"

    def load(self) -> Transform:
        """Load the function, which takes one argument. Raises :class:`TransformError`."""
        return adapted(self._load(), self.label)

    def _load(self) -> Callable[..., Any]:
        if self.kind == "path":
            return _load_path(self.text)
        if self.kind == "source":
            return _load_source(self.text, self.filename)
        from graftlab.base.shipping import unpack_function

        return unpack_function(self.blob)


OneTransform = str | Transform | TransformSpec | tuple[str, "str | Transform | TransformSpec"]
"""The argument of :meth:`TransformSpec.of`."""

AnyTransform = OneTransform | Sequence[OneTransform] | None
"""A plan's ``transform``: one, a list whose first match applies at each tap, or None for the default."""

Specs = TransformSpec | tuple[TransformSpec, ...] | None
"""The same as a plan stores it."""


def each_of(specs: Specs) -> tuple[TransformSpec, ...]:
    """Return the transforms of a plan, in the order of precedence."""
    return () if specs is None else specs if isinstance(specs, tuple) else (specs,)


def specs_of(transform: AnyTransform, make: Callable[[OneTransform], TransformSpec] = TransformSpec.of) -> Specs:
    """Convert the argument ``transform`` of a plan to specs; raises the errors of ``make``."""
    if transform is None or isinstance(transform, TransformSpec):
        return transform
    if isinstance(transform, tuple) and transform and all(isinstance(each, TransformSpec) for each in transform):
        return transform
    if isinstance(transform, list):
        specs = tuple(each if isinstance(each, TransformSpec) else make(each) for each in transform)
        return specs if len(specs) > 1 else specs[0] if specs else None
    return make(transform)  # type: ignore[arg-type]


def adapted(function: Callable[..., Any], label: str) -> Transform:
    """Return the function as a transform; a function of ``(received_list, target)`` is wrapped.

    Raises :class:`TransformError` for any other signature.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A builtin may have no signature; its first call will show whether it fits.
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
    """Return the name of the transform's function in its source, without running the source."""
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
        # str(error) would repeat the file and the line.
        where, why = (f", line {error.lineno}", error.msg) if isinstance(error, SyntaxError) else ("", error)
        raise TransformError(f"the transform's source does not compile{where}: {why}") from error
    # Makes tracebacks show the user's own lines, although no such file exists.
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
