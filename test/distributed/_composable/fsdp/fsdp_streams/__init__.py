"""Which stream waits for which: the checker, and what runs under it."""
