"""The order of taps over runs, on real ranks: where one side alone has taps, whichever run it is."""

from __future__ import annotations

import pytest
import torch

import graftlab as gl
from graftlab.verdict.order import group

pytestmark = pytest.mark.ranks


def model(both: bool) -> None:
    for layer in range(6):
        gl.tap("a", torch.ones(2), layer=layer)
        if both:
            gl.tap("only_baseline", torch.ones(2), layer=layer)


def test_one_sided_taps_keep_their_place_in_execution_order() -> None:
    with gl.launch(1, 1) as session:
        for _ in range(4):
            run = session.run(lambda: model(True), lambda: model(False))
            names = [key[0] for key in group(run.frame, "rel_l2").keys]
            assert names == ["a", "only_baseline"] * 6
        assert run.frame["order"].max() <= 12, "counted anew in each step"
