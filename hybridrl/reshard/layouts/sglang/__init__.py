"""SGLang's layout of a model's weights, from the model's dimensions and the engine's sizes alone. Pure data.

Facts are those of SGLang 0.5.23, unquantized, in the layout that its Triton and native backends read (backends that
shuffle expert weights after loading, and CPU packing, are not described).
"""

from hybridrl.reshard.layouts.sglang.layout import SGLangLayout
from hybridrl.reshard.layouts.sglang.sizes import RolloutSizes

__all__ = ["RolloutSizes", "SGLangLayout"]
