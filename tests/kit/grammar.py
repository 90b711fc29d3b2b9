"""Leaves out a grammar that no test needs: jsonschema compiles it for one of its formats, when nbformat or JupyterLab
are imported, which takes a second and a half of each process.
"""

from __future__ import annotations

import sys
from typing import Any


def leave_out() -> None:
    """Let jsonschema find no package that checks internationalised addresses, as without its extras."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("rfc3987_syntax", None)
