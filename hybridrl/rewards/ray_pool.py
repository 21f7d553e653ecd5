"""The judge pool on a Ray cluster: actors that each run a `JudgePool` of one worker where Ray places them.

So the limits are the same as on the ranks' own machines: time and memory of a judge, its process group, its guard. A
lost actor costs its jobs one more try on another; whoever is lost with the second has died.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from hybridrl.rewards.pool import START_S, Job, JudgePool, Pool, Verdict

Judges = Sequence[tuple[str, Mapping[str, Any]]]


class Host:
    """One worker on some node of the cluster."""

    def __init__(self, judges: Judges, limits: Mapping[str, Any]) -> None:
        self._pool = JudgePool(judges, size=1, **limits)
        self._pool.start()

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """See `JudgePool.run`."""
        return self._pool.run(jobs)


class RayJudgePool(Pool):
    """`size` judging actors; what `JudgePool` is on a machine. The cluster is the one of RAY_ADDRESS."""

    def __init__(
        self,
        judges: Judges,
        *,
        size: int,
        timeout_s: float,
        batch_timeout_s: float,
        memory_mb: int,
        address: str = "auto",
    ) -> None:
        self._judges = [(name, dict(args)) for name, args in judges]
        self._size = size
        self._limits = {"timeout_s": timeout_s, "batch_timeout_s": batch_timeout_s, "memory_mb": memory_mb}
        self._batch_timeout_s = batch_timeout_s
        self._address = address
        self._hosts: list[Any] = []
        self._owns_connection = False

    def start(self) -> None:
        """Connects, and starts the actors. Raises ValueError without a cluster, and where a judge is refused."""
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, logging_level="warning", log_to_driver=False)
            except ConnectionError as error:
                raise ValueError(
                    f"rewards.pool=ray: no Ray cluster at {self._address}; start one (`ray start --head`), set "
                    f"RAY_ADDRESS, or launch by hybridrl.launch.ray: {error}"
                ) from error
            self._owns_connection = True
        self._hosts = [self._host() for _ in range(self._size)]
        try:
            ray.get([host.run.remote([]) for host in self._hosts], timeout=2 * START_S)
        except ray.exceptions.GetTimeoutError as error:
            free = ray.available_resources().get("CPU", 0)
            self.close()
            raise ValueError(
                f"rewards.pool=ray: {self._size} judging actors of one CPU each did not start within {2 * START_S:g} "
                f"s; the cluster has {free:g} CPUs free"
            ) from error
        except RayError as error:
            self.close()
            raise ValueError(str(error.__cause__ or error)) from error

    def close(self) -> None:
        """Ends the actors."""
        for host in self._hosts:
            ray.kill(host)
        self._hosts = []
        if self._owns_connection:
            ray.shutdown()
            self._owns_connection = False

    def run(self, jobs: Sequence[Job]) -> list[Verdict]:
        """One verdict a job, in order, within the batch's time limit. Raises RuntimeError if the pool is closed."""
        if not self._hosts:
            raise RuntimeError("the judge pool is closed: enter it (`with pool:`) before judging")
        deadline = time.monotonic() + self._batch_timeout_s
        waiting, retried = deque(range(len(jobs))), set[int]()
        verdicts: dict[int, Verdict] = {}
        running: dict[Any, tuple[int, int]] = {}
        free = list(range(self._size))
        while len(verdicts) < len(jobs) and (left := deadline - time.monotonic()) > 0:
            while free and waiting:
                slot, index = free.pop(), waiting.popleft()
                running[self._hosts[slot].run.remote([jobs[index]])] = slot, index
            done, _ = ray.wait(list(running), timeout=min(1.0, left))
            for reference in done:
                slot, index = running.pop(reference)
                free.append(slot)
                try:
                    (verdicts[index],) = ray.get(reference)
                except RayError as error:
                    self._hosts[slot] = self._host()
                    if index in retried:
                        verdicts[index] = Verdict(None, "died", f"its actor was lost: {error}")
                    else:
                        retried.add(index)
                        waiting.appendleft(index)
        for slot, _ in running.values():  # the batch's time is over
            ray.kill(self._hosts[slot])
            self._hosts[slot] = self._host()
        over = Verdict(None, "batch_timeout", "rewards.batch_timeout_s was over")
        return [verdicts.get(index, over) for index in range(len(jobs))]

    def _host(self) -> Any:
        return ray.remote(Host).options(num_cpus=1, max_restarts=0).remote(self._judges, self._limits)
