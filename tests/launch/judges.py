"""A judge that does what it is told."""

import os
import time
from typing import Any


def judge(response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    if response == "hang":
        time.sleep(600)
    if response == "die":
        os._exit(3)
    if response == "hog":
        return float(len(bytearray(10**9)))
    return float(response)
