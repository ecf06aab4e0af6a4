"""``kvpush bench serve``: the hand-over between real vLLM engines, connector beside connector."""
