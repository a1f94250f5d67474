import threading
from pathlib import Path

import pytest

from sgl_vertumnus.demo.checkpoint_cache import MANIFEST, cache_root, damage, materialise


class Builder:
    """Writes two files, and counts how often it was asked to."""

    def __init__(self, text: str = "weights") -> None:
        self.calls = 0
        self._text = text

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        assert not list(directory.iterdir())
        (directory / "model.bin").write_text(self._text)
        (directory / "sub").mkdir()
        (directory / "sub" / "config.json").write_text("{}")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "model"


def test_is_built_once(target: Path) -> None:
    build = Builder()
    assert damage(target, "1") == "not built"
    assert materialise(target, "1", build) == target
    assert materialise(target, "1", build) == target
    assert build.calls == 1
    assert damage(target, "1") is None
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["model"]


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda d: (d / "model.bin").write_text("weight"), "model.bin has 6 bytes, not 7"),
        (lambda d: (d / "model.bin").write_text("wEights"), "model.bin has changed"),
        (lambda d: (d / "sub" / "config.json").unlink(), "sub/config.json is missing"),
        (lambda d: (d / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda d: (d / MANIFEST).write_text('{"rec'), "manifest.json is unreadable"),
    ],
)
def test_damage_is_noticed_and_mended(target: Path, harm: object, complaint: str) -> None:
    build = Builder()
    materialise(target, "1", build)
    assert callable(harm)
    harm(target)
    reason = damage(target, "1")
    assert reason is not None and reason.startswith(complaint)
    materialise(target, "1", build)
    assert build.calls == 2
    assert damage(target, "1") is None


def test_another_recipe_is_built_again(target: Path) -> None:
    materialise(target, "1", Builder("old"))
    assert damage(target, "2") == "built by recipe '1', this release has '2'"
    materialise(target, "2", Builder("new"))
    assert (target / "model.bin").read_text() == "new"


def test_a_failed_build_leaves_what_was_there(target: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "model.bin").write_text("half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        materialise(target, "1", fail)
    assert not target.exists()
    materialise(target, "1", Builder("old"))
    with pytest.raises(RuntimeError, match="on fire"):
        materialise(target, "2", fail)
    assert (target / "model.bin").read_text() == "old"
    assert [path.name for path in target.parent.iterdir() if path.is_dir()] == ["model"]


def test_remains_of_a_killed_build_are_removed(target: Path) -> None:
    remains = target.parent / ".model.abc123.partial"
    (remains / "new").mkdir(parents=True)
    (remains / "new" / "model.bin").write_text("half")
    bystander = target.parent / ".other.abc123.partial"
    bystander.mkdir()
    materialise(target, "1", Builder())
    assert not remains.exists()
    assert bystander.exists()


def test_builders_of_the_same_directory_take_turns(target: Path) -> None:
    inside = threading.Event()
    proceed = threading.Event()

    class Slow(Builder):
        def __call__(self, directory: Path) -> None:
            inside.set()
            assert proceed.wait(10)
            super().__call__(directory)

    slow, second = Slow(), Builder()
    threads = [threading.Thread(target=materialise, args=(target, "1", slow))]
    threads[0].start()
    assert inside.wait(10)
    threads.append(threading.Thread(target=materialise, args=(target, "1", second)))
    threads[1].start()
    proceed.set()
    for thread in threads:
        thread.join(10)
    assert (slow.calls, second.calls) == (1, 0)
    assert damage(target, "1") is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"VERTUMNUS_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/sgl-vertumnus")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "sgl-vertumnus"),
        ({"VERTUMNUS_CACHE": ""}, Path.home() / ".cache" / "sgl-vertumnus"),
    ],
)
def test_cache_root(environ: dict[str, str], expected: Path) -> None:
    assert cache_root(environ) == expected
