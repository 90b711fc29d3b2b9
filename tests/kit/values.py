"""Values: what is handed out as one stays as it was made."""

from __future__ import annotations

import dataclasses

import pytest


def assert_values(*kinds: type) -> None:
    """No code can give a field of these classes another value."""
    for kind in kinds:
        made = object.__new__(kind)
        for field in dataclasses.fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(made, field.name, None)
