"""The drafts of the transform editor: source text, a function or dotted path by name, or the default transform."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, Literal

from graftlab.base.text import counted
from graftlab.errors import TransformError
from graftlab.transforms import SIGNATURE, GraftTransformInput, TransformSpec, default_transform
from graftlab.transforms.spec import Specs

_COMMENT_WIDTH = 88

Kind = Literal["text", "name", "default"]

_MEANINGS = {
    "tags": "dict: name, step, side, rank and the tags of the call",
    "received_list": "a tensor from each sending rank, in rank order",
    "received_extras_list": "parallel to received_list: each sender's extras, or None",
    "target": "this rank's own tensor; the result needs its shape",
    "direction": '"b2t" or "t2b"',
    "recv_rank": "this rank's number",
    "recv_world_size": "number of ranks on the receiving side",
    "senders": "the ranks that sent received_list, in its order",
    "send_world_size": "number of ranks on the sending side",
    "target_extras": "the extras of this rank's own tap, or None",
    "layout": "how this rank's part is cut from the whole tensor, if declared",
    "received_layouts": "the layouts of received_list, in its order",
    "pair": "the layout of the plan's pair, or None",
    "whole": '"received" or "target": the larger one of the pair',
    "target_reduced": "the target with its partial sums added up, or why not",
}
FIELDS = tuple(field.name for field in fields(GraftTransformInput))


def _template() -> str:
    width = max(map(len, FIELDS))
    lines = [f"    #   graft_input.{name:<{width}}  {_MEANINGS.get(name, '')}".rstrip() for name in FIELDS]
    comments = ["    # All tensors are copies, which may be written into. The fields:", *lines]
    return "\n".join([f"{SIGNATURE}:", *comments, "    return graft_input.received_list[0]", ""])


TEMPLATE = _template()
"""The initial text of the editor, which can use ``torch`` and ``gl`` without an import."""


@dataclass(frozen=True)
class Draft:
    """A transform to try or publish: ``text`` is its source (kind ``"text"``) or its name (kind ``"name"``).

    ``where`` is the filter of the taps to transform; blank for those that the plan grafts.
    """

    kind: Kind
    text: str = ""
    where: str = ""


@dataclass(frozen=True)
class Version:
    """A transform and the first ``plan`` with it; ``plan`` is None for a text that was never published.

    A ``spec`` of None is the default transform; a tuple has several transforms, each with its own filter.
    """

    plan: int | None
    spec: Specs

    @property
    def label(self) -> str:
        size = ""
        if isinstance(self.spec, TransformSpec) and self.spec.kind == "source":
            size = f", {counted(len(self.spec.text.splitlines()), 'line')}"
        where = f", where {self.spec.where}" if isinstance(self.spec, TransformSpec) and self.spec.where else ""
        return f"{'not applied' if self.plan is None else f'plan {self.plan}'}: {label_of(self.spec)}{size}{where}"

    @property
    def draft(self) -> Draft:
        """The draft that gives this transform."""
        if self.spec is None:
            return Draft("default")
        if isinstance(self.spec, tuple):
            return Draft("name", f"{label_of(self.spec)} (plan {self.plan})")
        where = self.spec.where or ""
        if self.spec.kind == "source":
            return Draft("text", self.spec.text, where)
        # By now the notebook may use that name for a different function.
        is_path = self.spec.kind == "path"
        return Draft("name", self.spec.text if is_path else f"{self.spec.label} (plan {self.plan})", where)


def label_of(spec: Specs) -> str:
    if isinstance(spec, tuple):
        return f"{len(spec)} transforms"
    return "the default transform" if spec is None else spec.label


def spec_of(draft: Draft, names: Mapping[str, Any], versions: Sequence[Version]) -> Specs:
    """Find the transform that a draft names, with its filter, without running it. None is the default transform.

    A name is one of ``versions``, a callable in ``names``, or a dotted path. Raises :class:`TransformError` for an
    unknown name, and for a filter on several transforms, which have their own; :class:`ShippingError` for a function
    that cannot be sent.
    """
    found = _spec_of(draft, names, versions)
    if isinstance(found, TransformSpec):
        return replace(found, where=draft.where.strip() or None)
    if isinstance(found, tuple) and draft.where.strip():
        raise TransformError(f"{draft.text!r} have their own filters; leave this filter blank")
    return found


def _spec_of(draft: Draft, names: Mapping[str, Any], versions: Sequence[Version]) -> Specs:
    """Do the work of :func:`spec_of`, without the filter."""
    if draft.kind == "default":
        return None
    if draft.kind == "text":
        return TransformSpec("source", draft.text)
    name = draft.text.strip()
    for version in versions:
        if version.draft.kind == "name" and version.draft.text == name:
            return version.spec
    if callable(names.get(name)):
        return TransformSpec.draft(names[name])
    if "." in name.replace(":", ".") and all(part.isidentifier() for part in name.replace(":", ".").split(".")):
        return TransformSpec.draft(name)
    raise TransformError(
        f"the notebook has no function {name!r}; choose one, or give a dotted path such as package.module.function"
        if name
        else "no function is chosen; choose one of the notebook's, or give a dotted path"
    )


def likely_transforms(functions: Mapping[str, FunctionType]) -> list[str]:
    """The names of the functions that look like transforms: one argument, with the annotation or name of one."""
    return sorted(name for name, function in functions.items() if _looks_like_transform(function))


def functions_in(names: Mapping[str, Any]) -> dict[str, FunctionType]:
    """The public functions among a notebook's names."""
    return {name: value for name, value in tuple(names.items()) if isinstance(value, FunctionType) and name[:1] != "_"}


def _looks_like_transform(function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        return False
    if any(other.default is other.empty and other.kind not in variable for other in parameters[1:]):
        return False
    first = parameters[0]
    annotation = first.annotation
    if annotation is first.empty:
        return first.name == "graft_input"
    # Under `from __future__ import annotations` it is text, and the module may have any alias.
    written = annotation.strip("'\"") if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return str(written).rpartition(".")[2] == GraftTransformInput.__name__


def source_of(spec: Specs) -> str:
    """The source of a transform, or a comment with the reason why it is unavailable. Imports nothing."""
    if isinstance(spec, tuple):
        return "\n\n".join(f"{_comment(each.described)}\n{source_of(each)}" for each in spec)
    if spec is None:
        return _comment(f"The default transform.\n\n{inspect.getdoc(default_transform)}")
    if spec.kind == "source":
        return spec.text
    try:
        return inspect.getsource(_function_of(spec))
    except KeyError:
        why = "its module has not been imported in this notebook"
    except (OSError, TypeError, AttributeError) as error:
        why = str(error)
    return f"# The source of {spec.label} cannot be shown: {why}."


def _comment(text: str) -> str:
    """Format paragraphs and lists as wrapped Python comments."""
    lines: list[str] = []
    for paragraph in re.sub(r":\w+:`(\w+)`", r"\1", text).split("\n\n"):
        for item in re.split(r"\n(?=- )", paragraph):
            lines += textwrap.wrap(item, _COMMENT_WIDTH)
        lines.append("")
    return "\n".join(f"# {line}".rstrip() for line in lines[:-1])


def _function_of(spec: TransformSpec) -> Any:
    if spec.kind == "function":
        return spec.load()
    module, _, attribute = spec.text.replace(":", ".").rpartition(".")
    return getattr(sys.modules[module], attribute)
