"""The transformer with multimodal rotary positions: where an image's patches stand in time, height and width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from graftlab.models.transformer import ModelConfig, Transformer


class MultimodalTransformer(Transformer):
    """`Transformer` whose tokens have three positions each: temporal, height, width (M-RoPE, Qwen2-VL, 2024).

    `sections` says how many of the head's D/2 rotation planes turn by each of them. Tokens `image_token` of a prompt
    are patches of an image, row by row, `image_width` to a row. ``positions`` of the forward are ``[3, B, T]``; where
    all three rows are alike, the model is ``Transformer(config, seed)``.

    Raises `ValueError` for sections that are not the head's, a token outside the vocabulary and a width below 1.
    """

    _position_rows: ClassVar[tuple[int, ...]] = (3,)

    def __init__(
        self, config: ModelConfig, seed: int = 0, *, sections: Sequence[int], image_token: int, image_width: int
    ) -> None:
        planes = config.head_dim // 2
        if len(sections) != 3 or min(sections) < 0 or sum(sections) != planes:
            raise ValueError(
                f"sections={tuple(sections)} must be three counts, for time, height and width, that add up to half "
                f"of head_dim: {planes}"
            )
        if not 0 <= image_token < config.vocab_size:
            raise ValueError(f"image_token={image_token} is not in the vocabulary of {config.vocab_size}")
        if image_width < 1:
            raise ValueError(f"image_width must be at least 1, got {image_width}")
        super().__init__(config, seed)
        self.sections, self.image_token, self.image_width = tuple(sections), image_token, image_width

    def mrope_positions(self, prompt: Sequence[int], count: int) -> Tensor:
        """Positions ``[3, count]`` (int64, on the CPU) of a request's first tokens: its prompt, then its output.

        Text has one position for all three. The patches of an image share the temporal one, and what follows an image
        stands after its largest. All output is text, whatever its tokens are.
        """
        found: list[tuple[int, int, int]] = []
        following = patches = 0
        for token in prompt[:count]:
            if token == self.image_token:
                row, column = divmod(patches, self.image_width)
                found.append((following, following + row, following + column))
                patches += 1
            else:
                following, patches = following + self._extent(patches), 0
                found.append((following, following, following))
                following += 1
        following += self._extent(patches)
        found += [(place, place, place) for place in range(following, following + count - len(found))]
        return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(-1, 3).T.contiguous()

    def _extent(self, patches: int) -> int:
        """Return the positions that an image of this many patches takes: the larger of its rows and its columns."""
        return max(-(-patches // self.image_width), min(patches, self.image_width))

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super()._angles(positions, dtype)
        return self._mixed(cos), self._mixed(sin)

    def _mixed(self, angles: Tensor) -> Tensor:
        """``[B, T, 1, D/2]`` of ``[3, B, T, 1, D/2]``: each section from the row of its position."""
        return torch.cat(
            [part[row] for row, part in enumerate(torch.split(angles, list(self.sections), dim=-1))], dim=-1
        )
