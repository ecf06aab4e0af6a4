"""Optional record of each finished transfer: one JSON object per line in ``$KVPUSH_TRACE_FILE``."""

import json
import os
import threading
from typing import Any


class Trace:
    """Appends records to a file; without a path every call does nothing."""

    def __init__(self, path: str | None = None) -> None:
        path = os.environ.get("KVPUSH_TRACE_FILE") if path is None else path
        self._lock = threading.Lock()
        self._file = open(path, "a", buffering=1, encoding="utf-8") if path else None  # noqa: SIM115

    def write(self, **record: Any) -> None:
        """Append one record."""
        if self._file is not None:
            with self._lock:
                self._file.write(json.dumps(record, default=str) + "\n")

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def event_fields(event: Any) -> dict[str, Any]:
    """Return what a terminal event of the engine adds to a record."""
    return {
        "kind": event.kind,
        "key": event.key,
        "status": event.status,
        "detail": event.detail,
        "peer": event.peer,
        "transfer": event.transfer,
        "bytes": event.bytes,
        "boxes": event.boxes,
        "timings": dict(event.timings),
    }
