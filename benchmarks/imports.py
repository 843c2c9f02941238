"""What `import distlocks` adds, in fresh interpreters."""

import json
import os
import subprocess
import sys

from benchmarks.environment import Environment
from benchmarks.rounds import Result, Target, interleaved, median, spread

SET_UP = """
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", *{apps}],
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}},
)
"""
TIMED = """
import sys, time
{before}
modules, began, began_cpu = set(sys.modules), time.perf_counter(), time.process_time()
{what}
took = [time.perf_counter() - began, time.process_time() - began_cpu]
print([*took, len(set(sys.modules) - modules)])
"""
BARE = SET_UP.format(apps=[])
WITH = SET_UP.format(apps=["distlocks"])
FOREIGN = ("DJANGO", "DISTLOCKS", "PYTHONDONTWRITEBYTECODE")
CASES = {
    "import distlocks, Django set up": (BARE + "django.setup()", "import distlocks"),
    "import distlocks, Django imported": ("import django", "import distlocks"),
    "django.setup() without it": (BARE, "django.setup()"),
    "django.setup() with it installed": (WITH, "django.setup()"),
    "import django": ("", "import django"),
    "import django.db.models": ("import django", "import django.db.models"),
}


def run(env: Environment, quick: bool) -> list[Result]:
    modules: dict[str, int] = {}
    cpu: dict[str, list[float]] = {name: [] for name in CASES}

    def case(name: str) -> float:
        before, what = CASES[name]
        # No settings but those of the script; bytecode of what is there now, made by the first
        # round, which does not count.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        clean["PYTHONPYCACHEPREFIX"] = os.path.join(os.environ["DISTLOCKS_TEST_DIR"], "bytecode")
        done = subprocess.run(
            [sys.executable, "-c", TIMED.format(before=before, what=what)],
            env=clean,
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, cpu_seconds, modules[name] = json.loads(done.stdout)
        cpu[name].append(cpu_seconds)
        return float(seconds)

    rounds = 7 if quick else 31
    measured = interleaved({name: lambda name=name: case(name) for name in CASES}, rounds)  # type: ignore[misc]
    shown = {name: [seconds * 1000 for seconds in times] for name, times in measured.items()}
    extra = [
        one - other
        for one, other in zip(
            shown["django.setup() with it installed"],
            shown["django.setup() without it"],
            strict=True,
        )
    ]
    rows = [
        (name, spread(times), f"{median(cpu[name]) * 1000:.1f}", str(modules[name]))
        for name, times in shown.items()
    ]
    rows.append(("installed, added to django.setup()", spread(extra), "", ""))
    base = "import distlocks, Django set up"
    return [
        Result(
            "imports",
            f"what it takes to import, {rounds} fresh interpreters each, bytecode compiled",
            ("", "ms (middle half)", "of these, CPU", "modules"),
            rows,
            {"seconds": measured, "cpu_seconds": cpu, "modules": modules},
            [Target(base, median(shown[base]), 20.0, " ms")],
        )
    ]
