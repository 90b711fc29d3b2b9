"""``python -m benchmarks``: measure, print one table, and write the results as JSON."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import machine, table
from benchmarks.lines import Line, Setup

# In the order of the table; each is a module with a function ``measure``.
SUBJECTS = (
    "grafts",
    "diff_statistics",
    "taps",
    "minilm",
    "compiled",
    "matching",
    "launch",
    "edit",
    "rows",
    "dumps",
    "recordings",
    "memory",
    "steps",
    "graphs",
    "jobs",
    "tcp",
    "scale",
    "verdicts",
    "cuda",
    "growth",
)
# Minutes in themselves, and gigabytes of memory: measured only where they are named.
_NAMED_ONLY = frozenset({"growth"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 1 when a subject could not be measured, 2 for wrong options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=SUBJECTS,
        default=[subject for subject in SUBJECTS if subject not in _NAMED_ONLY],
        help=f"of {', '.join(SUBJECTS)}; by default all but {', '.join(sorted(_NAMED_ONLY))}",
    )
    parser.add_argument("--quick", action="store_true", help="few repeats, to test the benchmark itself")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/speed.md")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"), help="the JSON file (%(default)s)")
    options = parser.parse_args(argv)
    facts = machine.facts()
    read, copied = machine.bandwidths(3 if options.quick else 9)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="graftlab-benchmarks-") as folder:
        setup = Setup(read.median, copied.median, Path(folder), options.quick)
        for subject in SUBJECTS:
            if subject in options.only:
                sys.stderr.write(f"measuring {subject} ...\n")
                lines += _measured(subject, setup)
    facts.update(read_bandwidth=asdict(read), copy_bandwidth=asdict(copied), quick=options.quick)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(table.to_json(facts, lines))
    render = table.markdown if options.markdown else table.plain
    sys.stdout.write(f"{render(facts, lines)}\n")
    sys.stderr.write(f"written to {options.out}\n")
    return 1 if any(line.failed for line in lines) else 0


def _measured(subject: str, setup: Setup) -> list[Line]:
    try:
        lines: list[Line] = importlib.import_module(f"benchmarks.{subject}").measure(setup)
    except Exception as error:
        # Do not lose the figures of the other subjects, which take minutes.
        traceback.print_exc()
        return [Line(subject, subject, note=f"failed: {type(error).__name__}: {error}", failed=True)]
    return lines


if __name__ == "__main__":
    sys.exit(main())
