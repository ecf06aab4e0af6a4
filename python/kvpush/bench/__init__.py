"""``kvpush bench``: how fast, and beside what. Needs numpy (the extra ``bench``)."""
