"""The baseline's job: the whole tensor, in a script that calls its module `trusted_model`."""

import sys

import torch

import graftlab as gl

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 3


class Reference:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            x = gl.tap("hidden", x * 2.0, layer=layer)
        return gl.tap("logits", x.sum(-1))


for number in range(steps):
    Reference().forward(torch.arange(12.0).reshape(2, 6) + number)
    gl.step()
print("done", gl.here() is not None)
