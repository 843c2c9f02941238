"""How what was granted is extended, released and abandoned."""

from __future__ import annotations

from collections.abc import Sequence

from kazoo.exceptions import BadVersionError, NoNodeError

from ...claims import Extended, Extension, Grant, Request
from .nodes import Named, node_of
from .records import Held, held
from .requests import catch_up, children, delete, get
from .session import Interrupted, Talk, Transaction
from .table import Judge


def _nodes(grant: Grant) -> list[Named]:
    """The nodes of a grant's claims. It names the session in which it was granted as its store."""
    return [Named(claim, grant.owner_id, grant.store) for claim in grant.claims]


def _path(talk: Talk, named: Named) -> str:
    return f"{talk.session.paths.key(named.claim.key)}/{named.node}"


def _read(talk: Talk, nodes: Sequence[Named]) -> list[Held | None]:
    """The claims as they are now; None for one that is gone."""
    paths = [_path(talk, named) for named in nodes]
    answers = talk.ask(*[get(path) for path in paths])
    return [
        None
        if isinstance(answer, NoNodeError)
        else held(named, path, *answer, trusted=named.session == talk.session.name)
        for named, path, answer in zip(nodes, paths, answers, strict=True)
    ]


def extend(judge: Judge, talk: Talk, extensions: Sequence[Extension]) -> Extended:
    """Make each grant last, by a transaction that finds its session alive and nothing changed.

    It looks at no clock: as long as nobody has taken the claim, its holder may keep it, and by its
    own clock a lease does not ask after its deadline.
    """
    extended, lost = set(), set()
    wanted: list[tuple[Extension, list[Held]]] = []
    nodes = [_nodes(extension.grant) for extension in extensions]
    flat = iter(_read(talk, [named for several in nodes for named in several]))
    for extension, several in zip(extensions, nodes, strict=True):
        grant = extension.grant
        found = [next(flat) for _ in several]
        held_still = [
            one
            for one, token in zip(found, grant.fencing_tokens, strict=True)
            if one is not None and one.token == token and one.trusted
        ]
        if len(held_still) == len(several):
            wanted.append((extension, held_still))
        else:
            lost.add(grant.owner_id)
            talk.session.forget_lease(grant.owner_id)
    changes = []
    for extension, several_held in wanted:
        change = Transaction(talk)
        for one in several_held:
            change.set(one.path, one.data(ttl_us=extension.ttl_us), one.version)
        changes.append(change)
    answers = talk.ask(*[change.send for change in changes])
    for (extension, several_held), change, answer in zip(wanted, changes, answers, strict=True):
        outcome = change.outcome(answer)
        owner_id = extension.grant.owner_id
        if outcome.failure is None:
            extended.add(owner_id)
            talk.session.note_lease(owner_id, extension.ttl_us)
            for one in several_held:
                judge.seen.since(one.path, outcome.state)
        elif isinstance(outcome.failure, NoNodeError):
            lost.add(owner_id)
            talk.session.forget_lease(owner_id)
    return Extended(extended=frozenset(extended), lost=frozenset(lost))


def release(talk: Talk, grant: Grant) -> bool:
    """Free what is still the grant's; whether all was, now or by an earlier release."""
    nodes = _nodes(grant)
    if grant.min_hold_us:
        freed = _cool_down(talk, nodes, grant)
    else:
        answers = talk.ask(*[delete(_path(talk, named)) for named in nodes])
        freed = [not isinstance(answer, NoNodeError) for answer in answers]
    talk.session.forget_lease(grant.owner_id)
    if all(freed):
        return True
    # Whoever takes or frees a claim that is not its own raises the key's token: with ours still
    # there, it was our own release, whose answer was lost.
    paths = talk.session.paths
    _, *tokens = talk.ask(
        catch_up(paths.root), *[get(paths.key(claim.key)) for claim in grant.claims]
    )
    return all(
        done or (not isinstance(answer, NoNodeError) and int(answer[0]) == token)
        for done, answer, token in zip(freed, tokens, grant.fencing_tokens, strict=True)
    )


def _cool_down(talk: Talk, nodes: Sequence[Named], grant: Grant) -> list[bool]:
    """Release claims with a minimum hold: what is left of it goes on without their session."""
    now_us = talk.session.now_us()
    found = _read(talk, nodes)
    changes = []
    for named, one in zip(nodes, found, strict=True):
        change = Transaction(talk)
        if one is not None:
            change.delete(one.path, one.version)
            rest_us = one.cooled_us - now_us
            if rest_us > 0:
                after = named._replace(released=True)
                change.create(_path(talk, after), one.cooling_data(rest_us))
        changes.append(change)
    answers = talk.ask(*[change.send for change in changes])
    done = []
    for one, change, answer in zip(found, changes, answers, strict=True):
        failure = change.outcome(answer).failure
        if isinstance(failure, BadVersionError):
            # An extension that was under way: once more.
            raise Interrupted("the claim was extended while it was released", in_doubt=False)
        done.append(one is not None and failure is None)
    return done


def abandon(talk: Talk, request: Request) -> None:
    """Free whatever the owner id has, in whichever session it got it: claims and places."""
    paths = talk.session.paths
    owner = node_of(request.owner_id).replace(".", "%2E")
    parents = [paths.key(key) for key in request.keys] + [paths.queue(key) for key in request.keys]
    # What a server has not heard of yet must not be left behind.
    _, *families = talk.ask(catch_up(paths.root), *[children(parent) for parent in parents])
    own = [
        f"{parent}/{node}"
        for parent, family in zip(parents, families, strict=True)
        if not isinstance(family, NoNodeError)
        for node in family
        if node.split(".")[1:2] == [owner]
    ]
    talk.session.forget_lease(request.owner_id)
    if own:
        talk.ask(*[delete(path) for path in own])
