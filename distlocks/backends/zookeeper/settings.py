"""What the OPTIONS of a ZooKeeper backend say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kazoo.security import ACL, CREATOR_ALL_ACL

from ..given import GivenOptions
from .nodes import node_of

if TYPE_CHECKING:
    from .backend import ZooKeeperBackend

NAMES = ("hosts", "path", "timeout", "auth", "acl", "connection")
# Seconds.
TIMEOUT = 5.0
# Of KazooClient's arguments: what distlocks says itself.
RESERVED = {"hosts", "timeout", "handler", "connection_retry", "command_retry", "client_id"} | {
    "default_acl",
    "auth_data",
    "read_only",
}


class Settings(GivenOptions):
    """The OPTIONS of one alias, checked."""

    check = 40

    def __init__(self, backend: ZooKeeperBackend) -> None:
        super().__init__(backend)
        self.alias = backend.alias
        # Seconds: how long a session is to last without a sign of life.
        self.session_timeout = backend.params.max_ttl
        self.hosts = self._hosts()
        self.path = self._path()
        self.timeout = self._timeout()
        self.auth = self._auth()
        self.acl = self._acl()
        self.connection = self._connection()

    def _hosts(self) -> str:
        hosts = self.options.get("hosts")
        if isinstance(hosts, Sequence) and not isinstance(hosts, str):
            hosts = ",".join(map(str, hosts))
        if not isinstance(hosts, str) or not hosts.strip(", "):
            self.refuse(
                f"['hosts'] must name the servers, not {hosts!r}.",
                "For instance 'zk1:2181,zk2:2181,zk3:2181', or a list of such.",
            )
        if "/" in hosts:
            self.refuse(
                f"['hosts'] = {hosts!r} has a path.", "Give it as 'path', as in '/myproject/locks'."
            )
        return hosts

    def _path(self) -> str:
        path = self.options.get("path", "/distlocks")
        parts = path.split("/")[1:] if isinstance(path, str) else []
        if not parts or path[0] != "/" or any(not p or p != node_of(p) for p in parts):
            self.refuse(
                f"['path'] = {path!r} is no path of a node.",
                "Begin it with '/' and end it with none, as in the default '/distlocks'.",
            )
        if parts[0] == "zookeeper":
            self.refuse(f"['path'] = {path!r} is ZooKeeper's own.", "Choose another.")
        return str(path)

    def _timeout(self) -> float:
        value = self.seconds("timeout", min(TIMEOUT, self.session_timeout / 3))
        if value <= 0:
            self.refuse(f"['timeout'] is {value:g} s.", "Give what a request may take.")
        return value

    def _auth(self) -> list[tuple[str, str]]:
        auth = self.options.get("auth", ())
        if isinstance(auth, Sequence) and len(auth) == 2 and all(isinstance(a, str) for a in auth):
            auth = [auth]
        try:
            pairs = [(scheme, credential) for scheme, credential in auth]
        except (TypeError, ValueError):
            pairs = [(None, None)]
        if not all(isinstance(word, str) for pair in pairs for word in pair):
            # The value is a secret.
            self.refuse(
                "['auth'] must be a pair of scheme and credential, or a list of such.",
                "For instance ('digest', 'user:password').",
            )
        return pairs

    def _acl(self) -> list[Any] | None:
        """None: everybody may do everything."""
        acl = self.options.get("acl", "creator" if self.auth else "open")
        if acl == "open":
            return None
        if acl == "creator":
            if not (self.auth or self.options.get("connection", {}).get("sasl_options")):
                self.refuse("['acl'] = 'creator' needs to know who creates.", "Add 'auth' or SASL.")
            return list(CREATOR_ALL_ACL)
        if isinstance(acl, Sequence) and acl and all(isinstance(one, ACL) for one in acl):
            return list(acl)
        self.refuse(
            f"['acl'] = {acl!r} is not known.",
            "'creator' (the default with 'auth'), 'open' (the default without), or a list of "
            "kazoo.security.ACL. All processes that use the locks need every right.",
        )

    def _connection(self) -> dict[str, Any]:
        connection = self.arguments("KazooClient")
        if taken := RESERVED & connection.keys():
            self.refuse(
                f"['connection'] has {', '.join(sorted(taken))}, which distlocks gives itself.",
                "Leave it out, or use the option of its own: see the reference.",
            )
        return connection
