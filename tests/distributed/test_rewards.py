"""Judges and data on the ranks of one world."""

import os
import tempfile
from pathlib import Path

from hybridrl.config.schema import DataConfig, JudgeConfig, RewardsConfig
from hybridrl.data.rows import load_rows
from hybridrl.data.stream import PromptStream
from hybridrl.rewards.score import Judges
from hybridrl.rollout.samples import Finish, Prompt, Sample
from tests.distributed.pool import WorkerPool


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def judge_on_rank() -> list[float | None]:
    text = f"#### {os.environ['RANK']}"
    sample = Sample(
        prompt=Prompt(id=0, token_ids=(1,), answer="1"),
        index=0,
        response_ids=[ord(character) for character in text],
        log_probs=[0.0] * len(text),
        versions=[0] * len(text),
        finish=Finish.STOP,
    )
    rewards = []
    for _ in range(2):
        with Judges(RewardsConfig(judges=[JudgeConfig(name="numeric")], workers=1)) as judges:
            judges.score([sample], Letters())
            rewards.append(sample.reward)
    return rewards


def read_on_rank(cache: str) -> list[tuple[int, str | None]]:
    rows = load_rows(DataConfig(path="builtin:tiny_sums"), cache=Path(cache))
    prompts = [Prompt(id=0, token_ids=(1,), answer=row.fields["answer"]) for row in rows]
    stream = PromptStream(prompts, batch=8, seed=4)
    return [(prompt.id, prompt.answer) for _ in range(20) for prompt in stream.next(8)]


def test_each_rank_judges_in_workers_of_its_own(pool: WorkerPool) -> None:
    assert pool.run(judge_on_rank, world=2) == [[0.0, 0.0], [1.0, 1.0]]


def test_ranks_that_race_for_builtin_data_read_the_same_prompts(pool: WorkerPool) -> None:
    with tempfile.TemporaryDirectory() as cache:
        first, second = pool.run(read_on_rank, world=2, cache=cache)
        assert first == second
        assert len(first) == 160
        assert len(list(Path(cache).iterdir())) == 1
