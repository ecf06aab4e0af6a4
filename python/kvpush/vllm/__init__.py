"""vLLM KV connector of kvpush, for vLLM 0.32 and 0.33.

vLLM finds the name ``KVPushConnector`` through the plugin entry point; with ``VLLM_PLUGINS`` set to a
list without ``kvpush``, add ``"kv_connector_module_path": "kvpush.vllm"`` to ``--kv-transfer-config``.
"""

import re
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from kvpush.vllm.connector import KVPushConnector

__all__ = ["KVPushConnector", "check_version", "register"]

SUPPORTED = ((0, 32), (0, 33))
_NAME = "KVPushConnector"


def check_version(version: str) -> None:
    """Accept vLLM 0.32.x and 0.33.x.

    Raises
    ------
    ImportError
        Another version; the message names it and the supported ones.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) not in SUPPORTED:
        supported = " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
        raise ImportError(f"kvpush.vllm supports vLLM {supported}; vLLM {version} is installed")


check_version(str(vllm.__version__))


def register() -> None:
    """Make the connector's name known to vLLM. May be called several times, in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(_NAME, "kvpush.vllm.connector", _NAME)


def __getattr__(name: str) -> Any:
    # Late, so that loading the plugin stays cheap in processes that do not use the connector.
    if name == _NAME:
        from kvpush.vllm import connector

        return connector.KVPushConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
