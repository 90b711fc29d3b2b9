"""Runs a script on a machine whose clock is wrong by these seconds, and is set by up to a day whenever it is read."""

import random
import runpy
import sys
import time

wrong, script, *arguments = sys.argv[1:]
chance, right = random.Random(wrong), time.time


def wrong_time() -> float:
    return right() + float(wrong) + chance.uniform(-86_400, 86_400)


time.time = wrong_time
time.time_ns = lambda: int(wrong_time() * 1e9)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
