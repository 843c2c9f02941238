"""What the locks of the tests protect. No migrations: the tables come from the models."""

from django.db import models

from distlocks.fencing import FencedModel


class Account(models.Model):
    """Read, changed and written back: a lost update shows in the balance."""

    name = models.CharField(max_length=200, unique=True)
    balance = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.balance}"


class JobMark(models.Model):
    """One row for each time that a job ran: a second row is one run too many."""

    job = models.CharField(max_length=200)
    token = models.BigIntegerField(null=True)
    pid = models.IntegerField()
    started_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.job} by {self.pid}"


class Report(FencedModel):
    """Written by whoever holds its lock, one conditional update at a time."""

    name = models.CharField(max_length=200, unique=True)
    text = models.CharField(max_length=200, blank=True)
    views = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"
