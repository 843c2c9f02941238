"""The rig: starts processes, gives them orders, kills and pauses them, and gathers the proof."""

import itertools
import json
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distlocks.clock import lease_now
from tests.integration.rig import checker, journal
from tests.integration.rig.store import Store
from tests.servers import processes
from tests.servers.children import Child

WORKERS = 8
# Seconds: nothing here takes that long; what does is stuck.
PATIENCE = 40.0


# What may happen to a holder; "!" if it does not renew.
KINDS = ("killed", "killed!", "paused", "paused!", "overrun", "kept")
# What is over by itself.
CALM = ("kept", "overrun")


class Rig:
    """One run of the rig on one store, over some keys."""

    def __init__(
        self,
        server: Child,
        store: Store,
        folder: Path,
        keys: Sequence[str],
        *,
        ttls: Sequence[float] = (1.0, 2.0),
        least: int = 0,
        **plan: Any,
    ) -> None:
        self.store = store
        self.keys = list(keys)
        self._server = server
        self._folder = folder
        self._plan = {
            "alias": store.alias,
            "keys": self.keys,
            "ttls": list(ttls),
            "least": least,
            "folder": str(folder),
            **plan,
        }
        self._numbers = itertools.count()
        self._pids: dict[str, int] = {}
        self._said: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
        store.open_accounts(self.keys)
        self._journal = journal.Journal(folder / "conductor.jsonl")

    # Orders

    def start(self, role: str, **plan: Any) -> str:
        """Start another process; its name."""
        number = next(self._numbers)
        name = f"{role}-{number}"
        plan = self._plan | {"role": role, "seed": number} | plan
        self._command(fork=name, plan=plan)
        self._pids[name] = self.hear(name, "forked")["pid"]
        return name

    def pid(self, name: str) -> int:
        """The process of that name."""
        return self._pids[name]

    def order(self, name: str, do: str, **options: Any) -> None:
        self._command(tell=name, order={"do": do, "with": options})

    def hear(self, name: str, *words: str) -> dict[str, Any]:
        """Wait until the process says one of these words; what it says before is passed over."""
        deadline = lease_now() + PATIENCE
        while True:
            while self._said[name]:
                said = self._said[name].popleft()
                if said["word"] in words:
                    return said
                assert said["word"] != "failed", f"{name} failed:\n{said['error']}"
            said = json.loads(self._server.readline(max(deadline - lease_now(), 0.001)))
            self._said[said["who"]].append(said)

    def stop(self, *names: str) -> None:
        """Let processes end in order; all that run when none is named."""
        chosen = names or tuple(self._pids)
        for name in chosen:
            self.order(name, "stop")
        for name in chosen:
            self.hear(name, "stopped")
            self._reap(name)

    def _command(self, **command: Any) -> None:
        self._server.send(json.dumps(command))

    def _reap(self, name: str) -> None:
        self._command(reap=name, pid=self._pids.pop(name))
        self.hear(name, "reaped")

    # Faults

    def kill(self, name: str) -> None:
        """SIGKILL."""
        before_us, at = self.store.now_us(), lease_now()
        processes.kill(self._pids[name])
        self._journal.write("killed", victim=name, before_us=before_us, at=at, after=lease_now())
        self._reap(name)

    def pause(self, name: str) -> None:
        """SIGSTOP, but not in the middle of a transaction that would stop all others too."""
        processes.freeze(self._pids[name])
        while not self.store.is_writable():
            processes.thaw(self._pids[name])
            time.sleep(0.02)
            processes.freeze(self._pids[name])
        self._journal.write("paused", victim=name)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        processes.thaw(self._pids[name])

    # Scenes

    def faults(self, runners: Sequence[str], keys: Sequence[str], kinds: Sequence[str]) -> None:
        """At once, each with a runner and a key of its own.

        A "killed" or "paused" holder is inherited from by a process that does nothing else; a
        "kept" lease is renewed and held for longer than one lasts, an "overrun" one not renewed.
        """
        scene = list(zip(runners, keys, kinds, strict=False))
        for number, (name, key, kind) in enumerate(scene):
            renew = not kind.endswith("!") and kind != "overrun"
            ttl = self._plan["ttls"][number % len(self._plan["ttls"])]
            least = 1.3 * ttl if kind == "kept" else 0.0
            self.order(name, "hold", key=key, ttl=ttl, renew=renew, least=least)
        for name, *_ in scene:
            self.hear(name, "holding")
        faulty = [(n, k, kind.rstrip("!")) for n, k, kind in scene if kind not in CALM]
        heirs = []
        for name, key, kind in faulty:
            heirs.append(heir := self.start("follower"))
            self.order(heir, "inherit", key=key, ttl=max(self._plan["ttls"]), timeout=6)
            self.hear(heir, "asking")
            (self.kill if kind == "killed" else self.pause)(name)
        for heir in heirs:
            assert self.hear(heir, "asked")["granted"], f"{heir} waited in vain"
        for (name, _, kind), heir in zip(faulty, heirs, strict=True):
            if kind == "paused":
                self.resume(name)
                self.hear(name, "released")
            self.order(heir, "release")
            self.hear(heir, "released")
        for heir in heirs:
            self.stop(heir)
        for name, _, kind in scene:
            if kind in CALM:
                self.hear(name, "released")

    # The proof

    def close(self) -> None:
        """Kill what still runs."""
        for name in tuple(self._pids):
            self.kill(name)
        self._journal.close()

    def discard(self) -> None:
        """Throw the journals away, once they have been checked."""
        self.close()
        shutil.rmtree(self._folder)

    def events(self) -> list[journal.Event]:
        return list(journal.read(self._folder))

    def longest_wait_since(self, moment: float) -> float:
        """The longest time that anybody has waited since then, on the lease clock."""
        began: dict[str, float] = {}
        longest = 0.0
        for event in self.events():
            who, at = event["who"], event["at"]
            if event["event"] == "ask":
                began[who] = at
            elif event["event"] in ("grant", "denied") and at > moment:
                longest = max(longest, at - max(began[who], moment))
        return longest

    def report(self) -> checker.Report:
        """What the journals and, where there is one, the server's log show."""
        return self.store.report(self.events())
