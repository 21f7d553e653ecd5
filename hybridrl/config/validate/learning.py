"""The algorithm, its rewards and its optimizer: settings that learn nothing, contradict or have no effect."""

from collections.abc import Iterator

from hybridrl.config.kinds import is_supervised
from hybridrl.config.schema import Config
from hybridrl.config.validate.algorithm import algorithm_problems, updates_a_step


def learning_problems(config: Config) -> Iterator[str]:
    """Mistakes in `algorithm`, `rewards`, `optimizer` and `warm_start`."""
    yield from _supervised(config) if is_supervised(config) else _reinforced(config)
    yield from _optimizer(config)


def _supervised(config: Config) -> Iterator[str]:
    name = config.algorithm.name
    if config.algorithm.kl.where != "none":
        where = config.algorithm.kl.where
        yield f"algorithm.kl.where={where} with algorithm.name={name}: there is no policy to hold back"
    if config.warm_start.steps:
        yield f"warm_start.steps={config.warm_start.steps} with algorithm.name={name}: the whole run is supervised"


def _reinforced(config: Config) -> Iterator[str]:
    rewards = config.rewards
    yield from algorithm_problems(config)
    if not rewards.judges and config.algorithm.name != "distill":
        yield "rewards.judges is empty: without a judge every reward is 0; name one, as rewards.judges=[{name: exact}]"
    elif rewards.judges and all(judge.weight == 0 for judge in rewards.judges):
        yield "rewards.judges: every weight is 0, so every reward is 0"
    if rewards.batch_timeout_s < rewards.timeout_s:
        yield (
            f"rewards.batch_timeout_s={rewards.batch_timeout_s} is less than rewards.timeout_s={rewards.timeout_s}: "
            "a step's time must hold one sample's"
        )


def _optimizer(config: Config) -> Iterator[str]:
    optimizer, trainer = config.optimizer, config.trainer
    updates = trainer.steps * updates_a_step(config)
    if optimizer.name == "sgd" and optimizer.distributed:
        yield (
            "optimizer.name=sgd with optimizer.distributed=true: Megatron's distributed optimizer shards Adam's state "
            "only; set optimizer.distributed=false (optimizer=sgd sets both)"
        )
    if optimizer.name == "adam" and optimizer.momentum:
        yield f"optimizer.momentum={optimizer.momentum} has no effect with optimizer.name=adam; use optimizer.beta1"
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr={optimizer.min_lr} is more than optimizer.lr={optimizer.lr}"
    elif optimizer.min_lr and optimizer.schedule == "constant":
        yield f"optimizer.min_lr={optimizer.min_lr} has no effect with optimizer.schedule=constant"
    if optimizer.warmup_steps > updates:
        yield (
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than the {updates} updates of trainer.steps="
            f"{trainer.steps}: lr is never reached"
        )
