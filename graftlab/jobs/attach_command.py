"""The command ``graftlab attach -- script.py args``: an unchanged script joins as a job."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from graftlab.config import PREFIX, GraftConfig
from graftlab.errors import ConfigError
from graftlab.jobs.attach import warn_never_joined
from graftlab.jobs.on_import import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is a module, not a file")
    parser.add_argument(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting, such as role=target; the environment's GRAFTLAB_<NAME> wins",
    )
    parser.add_argument("script", help="the file or module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")


def run(arguments: argparse.Namespace) -> int:
    """Run the script as ``python script.py`` would; it joins at its first tap."""
    try:
        for pair in arguments.set:
            # Checked first, so that the error names this command line.
            GraftConfig.from_kv_pairs([pair])
            name, _, text = pair.partition("=")
            os.environ.setdefault(f"{PREFIX}{name.upper()}", text)
        os.environ[f"{PREFIX}ENABLE"] = "1"
        GraftConfig.from_env().require_complete()
        if not arguments.as_module and not os.path.exists(arguments.script):
            raise ConfigError(f"{arguments.script} does not exist; use -m for a module")
    except ConfigError as error:
        # A mistake of the command line or the environment: a traceback would not help.
        sys.stderr.write(f"graftlab attach: {error}\n")
        return 2
    # Does nothing if the import has prepared it already.
    prepare()
    sys.argv = [arguments.script, *arguments.arguments]
    try:
        if arguments.as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.script)))
            runpy.run_path(arguments.script, run_name="__main__")
    finally:
        warn_never_joined(arguments.script)
    return 0
