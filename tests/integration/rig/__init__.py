"""Eight processes, few keys, and faults; their journals and the server's log prove the promises."""
