"""Processes that work when asked, one at a time, and the watch on what else the machine is
doing.
"""

import json
import os
import selectors
import subprocess
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


class WorkerFailed(Exception):
    """A worker gave an error, ended, or did not answer in time."""


def serve(handle, requests, replies):
    """The worker's side: a JSON request a line in, a JSON reply a line out.

    An exception becomes {"error": …}.
    """
    for line in requests:
        request = json.loads(line)
        if request.get("do") == "quit":
            return
        try:
            reply = handle(request)
        # whatever a peer may throw: it is reported, and the others go on
        except Exception as error:
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class Worker:
    """The other side of `serve`: a process that is started with `command` and asked with `ask`."""

    def __init__(self, command, environment=None, log=None, folder=None):
        self.log = open(log, "ab") if log else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, env=environment, cwd=folder, bufsize=0)
        self.rest = b""

    def send(self, **request):
        """Ask, and do not wait for the reply."""
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise WorkerFailed(f"the process has ended: {error}") from None

    def receive(self, timeout=600.0):
        """The reply to what was sent.

        `WorkerFailed` for an error, an end, or none within `timeout` seconds.
        """
        end, out = time.monotonic() + timeout, self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self.rest:
                if not selector.select(max(0.0, end - time.monotonic())):
                    self.close(kill=True)
                    raise WorkerFailed(f"no reply within {timeout:g} s")
                part = out.read(65536)
                if not part:
                    raise WorkerFailed(f"the process ended with status {self.process.wait()}")
                self.rest += part
        line, _, self.rest = self.rest.partition(b"\n")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply

    def ask(self, timeout=600.0, **request):
        """Send and receive."""
        self.send(**request)
        return self.receive(timeout)

    def close(self, kill=False):
        """End the process: with a word, and by force if that does not help."""
        if self.process.poll() is None:
            try:
                if kill:
                    self.process.kill()
                else:
                    self.send(do="quit")
                self.process.wait(10)
            except (WorkerFailed, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        if self.log is not subprocess.DEVNULL:
            self.log.close()


# -- the watch -------------------------------------------------------------------------------------


def busy_ticks(stat):
    """Ticks that all processors together were not idle, from the text of /proc/stat (stolen time
    counts as busy).
    """
    numbers = [int(number) for number in stat.splitlines()[0].split()[1:]]
    # user nice system idle iowait irq softirq steal; guests are in user
    return sum(numbers[:8]) - numbers[3] - numbers[4]


def process_ticks(stat):
    """Ticks of a process and of its children that have ended, from the text of /proc/PID/stat."""
    return sum(int(number) for number in stat.rpartition(")")[2].split()[11:15])


def foreign_share(busy, own, seconds, processors, ticks=TICKS):
    """Share of the machine that went to others, of `busy` ticks of which `own` were ours.

    0 where rounding says less.
    """
    return max(0.0, busy - own) / (seconds * ticks * processors)


class Watch:
    """How much of the machine others used since `start`."""

    def __init__(self, workers=list, proc="/proc"):
        self.workers, self.proc = workers, Path(proc)  # workers: a function that lists those alive
        self.start()

    def _own(self):
        total = 0
        for pid in [os.getpid(), *(worker.process.pid for worker in self.workers())]:
            try:
                total += process_ticks((self.proc / str(pid) / "stat").read_text())
            # just ended, and reaped: then it is among the ended children of this process
            except OSError:
                continue
        return total

    def start(self):
        """Begin anew."""
        self.before = time.monotonic(), busy_ticks((self.proc / "stat").read_text()), self._own()

    @property
    def seconds(self):
        """Since `start`."""
        return time.monotonic() - self.before[0]

    def foreign(self):
        """Share of the machine, 0 to 1, that other processes took since `start`."""
        busy = busy_ticks((self.proc / "stat").read_text()) - self.before[1]
        own = self._own() - self.before[2]
        return foreign_share(busy, own, max(self.seconds, 1e-6), os.cpu_count() or 1)


def settle(pid, longest=0.5, proc="/proc"):
    """Wait until a process no longer uses the processors: threads may spin a while after their work
    is done.
    """
    end, before = time.monotonic() + longest, None
    while time.monotonic() < end:
        now = process_ticks((Path(proc) / str(pid) / "stat").read_text())
        if now == before:
            return
        before = now
        time.sleep(0.025)


# -- rounds ----------------------------------------------------------------------------------------


def rounds(names, visit, undisturbed, seconds, least=3, most=9, share=0.34):
    """Visit all in turn, A B C A B C …, until about `seconds` are over; {name: list of what the
    visits gave}, lost rounds.

    visit(name) -> a dict with "seconds", or None for one that has failed and is left out from then
    on. undisturbed(): whether the rounds since its last call were (None: too soon to tell, ask
    again after the next); those that were not are measured again, at most twice as often as wanted.
    One whose visit takes more than `share` of `seconds` is visited once.
    """
    kept, pending, lost, start = {name: [] for name in names}, [], 0, time.monotonic()
    alive, done, tries, slow = list(names), 0, 0, set()
    while alive and tries < 2 * most and done + len(pending) < most:
        spent = time.monotonic() - start
        over = done >= least and spent + spent / max(tries, 1) > seconds
        if over or tries >= 2 * least and spent > 3 * seconds:
            break
        this, tries = {}, tries + 1
        for name in list(alive):
            if name in slow and (kept[name] or any(name in one for one in pending)):
                continue
            result = visit(name)
            if result is None:
                alive.remove(name)
                continue
            this[name] = result
            if result["seconds"] > share * seconds:
                slow.add(name)
        pending.append(this)
        verdict = undisturbed()
        if verdict is None:
            continue
        if verdict:
            done += len(pending)
            for one in pending:
                for name, result in one.items():
                    kept[name].append(result)
        else:
            lost += len(pending)
        pending = []
    if pending and undisturbed() is not False:
        for one in pending:
            for name, result in one.items():
                kept[name].append(result)
    return {name: kept[name] for name in names}, lost
