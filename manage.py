#!/usr/bin/env python
"""Runs the demo project's management commands."""

import os
import sys

from django.core.exceptions import ImproperlyConfigured
from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        # For who runs a command to mend, and not by reading a traceback.
        sys.exit(f"manage.py: {error}")


if __name__ == "__main__":
    main()
