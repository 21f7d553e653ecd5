"""The whole configuration: one dataclass a concern, a docstring under each field.

Types are strict (see `hybridrl.config.load`): text is no number, None only where a field says `| None`, unknown keys
are errors. Impossible combinations are found by `hybridrl.config.validate`.
"""

from dataclasses import dataclass, field

from hybridrl.config.sections.algorithm import AlgorithmConfig, CovarianceConfig, KlConfig, OverlongConfig
from hybridrl.config.sections.checkpoint import CheckpointConfig
from hybridrl.config.sections.correction import CorrectionConfig, LimitsConfig, MismatchConfig
from hybridrl.config.sections.critic import CriticConfig, CriticParallelConfig
from hybridrl.config.sections.data import DataConfig
from hybridrl.config.sections.evaluation import EvaluationConfig
from hybridrl.config.sections.memory import MemoryConfig
from hybridrl.config.sections.model import ModelConfig, ParallelConfig
from hybridrl.config.sections.optimizer import OptimizerConfig, WarmStartConfig
from hybridrl.config.sections.plan import PlanConfig
from hybridrl.config.sections.preference import PreferenceConfig, TeacherConfig
from hybridrl.config.sections.reshard import ReshardConfig
from hybridrl.config.sections.rewards import JudgeConfig, RewardsConfig
from hybridrl.config.sections.rollout import RolloutConfig, SGLangConfig
from hybridrl.config.sections.sampling import DynamicSamplingConfig
from hybridrl.config.sections.trainer import TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "CovarianceConfig",
    "CriticConfig",
    "CriticParallelConfig",
    "DataConfig",
    "DynamicSamplingConfig",
    "EvaluationConfig",
    "JudgeConfig",
    "KlConfig",
    "LimitsConfig",
    "MemoryConfig",
    "MismatchConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "ParallelConfig",
    "PlanConfig",
    "PreferenceConfig",
    "ReshardConfig",
    "RewardsConfig",
    "RolloutConfig",
    "SGLangConfig",
    "TeacherConfig",
    "TrainerConfig",
    "WarmStartConfig",
]


@dataclass(kw_only=True)
class Config:
    """Everything a run depends on."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
