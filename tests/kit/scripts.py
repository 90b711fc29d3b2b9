"""Scripts that hold a session, in processes that tests may kill."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graftlab as gl
from kit import warm


@contextlib.contextmanager
def script(source: str, cwd: Path) -> Iterator[warm.Running]:
    """A script without a main guard, in a separate process group; its first line of output is yet to be read."""
    path = cwd / "script.py"
    path.write_text(textwrap.dedent(source))
    # The graftlab that is being tested, be it installed or not.
    roots = [str(Path(gl.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
    with warm.start([path], env, cwd=cwd, start_new_session=True, forkserver=True) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: warm.Running) -> Any:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line, f"the script ended: {process.stderr.read()}"
    return json.loads(line)
