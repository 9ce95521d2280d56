"""Rewards of every temper, for the tests of the pool; loaded by file in worker processes."""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path


def length(scored, *, scale=1.0):
    return scale * len(scored.response)


def parts(scored):
    return {"reward": 0.5, "format": 1, "answer": 0.25}


async def asynchronous(scored):
    await asyncio.sleep(0.01)
    return 2.0


def imports(scored):
    return float(any(name in sys.modules for name in ("torch", "ray", "transformers")))


def chatty(scored):
    print("this would break a protocol on stdout")
    os.write(1, b"\x00\x00\x00\x01x")
    return float(sys.stdin.read() == "")


def by_response(scored):
    """What the response says: a number, an exception, or trouble."""
    what = scored.response
    if what == "raise":
        raise ValueError("no such answer")
    if what == "exit":
        os._exit(7)
    if what == "sys.exit":
        sys.exit(1)
    if what == "hang":
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the GIL for longer than the universe has
    if what == "ignore-signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(3600)
    if what == "none":
        return None
    if what == "text":
        return "1.0"
    if what == "no-reward":
        return {"score": 1.0}
    if what == "bad-part":
        return {"reward": 1.0, "x": float("nan")}
    if what.startswith("note"):
        Path(what.split()[1]).touch()
        return 1.0
    if what.startswith("sleep"):
        time.sleep(float(what.split()[1]))
        return 1.0
    return float(what)


def leaves_a_child(scored):
    """Starts a child, notes its pid in the file the response names, and hangs."""
    child = subprocess.Popen(["sleep", "600"])
    Path(scored.response).write_text(str(child.pid))
    time.sleep(600)


def hash_order(scored):
    return float(list({"a", "b", "c", "d", "e"}).index("a"))


def noise(scored):
    return random.random()


not_callable = 3
