"""The critic's view of a run's configuration."""

from dataclasses import replace

from hybridrl.config.schema import Config


def critic_config(config: Config) -> Config:
    """The run's configuration as the critic has it: its own learning rate and layout, all else the policy's."""
    critic, policy = config.critic, config.parallel
    optimizer = replace(config.optimizer, lr=critic.lr, min_lr=critic.min_lr, warmup_steps=critic.lr_warmup_steps)
    sizes = {name: size for name, size in vars(critic.parallel).items() if size is not None}
    parallel = replace(policy, **sizes)
    if "tp" in sizes:
        parallel = replace(parallel, sequence_parallel=None)
    if "pp" in sizes:  # the policy's cuts are not the critic's
        parallel = replace(parallel, vpp=1, first_stage_layers=None, last_stage_layers=None)
    return replace(config, optimizer=optimizer, parallel=parallel)
