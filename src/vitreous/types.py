"""Tensor types; each axis has the same letter everywhere.

B images   L layers   H attention heads   N queries   M keys   d width of a head   D width of a token
h w patch grid   Y X pixels   C outputs
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

Extent = tuple[int, ...]  # (Y, X) of images; (T, Y, X) of videos
Images = Float[Tensor, "B *frames channels Y X"]  # with frames: videos
Map = Float[Tensor, "B *frames rows columns"]  # patches or pixels; with frames, of tubelets
Tokens = Float[Tensor, "B N D"]
Heads = Float[Tensor, "B H N d"]
Keys = Float[Tensor, "B H M d"]
Weights = Float[Tensor, "B H N M"]
Row = Float[Tensor, "B M"]
HeadRows = Float[Tensor, "B H M"]
Output = Float[Tensor, "B *outputs"]  # one vector per image, or another of `vitreous.models.output.Form`
Scores = Float[Tensor, "B"]
Box = tuple[float, float, float, float]  # top, left, bottom, right, as shares of the height and width of an image
