"""A project's views that need a lock which somebody else has."""

from typing import Any

from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from distlocks import BackendUnavailable, LeaseLost, db_lock, locks
from distlocks.http import answers_lock_errors

KEY = "customer:7"


def metadata_of(key: str) -> dict[str, Any]:
    (holder,) = locks["default"].holders(key)
    return dict(holder.metadata)


def held(request: HttpRequest) -> HttpResponse:
    with db_lock(KEY, timeout=0):
        return HttpResponse("had")


async def aheld(request: HttpRequest) -> HttpResponse:
    async with db_lock(KEY, timeout=0):
        return HttpResponse("had")


def down(request: HttpRequest) -> HttpResponse:
    raise BackendUnavailable("db7.internal:5432 refuses connections", keys=(KEY,))


def lost(request: HttpRequest) -> HttpResponse:
    raise LeaseLost("gone", keys=(KEY,))


def staff(request: HttpRequest) -> HttpResponse:
    assert request.user.is_staff
    return held(request)


async def astaff(request: HttpRequest) -> HttpResponse:
    assert (await request.auser()).is_staff
    return await aheld(request)


locked = answers_lock_errors(status=423, retry_after=7)(held)
alocked = answers_lock_errors(status=423, retry_after=7)(aheld)


@answers_lock_errors
def writes_first(request: HttpRequest) -> HttpResponse:
    User.objects.create(username="written before the lock was asked for")
    return held(request)


@method_decorator(answers_lock_errors(status=423), name="dispatch")
class Held(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return held(request)


@method_decorator(answers_lock_errors(status=423), name="dispatch")
class AHeld(View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        return await aheld(request)


def told(request: HttpRequest, **_: str) -> HttpResponse:
    if "load" in request.GET:
        assert request.user.is_authenticated
    with db_lock("told", metadata={"path": "mine"} if "mine" in request.GET else None):
        return JsonResponse(metadata_of("told"))


async def atold(request: HttpRequest) -> HttpResponse:
    if "load" in request.GET:
        await request.auser()
    async with db_lock("told"):
        return JsonResponse(metadata_of("told"))


async def told_in_a_thread(request: HttpRequest) -> HttpResponse:
    return await sync_to_async(told)(request)


urlpatterns = [
    path("held", held),
    path("aheld", aheld),
    path("down", down),
    path("lost", lost),
    path("staff", staff),
    path("astaff", astaff),
    path("locked", locked),
    path("alocked", alocked),
    path("writes-first", writes_first),
    path("class", Held.as_view()),
    path("aclass", AHeld.as_view()),
    path("told", told),
    path("told/<path:rest>", told),
    path("atold", atold),
    path("told-in-a-thread", told_in_a_thread),
]
