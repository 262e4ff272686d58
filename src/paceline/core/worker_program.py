"""Program of a process that answers untrusted questions within limits. Imports nothing of Paceline.

It is started with the path of a script, which has ``MEMORY_LIMIT``, in bytes, and ``begin``: a
function that takes the greeting, makes what all questions need, and returns the function that
answers one. A timer of processor time ends this process in a question that takes too long, and its
parent kills it at the deadline. Processor time, because a machine that is busy says nothing about a
question.

Protocol: one JSON object a line on standard input, one on standard output. The greeting is answered
with ``{"ready"}``. Each question has ``seconds``, of processor time.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys


def _limit_time(seconds: float) -> None:
    """End this process when it has computed for so long; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):  # elsewhere the parent's deadline alone has to do
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(num_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on this platform; the deadline still holds
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > num_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def main() -> None:
    # The parent handles an interrupt and closes the pipe; this process need not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    script = runpy.run_path(sys.argv[1])
    _limit_memory(script["MEMORY_LIMIT"])
    answer = script["begin"](json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        _limit_time(question["seconds"])
        reply = json.dumps(answer(question))
        _limit_time(0)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
