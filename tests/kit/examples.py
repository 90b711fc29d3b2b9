"""How many examples a property test tries: few in the suite, many under ``make fuzz``."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FUZZ_VARIABLE = "GRAFTLAB_FUZZ"


def factor() -> int:
    """By how much a property test tries more than in the suite."""
    return int(os.environ.get(FUZZ_VARIABLE, "1"))


def examples(usual: int, **more: Any) -> settings:
    """``@settings`` of a test that tries ``usual`` examples in the suite, in place of hypothesis's own number."""
    return settings(max_examples=usual * factor(), **more)
