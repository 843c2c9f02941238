"""Locks in a ZooKeeper ensemble."""

from ...conf import InvalidSetting

try:
    from .backend import ZooKeeperBackend
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "kazoo":
        raise
    raise InvalidSetting(
        40,
        "The ZooKeeper backend needs kazoo, which is not installed.",
        "Install it: pip install 'distlocks[zookeeper]'.",
    ) from error

__all__ = ["ZooKeeperBackend"]
