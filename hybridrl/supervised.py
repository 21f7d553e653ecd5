"""Runs that learn from data alone: demonstrations, preferences, and reward models. No engine and no judge is used."""

from hybridrl.session import Session
from hybridrl.training.batch import combine, mini_batches, places_by_update
from hybridrl.training.losses import Supervised, make_loss
from hybridrl.training.preference_tasks import PairTask, RewardTask, Task, VerdictTask
from hybridrl.training.rows import Row, rows_from_examples


def learn_from_data(session: Session) -> None:
    """The whole run, of the kind that `algorithm.name` says."""
    if session.config.algorithm.name == "sft":
        imitate(session)
    else:
        compare(session)


def imitate(session: Session) -> None:
    """Supervised fine-tuning on demonstrations."""
    config, algorithm = session.config, session.config.algorithm
    loss = make_loss(algorithm, config.rollout.max_response_length)
    for step in session.steps():
        with session.timer("step"), session.timer("update"):
            rows = demonstrations(session, config.trainer.prompts_per_step)
            updates = [session.actor.update(batch, loss) for batch in mini_batches(rows, config.trainer, step)]
        session.record(step, combine(updates), {"data/epoch": session.demonstrations.epoch})


def compare(session: Session) -> None:
    """Preferences, by a policy or a reward model; rows that are held out are measured now and then."""
    config, data = session.config, session.preferences
    task, held = _task(session), data.held_out
    if not session.done:
        with session.timer("reference"):
            task.prepare()
    session.checkpoints.states.add("references", task)
    for step in session.steps():
        measured = {}
        with session.timer("step"):
            if held and step == 1:
                measured = {f"holdout/start/{name}": value for name, value in task.measure(held).items()}
            with session.timer("update"):
                updates, drawn = [], data.next(config.trainer.prompts_per_step)
                for places in places_by_update(config.trainer, step):
                    rows = task.rows([drawn[place] for place in places])
                    updates.append(session.trained.update(rows, task.loss(rows)))
            if held and (step == config.trainer.steps or step % config.preference.holdout_every == 0):
                with session.timer("holdout"):
                    measured |= {f"holdout/{name}": value for name, value in task.measure(held).items()}
        session.record(step, combine(updates), measured, {"data/epoch": data.epoch})


def warm_start(session: Session) -> None:
    """Supervised steps before the first rollout; the optimizer, and the reference of a KL, start afresh after them."""
    config, actor = session.config.warm_start, session.actor
    if session.done:
        return  # what goes on has had it
    for step in range(1, config.steps + 1):
        found = actor.update(demonstrations(session, config.batch_size), Supervised(), lr=config.lr)
        if step in (1, config.steps):
            session.note(f"warm start {step}/{config.steps}  loss {found['loss/sft']:.4g}")
    if config.steps:
        actor.optimizer.forget()
        if session.reference is not None:
            session.reference.take(actor.tensors())


def demonstrations(session: Session, count: int) -> list[Row]:
    """The next examples as rows."""
    return rows_from_examples((d.token_ids, d.mask) for d in session.demonstrations.next(count))


def _task(session: Session) -> Task:
    preference, examples = session.config.preference, session.preferences.examples
    if session.reward_model is not None:
        return RewardTask(examples, session.reward_model)
    kind = VerdictTask if preference.loss == "kto" else PairTask
    return kind(preference, examples, session.actor, session.reference)
