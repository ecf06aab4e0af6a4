"""The connector class that vLLM loads: thin, each hook goes to the scheduler or the worker half."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpush.vllm import layout
from kvpush.vllm.metadata import KVPushMetadata, WorkerAddress
from kvpush.vllm.metrics import KVPushPromMetrics, KVPushStats
from kvpush.vllm.scheduler import PushScheduler
from kvpush.vllm.worker import PushWorker


class KVPushConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector in which prefill pushes packed KV blocks to decode.

    ``kv_role`` "kv_producer" on prefill engines and "kv_consumer" on decode engines.
    ``kv_connector_extra_config`` takes the fields of :class:`kvpush.Config`, and
    ``side_channel_host`` and ``side_channel_port``.

    Raises
    ------
    UnsupportedSetupError
        The engine's configuration cannot be served; the message names the values.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        layout.check_parallelism(vllm_config)
        self._scheduler: PushScheduler | None = None
        self._worker: PushWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = PushScheduler(vllm_config, kv_cache_config)
        else:
            self._worker = PushWorker(vllm_config, kv_cache_config)

    @property
    def scheduler_half(self) -> PushScheduler:
        """The scheduler half; only in the scheduler's process and role."""
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler

    @property
    def worker_half(self) -> PushWorker:
        """The worker half; only in a worker's process and role."""
        assert self._worker is not None, "a worker hook was called on the scheduler's connector"
        return self._worker

    # ---- class ---------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Prefer one contiguous block per layer; any strided layout works."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPushStats:
        """Wrap a stats payload."""
        return KVPushStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVPushPromMetrics:
        """Create the Prometheus metrics ``vllm:kvpush_*``."""
        return KVPushPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Whether registrations can be dropped and redone (vLLM 0.33)."""
        return True

    # ---- scheduler -----------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """See :class:`PushScheduler`."""
        self.scheduler_half.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See :class:`PushScheduler`."""
        return self.scheduler_half.get_num_new_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All transfer groups: a load restores the request's own blocks."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See :class:`PushScheduler`."""
        self.scheduler_half.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVPushMetadata:
        """See :class:`PushScheduler`."""
        return self.scheduler_half.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See :class:`PushScheduler`."""
        self.scheduler_half.update_connector_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """One group's form of :meth:`request_finished_all_groups`."""
        return self.scheduler_half.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See :class:`PushScheduler`."""
        return self.scheduler_half.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Never: delayed requests and waiting loads keep the engine stepping by themselves."""
        return False

    def has_pending_block_frees(self) -> bool:
        """See :class:`PushScheduler`."""
        return self.scheduler_half.has_pending_block_frees()

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Open the side channel over the workers' addresses."""
        self.scheduler_half.set_workers([one for one in metadata.values() if isinstance(one, WorkerAddress)])

    # ---- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """See :class:`PushWorker`."""
        self.worker_half.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Drop the registrations (sleep mode, vLLM 0.33); idempotent."""
        self.worker_half.close_engine("this engine sleeps")

    def restore_kv_caches(self) -> None:
        """Redo the registrations after a wake-up (vLLM 0.33); idempotent."""
        self.worker_half.reopen_engine()

    def get_handshake_metadata(self) -> WorkerAddress | None:
        """Where this worker answers offers; None on decode engines."""
        return self.worker_half.handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Before the forward: see :class:`PushWorker`."""
        self.worker_half.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: it comes after the forward, too late for a receive."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are handed out once per step."""

    def wait_for_save(self) -> None:
        """After the forward: see :class:`PushWorker`."""
        if self.has_connector_metadata():
            self.worker_half.wait_for_save(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See :class:`PushWorker`."""
        return self.worker_half.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Older form of :meth:`get_transfer_results`, without failures."""
        results = self.worker_half.get_transfer_results()
        return results.finished_sending, results.finished_recving

    def get_kv_connector_stats(self) -> KVPushStats | None:
        """Statistics since the last call, of whichever half this is."""
        return self._worker.take_stats() if self._worker else self.scheduler_half.stats.take()

    def shutdown(self) -> None:
        """Close this half. May be called twice."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()
