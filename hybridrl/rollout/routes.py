"""The experts that tokens were routed to, as samples carry them. Pure: numpy alone.

One array a sample, [tokens, layers, top-k]: row i is of the forward pass that token i of prompt and response went
through. The last token went through none, so there is one row less than there are tokens; the last `len(response_ids)`
rows are those of the passes that drew the response.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybridrl.models.spec import MoeSpec

NO_EXPERT = -1
"""What dense layers hold: no expert has this id."""

Routes: TypeAlias = NDArray[np.signedinteger]
"""int8 or int16 [tokens, layers, top-k]."""


def dtype_for(num_experts: int) -> np.dtype[np.signedinteger]:
    """The narrowest type that holds every expert's id, and `NO_EXPERT`."""
    return np.dtype(np.int8 if num_experts <= 1 << 7 else np.int16)


def pack(parts: Sequence[NDArray[np.integer]], moe: MoeSpec) -> Routes:
    """The rows of `parts`, each [tokens, layers, top-k], one after another, and `NO_EXPERT` in dense layers.

    Raises ValueError for parts of another shape, and for ids in MoE layers that are none of an expert.
    """
    expected = (len(moe.layers), moe.top_k)
    wrong = {part.shape[1:] for part in parts} - {expected}
    if wrong:
        raise ValueError(f"routed experts came as [tokens, {wrong.pop()}]; expected layers and top-k {expected}")
    ids = np.concatenate(parts) if parts else np.empty((0, *expected), np.int64)
    packed: Routes = np.full(ids.shape, NO_EXPERT, dtype_for(moe.num_experts))
    layers = np.flatnonzero(moe.layers)
    chosen = ids[:, layers]
    strange = (chosen < 0) | (chosen >= moe.num_experts)
    if strange.any():
        row, layer, choice = (int(i[0]) for i in strange.nonzero())
        raise ValueError(
            f"token {row} of prompt and response, layer {int(layers[layer])}: routed to expert "
            f"{int(chosen[row, layer, choice])}; expected 0 to {moe.num_experts - 1}"
        )
    packed[:, layers] = chosen
    return packed
