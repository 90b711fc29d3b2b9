"""How many examples a property test tries: fewer in ``make test-fast`` than in the suite, more in ``make fuzz``."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

FUZZ_VARIABLE = "GRAFTLAB_FUZZ"


def factor() -> float:
    """How many times as many examples a property test tries as in ``make test``."""
    return float(os.environ.get(FUZZ_VARIABLE, "1"))


def scaled(usual: int) -> int:
    return max(round(usual * factor()), 1)


def examples(usual: int, **more: Any) -> settings:
    """``@settings`` of a test that tries ``usual`` examples in the suite, in place of hypothesis's own number."""
    return settings(max_examples=scaled(usual), **more)
