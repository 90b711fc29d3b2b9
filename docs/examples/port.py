"""The same encoder, rewritten by hand; something in it differs."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(64, 4, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm1, self.norm2 = nn.LayerNorm(64, eps=eps), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.self_attn(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(0.01 if number == 3 else 1e-5) for number in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128, batch_first=True)
weights = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False).state_dict()
encoder = Encoder().eval()
encoder.load_state_dict(weights)
torch.manual_seed(1)
batch = torch.randn(2, 16, 64)

with torch.no_grad():
    print(encoder(batch).mean(dim=(1, 2)))
