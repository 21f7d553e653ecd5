"""What the launcher's tests run on ranks: `python -m tests.launch.ranks WHAT [MARK]`."""

import os
import signal
import sys
import time
from pathlib import Path


def main(what: str) -> None:
    rank = int(os.environ["RANK"])
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} does {what}", flush=True)
    if what == "environment":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        gathered: list[object] = [None] * dist.get_world_size()
        own = {k: os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        dist.all_gather_object(gathered, own)
        print(f"all {gathered}", flush=True)
        dist.destroy_process_group()
    elif what == "fail" and rank == 1:
        from hybridrl.parallel.failure import recorded

        @recorded
        def broken() -> None:
            raise ValueError("rank 1 is broken on purpose")

        broken()
    elif what == "killed" and rank == 1:
        os.kill(os.getpid(), 9)
    elif what == "told":
        folder = Path(sys.argv[2])

        def save(number: int, _: object) -> None:
            (folder / f"saved-{rank}").touch()
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, save)
        (folder / f"ready-{rank}").touch()
        time.sleep(600)
    elif what in ("fail", "killed"):
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
