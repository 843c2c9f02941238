"""What a key may be, and what is said about one that may not."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlocks.keys import MAX_LENGTH, ancestors, check_characters, check_key, key_of

# "Cc" is the control characters, "Cs" the surrogates.
allowed_text = st.text(st.characters(exclude_categories=["Cc", "Cs"]))


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=MAX_LENGTH))
def test_every_text_without_control_characters_is_returned_unchanged(key: str) -> None:
    assert check_key(key) is key


@pytest.mark.parametrize(
    "key",
    [
        "a",
        " ",
        "order:42 ",
        "Straße",
        "e\u0301",
        "emoji 👩\u200d🚀",
        "no\u00a0break",
        "line\u2028separator",
        "private \ue000",
        "100%",
        'it\'s "quoted"',
        "{braces}",
        "x" * MAX_LENGTH,
        "🔒" * MAX_LENGTH,
    ],
)
def test_a_key_may_hold_any_printable_text(key: str) -> None:
    assert check_key(key) == key


@given(st.text(max_size=5), st.characters(categories=["Cc", "Cs"]), st.text(max_size=5))
def test_a_refused_character_is_named_with_its_place(
    before: str, character: str, after: str
) -> None:
    key = before + character + after
    with pytest.raises(ValueError, match="which no store can keep exactly") as caught:
        check_key(key)
    first = next(i for i, c in enumerate(key) if unicodedata.category(c) in ("Cc", "Cs"))
    assert f"U+{ord(key[first]):04X} at position {first}" in str(caught.value)


@pytest.mark.parametrize(
    ("character", "kind"),
    [
        ("\x00", "control character U+0000"),
        ("\n", "control character U+000A"),
        ("\x7f", "control character U+007F"),
        ("\x85", "control character U+0085"),
        ("\ud800", "lone surrogate U+D800"),
        ("\udfff", "lone surrogate U+DFFF"),
    ],
)
def test_control_characters_and_lone_surrogates_are_refused(character: str, kind: str) -> None:
    with pytest.raises(ValueError, match="lock key") as caught:
        check_key(f"order{character}42")
    assert f"{kind} at position 5" in str(caught.value)
    # Printable itself, so that it can be logged.
    str(caught.value).encode()


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        check_key("")


def test_a_key_that_is_too_long_is_refused_with_its_length() -> None:
    with pytest.raises(ValueError, match=r"has 201 characters; at most 200 .* digest") as caught:
        check_key("x" * (MAX_LENGTH + 1))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", [b"order:42", bytearray(b"x"), memoryview(b"x")])
def test_bytes_are_refused_with_the_way_out(key: object) -> None:
    with pytest.raises(TypeError, match=rf"not {type(key).__name__}: decode it .*key\.hex\(\)"):
        check_key(key)


@pytest.mark.parametrize("key", [None, 42, 4.2, True, ["a"], {"a": 1}, object()])
def test_what_is_no_text_is_refused_by_type(key: object) -> None:
    with pytest.raises(TypeError, match=f"must be a str, not {type(key).__name__}"):
        check_key(key)


def test_the_message_about_other_text_names_that_text() -> None:
    with pytest.raises(ValueError, match="The label holds the control character U\\+0009"):
        check_characters("a\tb", "label")


@given(allowed_text)
def test_the_character_check_lets_all_else_pass(text: str) -> None:
    check_characters(text, "text")


# Tree keys


def test_a_tree_key_is_the_path_of_its_parts() -> None:
    name = check_key(("customer:7", "order:42"))
    assert key_of(name) == ("customer:7", "order:42")
    assert ancestors(name) == ["customer:7"]
    assert ancestors(check_key(("a", "b", "c"))) == ["a", check_key(("a", "b"))]
    assert ancestors("customer:7") == []


def test_a_tree_key_of_one_part_is_that_part() -> None:
    assert check_key(("a",)) == check_key("a")
    assert key_of(check_key(("a",))) == "a"


@pytest.mark.parametrize(
    ("key", "error", "way_out"),
    [
        ((), ValueError, "at least one part"),
        (("a", ""), ValueError, "must not be empty"),
        (("a", ("b",)), TypeError, "flatten"),
        (("a", 7), TypeError, "must be a str"),
        (("a", b"b"), TypeError, "decode"),
        (("a", "b\x1fc"), ValueError, "U\\+001F"),
        (("a" * 100, "b" * 100), ValueError, "at most 200"),
    ],
)
def test_bad_tree_keys_are_refused_with_the_way_out(
    key: object, error: type[Exception], way_out: str
) -> None:
    with pytest.raises(error, match=way_out):
        check_key(key)


def test_the_longest_tree_key() -> None:
    assert len(check_key(("a" * 100, "b" * 99))) == 200
