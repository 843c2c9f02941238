"""What may be ordered: which job, how much work, how often at most."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from django import forms
from django.conf import settings
from django.core.exceptions import ValidationError
from django.http import HttpRequest

DEFAULT_SECONDS = 1.0
MAX_SECONDS = 60
MAX_INTERVAL = 3600
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class BadOrder(Exception):
    """The order cannot be carried out as it is: what is wrong with each field of it."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        super().__init__(" ".join(f"{name}: {' '.join(said)}" for name, said in fields.items()))
        self.fields = fields


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder:
    """One job to run: `seconds` of work, and not again within `interval` seconds."""

    job: str
    seconds: float
    interval: float


def read_order(request: HttpRequest, job: str) -> JobOrder:
    """The order in a request: the job from its path, the numbers from its query or body."""
    given = {**request.GET.dict(), **_body(request)}
    unknown = given.keys() - {"seconds", "interval"}
    if unknown:
        says = ["There is no such parameter. Known are seconds and interval."]
        raise BadOrder(dict.fromkeys(sorted(unknown), says))
    form = OrderForm({**given, "job": job})
    if not form.is_valid():
        raise BadOrder({name: [str(text) for text in texts] for name, texts in form.errors.items()})
    return form.order()


def _number(most: float) -> forms.FloatField:
    """A number that may be left out; whatever is wrong with it, the way out is the same."""
    way_out = dict.fromkeys(
        ("invalid", "min_value", "max_value"), f"Give a number from 0 to {most}."
    )
    return forms.FloatField(required=False, min_value=0, max_value=most, error_messages=way_out)


class OrderForm(forms.Form):
    """Checks an order; what is left out gets its default."""

    job = forms.CharField(strip=False, error_messages={"required": "Name a job: /run/<job id>."})
    seconds = _number(MAX_SECONDS)
    interval = _number(MAX_INTERVAL)

    def clean_job(self) -> str:
        job = cast("str", self.cleaned_data["job"])
        if not JOB_ID.fullmatch(job):
            raise ValidationError(
                "Use 1 to 64 letters, digits, dots, dashes or underscores, "
                "the first one a letter or digit."
            )
        return job

    def order(self) -> JobOrder:
        """The order, once the form is valid."""
        given = {name: value for name, value in self.cleaned_data.items() if value is not None}
        defaults = {
            "seconds": DEFAULT_SECONDS,
            "interval": settings.JOB_DEFAULT_INTERVAL,
        }
        return JobOrder(**{**defaults, **given})


def _body(request: HttpRequest) -> dict[str, Any]:
    if request.content_type != "application/json":
        return request.POST.dict()
    try:
        body = json.loads(request.body)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise BadOrder({"body": ['Send a JSON object such as {"seconds": 2}, or form fields.']})
    return body
