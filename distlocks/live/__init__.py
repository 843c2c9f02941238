"""Which locks there are now, over all backends, page by page.

What a page costs does not grow with the number of locks. Database backends sort and filter in SQL;
other stores have no order, and are listed from a snapshot that each process takes of them in the
background, for as long as somebody looks. Each backend is given so long to answer, all at once: one
that is down or slow is told as such, and delays nobody.
"""

from .asking import NoAnswer, ask
from .entries import COOLING, MODES, SORTS, Entry, Listing, StoreState, Wanted, mode_of
from .together import listing, refresh

__all__ = [
    "COOLING",
    "MODES",
    "SORTS",
    "Entry",
    "Listing",
    "NoAnswer",
    "StoreState",
    "Wanted",
    "ask",
    "listing",
    "mode_of",
    "refresh",
]
