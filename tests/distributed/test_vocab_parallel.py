"""Vocabulary-parallel log-probs, and whitening over ranks: values and gradients of every rank's own share."""

import pytest
import torch
import torch.distributed as dist

from hybridrl.algorithms.whiten import whiten
from hybridrl.training.logprobs import Vocabulary, token_log_probs


def own_shard(logits, targets, size, temperature, chunk):
    """Log-probs, entropy and this rank's gradient of Σ (log-prob·a + entropy·b)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = logits.chunk(ranks, dim=-1)[rank].clone().requires_grad_()
    vocabulary = Vocabulary(size=size, rank=rank, ranks=ranks, group=dist.group.WORLD)
    log_probs, entropy = token_log_probs(mine, targets, vocabulary, temperature=temperature, chunk=chunk)
    t = torch.arange(len(targets))
    (log_probs * (1 + t) - entropy * (2 + t)).sum().backward()
    return log_probs.detach(), entropy.detach(), mine.grad


@pytest.mark.parametrize(("size", "world"), [(16, 2), (13, 2), (8, 2), (3, 2), (16, 4)])
def test_shards_equal_the_whole(pool, size, world):
    generator = torch.Generator().manual_seed(size)
    logits = 4 * torch.randn(9, 16, generator=generator)
    targets = torch.randint(0, size, (9,), generator=generator)
    whole = logits.clone().requires_grad_()
    log_p = (whole[:, :size].double() / 0.8).log_softmax(-1)
    log_probs, entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    t = torch.arange(9)
    (log_probs * (1 + t) - entropy * (2 + t)).sum().backward()
    results = pool.run(own_shard, world=world, logits=logits, targets=targets, size=size, temperature=0.8, chunk=4)
    for got_log_probs, got_entropy, _ in results:
        torch.testing.assert_close(got_log_probs, log_probs.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_entropy, entropy.float(), rtol=1e-5, atol=1e-6)
        assert torch.equal(got_log_probs, results[0][0])
    gradient = torch.cat([grad for _, _, grad in results], dim=-1)
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-5, atol=1e-6)


def score_gradient():
    rank = dist.get_rank()
    mine = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[rank : rank + 1].clone().requires_grad_()
    vocabulary = Vocabulary(size=4, rank=rank, ranks=2, group=dist.group.WORLD)
    token_log_probs(mine, torch.tensor([0]), vocabulary)[0].sum().backward()
    return mine.grad[0].tolist()


def test_ranks_that_do_not_own_the_target_have_their_gradient(pool):
    first, second = pool.run(score_gradient, world=2)
    assert first == pytest.approx([0.967941, -0.087144], abs=1e-6)
    assert second == pytest.approx([-0.236883, -0.643914], abs=1e-6)


def whiten_share(values, masks):
    rank = dist.get_rank()
    return whiten(torch.tensor(values[rank]), torch.tensor(masks[rank]), group=dist.group.WORLD).tolist()


def test_whitening_is_over_all_ranks_also_those_with_nothing_valid(pool):
    first, second = pool.run(whiten_share, world=2, values=[[1.0, 2.0], [3.0, 6.0]], masks=[[True] * 2] * 2)
    assert first + second == pytest.approx([-0.925820, -0.462910, 0, 1.388730], abs=1e-6)
    first, second = pool.run(whiten_share, world=2, values=[[1.0, 3.0], [9.0, 9.0]], masks=[[True] * 2, [False] * 2])
    assert first + second == pytest.approx([-0.707107, 0.707107, 0, 0], abs=1e-6)
