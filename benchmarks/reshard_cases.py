"""The cases of `benchmarks/reshard.py`: models of some hundred megabytes, a training and an engine layout each."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.models.families import weight_map
from hybridrl.models.spec import ModelSpec, MoeSpec
from hybridrl.parallel.sizes import ParallelSizes
from hybridrl.reshard.layout import Layout
from hybridrl.reshard.layouts.megatron import MegatronLayout
from hybridrl.reshard.layouts.sglang import RolloutSizes, SGLangLayout
from hybridrl.reshard.layouts.transformers import TransformersLayout

MIB = 2**20

MOE = ModelSpec(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=256,
    vocab_size=4096,
    tied=False,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=4096,
    qk_norm=True,
    dtype="bfloat16",
    moe=MoeSpec(num_experts=64, top_k=8, ffn_size=256, norm_topk_prob=True, layers=(True,) * 4),
)
"""About 218 MB; proportions of experts to the rest as in Qwen3-30B-A3B."""
DENSE = replace(MOE, family="qwen3", moe=None, num_layers=12, hidden_size=1024, num_heads=16, ffn_size=2048)
"""About 220 MB."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and where it is before and after."""

    name: str
    spec: ModelSpec = MOE
    train: Mapping[str, int] = field(default_factory=dict)
    """Sizes of Megatron's layout, over `train_world` ranks."""
    rollout: Mapping[str, int] | None = None
    """Sizes of SGLang's layout, over `rollout_ranks`; None for transformers' (whole models)."""
    retrain: Mapping[str, int] | None = None
    """Sizes of Megatron's layout, if that is the destination instead of an engine."""
    engine_order: bool = False
    """Trained in the engine's order, so that the engine shares storage with it where the sizes are equal."""
    train_world: int = 4
    rollout_ranks: tuple[int, ...] = (0, 1, 2, 3)
    engine_dtype: str | None = None
    bucket_bytes: int = 64 * MIB

    def layouts(self) -> tuple[Layout, Layout]:
        """Source and destination."""
        weights = weight_map(self.spec)
        sizes = ParallelSizes(world=self.train_world, **self.train)
        source = MegatronLayout(weights, sizes, vocab_multiple=64, engine_order=self.engine_order)
        if self.retrain is not None:
            sizes = ParallelSizes(world=self.train_world, **self.retrain)
            return source, MegatronLayout(weights, sizes, vocab_multiple=64)
        dtype = self.engine_dtype or self.spec.dtype
        if self.rollout is None:
            return source, TransformersLayout(weights, self.rollout_ranks, dtype=dtype)
        engine: dict[str, Any] = {"world": len(self.rollout_ranks), **self.rollout}
        return source, SGLangLayout(weights, RolloutSizes(**engine), ranks=self.rollout_ranks, dtype=dtype)

    def shrunk(self) -> "Case":
        """The same case with a model of about a megabyte."""
        moe = self.spec.moe and replace(self.spec.moe, num_experts=8, ffn_size=32)
        spec = replace(self.spec, hidden_size=64, head_dim=8, ffn_size=64, vocab_size=256, moe=moe)
        return replace(self, spec=spec, bucket_bytes=max(self.bucket_bytes // 512, 2**14))


CASES = (
    Case(name="headline", train={"tp": 2, "ep": 4}, rollout={"tp": 4, "ep": 4}),
    Case(name="headline, small bucket", train={"tp": 2, "ep": 4}, rollout={"tp": 4, "ep": 4}, bucket_bytes=MIB // 4),
    Case(name="equal_layouts", train={"tp": 4, "ep": 4}, rollout={"tp": 4, "ep": 4}, engine_order=True),
    Case(name="experts to tensor shards", train={"tp": 2, "ep": 4}, rollout={"tp": 4}),
    Case(name="experts to attention replicas", train={"tp": 4, "ep": 4}, rollout={"tp": 4, "dp": 2, "ep": 4}),
    Case(name="pipeline to one engine", train={"tp": 2, "pp": 2, "ep": 2}, rollout={"tp": 4, "ep": 4}),
    Case(name="pipeline to two engines", train={"pp": 4}, rollout={"tp": 2, "ep": 2}),
    Case(
        name="fp32 to bf16",
        spec=replace(MOE, dtype="float32", num_layers=2),
        train={"ep": 4},
        rollout={"tp": 4},
        engine_dtype="bfloat16",
    ),
    Case(name="dense", spec=DENSE, train={"tp": 4}, rollout={"tp": 2}),
    Case(name="dense, pipeline", spec=DENSE, train={"tp": 2, "pp": 2}, rollout={"tp": 4}),
    Case(
        name="to other ranks", train={"tp": 2, "ep": 2}, train_world=2, rollout={"tp": 2, "ep": 2}, rollout_ranks=(2, 3)
    ),
    Case(name="dense, Megatron to Megatron", spec=replace(DENSE, num_layers=6), train={"tp": 2}, retrain={"tp": 4}),
    Case(name="to whole models", spec=replace(MOE, num_layers=2), train={"tp": 2, "ep": 4}),
)
SMOKE = (
    "headline",
    "headline, small bucket",
    "equal_layouts",
    "pipeline to two engines",
    "to other ranks",
    "dense, Megatron to Megatron",
)
"""Cases of `--smoke`, shrunk."""
WORLD = 4
