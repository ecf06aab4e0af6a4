"""Sending the demo's prompts as an ordinary OpenAI client."""

import json
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpush.demo.engines import MODEL_NAME
from kvpush.demo.prompts import Prompt

if TYPE_CHECKING:
    import httpx


class RequestError(RuntimeError):
    """A completion came back as an error."""


@dataclass
class Completion:
    """One answer. Token ids are as the engine reports them."""

    request_id: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)


def complete_all(url: str, prompts: Sequence[Prompt], salt: str | None = None) -> list[Completion]:
    """Send all prompts at the same time and return their answers in the same order.

    ``salt`` keeps the request off every cached prefix that has another salt.

    Raises
    ------
    RequestError
        With the server's message.
    """
    import httpx

    with (
        httpx.Client(trust_env=False, timeout=300.0) as client,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        return list(pool.map(lambda prompt: _complete(client, url, prompt, salt), prompts))


def _complete(client: "httpx.Client", url: str, prompt: Prompt, salt: str | None) -> Completion:
    import httpx

    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": prompt.text,
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        # Streamed: the first token's time is the end of the hand-over.
        "stream": True,
        "return_token_ids": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    completion = Completion(f"demo-{uuid.uuid4().hex}")
    headers = {"x-request-id": completion.request_id}
    try:
        with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            if not answer.is_success:
                raise RequestError(f"{prompt.label}: {answer.read().decode(errors='replace')[:500]}")
            for line in answer.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    _add_event(completion, prompt, json.loads(data))
    except httpx.HTTPError as error:
        raise RequestError(f"{prompt.label}: {type(error).__name__}: {error}") from error
    return completion


def _add_event(completion: Completion, prompt: Prompt, event: dict[str, Any]) -> None:
    if "error" in event:
        raise RequestError(f"{prompt.label}: {event['error']}")
    for choice in event.get("choices", ()):
        completion.text += choice.get("text") or ""
        completion.token_ids += choice.get("token_ids") or ()
        completion.prompt_token_ids += choice.get("prompt_token_ids") or ()
