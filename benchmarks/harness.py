"""The measuring harness: worker processes that answer requests, a monitor of the load that other
programs cause, and rounds in which all contenders take turns.
"""

import json
import os
import selectors
import subprocess
import time
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")  # per second


class WorkerFailed(Exception):
    """A worker answered with an error, ended, or did not answer in time."""


def serve(handle, requests, replies):
    """Answer requests in a worker process: each is one line of JSON, and so is its reply.

    An exception of `handle` becomes the reply {"error": message}. Returns when `requests` ends.
    """
    for line in requests:
        try:
            reply = handle(json.loads(line))
        # another library may raise anything; it is reported, and the other contenders go on
        except Exception as error:
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class Worker:
    """The parent's handle on a process that runs `serve`."""

    def __init__(self, command, environment=None, log=None, folder=None):
        self.log = open(log, "ab") if log else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, env=environment, cwd=folder, bufsize=0)
        self.buffer = b""

    def send(self, **request):
        """Send a request without waiting for its reply."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise WorkerFailed(f"the process has ended: {error}") from None

    def receive(self, timeout=600.0):
        """Return the next reply.

        Raises `WorkerFailed` for an error, for a process that ended, and after `timeout` seconds.
        """
        deadline, out = time.monotonic() + timeout, self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close(kill=True)
                    raise WorkerFailed(f"no reply within {timeout:g} s")
                chunk = out.read(65536)
                if not chunk:
                    raise WorkerFailed(f"the process ended with status {self.process.wait()}")
                self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply

    def ask(self, timeout=600.0, **request):
        """Send a request and return its reply."""
        self.send(**request)
        return self.receive(timeout)

    def close(self, kill=False):
        """End the process: at the end of its input, or by force with `kill` and after 10 s."""
        if kill:
            self.process.kill()
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        if self.log is not subprocess.DEVNULL:
            self.log.close()


def ask_all(workers, requests, timeout=600.0):
    """Have several workers answer one request each at the same time.

    Returns their replies, and the seconds from the first start to the last end.
    """
    for worker, request in zip(workers, requests, strict=True):
        worker.send(**request)
    replies = [worker.receive(timeout) for worker in workers]
    return replies, max(r["end"] for r in replies) - min(r["start"] for r in replies)


# -- load ------------------------------------------------------------------------------------------


def busy_ticks(stat):
    """Return the clock ticks in which the processors were not idle, from the text of /proc/stat
    (stolen time counts as busy).
    """
    ticks = [int(number) for number in stat.splitlines()[0].split()[1:]]
    # user nice system idle iowait irq softirq steal; the time of guests is part of user
    return sum(ticks[:8]) - ticks[3] - ticks[4]


def process_ticks(stat):
    """Return the clock ticks of a process and of its children that have ended, from the text of
    /proc/PID/stat.
    """
    return sum(int(number) for number in stat.rpartition(")")[2].split()[11:15])


class LoadMonitor:
    """Measures which share of the machine other programs have used since `start`."""

    def __init__(self, workers=list, proc="/proc"):
        self.workers, self.proc = workers, Path(proc)  # workers: a function that lists them
        self.start()

    def _own_ticks(self):
        total = 0
        for pid in [os.getpid(), *(worker.process.pid for worker in self.workers())]:
            try:
                total += process_ticks((self.proc / str(pid) / "stat").read_text())
            # the process has ended, and counts among the children of this one
            except OSError:
                continue
        return total

    def start(self):
        """Start a new interval."""
        self.started = time.monotonic()
        self.busy, self.own = busy_ticks((self.proc / "stat").read_text()), self._own_ticks()

    @property
    def seconds(self):
        """Seconds since `start`."""
        return time.monotonic() - self.started

    def other_load(self):
        """Return the share of the machine, 0 to 1, that other processes have used since `start`."""
        busy = busy_ticks((self.proc / "stat").read_text()) - self.busy
        available = max(self.seconds, 1e-6) * CLOCK_TICKS * (os.cpu_count() or 1)
        return max(0.0, busy - (self._own_ticks() - self.own)) / available


def wait_until_idle(pid, timeout=0.5, proc="/proc"):
    """Wait until a process uses no processor: threads may spin for a while after their work."""
    deadline, before = time.monotonic() + timeout, None
    while time.monotonic() < deadline:
        now = process_ticks((Path(proc) / str(pid) / "stat").read_text())
        if now == before:
            return
        before = now
        time.sleep(0.025)


# -- rounds ----------------------------------------------------------------------------------------


def run_rounds(names, measure, was_quiet, seconds, min_rounds=3, max_rounds=9, slow_share=0.34):
    """Measure all contenders in turn, A B C A B C …, for about `seconds`.

    Returns {name: its results}, and how many rounds were discarded.

    measure(name): returns a dictionary with "seconds", or None if the contender has failed; then it
    is left out from then on. was_quiet(): whether no other program disturbed the rounds since its
    last call, or None if it is too early to tell. Disturbed rounds are discarded and repeated, up
    to twice `max_rounds` in all. A contender that takes more than `slow_share` of `seconds` is
    measured once.
    """
    kept, pending, discarded, started = [], [], 0, time.monotonic()
    active, count, slow = list(names), 0, set()
    while active and count < 2 * max_rounds and len(kept) + len(pending) < max_rounds:
        spent = time.monotonic() - started
        enough = len(kept) >= min_rounds and spent + spent / max(count, 1) > seconds
        if enough or count >= 2 * min_rounds and spent > 3 * seconds:
            break
        count += 1
        results = {}
        for name in list(active):
            if name in slow and any(name in earlier for earlier in kept + pending):
                continue
            result = measure(name)
            if result is None:
                active.remove(name)
                continue
            results[name] = result
            if result["seconds"] > slow_share * seconds:
                slow.add(name)
        pending.append(results)
        quiet = was_quiet()
        if quiet is None:
            continue
        if quiet:
            kept += pending
        else:
            discarded += len(pending)
        pending = []
    if pending and was_quiet() is not False:
        kept += pending
    return {name: [results[name] for results in kept if name in results]
            for name in names}, discarded
