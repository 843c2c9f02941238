"""What is said to a Redis server and how its answers are read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distlocks.backends.redis.wire import Incomplete, ReplyError, pack, unpack

REPLIES = [
    (b"+OK\r\n", b"OK"),
    (b":42\r\n", 42),
    (b"$5\r\na\r\nbc\r\n", b"a\r\nbc"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"_\r\n", None),
    (b"#t\r\n", 1),
    (b",1.5\r\n", b"1.5"),
    (b"*3\r\n:1\r\n*1\r\n$1\r\nx\r\n$-1\r\n", [1, [b"x"], None]),
    (b"~1\r\n:1\r\n", [1]),
    (b"%1\r\n+a\r\n:1\r\n", [b"a", 1]),
    (b">2\r\n+push\r\n:1\r\n+OK\r\n", b"OK"),
]


@pytest.mark.parametrize(("data", "reply"), REPLIES, ids=[str(data) for data, _ in REPLIES])
def test_a_reply_is_read_whole(data: bytes, reply: object) -> None:
    assert unpack(data) == (reply, len(data))
    assert unpack(data + b"+next\r\n")[1] == len(data)


@pytest.mark.parametrize("data", [data for data, _ in REPLIES])
def test_a_part_of_it_is_not_taken_for_all(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(Incomplete):
            unpack(data[:end])


@pytest.mark.parametrize("data", [b"-NOSCRIPT gone\r\n", b"!13\r\nNOSCRIPT gone\r\n"])
def test_an_error_is_a_value_with_its_code(data: bytes) -> None:
    error, _ = unpack(data)
    assert isinstance(error, ReplyError)
    assert (error.code, str(error)) == ("NOSCRIPT", "NOSCRIPT gone")


def test_what_is_no_reply_is_said_to_be_none() -> None:
    with pytest.raises(ReplyError, match="unknown reply"):
        unpack(b"HTTP/1.1 400 Bad Request\r\n")


@given(st.lists(st.binary(max_size=50), min_size=1))
def test_a_command_is_read_as_it_was_packed(words: list[bytes]) -> None:
    packed = pack(*words)
    assert unpack(packed) == (words, len(packed))
