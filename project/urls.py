"""Where everything is."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from distlocks.contrib.prometheus.views import metrics

urlpatterns = [
    path("", include("project.jobs.urls")),
    path("admin/", admin.site.urls),
    # To be kept from the public elsewhere: this project is served to its own machine only.
    path("metrics", metrics, name="metrics"),
]
