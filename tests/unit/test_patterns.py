"""What keys have in common."""

import pytest

from distlocks.patterns import pattern_of, pattern_of_template


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("order:42", "order:*"),
        ("order:42:line:7", "order:*:line:*"),
        ("nightly", "nightly"),
        ("user:6f9619ff-8b86-d011-b42d-00c04fc964ff", "user:*"),
        ("blob:9f86d081884c7d659a2feaa0c55ad015", "blob:*"),
        # A word, not a digest.
        ("defaced:feedback", "defaced:feedback"),
        ("report:2026-11-30", "report:*"),
        ("rate:1.5", "rate:*"),
        ("customer:7\x1forder:42", "customer:*\x1forder:*"),
        ("42", "*"),
    ],
)
def test_a_star_for_what_tells_one_from_the_others(name: str, pattern: str) -> None:
    assert pattern_of(name) == pattern


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("invoice:{invoice_id}", "invoice:*"),
        ("{user.name}/{path!r:>10}", "*/*"),
        ("all", "all"),
        ("literal {{braces}}", "literal {braces}"),
    ],
)
def test_a_template_tells_better(template: str, pattern: str) -> None:
    assert pattern_of_template(template) == pattern
