"""What a notebook shows for a run: it never reads as success what is none."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import pytest
import torch

import graftlab as gl


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        yield session


def model(nan: bool) -> None:
    for layer in range(3):
        gl.tap("hidden", torch.ones(8), layer=layer)
    logits = torch.ones(64)
    if nan:
        logits[:12] = torch.nan
    gl.tap("logits", logits)


def shown(run: gl.Run) -> str:
    return html.unescape(re.sub("<[^>]*>", " ", run._repr_mimebundle_()["text/html"]))


def test_nans_on_one_side_are_what_the_summary_says_first(session: gl.Session) -> None:
    run = session.run(lambda: model(False), lambda: model(True))
    text = shown(run)
    assert "4 compared" in text
    told = text.index("non-finite values differ in 1 row, first at logits on target[0]: 12 of 64 elements")
    assert told < text.index("largest rel_l2 of what is finite 0.00e+00")


def test_without_nans_the_largest_difference_is_named(session: gl.Session) -> None:
    assert "largest rel_l2 0.00e+00 at hidden layer=0 on target[0]" in shown(
        session.run(lambda: model(False), lambda: model(False))
    )
