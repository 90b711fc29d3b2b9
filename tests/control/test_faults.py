"""What goes wrong on the ranks, on the disk or in the notebook: it is told at once, and costs no more than itself."""

from __future__ import annotations

import pytest
import torch

import graftlab as gl

pytestmark = pytest.mark.ranks


def test_an_evaluation_in_inference_mode_leaves_later_taps_alone() -> None:
    def run(inference: bool) -> None:
        with torch.inference_mode(inference):
            gl.tap("a", torch.ones(3))

    with gl.launch(1, 1) as session:
        for inference in (True, False):
            frame = session.run(run, run, args=(inference,)).frame
            assert frame[["status", "rel_l2"]].values.tolist() == [["compared", 0.0]]
