"""The command line."""

import argparse
import time
from importlib import import_module
from pathlib import Path

from benchmarks import report
from benchmarks.environment import environment
from tests.servers.base import Server
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer

# Of the servers, only those that the chosen ones need are started.
NAMES: dict[str, tuple[type[Server], ...]] = {
    "uncontended": (PostgresServer,),
    "advisory": (PostgresServer,),
    "imports": (),
    "growth": (PostgresServer,),
    "sweep": (PostgresServer,),
    "contended": (PostgresServer,),
    "renewal": (PostgresServer,),
    "recording": (PostgresServer, RedisServer),
    "history": (PostgresServer,),
    "admin": (PostgresServer, RedisServer),
    "redis.uncontended": (RedisServer,),
    "redis.drain": (RedisServer,),
    "redis.fairness": (RedisServer,),
    "redis.crowd": (RedisServer,),
    "redis.handoffs": (RedisServer,),
    "redis.keys": (RedisServer,),
    "redis.renewal": (RedisServer,),
    "redis.memory": (RedisServer,),
    "redis.fastpath": (RedisServer, PostgresServer),
    "redis.redlock": (RedisServer,),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; redis for all of its own",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--postgres",
        metavar="URL",
        help="a PostgreSQL on which databases may be created; without it, one is started",
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="a Redis whose database is empty, and will be emptied; without it, one is started",
    )
    options = parser.parse_args()
    chosen = []
    for name in options.names or NAMES:
        chosen.extend(found := [n for n in NAMES if n == name or n.startswith(f"{name}.")])
        if not found:
            parser.error(f"there is no benchmark {name!r}, only {', '.join(NAMES)}")
    kinds = {kind for name in chosen for kind in NAMES[name]}
    urls = {PostgresServer: options.postgres, RedisServer: options.redis}
    results = []
    with environment({kind: urls[kind] for kind in kinds}) as env:
        versions = env.versions()
        report.console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
        for name in chosen:
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
