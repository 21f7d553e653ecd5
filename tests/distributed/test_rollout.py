"""Generation spread over ranks gives the samples of one rank, and rewards travel with them."""

from dataclasses import replace

import torch.distributed as dist

from hybridrl.rollout.replicas import Replicas
from hybridrl.rollout.samples import Request, Sample
from hybridrl.rollout.transformers_engine import TransformersEngine
from tests.distributed.pool import WorkerPool
from tests.models.tiny import tiny_folder
from tests.rollout.common import loaded_engine, prompt, requests
from tests.rollout.test_collect import EchoEngine, make


def spread(folder: str, asked: list[Request], num_prompts: int) -> list[list[Sample]]:
    world = dist.get_world_size()
    engine = TransformersEngine(folder, ranks=range(world), rank=dist.get_rank(), load=True, max_batch_size=3)
    engine.publish(0)
    asked = asked[: 2 * num_prompts]
    replicas = Replicas(engine)
    return [replicas.share(replicas.generate(asked), asked) for _ in range(2)]


def test_replicas_together_answer_as_one_rank(pool: WorkerPool) -> None:
    asked = requests([prompt(i) for i in range(5)], n=2, stop_token_ids=(1, 2, 3))
    folder = str(tiny_folder("qwen3_moe"))
    for num_prompts in (5, 1):  # with one prompt, the second rank has no request
        alone = loaded_engine(max_batch_size=3).generate(asked[: 2 * num_prompts])
        for rank in pool.run(spread, world=2, folder=folder, asked=asked, num_prompts=num_prompts):
            assert rank[0] == rank[1]
            for one, other in zip(rank[0], alone, strict=True):
                near = [round(p, 4) for p in one.log_probs], [round(p, 4) for p in other.log_probs]
                assert near[0] == near[1]
                assert replace(one, log_probs=[], response_ids=[], versions=[], mask=[]) == replace(
                    other, log_probs=[], response_ids=[], versions=[], mask=[]
                )
                assert one.response_ids == other.response_ids


def judge_and_share(asked: list[Request], ranks_a_replica: int) -> list[Sample]:
    rank, world = dist.get_rank(), dist.get_world_size()
    engine = EchoEngine(rank // ranks_a_replica, world // ranks_a_replica)
    replicas = Replicas(engine)  # type: ignore[arg-type]
    local = replicas.generate(asked)
    for sample in local:
        sample.reward = rank + sample.response_ids[0] / 3
        sample.rewards = {f"judge{rank}": sample.reward, "all": 1.0}
        sample.failed = sample.index == 1
    return replicas.share(local, asked)


def test_rewards_judged_by_each_rank_reach_all_ranks(pool: WorkerPool) -> None:
    asked = make(5, n=3)
    for ranks_a_replica, leaders in ((1, {0, 1, 2, 3}), (2, {0, 2})):
        results = pool.run(judge_and_share, world=4, asked=asked, ranks_a_replica=ranks_a_replica)
        assert all(result == results[0] for result in results)
        assert len(results[0]) == 15
        judges = set()
        for request, sample in zip(asked, results[0], strict=True):
            assert (sample.prompt, sample.index) == (request.prompt, request.index)
            assert sample.failed == (request.index == 1)
            (name,) = set(sample.rewards) - {"all"}
            judges.add(int(name.removeprefix("judge")))
            assert sample.reward == judges_reward(name, request)
        assert judges == leaders


def judges_reward(name: str, request: Request) -> float:
    return int(name.removeprefix("judge")) + request.seed % 1000 / 3


def share_nothing(asked: list[Request]) -> str:
    replicas = Replicas(EchoEngine(dist.get_rank(), 2))  # type: ignore[arg-type]
    local = replicas.generate(asked)
    try:
        replicas.share(local[dist.get_rank() :], asked)
    except ValueError as error:
        return str(error)
    return ""


def test_a_lost_sample_is_an_error_on_every_rank(pool: WorkerPool) -> None:
    first, second = pool.run(share_nothing, world=2, asked=make(4, n=2))
    assert first == second
    assert "replica 1: 3 samples came for 4 requests" in first
