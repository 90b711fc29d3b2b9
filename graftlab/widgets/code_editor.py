"""Makes the best code editor there is: CodeMirror where its script is, a plain text area where it is not."""

from __future__ import annotations

import importlib

from graftlab.widgets.code_mirror_editor import CodeMirrorEditor
from graftlab.widgets.editor import CodeEditor
from graftlab.widgets.text_area_editor import TextareaEditor


def code_editor(
    value: str = "", *, language: str = "python", lines: int = 16, label: str = "", plain: bool = False
) -> CodeEditor:
    """The best editor there is: CodeMirror, or, where that is missing, a text area that says why.

    ``plain=True`` asks for the text area, for a JupyterLab that runs in another environment than the kernel and
    has no anywidget there, which cannot be seen from the kernel. The rest is :class:`CodeEditor`'s.
    """
    if plain:
        return TextareaEditor(value, language=language, lines=lines, label=label)
    if reason := _missing():
        return TextareaEditor(value, language=language, lines=lines, label=label, reason=f"Plain text area: {reason}")
    return CodeMirrorEditor(value, language=language, lines=lines, label=label)


def _missing() -> str:
    """What CodeMirror lacks here and how to get it; empty if nothing."""
    try:
        code_mirror = importlib.import_module("graftlab.widgets.code_mirror")
    except ImportError as error:
        return f"anywidget cannot be imported ({error}); pip install anywidget brings it."
    if not code_mirror.BUNDLE.is_file():
        return "the code editor was not built, which takes npm (in graftlab's repository: python hatch_build.py)."
    return ""
