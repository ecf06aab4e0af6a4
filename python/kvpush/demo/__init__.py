"""The demo: two vLLM engines on this machine, real prompts, real KV between them."""
