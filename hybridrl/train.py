"""The entry: `torchrun --nproc-per-node 2 -m hybridrl.train recipe=grpo_tiny_moe`. The loop, on one page."""

import torch

from hybridrl.config.load import hydra_main
from hybridrl.config.schema import Config
from hybridrl.evaluation import evaluate
from hybridrl.inputs import Inputs, read_inputs
from hybridrl.models.spec import ModelSpec
from hybridrl.parallel.failure import recorded
from hybridrl.planning.facts import load_checked
from hybridrl.registered import NAMES
from hybridrl.rollout.engines import installed_problems
from hybridrl.sampling_loop import collect
from hybridrl.session import Session
from hybridrl.supervised import learn_from_data, warm_start
from hybridrl.training.batch import combine, mini_batches, with_selection
from hybridrl.training.correction import correct
from hybridrl.training.losses import make_loss
from hybridrl.training.rows import rows_from_samples
from hybridrl.training.token_estimate import credit


def run(config: Config, inputs: Inputs | None = None) -> None:
    """Trains as `config` says, on `inputs` or what it reads itself. Every rank calls it."""
    with Session(config, inputs) as session:
        if session.supervised:
            learn_from_data(session)
        else:
            with session.hybrid.training_phase():
                warm_start(session)
            reinforce(session)
        session.finish()


def reinforce(session: Session) -> None:
    """Reinforcement: the engine gets the weights, generates, is judged, and the policy learns from the judgement."""
    config, algorithm = session.config, session.config.algorithm
    for step in session.steps():
        with session.timer("step"):
            with session.rollout_phase(version=step - 1) as moved:
                groups, sampled = collect(session, step)
            with session.hybrid.training_phase():
                with session.timer("logprob"):
                    samples = [sample for group in groups for sample in group.samples]
                    replay = algorithm.routing_replay == "r3"
                    rows = rows_from_samples(samples, filter_truncated=algorithm.overlong.filter, replay=replay)
                    rows, gap = session.score(rows)
                rows, corrected = correct(rows, algorithm.correction)
                rows, estimated = credit(rows, groups, config, kl_coef=session.kl.coef)
                with session.timer("update"):
                    loss = make_loss(algorithm, config.rollout.max_response_length, kl_coef=session.kl.coef)
                    parts = enumerate(mini_batches(rows, config.trainer, step))
                    updates = [
                        session.update(with_selection(part, config, step, i), loss, step=step) for i, part in parts
                    ]
            session.kl.update(estimated.get("kl/response", 0.0))
        session.keep_rollouts(step, samples, rows)
        measured = evaluate(session, step)
        metrics = (sampled, gap, corrected, estimated, moved, combine(updates), measured)
        session.record(step, *metrics, {"data/epoch": session.prompts.epoch})


def _spec(config: Config) -> ModelSpec:
    return load_checked(config)


def _device(config: Config) -> str:
    """The device of the run. Raises ValueError where it is asked for and absent."""
    wanted, present = config.trainer.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ValueError("trainer.device=cuda: this torch sees no CUDA device; install a CUDA build or use cpu")
    return wanted if wanted != "auto" else "cuda" if present else "cpu"


main = hydra_main(
    recorded(run),
    spec=_spec,
    device=_device,
    read=read_inputs,
    names=NAMES,
    further=installed_problems,
)

if __name__ == "__main__":
    main()
