"""The metrics: what is counted, under which names, and that neither locks nor scrapes wait."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import Error
from django.test import RequestFactory, override_settings
from prometheus_client import CollectorRegistry

from distlocks import BackendUnavailable, LockTimeout, db_lock, force_release, locks
from distlocks.backends.memory import MemoryBackend
from distlocks.contrib.prometheus import up
from distlocks.contrib.prometheus.metrics import Metrics
from distlocks.contrib.prometheus.settings import check_prometheus
from distlocks.contrib.prometheus.views import metrics as metrics_view
from distlocks.histogram import BOUNDS
from distlocks.history.journal import journal
from distlocks.history.waits import Waiting, waits
from distlocks.testing import FakeClock
from tests.servers.watchdog import ROOT
from tests.waiting import eventually

MEMORY = {
    "BACKEND": "distlocks.backends.memory.MemoryBackend",
    "GUARD_DATABASES": [],
    "HISTORY_DAYS": 0,
}


@pytest.fixture(autouse=True)
def _locks(lock_clock: FakeClock) -> Iterator[None]:
    with override_settings(DISTLOCKS={"default": MEMORY, "other": MEMORY}):
        up.stores._reset()
        yield
    up.stores._reset()


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    journal.look()
    journal.dropped.clear()
    metrics = Metrics(CollectorRegistry())
    metrics.start()
    yield metrics
    metrics.stop()


@pytest.fixture
def value(metrics: Metrics) -> Callable[..., float | None]:
    """A sample by its name without the prefix, after all that has happened was counted."""

    def read(name: str, pattern: str | None = None, backend: str = "default", **more: str) -> Any:
        journal.look()
        labels = {"backend": backend, **({} if pattern is None else {"pattern": pattern}), **more}
        return metrics.registry.get_sample_value(f"distlocks_{name}", labels)

    return read


Value = Callable[..., float | None]


def test_grants_and_releases(lock_clock: FakeClock, value: Value) -> None:
    for number in range(3):
        with db_lock(f"order:{number}"):
            lock_clock.advance(2)
    assert value("acquires_total", "order:*") == 3
    assert value("wait_seconds_count", "order:*") == 3
    assert value("hold_seconds_count", "order:*") == 3
    assert value("hold_seconds_sum", "order:*") == pytest.approx(6, abs=0.2)
    assert value("hold_seconds_bucket", "order:*", le="1.0") == 0
    assert value("hold_seconds_bucket", "order:*", le="2.5") == 3
    assert value("acquires_total", "order:*", backend="other") is None


def test_a_lease_of_two_kinds_counts_in_both(value: Value) -> None:
    with db_lock("order:1", "order:2", "stock:7"):
        pass
    assert value("acquires_total", "order:*") == value("acquires_total", "stock:*") == 1


def test_keys_that_are_taken(value: Value) -> None:
    with db_lock("order:1"):
        assert db_lock("order:1", timeout=0).try_acquire() is None
        # Denied at once, it has not waited.
        assert value("timeouts_total", "order:*") == 0
    assert value("contended_total", "order:*") == 1


def test_acquires_that_wait_in_vain(lock_clock: FakeClock, value: Value) -> None:
    found: list[Exception] = []

    def wait() -> None:
        try:
            db_lock("order:1", timeout=0.05).acquire()
        except LockTimeout as error:
            found.append(error)

    with db_lock("order:1"):
        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: value("contended_total", "order:*"))
        lock_clock.advance(1)
        eventually(lambda: not thread.is_alive())
    assert found
    assert value("timeouts_total", "order:*") == 1


def test_what_goes_wrong(
    lock_clock: FakeClock, value: Value, monkeypatch: pytest.MonkeyPatch
) -> None:
    db_lock("order:1", "order:2", ttl=10, renew=False).acquire()
    lock_clock.advance(11)
    # One for each key.
    assert value("lost_total", "order:*") == 2
    db_lock("order:3").acquire()
    force_release("order:3", by="jane")
    assert value("forced_total", "order:*") == 1
    lease = db_lock("order:4").acquire()
    holders = locks["default"].holders("order:4")
    journal.note_expired("expired", locks["default"], holders, None)
    journal.note_expired("taken_over", locks["default"], holders, None)
    assert value("expired_total", "order:*") == 2
    journal.note("cycle", locks["default"], ("order:4",))
    assert value("cycles_total", "order:*") == 1
    lease.release()

    def refuse(*_: object) -> Any:
        raise BackendUnavailable("connection refused")

    monkeypatch.setattr(MemoryBackend, "try_acquire", refuse)
    with pytest.raises(BackendUnavailable):
        db_lock("order:5").acquire()
    assert value("errors_total") == 1


def test_rare_counters_are_there_from_the_first_lock_on(value: Value) -> None:
    with db_lock("order:1"):
        pass
    for name in ("lost", "expired", "forced", "timeouts", "contended", "cycles"):
        assert value(f"{name}_total", "order:*") == 0, name
    assert value("errors_total") == value("history_dropped_total") == 0


def test_what_is_held_and_what_waits(value: Value) -> None:
    first, second = db_lock("a").acquire(), db_lock("b").acquire()
    assert value("leases_held") == 2
    assert value("acquires_waiting") == 0
    first.release()
    second.release()
    assert value("leases_held") == 0


def test_what_waits_where_history_is_kept(value: Value, metrics: Metrics) -> None:
    with db_lock("a"):
        pass
    waiting = Waiting(
        backend=locks["default"], mode="exclusive", unit=1, started=0.0, since=0.0, gives_up=None
    )
    waits._current.add(waiting)
    assert value("acquires_waiting") == 1
    waits._current.discard(waiting)
    assert value("acquires_waiting") == 0


def test_what_was_dropped(value: Value) -> None:
    with db_lock("a"):
        pass
    before = value("history_dropped_total")
    assert before == 0
    journal.dropped["default"] += 3
    assert value("history_dropped_total") == 3
    assert value("history_dropped_total") == 3
    journal.dropped["default"] += 2
    assert value("history_dropped_total") == 5


def test_what_finds_no_room_on_the_list_is_counted(
    value: Value, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlocks.history.journal.MAX_ENTRIES", 2)
    for _ in range(3):
        with db_lock("a"):
            pass
    assert value("history_dropped_total") == 4
    assert value("acquires_total", "a") == 1


def test_of_many_patterns_the_most_frequent_are_told_apart(metrics: Metrics, value: Value) -> None:
    with override_settings(DISTLOCKS_PROMETHEUS={"MAX_PATTERNS": 2}):
        for name in ("rare", "busy", "busier", "busier", "busy", "busier"):
            with db_lock(name):
                pass
        assert value("acquires_total", "busy") == 2
        assert value("acquires_total", "busier") == 3
        assert value("acquires_total", "(others)") == 1
        for number in range(100):
            with db_lock(f"{'x' * number} busy-or-not"):
                pass
        assert value("acquires_total", "(others)") == 101
    # Not by accident of the help text: every label there is.
    patterns = {
        sample.labels["pattern"]
        for family in metrics.registry.collect()
        for sample in family.samples
        if "pattern" in sample.labels
    }
    assert patterns == {"busy", "busier", "(others)"}


def test_two_of_the_others_in_one_lease_are_one(value: Value) -> None:
    with override_settings(DISTLOCKS_PROMETHEUS={"MAX_PATTERNS": 0}):
        with db_lock("a", "b"):
            pass
        assert value("acquires_total", "(others)") == 1


def test_no_label_tells_more_than_the_pattern(metrics: Metrics) -> None:
    with db_lock("order:42", label="import", metadata={"user": 1}):
        journal.look()
    labels = {
        (name, sample.labels[name])
        for family in metrics.registry.collect()
        for sample in family.samples
        for name in sample.labels
        if name != "le"
    }
    assert labels == {("backend", "default"), ("backend", "other"), ("pattern", "order:*")}


def test_labels_are_quoted(value: Value) -> None:
    with db_lock('quo"te\\{}'):
        pass
    assert value("acquires_total", 'quo"te\\{}') == 1


@pytest.mark.parametrize(
    "setting",
    [[], {"PATTERNS": 1}, {"MAX_PATTERNS": -1}, {"MAX_PATTERNS": "9"}, {"MAX_PATTERNS": True}],
)
def test_wrong_settings(setting: Any, value: Value) -> None:
    with override_settings(DISTLOCKS_PROMETHEUS=setting):
        (found,) = check_prometheus()
        with db_lock("a"):
            pass
        assert value("acquires_total", "a") == 1
    assert isinstance(found, Error)
    assert found.id == "distlocks.E065"
    assert found.hint


# Whether stores answer


def ups(stores: up.Stores, patience: float = 5.0) -> dict[str, bool]:
    return stores.states(patience)


def test_stores_that_answer(value: Value) -> None:
    assert value("backend_up") == value("backend_up", backend="other") == 1


def test_a_store_that_does_not(value: Value, monkeypatch: pytest.MonkeyPatch) -> None:
    def holders(self: MemoryBackend, *_: object, **__: object) -> Any:
        if self.alias == "default":
            raise BackendUnavailable("connection refused")
        return []

    monkeypatch.setattr(MemoryBackend, "holders", holders)
    assert value("backend_up") == 0
    assert value("backend_up", backend="other") == 1


def test_a_store_that_hangs_keeps_no_scrape_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    go, asked, now = threading.Event(), [], [0.0]

    def holders(self: MemoryBackend, *_: object, **__: object) -> Any:
        asked.append(self.alias)
        if self.alias == "default":
            go.wait(20)
        return []

    monkeypatch.setattr(MemoryBackend, "holders", holders)
    monkeypatch.setattr(up, "under_test_runner", lambda: False)
    stores = up.Stores(lambda: now[0])
    assert stores.states(0.05) == {"default": False, "other": True}
    # It is not asked again, nor waited for, while it hangs; others are.
    now[0] += 60
    assert stores.states(5) == {"default": False, "other": True}
    assert sorted(asked) == ["default", "other", "other"]
    go.set()
    eventually(lambda: stores.states(0)["default"])
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("distlocks-up")])


def test_many_scrapes_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now = [], [0.0]
    monkeypatch.setattr(
        MemoryBackend, "holders", lambda self, *_, **__: asked.append(self.alias) or []
    )
    stores = up.Stores(lambda: now[0])
    for _ in range(5):
        assert all(stores.states().values())
    assert sorted(asked) == ["default", "other"]
    now[0] += up.GOOD_FOR
    stores.states()
    assert len(asked) == 4


def test_wrong_settings_of_an_alias_break_no_scrape() -> None:
    with override_settings(DISTLOCKS={"default": MEMORY, "bad": {"TTL": "long"}}):
        assert up.Stores().states() == {"default": True}


# The app, as projects use it


SETUP = """
import sys, django
from django.conf import settings
settings.configure(
    SECRET_KEY="x",
    INSTALLED_APPS=["distlocks", "distlocks.contrib.prometheus"],
    DISTLOCKS={"default": {"BACKEND": "distlocks.backends.memory.MemoryBackend"}},
)
django.setup()
from django.core.management import call_command
call_command("check")
from django.test import RequestFactory
from distlocks import db_lock
from distlocks.history.journal import journal
from distlocks.contrib.prometheus.views import metrics
def page():
    return metrics(RequestFactory().get("/metrics")).content.decode()
"""


def run(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SETUP + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        env={"PATH": "", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_app_counts_and_is_read() -> None:
    page = run(
        """
with db_lock("order:1"):
    pass
journal.look()
print(page())
"""
    )
    assert 'distlocks_acquires_total{backend="default",pattern="order:*"} 1.0' in page
    assert 'distlocks_backend_up{backend="default"} 1.0' in page


def test_by_itself_within_a_second_or_so() -> None:
    page = run(
        """
import time
with db_lock("order:1"):
    pass
give_up = time.monotonic() + 20
while "order" not in page() and time.monotonic() < give_up:
    time.sleep(0.02)
print(page())
"""
    )
    assert 'distlocks_acquires_total{backend="default",pattern="order:*"} 1.0' in page


def test_processes_are_counted_together(tmp_path: Path) -> None:
    """As gunicorn has them: forked from one that has loaded the project, while that counts."""
    page = run(
        """
import os, threading
stop = threading.Event()
def go_on():
    while not stop.is_set():
        with db_lock("parent"):
            pass
        journal.look()
thread = threading.Thread(target=go_on)
thread.start()
children = []
for _ in range(5):
    child = os.fork()
    if not child:
        lease = db_lock("order:1").acquire()
        journal.look()
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
stop.set()
thread.join()
lease = db_lock("order:2").acquire()
journal.look()
from prometheus_client import multiprocess
before = page()
for child in children:
    multiprocess.mark_process_dead(child)
print(before, "=====", page())
""",
        PROMETHEUS_MULTIPROC_DIR=str(tmp_path),
    )
    before, after = page.split("=====")
    assert 'distlocks_acquires_total{backend="default",pattern="order:*"} 6.0' in before
    assert 'distlocks_leases_held{backend="default"} 6.0' in before
    assert 'distlocks_leases_held{backend="default"} 1.0' in after
    assert 'distlocks_acquires_total{backend="default",pattern="order:*"} 6.0' in after
    assert 'distlocks_backend_up{backend="default"} 1.0' in after


def test_without_the_client_the_app_says_what_to_do() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['prometheus_client'] = None\n" + SETUP,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "ImproperlyConfigured" in done.stderr
    assert "pip install 'distlocks[prometheus]'" in done.stderr


def test_the_page_is_for_reading(rf: RequestFactory) -> None:
    assert metrics_view(rf.post("/metrics")).status_code == 405


# The alert rules

RULE = re.compile(r"      - alert: (\w+)\n(.*?)(?=\n\n|\Z)", re.DOTALL)
KEYWORDS = {"sum", "min", "by", "rate", "increase", "and", "or", "unless", "offset"}


def rules() -> dict[str, str]:
    text = files("distlocks.contrib.prometheus").joinpath("alerts.yml").read_text()
    head, _, body = text.partition("    rules:\n")
    assert head.endswith("groups:\n  - name: distlocks\n")
    return dict(RULE.findall(body))


def test_there_is_a_rule_for_each_thing_that_goes_wrong() -> None:
    assert [*rules()] == [
        "DistlocksBackendDown",
        "DistlocksStoreErrors",
        "DistlocksLeasesLost",
        "DistlocksLeasesExpired",
        "DistlocksContention",
        "DistlocksTimeouts",
        "DistlocksHistoryDropped",
    ]


@pytest.mark.parametrize("name", rules())
def test_a_rule_asks_for_metrics_that_there_are(name: str, metrics: Metrics) -> None:
    rule = rules()[name]
    found = re.search(r"        expr: (?:>-\n)?(.*?)\n        \w+:", rule, re.DOTALL)
    assert found
    expression = found[1]
    with db_lock("order:1"):
        journal.look()
    there: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            there.setdefault(sample.name, set()).update(sample.labels)
    asked = set(re.findall(r"distlocks_\w+", expression))
    assert asked
    assert asked <= there.keys()
    labels = {
        one for group in re.findall(r"by \(([\w, ]+)\)", expression) for one in group.split(", ")
    }
    for metric in asked:
        assert labels <= there[metric]
    words = set(re.findall(r"\b[a-z_]+\b", expression)) - asked - labels
    assert words - {"m"} <= KEYWORDS
    assert expression.count("(") == expression.count(")")
    assert rule.count("severity: ") == rule.count("summary: ") == rule.count("description: ") == 1
    # Plain text in YAML may hold no ": ".
    for line in re.findall(r"^ +(?:summary|description): (.*)$", rule, re.MULTILINE):
        assert ": " not in line
        assert " #" not in line
        assert set(re.findall(r"\$labels\.(\w+)", line)) <= labels


def test_buckets_are_those_of_the_history(metrics: Metrics) -> None:
    assert tuple(metrics.wait._upper_bounds[:-1]) == BOUNDS
