"""What scripts are told of requests and grants; requests whose keys are on several servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ... import clock
from ...claims import Claim, Extended, Extension, Grant, Request, to_us
from ...exceptions import BackendUnavailable
from .mail import Mailbox
from .records import LETTER, who
from .server import Servers
from .wire import packed

# Why a lease is not extended across a change of the epoch.
NOT_OPEN = "the Redis server is not open for this epoch any more"
# So many claims are extended by one script: a longer one would keep others waiting.
EXTENDED_AT_ONCE = 200


def asking(request: Request, claims: Sequence[Claim], mailbox: Mailbox | None) -> tuple[int, bytes]:
    """The arguments of the acquire script, packed: how many, and what."""
    waited = b""
    if request.waits:
        waited = b"%d" % max(to_us(clock.lease_now() - request.asked_at), 0)
    words = [
        mailbox.name if mailbox is not None else b"",
        request.owner_id.encode(),
        b"%d" % request.hold_us,
        waited,
        who(request),
    ]
    for key, mode, limit in claims:
        words += (key.encode(), LETTER[mode], b"%d" % limit)
    return len(words), packed(words)


def ending(
    servers: Servers,
    claims: Sequence[Claim],
    owner_id: str,
    tokens: Sequence[int] = (),
    min_hold_us: int = 0,
) -> Iterator[tuple[bytes, int, bytes, int]]:
    """Per hash, the arguments of the release script and how many claims are in them."""
    head = (owner_id.encode(), b"%d" % min_hold_us)
    if len(claims) == 1:
        key, mode, _ = claims[0]
        token = b"%d" % tokens[0] if tokens else b""
        words = (*head, key.encode(), LETTER[mode], token)
        yield servers.hash_name(key), 5, packed(words), 1
        return
    by_hash: dict[bytes, list[bytes]] = {}
    for number, (key, mode, _) in enumerate(claims):
        token = b"%d" % tokens[number] if tokens else b""
        by_hash.setdefault(servers.hash_name(key), []).extend((key.encode(), LETTER[mode], token))
    for hash_name, fields in by_hash.items():
        yield hash_name, len(fields) + 2, packed((*head, *fields)), len(fields) // 3


def lasting(
    servers: Servers, extensions: Sequence[Extension]
) -> Iterator[tuple[bytes, int, bytes, list[str]]]:
    """Per hash and batch, the arguments of the extend script and whose claims they are."""
    wanted: dict[bytes, list[tuple[str, tuple[bytes, ...]]]] = {}
    for extension in extensions:
        grant = extension.grant
        owner, ttl = grant.owner_id.encode(), b"%d" % extension.ttl_us
        min_hold = b"%d" % grant.min_hold_us
        for (key, mode, _), token in zip(grant.claims, grant.fencing_tokens, strict=True):
            wanted.setdefault(servers.hash_name(key), []).append(
                (
                    grant.owner_id,
                    (key.encode(), owner, b"%d" % token, ttl, min_hold, LETTER[mode]),
                )
            )
    for hash_name, all_of_it in wanted.items():
        for first in range(0, len(all_of_it), EXTENDED_AT_ONCE):
            batch = all_of_it[first : first + EXTENDED_AT_ONCE]
            words = [word for _, claim in batch for word in claim]
            yield hash_name, len(words), packed(words), [owner for owner, _ in batch]


def parts(servers: Servers, request: Request) -> list[Request]:
    """What each server of a Cluster is asked for, in the order in which everybody asks them."""
    by_hash: dict[bytes, list[Claim]] = {}
    for claim in request.claims:
        by_hash.setdefault(servers.hash_name(claim.key), []).append(claim)
    return [replace(request, claims=tuple(by_hash[name])) for name in sorted(by_hash)]


def without(request: Request, part: Request) -> Request:
    """The rest of a request."""
    return replace(request, claims=tuple(c for c in request.claims if c not in part.claims))


def whole(request: Request, grants: Sequence[Grant]) -> Grant:
    """The grant of all claims, from those of the parts."""
    tokens = {
        claim.key: token
        for grant in grants
        for claim, token in zip(grant.claims, grant.fencing_tokens, strict=True)
    }
    return replace(
        grants[0],
        claims=request.claims,
        fencing_tokens=tuple(tokens[claim.key] for claim in request.claims),
        acquired_us=min(grant.acquired_us for grant in grants),
        expired=tuple(holder for grant in grants for holder in grant.expired),
    )


class Answers:
    """What became of each grant of a batch, whose claims may be on several servers."""

    def __init__(self, extensions: Sequence[Extension]) -> None:
        self._worst = {extension.grant.owner_id: "1" for extension in extensions}
        self._failure: BackendUnavailable | None = None

    def note(self, owners: Sequence[str], reply: bytes) -> None:
        """One answer for each claim: '1' extended, 'B' busy, 'A' not in this epoch, '0' lost."""
        for owner, answer in zip(owners, reply.decode(), strict=True):
            self._worst[owner] = max(self._worst[owner], answer, key="1BA0".index)

    def fail(self, owners: Sequence[str], failure: BackendUnavailable) -> None:
        """There was no answer for these."""
        self.note(owners, b"B" * len(owners))
        self._failure = failure

    def result(self) -> Extended:
        """A grant is lost with any of its claims, and extended with all of them. Raises what went
        wrong if nothing can be said of any."""
        if self._failure is not None and set(self._worst.values()) == {"B"}:
            raise self._failure
        return Extended(
            extended=frozenset(o for o, answer in self._worst.items() if answer == "1"),
            lost=frozenset(o for o, answer in self._worst.items() if answer == "0"),
            ending={o: NOT_OPEN for o, answer in self._worst.items() if answer == "A"},
        )
