"""The pages and the JSON API of the job runner."""

from __future__ import annotations

import os
from typing import Any

from django.conf import settings
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, JsonResponse
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe
from django.views.generic import TemplateView

from distlocks import BackendUnavailable, LeaseLost, StaleToken
from project.jobs.board import snapshot
from project.jobs.holders import Contention
from project.jobs.models import JobRun
from project.jobs.orders import MAX_INTERVAL, MAX_SECONDS, BadOrder, read_order
from project.jobs.runner import JobContended, JobFailed, NoTurn, run_job


class BoardView(TemplateView):
    """The board. The page itself needs no database: it fetches what it shows."""

    template_name = "board.html"

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(
            server=settings.SERVER_NAME,
            peers=settings.PEERS,
            max_seconds=MAX_SECONDS,
            interval=settings.JOB_DEFAULT_INTERVAL,
            max_interval=MAX_INTERVAL,
            **kwargs,
        )


@require_safe
@never_cache
def board_data(request: HttpRequest) -> JsonResponse:
    """What the board shows, as JSON."""
    try:
        return JsonResponse(snapshot())
    except (BackendUnavailable, DatabaseError):
        return _store_unavailable(".")


@require_safe
@never_cache
def ready(request: HttpRequest) -> JsonResponse:
    """Says that this server process answers, and which one it is."""
    return JsonResponse({"server": settings.SERVER_NAME, "pid": os.getpid()})


# For scripts, which have no token to send: the view reads no cookie and no session, so there is
# no log-in that a foreign page could misuse. That such a page does not start jobs through a
# visitor's browser is checked below, by what browsers say about where a request comes from.
@method_decorator(csrf_exempt, name="dispatch")
class RunJobView(View):
    """`POST /run/<job>` runs the job and answers when it is done, or says why it does not run."""

    http_method_names = ("post", "options")

    def post(self, request: HttpRequest, job: str) -> HttpResponse:
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            return JsonResponse(
                {"error": "cross_site", "detail": "Other sites' pages may not start jobs."},
                status=403,
            )
        try:
            return _done(run_job(read_order(request, job)))
        except BadOrder as error:
            return JsonResponse(
                {"error": "bad_request", "detail": str(error), "fields": error.fields}, status=400
            )
        except JobContended as error:
            return _contended(job, error.contention)
        except NoTurn as error:
            return _no_turn(job, error)
        except BackendUnavailable:
            return _store_unavailable(f", so {job} does not run: nobody would be kept out.")
        except (LeaseLost, StaleToken) as error:
            detail = (
                "The lease was lost while the job ran, so another run may have started: "
                f"what this one did is not to be trusted. {error}"
            )
            return JsonResponse({"error": "lease_lost", "job": job, "detail": detail}, status=500)
        except JobFailed as error:
            body = {"error": "failed", "job": job, "detail": f"Job {job} failed: {error}"}
            return JsonResponse(body, status=500)

    def http_method_not_allowed(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        refusal = HttpResponseNotAllowed(["POST", "OPTIONS"], content_type="application/json")
        refusal.content = b'{"error": "method_not_allowed", "detail": "Start a job with POST."}'
        return refusal


def _done(run: JobRun) -> JsonResponse:
    return JsonResponse(
        {
            "job": run.job,
            "run": run.id,
            "fencing_token": run.fencing_token,
            "started_at": run.started_at,
            "finished_at": run.finished_at,
            "server": run.server,
            "pid": run.pid,
        }
    )


def _contended(job: str, contention: Contention) -> JsonResponse:
    holder = contention.holder
    if holder is None:
        detail = f"The lock store was too busy to tell at once whether job {job} runs."
    elif holder.cooling_down:
        detail = (
            f"Job {job} ran on {holder.server} and may not run again "
            f"for another {holder.remaining:.1f} s."
        )
    else:
        detail = (
            f"Job {job} runs, or waits for its turn, on {holder.server} ({holder.host}, process "
            f"{holder.pid}); its lease has {holder.remaining:.1f} s left and is renewed meanwhile."
        )
    body = {
        "error": contention.state,
        "job": job,
        "detail": detail,
        "held_by": holder.as_json() if holder else None,
        "retry_after": contention.retry_after,
    }
    return _retry_later(body, 409, contention.retry_after)


def _no_turn(job: str, error: NoTurn) -> JsonResponse:
    body = {
        "error": "no_turn",
        "job": job,
        "detail": f"Job {job} has waited {settings.JOB_TURN_SECONDS:g} s for its turn: "
        f"{settings.JOB_LIMIT} others may run at once, now {error}.",
        "held_by": [other.as_json() for other in error.others],
    }
    return _retry_later(body, 503, settings.JOB_STORE_RETRY_SECONDS)


def _store_unavailable(detail: str) -> JsonResponse:
    body = {"error": "store_unavailable", "detail": f"The lock store cannot be reached{detail}"}
    return _retry_later(body, 503, settings.JOB_STORE_RETRY_SECONDS)


def _retry_later(body: dict[str, Any], status: int, seconds: int) -> JsonResponse:
    return JsonResponse(body, status=status, headers={"Retry-After": str(seconds)})
