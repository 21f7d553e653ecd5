"""SGLang's own Engine behind a pipe: `python -m hybridrl.rollout.sglang.process.server FD PARENT`.

One command at a time comes through the pipe, a tuple (method of `Server`, its arguments), and one answer goes back:
(True, result) or (False, error). It ends with the pipe, and with the process that started it.
"""

import asyncio
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from hybridrl.rollout.sglang.process.guard import die_with
from hybridrl.rollout.sglang.process.outcome import Outcome

BUSY_TRIES = 200
BUSY_WAIT_S = 0.02


class Server:
    """The commands. Requests are known by ids of one length."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._tasks: dict[str, asyncio.Task[Outcome]] = {}

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Starts requests: keyword arguments of the Engine's `async_generate`, `rid` among them."""
        for request in requests:
            self._tasks[request["rid"]] = asyncio.create_task(self._run(request))

    async def poll(self, seconds: float) -> int:
        """Waits so long at most for all requests to end; how many have not."""
        running = [task for task in self._tasks.values() if not task.done()]
        if running:
            await asyncio.wait(running, timeout=seconds)
        return sum(not task.done() for task in self._tasks.values())

    async def take(self) -> dict[str, Outcome]:
        """The requests that have ended since the last call."""
        done = {rid: task for rid, task in self._tasks.items() if task.done()}
        for rid in done:
            del self._tasks[rid]
        return {rid: task.result() for rid, task in done.items()}

    async def abort(self, rids: Sequence[str]) -> dict[str, Outcome]:
        """Ends these requests with what they have."""
        running = {rid: self._tasks[rid] for rid in rids if rid in self._tasks}
        for rid in running:
            self._engine.tokenizer_manager.abort_request(rid=rid)
        if running:
            await asyncio.wait(running.values())
        for rid in running:
            del self._tasks[rid]
        return {rid: task.result() for rid, task in running.items()}

    async def call(self, method: str, arguments: Mapping[str, Any]) -> None:
        """A method of the scheduler, on all ranks of the replica; tried again while it is busy with ended requests."""
        from hybridrl.rollout.sglang.process.scheduler import BUSY

        for attempt in range(BUSY_TRIES):
            try:
                self._engine.collective_rpc(method, **arguments)
            except AssertionError as error:
                if BUSY not in str(error) or attempt == BUSY_TRIES - 1:
                    raise RuntimeError(f"SGLang's {method} failed: {error}") from error
                await asyncio.sleep(BUSY_WAIT_S)
            else:
                return

    async def _run(self, request: Mapping[str, Any]) -> Outcome:
        result = await self._engine.async_generate(**request)
        meta = result["meta_info"]
        reason = meta["finish_reason"] or {}
        return Outcome(
            tokens=list(result["output_ids"]),
            log_probs=[entry[0] for entry in meta.get("output_token_logprobs") or []],
            spans=[(s["version"], s["start"], s["end"]) for s in meta.get("weight_versions") or []],
            finish=reason.get("type", ""),
            message=str(reason.get("message") or ""),
            cached_tokens=meta.get("cached_tokens") or 0,
            routed_experts=meta.get("routed_experts"),
        )


async def serve(pipe: Connection, server: Server) -> None:
    """Answers commands until the pipe ends."""
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), readable.set)
    while True:
        await readable.wait()
        readable.clear()
        while pipe.poll():
            try:
                name, arguments = pipe.recv()
            except EOFError:
                return
            try:
                answer = (True, await getattr(server, name)(*arguments))
            except Exception as error:  # noqa: BLE001 - the rank that asked raises it
                answer = (False, f"{type(error).__name__}: {error}")
            pipe.send(answer)


def end_with_children(over: threading.Event) -> None:
    """Has this process end as soon as one of SGLang's under it does, until `over` is set.

    SGLang's own watch acts in the event loop, which stands still while a command waits for an answer of the dead.
    """
    children = {child.sentinel: child for child in multiprocessing.active_children()}

    def watch() -> None:
        ended = multiprocessing.connection.wait(list(children))
        if over.is_set():
            return
        child = children[next(fd for fd in ended if isinstance(fd, int))]
        child.join()
        print(f"SGLang's process {child.name} ended with exit code {child.exitcode}", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="children", daemon=True).start()


def main(descriptor: int, parent: int) -> None:
    """Builds the Engine from what comes first through the pipe, and serves."""
    die_with(parent)
    pipe = Connection(descriptor)
    server_args, vocab_limit, tokenizer = pipe.recv()
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # by a few positions that are never used
    from hybridrl.rollout.sglang import internals as sg
    from hybridrl.rollout.sglang.process.scheduler import run_scheduler

    class BesideEngine(sg.engine_class()):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(partial(run_scheduler, vocab_limit=vocab_limit, tokenizer=tokenizer))

    engine, over = BesideEngine(**server_args), threading.Event()
    end_with_children(over)
    pipe.send((True, None))
    try:
        engine.loop.run_until_complete(serve(pipe, Server(engine)))
    finally:
        over.set()
        engine.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
