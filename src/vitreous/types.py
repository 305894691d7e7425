"""One letter per axis, everywhere.

B images   L layers   H heads   N queries   M keys   d head width   D width   h w patch grid   Y X pixels   C outputs
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

Images = Float[Tensor, "B 3 Y X"]
Map = Float[Tensor, "B rows columns"]  # patches or pixels
Tokens = Float[Tensor, "B N D"]
Heads = Float[Tensor, "B H N d"]
Keys = Float[Tensor, "B H M d"]
Weights = Float[Tensor, "B H N M"]
Row = Float[Tensor, "B M"]
HeadRows = Float[Tensor, "B H M"]
Output = Float[Tensor, "B C"]
Scores = Float[Tensor, "B"]
