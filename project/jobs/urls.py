"""The job runner's addresses."""

from __future__ import annotations

from django.urls import path, re_path

from project.jobs.views import BoardView, RunJobView, board_data, ready

app_name = "jobs"
urlpatterns = [
    path("", BoardView.as_view(), name="board"),
    path("board.json", board_data, name="board-data"),
    path("ready", ready, name="ready"),
    # Whatever stands for the id, or nothing, gets the API's own answer.
    re_path(r"^run/(?P<job>[\s\S]*)\Z", RunJobView.as_view(), name="run"),
]
