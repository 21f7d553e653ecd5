"""GLM-4.5 and 4.6: grouped-query attention with partial rotary positions, sigmoid-routed and shared experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.models.names import ATTENTION_NAMES
from hybridrl.models.settings import Settings
from hybridrl.models.sigmoid_moe import MOE_NAMES, read_moe, tensors_with_prediction
from hybridrl.models.spec import ModelSpec
from hybridrl.models.weights import Role, Tensor

NAMES: Mapping[Role, str] = {**ATTENTION_NAMES, **MOE_NAMES}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """The model that the configuration describes; UnsupportedModelError lists what cannot be honoured."""
    settings = Settings(config, ("glm4_moe",))
    bias, qk_norm = settings.flag("attention_bias", False), settings.flag("use_qk_norm", False)
    common = settings.common(default_kv_heads=8, partial_rotary=0.5, norm_eps=1e-5)
    moe = read_moe(settings, common["num_layers"], groups=1, topk_groups=1, dense=1, scale=1.0)
    mtp_layers = settings.integer("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    settings.finish()
    return ModelSpec(
        **common,
        qkv_bias=bias,
        qk_norm=qk_norm,
        moe=moe,
        mtp_layers=mtp_layers,
        dtypes={Role.ROUTER_BIAS: "float32"},
    )


def tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """All tensors in layer order, prediction layers last."""
    return tensors_with_prediction(spec, NAMES)
