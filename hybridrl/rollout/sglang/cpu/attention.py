"""SGLang's native attention where it has no answer: latent attention (MLA), and padding of data-parallel attention.

SGLang knows two ways to compute latent attention: absorbed, over the cached latents, and with keys and values of full
size, which its native operations cannot be handed. Here the absorbed way takes every pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridrl.rollout.sglang import internals as sg
from hybridrl.rollout.sglang.replaced import replaced

_scaled = sg.rotary_factory.get_rope_cpu


def rope(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool,
    rope_scaling: dict[str, Any] | None,
    dtype: Any,
    partial_rotary_factor: float,
    device: str | None,
) -> Any:
    """Rotary embeddings. SGLang's own for latent attention on a CPU know YaRN's scaling alone; its general ones take
    what has none."""
    common = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    return sg.rotary_factory.get_rope(*common) if rope_scaling is None else _scaled(*common, device)


@contextmanager
def served() -> Iterator[None]:
    """While a scheduler is built, models of latent attention can be. What passes ask for stays in place afterwards."""
    sg.AttentionBackendRegistry.register("torch_native", sg.dispatch_absorbed)
    # rows that pad a pass to the length of another rank's attend to one token, whatever it is: to none would be NaN
    sg.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1
    with replaced(sg.rotary_factory, get_rope_cpu=rope):
        yield
