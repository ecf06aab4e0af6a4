"""Keys, digests and the decorations that vLLM adds to request ids."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from kvpush.vllm import check_version
from kvpush.vllm import params as rp

SUFFIX = "-0123abcd"
UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [
        (f"chatcmpl-{UUID}{SUFFIX}", (UUID, 0, True)),
        (f"cmpl-{UUID}-0{SUFFIX}", (UUID, 0, True)),
        (f"cmpl-{UUID}-12{SUFFIX}", (UUID, 12, True)),
        (f"3_cmpl-{UUID}-0{SUFFIX}", (UUID, 0, True)),
        (f"2_chatcmpl-{UUID}{SUFFIX}", (UUID, 0, True)),
        (f"cmpl-a-7-0{SUFFIX}", ("a-7", 0, True)),
        (f"cmpl-12_a-0{SUFFIX}", ("12_a", 0, True)),
        (f"cmpl-a-deadbeef-0{SUFFIX}", ("a-deadbeef", 0, True)),
        (f"generate-tokens-{UUID}{SUFFIX}", (UUID, 0, True)),
        (f"plain{SUFFIX}", ("plain", 0, False)),
        (f"1_plain{SUFFIX}", ("1_plain", 0, False)),
        ("plain", ("plain", 0, False)),
        (UUID, (UUID, 0, False)),
        ("", ("", 0, False)),
    ],
)
def test_decorations(request_id: str, expected: tuple[str, int, bool]) -> None:
    assert rp.strip_decorations(request_id) == expected


def test_decorations_without_randomized_ids() -> None:
    assert rp.strip_decorations("cmpl-a-deadbeef-3", randomized=False) == ("a-deadbeef", 3, True)
    assert rp.strip_decorations("a-deadbeef", randomized=False) == ("a-deadbeef", 0, False)


def decode_params(**more: Any) -> dict[str, Any]:
    return {
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_request_id": UUID,
        **more,
    }


@pytest.mark.parametrize(
    ("p_id", "d_id", "remote_request_id"),
    [
        (f"chatcmpl-{UUID}-11111111", f"chatcmpl-{UUID}-22222222", UUID),
        (f"cmpl-{UUID}-0-11111111", f"cmpl-{UUID}-0-22222222", UUID),
        (f"cmpl-{UUID}-2-11111111", f"cmpl-{UUID}-2-22222222", UUID),
        (f"cmpl-{UUID}-0-11111111", f"1_cmpl-{UUID}-0-22222222", UUID),
        # One leg after the other: decode is given prefill's own, decorated id.
        (f"cmpl-{UUID}-0-11111111", "cmpl-other-0-22222222", f"cmpl-{UUID}-0-11111111"),
        (f"chatcmpl-{UUID}-11111111", "chatcmpl-other-22222222", f"chatcmpl-{UUID}-11111111"),
        ("cmpl-req-1a2b3c4d-0-11111111", "cmpl-req-1a2b3c4d-0-22222222", "req-1a2b3c4d"),
    ],
)
def test_both_legs_find_the_same_key(p_id: str, d_id: str, remote_request_id: str) -> None:
    p = rp.parse_prefill_leg({}, p_id)
    d = rp.parse_decode_leg(decode_params(remote_request_id=remote_request_id), d_id, 1, 1)
    assert p.key == d.key
    assert d.remote == rp.Remote("h", 5600, "e")


def test_transfer_id_wins() -> None:
    p = rp.parse_prefill_leg({"transfer_id": "t"}, "cmpl-a-1-11111111")
    d = rp.parse_decode_leg(decode_params(transfer_id="t"), "cmpl-b-1-22222222", 1, 1)
    assert p.key == d.key == "t#1"


def test_case_c3_keys_of_similar_requests_differ() -> None:
    bases = ["a", "a#1", "a#1#0", "a#", "#1", "ab", "a-0", "a-1", "1_a"]
    keys = [rp.make_key(base, index) for base in bases for index in range(3)]
    assert len(set(keys)) == len(keys)


def request(**more: Any) -> Any:
    fields = {
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
        "resumable": False,
    }
    return SimpleNamespace(**(fields | more))


def feature(identifier: str, offset: int, length: int) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def test_digest_tells_every_ingredient_apart() -> None:
    variants = [
        request(),
        request(prompt_token_ids=[1, 2]),
        request(prompt_token_ids=[1, 2, 4]),
        request(prompt_token_ids=[1, 2, 3, 0]),
        request(cache_salt=""),
        request(cache_salt="s"),
        request(lora_request=SimpleNamespace(lora_name="s", lora_int_id=1)),
        request(lora_request=SimpleNamespace(lora_name="", lora_int_id=1)),
        request(mm_features=[feature("a", 0, 1)]),
        request(mm_features=[feature("a", 1, 1)]),
        request(mm_features=[feature("a", 0, 2)]),
        request(mm_features=[feature("b", 0, 1)]),
        request(mm_features=[feature("a", 0, 1), feature("a", 0, 1)]),
    ]
    digests = [rp.request_digest(one) for one in variants]
    assert all(len(one) == 32 for one in digests)
    for a, b in itertools.combinations(digests, 2):
        assert a != b


def test_digest_ignores_what_is_local_to_one_engine() -> None:
    a = request(lora_request=SimpleNamespace(lora_name="x", lora_int_id=1), request_id="a")
    b = request(lora_request=SimpleNamespace(lora_name="x", lora_int_id=9), request_id="b")
    assert rp.request_digest(a) == rp.request_digest(b)


def test_digest_is_stable_across_releases() -> None:
    assert rp.digest([1, 2, 3]).hex() == DIGEST_OF_123


DIGEST_OF_123 = "283257ffbe0794fda3648bce5314d7337a68f1f17757c598dd6a2b10027a8875"


@pytest.mark.parametrize(
    "bad",
    [{"prompt_token_ids": None}, {"prompt_embeds": object()}, {"resumable": True}],
    ids=lambda bad: next(iter(bad)),
)
def test_prompts_without_a_digest(bad: dict[str, Any]) -> None:
    with pytest.raises(rp.BadParamsError):
        rp.request_digest(request(**bad))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5+cpu", "0.33.1", "0.33.0rc1"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev", ""])
def test_other_versions_are_named(version: str) -> None:
    with pytest.raises(ImportError, match=r"0\.32\.x and 0\.33\.x; vLLM " + version.replace(".", r"\.")):
        check_version(version)


def test_the_module_path_gives_the_class() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvpush.vllm import KVPushConnector, register

    register()
    register()
    for path in (None, "kvpush.vllm"):
        config = KVTransferConfig(
            kv_connector="KVPushConnector", kv_role="kv_producer", kv_connector_module_path=path
        )
        assert KVConnectorFactory.get_connector_class(config) is KVPushConnector
        assert KVConnectorFactory.supports_hma_config(config)
