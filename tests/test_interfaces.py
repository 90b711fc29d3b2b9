"""What notebooks, scripts and other releases rely on: signatures, options, messages between processes, file formats.

``tests/interfaces`` has them as they were last changed on purpose; ``python tests/test_interfaces.py``, with the
package and ``tests`` on the path, writes them anew. A change of what processes send each other needs another wire
version once the present one has been released, and a change of a file's format another number of that format.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit.command_options import options_of_commands

from graftlab.base.wire import WIRE_VERSION
from graftlab.recordings.file_format import FORMAT

PACKAGE = Path(__file__).resolve().parents[1] / "graftlab"
KEPT = Path(__file__).with_name("interfaces")
PUBLIC = (
    "graftlab",
    *(f"graftlab.{name}" for name in ("engine", "graphs", "layouts", "models", "plots", "requests", "transforms")),
)


def signatures() -> Iterator[str]:
    """The parameters of public functions, classes and methods, with their defaults."""
    for module in map(importlib.import_module, PUBLIC):
        for name in sorted(module.__all__):
            value, path = getattr(module, name), f"{module.__name__}.{name}"
            # Other public names are modules, constants and types of callables.
            if not inspect.isclass(value):
                yield f"{path}{_parameters(value)}" if inspect.isroutine(value) else path
                continue
            yield f"{path}{_parameters(value) if _is_ours(value.__init__) else ''}"
            for attribute in sorted(each for each in dir(value) if not each.startswith("_")):
                function = inspect.getattr_static(value, attribute)
                function = getattr(function, "__func__", function)
                if _is_ours(function):
                    yield f"{path}.{attribute}{_parameters(function)}"


def _is_ours(function: Any) -> bool:
    return inspect.isfunction(function) and function.__module__.startswith("graftlab")


def _parameters(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    # A function as a default has its address in its text.
    return re.sub(r" at 0x\w+", "", text)


def options() -> Iterator[str]:
    """The options and arguments of all commands."""
    for command, action in options_of_commands():
        if not isinstance(action, argparse._HelpAction):
            kind = type(action).__name__.strip("_").removesuffix("Action").lower()
            choices = f" of {', '.join(map(str, action.choices))}" if action.choices else ""
            count = "" if action.nargs is None else f" nargs={action.nargs}"
            required = " required" if action.required else ""
            flags = ", ".join(action.option_strings) or action.dest
            yield f"{command} {flags}: {kind}{choices}{count}{required}, {action.default!r}"


def messages() -> Iterator[str]:
    """The messages between processes, and what files have of the same kind."""
    yield f"wire version {WIRE_VERSION}, recordings of format {FORMAT}"
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"\((msgspec\.Struct|\w*Message), ", path.read_text(encoding="utf-8")):
            importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
    for kind in sorted(_below(msgspec.Struct), key=lambda each: (each.__module__, each.__qualname__)):
        config = kind.__struct_config__
        known = " closed" if config.forbid_unknown_fields else ""
        tag = "" if config.tag is None else f" {config.tag}"
        yield f"{kind.__module__}.{kind.__qualname__}{tag}{known}{' in order' if config.array_like else ''}"
        for field in msgspec.structs.fields(kind):
            made = getattr(field.default_factory, "__name__", "")
            default = f" = {made}()" if made else "" if field.required else f" = {field.default!r}"
            annotation = _annotation(kind, field.name)
            yield f"    {field.encode_name}: {annotation}{default}"


def _annotation(kind: type, name: str) -> str:
    return str(
        next(each.__annotations__[name] for each in kind.__mro__ if name in vars(each).get("__annotations__", ()))
    )


def _below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        if each.__module__.startswith("graftlab."):
            yield each
            yield from _below(each)


INTERFACES = {"signatures": signatures, "options": options, "messages": messages}


@pytest.mark.parametrize("name", INTERFACES)
def test_what_others_rely_on_changes_on_purpose_alone(name: str) -> None:
    before = (KEPT / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    now = list(INTERFACES[name]())
    assert [line for line in now if line not in before] == []
    assert [line for line in before if line not in now] == []
    assert now == before


if __name__ == "__main__":
    for file, lines in INTERFACES.items():
        (KEPT / f"{file}.txt").write_text("\n".join([*lines(), ""]), encoding="utf-8")
