"""Batch arithmetic: what prompts, groups, mini-batches and ranks mean together."""

from dataclasses import dataclass

from hybridrl.config.kinds import samples_per_row
from hybridrl.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class BatchArithmetic:
    """A step in numbers. The quotients are exact only where `problems` is empty."""

    prompts: int
    """Prompts a step (supervised: examples a step)."""
    n: int
    """Samples a prompt."""
    mini_batch_prompts: int
    """Prompts an update."""
    dp: int
    """Data-parallel ranks."""
    epochs: int = 1
    """Passes over a step's samples."""

    @property
    def samples(self) -> int:
        """Samples a step."""
        return self.prompts * self.n

    @property
    def updates(self) -> int:
        """Optimizer updates a step."""
        return self.prompts // self.mini_batch_prompts * self.epochs

    @property
    def samples_per_update(self) -> int:
        return self.mini_batch_prompts * self.n

    @property
    def samples_per_rank(self) -> int:
        """Samples of one data-parallel rank in one update."""
        return self.samples_per_update // self.dp

    @property
    def problems(self) -> list[str]:
        """Divisions that leave a remainder, each with its numbers."""
        found = []
        if self.mini_batch_prompts > self.prompts:
            found.append(
                f"trainer.mini_batch_prompts={self.mini_batch_prompts} is more than "
                f"trainer.prompts_per_step={self.prompts}: no update would ever be full"
            )
        elif self.prompts % self.mini_batch_prompts:
            found.append(
                f"trainer.prompts_per_step={self.prompts} is not a multiple of "
                f"trainer.mini_batch_prompts={self.mini_batch_prompts} "
                f"({self.prompts % self.mini_batch_prompts} prompts left over)"
            )
        if self.samples_per_update % self.dp:
            found.append(
                f"an update has {self.samples_per_update} samples (trainer.mini_batch_prompts="
                f"{self.mini_batch_prompts} · rollout.n={self.n}), not a multiple of the {self.dp} data-parallel ranks"
            )
        return found

    def __str__(self) -> str:
        rows = [
            ("prompts a step", self.prompts),
            ("samples a prompt", self.n),
            ("samples a step", self.samples),
            ("prompts an update", self.mini_batch_prompts),
            *([("passes a step", self.epochs)] if self.epochs > 1 else []),
            ("updates a step", self.updates),
            ("samples an update", self.samples_per_update),
            ("data-parallel ranks", self.dp),
            ("samples a rank an update", self.samples_per_rank),
        ]
        return "\n".join(f"{name:<26}{value:>8}" for name, value in rows)


def batch_arithmetic(config: Config, world: int) -> BatchArithmetic:
    """The numbers of a step on `world` ranks; a supervised step has one sample an example, two a pair.

    Raises ValueError where a size is below 1 or TP·CP·PP is more than the world.
    """
    parallel, trainer = config.parallel, config.trainer
    model_ranks = parallel.tp * parallel.cp * parallel.pp
    mini = trainer.prompts_per_step if trainer.mini_batch_prompts is None else trainer.mini_batch_prompts
    sizes = {"world": world, "tp·cp·pp": model_ranks, "prompts_per_step": trainer.prompts_per_step, "mini_batch": mini}
    small = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if small or config.rollout.n < 1 or model_ranks > world:
        raise ValueError(f"no batch arithmetic for n={config.rollout.n}, {sizes}")
    return BatchArithmetic(
        prompts=trainer.prompts_per_step,
        n=samples_per_row(config),
        mini_batch_prompts=mini,
        dp=world // model_ranks,
        epochs=trainer.update_epochs,
    )
