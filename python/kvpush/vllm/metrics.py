"""Transfer statistics: deltas per step, vLLM's own log line, Prometheus metrics ``vllm:kvpush_*``."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

COUNTERS = {
    "received": "KV receives that completed.",
    "sent": "KV pushes that completed.",
    "bytes_received": "Bytes of KV received and unpacked.",
    "bytes_sent": "Bytes of KV packed and pushed.",
    "bytes_expected": "Bytes of KV that receives which ended should have brought.",
    "network_ops": "Network operations posted.",
    "boxes": "Boxes received or sent.",
    "handshakes": "Hand-shakes that led to a session.",
    "sessions_lost": "Sessions that were lost.",
}
TIMES = {
    "receive_seconds": "Time from a receive's start to its end, as the worker saw it.",
    "push_seconds": "Time from the end of a prompt's prefill to the end of its push.",
    "handshake_seconds": "Time of a hand-shake with a new peer.",
}
LABELLED = {
    "failures": ("code", "Transfers that failed, by status code."),
    "skipped": ("reason", "Requests for which no transfer was tried, by reason."),
    "stage_us": ("stage", "Microseconds spent per transfer stage."),
}
GAUGES = {
    "waiting": "Receives that are open or wait for a hand-shake.",
    "open_pushes": "Pushes that are open.",
}
_TIME_BUCKETS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0]


class KVPushStats(KVConnectorStats):
    """Deltas since the last call; ``data`` is plain and serializable.

    Keys: those of ``COUNTERS`` (int), ``TIMES`` (list of seconds), ``LABELLED`` (dict label -> int)
    and ``GAUGES`` (int, the latest value). Absent keys are zero.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        if value:
            self.data[name] = self.data.get(name, 0) + value

    def label(self, name: str, label: str, value: int = 1) -> None:
        """Add to one label of a labelled counter."""
        values = self.data.setdefault(name, {})
        values[label] = values.get(label, 0) + value

    def observe(self, name: str, seconds: float) -> None:
        """Record one duration."""
        self.data.setdefault(name, []).append(seconds)

    def gauge(self, name: str, value: int) -> None:
        """Set a gauge."""
        self.data[name] = value

    def take(self) -> "KVPushStats | None":
        """Hand out what was collected and start anew; None if nothing was."""
        if self.is_empty():
            return None
        data, self.data = self.data, {}
        return KVPushStats(data=data)

    def aggregate(self, other: KVConnectorStats) -> "KVPushStats":
        """Merge ``other`` into this and return this."""
        for name, value in other.data.items():
            if name in GAUGES:
                self.data[name] = value
            elif name in TIMES:
                self.data[name] = [*self.data.get(name, ()), *value]
            elif name in LABELLED:
                # A new mapping: the old one may be a payload that others read too.
                mine = self.data.get(name, {})
                labels = {*mine, *value}
                self.data[name] = {label: mine.get(label, 0) + value.get(label, 0) for label in labels}
            else:
                self.count(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the interval in a few numbers, for vLLM's log line."""
        data = self.data
        out: dict[str, int | float] = {
            "KV received": data.get("received", 0),
            "KV sent": data.get("sent", 0),
            "MB received": round(data.get("bytes_received", 0) / 1e6, 3),
            "MB expected": round(data.get("bytes_expected", 0) / 1e6, 3),
            "MB sent": round(data.get("bytes_sent", 0) / 1e6, 3),
            "Network ops": data.get("network_ops", 0),
        }
        for name, title in (("receive_seconds", "receive (ms)"), ("push_seconds", "push (ms)")):
            times = sorted(data.get(name, ()))
            if times:
                out[f"Avg {title}"] = round(sum(times) / len(times) * 1e3, 3)
                out[f"P90 {title}"] = round(times[int(0.9 * (len(times) - 1))] * 1e3, 3)
        for name, title in (("failures", "Failed"), ("skipped", "Skipped")):
            for label, amount in sorted(data.get(name, {}).items()):
                out[f"{title} {label}"] = amount
        for name in GAUGES:
            if data.get(name):
                out[name.replace("_", " ").capitalize()] = data[name]
        return out

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data


class KVPushPromMetrics(KVConnectorPromMetrics):
    """The Prometheus side of :class:`KVPushStats`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def per_engine(metric: Any) -> dict[int, Any]:
            return dict(create_metric_per_engine(metric, per_engine_labelvalues))

        self._plain: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            metric = self._counter_cls(name=f"vllm:kvpush_{name}", documentation=text, labelnames=labelnames)
            self._plain[name] = per_engine(metric)
        self._gauges = {
            name: per_engine(
                self._gauge_cls(name=f"vllm:kvpush_{name}", documentation=text, labelnames=labelnames)
            )
            for name, text in GAUGES.items()
        }
        self._times = {
            name: per_engine(
                self._histogram_cls(
                    name=f"vllm:kvpush_{name}",
                    documentation=text,
                    buckets=_TIME_BUCKETS,
                    labelnames=labelnames,
                )
            )
            for name, text in TIMES.items()
        }
        self._labelled = {
            name: self._counter_cls(
                name=f"vllm:kvpush_{name}", documentation=text, labelnames=[*labelnames, label]
            )
            for name, (label, text) in LABELLED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one engine's deltas."""
        for name, value in transfer_stats_data.items():
            if name in self._plain:
                self._plain[name][engine_idx].inc(value)
            elif name in self._gauges:
                self._gauges[name][engine_idx].set(value)
            elif name in self._times:
                for seconds in value:
                    self._times[name][engine_idx].observe(seconds)
            elif name in self._labelled:
                values = self.per_engine_labelvalues[engine_idx]
                for label, amount in value.items():
                    self._labelled[name].labels(*values, label).inc(amount)
