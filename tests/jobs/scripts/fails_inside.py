"""A job of either side in which graftlab itself fails at the second step, from an unforeseen cause."""

import torch

import graftlab as gl
from graftlab.grafting import grafter, receive_pipeline


def broken(*_: object) -> None:
    raise RuntimeError("planted in graftlab")


for number in range(4):
    if number == 1:
        receive_pipeline.ReceivePipeline.take = grafter.Grafter._publish = broken
    gl.tap("hidden", torch.arange(12.0).reshape(2, 6) + number, layer=0)
    gl.step()
print("done")
