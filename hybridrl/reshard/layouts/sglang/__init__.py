"""SGLang's layout of a model's weights, from the model's dimensions and the engine's sizes alone. Pure data.

Facts are those of SGLang 0.5.23, unquantized, in the layout that its Triton and native backends read (backends that
shuffle expert weights after loading, and CPU packing, are not described). The absorbed projections of latent attention
are no part of it: hybridrl's engine has them as views of `kv_b_proj`.
"""

from hybridrl.reshard.layouts.sglang.layout import SGLangLayout
from hybridrl.reshard.layouts.sglang.sizes import RolloutSizes, argued_sizes

__all__ = ["RolloutSizes", "SGLangLayout", "argued_sizes"]
