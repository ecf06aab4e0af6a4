"""The worker half: owns the transfer engine, carries out each step's orders, reports each end once."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger

from kvpush.vllm import layout
from kvpush.vllm.handshake import Handshakes
from kvpush.vllm.launched import Launched
from kvpush.vllm.loads import Loads
from kvpush.vllm.metadata import KVPushMetadata, WorkerAddress
from kvpush.vllm.metrics import KVPushStats
from kvpush.vllm.pushes import Pushes
from kvpush.vllm.side_channel import OfferDesk, SideChannel, side_channel_address
from kvpush.vllm.trace import Trace

logger = init_logger("vllm." + __name__)

EngineFactory = Callable[[layout.CacheSpec, Mapping[str, Any]], Any]


class PushWorker:
    """Worker half of :class:`kvpush.vllm.KVPushConnector`.

    All methods run on the worker's thread and none of them waits for a peer.
    """

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, engine_factory: EngineFactory | None = None
    ) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._factory = engine_factory
        transfer = vllm_config.kv_transfer_config
        self._produces = bool(transfer.is_kv_producer)
        self._extra: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
        self._kv_caches: Mapping[str, Any] = {}
        self._engine: Any = None
        self._listener: SideChannel | None = None
        self._handshakes: Handshakes | None = None
        self._pushes: Pushes | None = None
        self._loads: Loads | None = None
        self._launched = Launched("cpu")
        self._network_ops = 0
        self._gauges = (0, 0)
        self._stats = KVPushStats()
        self._trace = Trace()
        # Refuse before the model is loaded rather than after.
        layout.plan_groups(kv_cache_config)

    # ---- life ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Build the engine over these tensors (layer name -> ``[B, H, N, C]``) and start to listen.

        Raises
        ------
        UnsupportedSetupError
            The cache cannot be transferred.
        OSError
            The listener's address cannot be bound.
        """
        self._kv_caches = dict(kv_caches)
        self._open()

    def _open(self) -> None:
        if self._engine is not None or not self._kv_caches:
            return
        spec = layout.describe(self._config, self._kv_cache_config, self._kv_caches)
        factory = self._factory or layout.build_engine
        self._engine = engine = factory(spec, self._extra)
        self._launched = Launched(spec.groups[0].planes[0].array.device.type)
        parallel = self._config.parallel_config
        self._handshakes = Handshakes(
            engine,
            int(parallel.rank),
            int(parallel.tensor_parallel_size),
            int(parallel.pipeline_parallel_size),
        )
        self._pushes = Pushes(engine, spec, self._stats, self._trace)
        self._loads = Loads(engine, self._handshakes, spec, self._launched, self._stats, self._trace)
        self._network_ops = 0
        if self._produces:
            if self._listener is None:
                host, _ = side_channel_address(self._config)
                self._listener = SideChannel(host, 0, OfferDesk(self._answer).answer, name="kvpush-offers")
            logger.info("kvpush: worker answers offers at %s:%d", self._listener.host, self._listener.port)
        num_planes = sum(len(group.planes) for group in spec.groups)
        logger.info(
            "kvpush: engine %s over %s: %d groups, %d planes, %d bytes per block",
            engine.incarnation,
            engine.transport,
            len(spec.groups),
            num_planes,
            sum(group.unit_bytes for group in spec.groups),
        )

    def _answer(self, offer: bytes) -> bytes:
        engine = self._engine
        if engine is None:
            raise RuntimeError("the prefill engine sleeps or shuts down")
        return bytes(engine.answer(offer))

    def handshake_metadata(self) -> WorkerAddress | None:
        """Where this worker answers offers; None where it does not."""
        if self._listener is None or self._engine is None:
            return None
        rank = int(self._config.parallel_config.rank)
        return WorkerAddress(rank, self._listener.host, self._listener.port, self._engine.hello())

    def close_engine(self, detail: str) -> None:
        """End every transfer and close the engine. May be called twice."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if self._handshakes is not None:
            self._handshakes.close()
        try:
            engine.close()
        except Exception:
            logger.exception("kvpush: closing the engine")
        for half in (self._pushes, self._loads):
            if half is not None:
                half.fail_all("closed", detail)

    def reopen_engine(self) -> None:
        """Build the engine anew over the registered tensors. May be called twice."""
        self._open()

    def shutdown(self) -> None:
        """Close everything. May be called twice."""
        self.close_engine("this engine shuts down")
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._trace.close()

    # ---- every step ----------------------------------------------------------------------------

    def handle_preemptions(self, meta: KVPushMetadata) -> None:
        """Carry out everything that must come before the forward: the fence first."""
        pushes, loads = self._pushes, self._loads
        if pushes is None or loads is None:
            return
        for req_id in meta.retracts:
            pushes.retract(req_id)
        # A request may come and go within one step: what is not known yet is ended after it came.
        late_closes = [order for order in meta.closes if not pushes.close(order)]
        for new in meta.pushes:
            pushes.open(new)
        for order in late_closes:
            if not pushes.close(order):
                pushes.close_unknown(order)
        late_cancels = []
        for req_id in meta.cancels:
            if loads.knows(req_id):
                loads.cancel(req_id)
            else:
                late_cancels.append(req_id)
        for intent in meta.intents:
            loads.intent(intent)
        for fetch in meta.fetches:
            loads.fetch(fetch)
        for req_id in late_cancels:
            loads.cancel(req_id)
        if meta.evict and self._engine is not None:
            self._engine.evict(meta.evict)
        if self._engine is None:
            self._fail_all("the engine is closed")
        loads.pump()

    def wait_for_save(self, meta: KVPushMetadata) -> None:
        """After the forward: hand out the blocks that it completed. Never waits."""
        if self._pushes is not None and meta.advances:
            self._pushes.advance(meta.advances, self._launched.so_far())

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """All ends since the last call; each id once, and only ids that vLLM waits for."""
        pushes, loads = self._pushes, self._loads
        if pushes is None or loads is None:
            return KVConnectorTransferResults()
        self._poll(pushes, loads)
        loads.pump()
        finished, failed = loads.take_results()
        self._update_gauges(len(loads), len(pushes))
        return KVConnectorTransferResults(
            finished_sending=pushes.take_sent(), finished_recving=finished, failed_recving=failed
        )

    def _poll(self, pushes: Pushes, loads: Loads) -> None:
        if self._engine is None:
            return
        try:
            events = self._engine.poll(0.0)
        except Exception:
            logger.exception("kvpush: the engine failed; open transfers fail")
            self.close_engine("the engine failed")
            return
        for event in events:
            if event.kind == "lost":
                logger.warning("kvpush: session with %s lost: %s %s", event.peer, event.status, event.detail)
                loads.on_lost(event.peer)
            elif event.side == "push":
                pushes.on_event(event)
            else:
                loads.on_event(event)
        if events:
            operations = int(self._engine.stats().get("network_ops", 0))
            self._stats.count("network_ops", operations - self._network_ops)
            self._network_ops = operations

    def _fail_all(self, detail: str) -> None:
        if self._pushes is not None and self._loads is not None:
            self._pushes.fail_all("closed", detail)
            self._loads.fail_all("closed", detail)

    def _update_gauges(self, waiting: int, open_pushes: int) -> None:
        if (waiting, open_pushes) != self._gauges:
            self._gauges = (waiting, open_pushes)
            self._stats.gauge("waiting", waiting)
            self._stats.gauge("open_pushes", open_pushes)

    def take_stats(self) -> KVPushStats | None:
        """Statistics since the last call, or None."""
        return self._stats.take()
