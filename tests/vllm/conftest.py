import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (the extra `demo`)")
sys.path.insert(0, str(Path(__file__).parent))

import tiny

tiny.set_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
