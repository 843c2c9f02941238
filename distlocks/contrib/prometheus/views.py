"""The page that Prometheus reads."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from .metrics import install, several_processes
from .up import BackendUpCollector


def registry() -> CollectorRegistry:
    """All metrics of this process; of all processes where they share them."""
    if not several_processes():
        return install().registry
    together = CollectorRegistry()
    MultiProcessCollector(together)  # type: ignore[no-untyped-call]
    together.register(BackendUpCollector())
    return together


@require_safe
@never_cache
def metrics(request: HttpRequest) -> HttpResponse:
    """The metrics as text. Anybody who may call it sees key patterns: keep others out."""
    return HttpResponse(generate_latest(registry()), content_type=CONTENT_TYPE_LATEST)
