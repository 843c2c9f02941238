"""The command line."""

import argparse
import time
from importlib import import_module
from pathlib import Path

from benchmarks import report
from benchmarks.environment import environment

NAMES = ("uncontended", "imports", "growth", "sweep", "contended", "renewal")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--postgres",
        metavar="URL",
        help="a PostgreSQL on which databases may be created; without it, one is started",
    )
    options = parser.parse_args()
    for name in options.names:
        if name not in NAMES:
            parser.error(f"there is no benchmark {name!r}, only {', '.join(NAMES)}")
    results = []
    with environment(options.postgres) as env:
        versions = env.versions()
        report.console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
        for name in options.names or NAMES:
            began = time.monotonic()
            found = import_module(f"benchmarks.{name}").run(env, options.quick)
            for result in found:
                report.show(result)
            report.console.print(f"({name}: {time.monotonic() - began:.0f} s)\n", style="dim")
            results.extend(found)
            # After each: a long run that is broken off keeps what it has found.
            if options.json:
                report.write(options.json, versions, options.quick, results)


if __name__ == "__main__":
    main()
