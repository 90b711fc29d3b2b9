"""Executes notebooks/ray.ipynb, which starts a cluster, and checks what it shows.

Run by tests/remote/test_ray_soak.py, in separate namespaces for network and processes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "ray.ipynb"


def main(folder: Path) -> None:
    document = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(document, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    outputs = [output for cell in document.cells for output in cell.get("outputs", [])]
    said = "\n".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs)
    assert "processors: 3.0" in said, said
    assert len(re.findall(r"graftlab (?:baseline|target) +[01] +127\.0\.0\.[12]", said)) == 3, said
    assert "block is computed differently in layer 1 of 0-2" in said, said
    verdicts = re.findall(r"<Verdict of \d+ runs: (.*)>", said)
    assert verdicts == ["block", "nothing named"], said
    assert "placement groups: 0" in said, said
    assert "ranks that still run: []" in said, said
    left = [
        process.info["name"]
        for process in psutil.process_iter(["name", "status"])
        if process.info["status"] != "zombie"
    ]
    assert not {"raylet", "gcs_server"} & set(left), left


if __name__ == "__main__":
    main(Path(sys.argv[1]))
