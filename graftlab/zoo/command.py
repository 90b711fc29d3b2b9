"""``graftlab zoo``: a self-test that prints how many planted faults a verdict names on this machine."""

from __future__ import annotations

import argparse
import sys
import warnings

from graftlab.errors import GraftWarning
from graftlab.zoo import scoring
from graftlab.zoo.controls import CONTROLS
from graftlab.zoo.faults import FAULTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    areas = sorted({each.area for each in (*FAULTS, *CONTROLS)} | {each.regime for each in FAULTS})
    parser.add_argument("--only", metavar="AREA", choices=areas, help=f"one of {', '.join(areas)}")
    parser.add_argument("--no-explain", action="store_true", help="name without the swaps that tell the cause")


def run(arguments: argparse.Namespace) -> int:
    """Judge specimen by specimen, a line each, and then the score; 0 when nothing benign raised an alarm."""
    found = []
    warnings.simplefilter("ignore", GraftWarning)
    for each in scoring.score(arguments.only, explain=not arguments.no_explain):
        found.append(each)
        sys.stdout.write(_line(each) + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n" + scoring.summary(found) + "\n")
    return int(any(each.alarm or each.innocents for each in found))


def _line(each: scoring.Scored) -> str:
    mark = "exact" if each.exact and not each.alarm else "ALARM" if each.is_control else "WRONG"
    named = ", ".join(f"{group} ({label})" for group, label in each.labels.items()) or "nothing"
    truth = "" if each.exact else f"; its truth: {', '.join(sorted(each.specimen.truth)) or 'nothing'}"
    return f"{mark}  {each.specimen.area}: {each.specimen.name}: {named}{truth}"
