"""Single writes that an old fencing token cannot make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from .claims import EXCLUSIVE
from .exceptions import NotSupported, StaleToken

if TYPE_CHECKING:
    from .lease import Lease


class FencedModel(models.Model):
    """A model whose rows remember the highest fencing token that has written them.

    See fenced_update() for what that covers. Create rows as usual: they begin at 0.
    """

    fencing_token = models.BigIntegerField(_("fencing token"), default=0, editable=False)

    class Meta:
        abstract = True


AnyModel = TypeVar("AnyModel", bound=models.Model)


def fenced_update(
    lease: Lease, target: FencedModel | models.QuerySet[AnyModel], /, **values: Any
) -> int:
    """Write `values` to a row, or to all rows of a queryset, unless a later holder has written it.

    One conditional UPDATE in whatever transaction is open: a row takes the values, and our token,
    if its own token is not higher. Returns how many rows did. For a row (an instance), raises
    StaleToken if it has a higher token or is gone, and brings the instance up to date otherwise.

    It covers a write that depends on nothing that was read: a status, a result, a heartbeat. It
    does **not** cover read-modify-write: a stale holder may read, a later one read the same, the
    stale one write (its token is still the highest), and the later one overwrite that. For this
    there is lease.atomic(), which lets one holder in at a time. Nor does it cover plain save() or
    update() by code that does not go through it. F() expressions are evaluated in the UPDATE, so a
    fenced `F("n") + 1` counts each accepted call once.

    The lease must have one key, exclusively: NotSupported otherwise, since those who share a key
    are not stale because of each other. Rows must be protected by always the same key.
    """
    token = lease.fencing_token
    if lease.mode != EXCLUSIVE:
        raise NotSupported(
            f"fenced_update() is for exclusive leases, and this one is {lease.mode}.",
            keys=lease.keys,
        )
    lease.check()
    if isinstance(target, models.QuerySet):
        _check_fenced(target.model)
        return target.filter(fencing_token__lte=token).update(fencing_token=token, **values)
    _check_fenced(type(target))
    rows = type(target)._base_manager.using(target._state.db).filter(pk=target.pk)
    if not rows.filter(fencing_token__lte=token).update(fencing_token=token, **values):
        raise StaleToken(
            f"{target!r} was written by a later holder of {lease.keys[0]!r}, or has been deleted: "
            f"nothing was written.",
            keys=lease.keys,
        )
    target.refresh_from_db(fields=[*values, "fencing_token"])
    return 1


def _check_fenced(model: type[models.Model]) -> None:
    if not issubclass(model, FencedModel):
        raise TypeError(f"{model.__name__} must inherit from distlocks.fencing.FencedModel.")
