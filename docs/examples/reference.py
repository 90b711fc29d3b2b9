"""An encoder that scores a batch of sentences."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128, batch_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False).eval()
torch.manual_seed(1)
batch = torch.randn(2, 16, 64)

with torch.no_grad():
    print(encoder(batch).mean(dim=(1, 2)))
