"""An engine that carries calls of SGLang's dumper, and knows nothing of graftlab."""

import os

import torch
from sglang.srt.debug_utils.dumper import dumper


class Layer:
    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id

    @dumper.ctx(lambda self: {"layer_id": self.layer_id})
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (0.5 if os.environ["DUMPER_GRAFTER_ROLE"] == "target" and self.layer_id == 1 else 0.0)
        dumper.dump("hidden", x, dims="b h", grafter_extras={"phase": "prefill"})
        return x


x = torch.ones(2, 4)
for _ in range(2):
    for layer_id in range(2):
        x = Layer(layer_id).forward(x)
    dumper.step()
print("sum", x.sum().item())
