"""The app that switches the metrics on."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _


class PrometheusConfig(AppConfig):
    """Counts what happens to the locks of this process from now on."""

    name = "distlocks.contrib.prometheus"
    label = "distlocks_prometheus"
    verbose_name = _("Metrics of distributed locks")

    def ready(self) -> None:
        from .settings import check_prometheus

        try:
            from .metrics import install
        except ImportError as error:
            raise ImproperlyConfigured(
                f"'distlocks.contrib.prometheus' is in INSTALLED_APPS, and prometheus-client is "
                f"not installed ({error}): run pip install 'distlocks[prometheus]', or take it out."
            ) from error
        register(check_prometheus, "distlocks")
        install()
