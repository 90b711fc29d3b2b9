"""What outputs use of the notebook that shows them: links that open a file in JupyterLab, and widgets."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

show_canvas: Callable[[Any, Any], None] | None = None
"""Displays a figure's interactive canvas, given the figure and the canvas; set where widgets are known.

It raises NotImplementedError where no front end could show it.
"""

# The command of JupyterLab behind a notebook's relative links. It works in widgets too, where such a link does not.
_OPEN = "rendermime:handle-local-link"
_STYLE = "background:none;border:0;padding:0;font:inherit;color:inherit;text-decoration:underline;cursor:pointer"


def file_link(file: str, text: str) -> str:
    """Return HTML of a text that opens a file, in a kernel of a Jupyter server whose folder has that file.

    Elsewhere, such as in VS Code, in a script or for a file of another folder, it is the text alone.
    """
    path = _path_on_server(file)
    if path is None:
        return html.escape(text)
    arguments = html.escape(json.dumps({"path": path}), quote=True)
    return (
        f'<button type="button" title="open this file" style="{_STYLE}" data-commandlinker-command="{_OPEN}" '
        f'data-commandlinker-args="{arguments}">{html.escape(text)}</button>'
    )


def _path_on_server(file: str) -> str | None:
    """Return a file's path as the Jupyter server of this kernel names it; None if there is none."""
    root = _server_folder()
    if root is None or not os.path.isfile(file):
        return None
    real = Path(file).resolve()
    # The server hides these.
    if not real.is_relative_to(root) or any(part.startswith(".") for part in real.relative_to(root).parts):
        return None
    return real.relative_to(root).as_posix()


def _server_folder() -> Path | None:
    parent = os.environ.get("JPY_PARENT_PID", "")
    if not parent.isdecimal():
        return None
    from jupyter_core.paths import jupyter_runtime_dir

    # Where a server describes itself, by its process.
    try:
        described = json.loads((Path(jupyter_runtime_dir()) / f"jpserver-{parent}.json").read_text(encoding="utf-8"))
        return Path(described["root_dir"]).resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None
