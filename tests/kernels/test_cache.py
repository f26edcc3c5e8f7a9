"""The cache of cubins: what it keeps and what it refuses."""

from __future__ import annotations

import itertools
import os
import stat
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from greensched.driver import nvrtc
from greensched.errors import CompileFailed
from greensched.kernels import cache
from greensched.kernels.cache import Cache

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "0" * 64


class Maker:
    """Counts how often it makes something."""

    def __init__(self, binary: bytes = b"cubin") -> None:
        self.binary = binary
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.binary


# -- the key ----------------------------------------------------------------------------------


@pytest.mark.fault("F12")
def test_the_key_covers_everything() -> None:
    """Everything that decides the machine code changes the key, even the order of options."""

    def key(
        source: str = "s",
        text: bytes = b"t",
        name: str = "n",
        arch: str = "sm_90",
        options: tuple[str, ...] = ("a", "b"),
        nvrtc: tuple[int, int] = (13, 0),
    ) -> str:
        return cache.key_of(source, text, name=name, arch=arch, options=options, nvrtc=nvrtc)

    different = [
        key(),
        key(source="t"),
        key(text=b"u"),
        key(name="m"),
        key(arch="sm_80"),
        key(options=("b", "a")),
        key(options=("a b",)),
        key(options=("ab",)),
        key(options=()),
        key(nvrtc=(13, 1)),
        key(nvrtc=(130, 0)),
    ]
    assert len(set(different)) == len(different)
    assert key() == key()


def test_the_key_covers_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of another format are not found."""
    before = cache.key_of("s", b"", name="n", arch="sm_90", options=(), nvrtc=(13, 0))
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert before != cache.key_of("s", b"", name="n", arch="sm_90", options=(), nvrtc=(13, 0))


# -- memory and disk --------------------------------------------------------------------------


def test_it_is_made_once(tmp_path: Path) -> None:
    """An entry is made once, for this cache and for later ones."""
    make = Maker()
    first = Cache(tmp_path)
    assert [first.get(KEY, make), first.get(KEY, make)] == [b"cubin"] * 2
    assert Cache(tmp_path).get(KEY, make) == b"cubin"
    assert make.calls == 1


def test_memory_alone(tmp_path: Path) -> None:
    """Without a directory it works, and each cache keeps its own."""
    make = Maker()
    alone = Cache(None)
    alone.get(KEY, make)
    alone.get(KEY, make)
    Cache(None).get(KEY, make)
    assert make.calls == 2


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used entry is dropped first."""
    monkeypatch.setattr(cache, "_MOST_IN_MEMORY", 2)
    makers = {key: Maker() for key in "abc"}
    bounded = Cache(None)
    for key in "abacab":
        bounded.get(key, makers[key])
    assert {key: maker.calls for key, maker in makers.items()} == {"a": 1, "b": 2, "c": 1}


@pytest.mark.fault("F12")
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[:20] + b"?" + content[21:],
        lambda content: content[:-1] + b"?",
        lambda content: b"cubin",
    ],
)
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: object) -> None:
    """A damaged file is made anew."""
    assert callable(damage)
    make = Maker()
    Cache(tmp_path).get(KEY, make)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert Cache(tmp_path).get(KEY, make) == b"cubin"
    assert make.calls == 2
    Cache(tmp_path).get(KEY, make)
    assert make.calls == 2


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.fault("F12", "I11")
@pytest.mark.parametrize(
    "damage", [replace_by_fifo, replace_by_link, lambda path: path.chmod(0o620)]
)
def test_what_is_no_plain_file_of_our_own_is_replaced(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """FIFOs, links, and files that others can write are replaced."""
    Cache(tmp_path).get(KEY, Maker())
    path = tmp_path / f"{KEY}.cubin"
    damage(path)
    make = Maker()
    assert Cache(tmp_path).get(KEY, make) == b"cubin"
    assert make.calls == 1
    assert stat.S_ISREG(path.lstat().st_mode)
    assert Cache(tmp_path).get(KEY, make) == b"cubin"
    assert make.calls == 1


@pytest.mark.fault("F12")
def test_a_file_under_another_name_is_replaced(tmp_path: Path) -> None:
    """A file with another key's content is replaced."""
    Cache(tmp_path).get("a" * 64, Maker(b"another"))
    (tmp_path / f"{'a' * 64}.cubin").rename(tmp_path / f"{KEY}.cubin")
    assert Cache(tmp_path).get(KEY, Maker()) == b"cubin"


def test_nothing_else_is_left_on_disk(tmp_path: Path) -> None:
    """Writing leaves one file for a key, and no temporary ones."""
    for key in ("a", "b", "a"):
        Cache(tmp_path).get(key, Maker())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.cubin", "b.cubin"]


def test_a_failure_is_not_cached(tmp_path: Path) -> None:
    """The caller gets the compiler's error, and the next call tries again."""

    def fail() -> bytes:
        raise CompileFailed("x.cu", "sm_90", "no")

    kept = Cache(tmp_path)
    with pytest.raises(CompileFailed):
        kept.get(KEY, fail)
    assert kept.get(KEY, Maker()) == b"cubin"


def test_a_disk_that_fails_is_no_failure(tmp_path: Path) -> None:
    """A directory that vanishes or cannot be written costs only the caching."""
    kept = Cache(tmp_path / "cubins")
    (tmp_path / "cubins").rmdir()
    make = Maker()
    assert kept.get(KEY, make) == b"cubin"
    assert kept.get(KEY, make) == b"cubin"
    assert make.calls == 1


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """If a file cannot be renamed, its temporary file is removed."""
    (tmp_path / f"{KEY}.cubin").mkdir()
    assert Cache(tmp_path).get(KEY, Maker()) == b"cubin"
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.cubin"]


# -- the directory ----------------------------------------------------------------------------


def test_the_directory_is_made_for_us_alone(tmp_path: Path) -> None:
    """A missing directory is made with its parents, for the user alone."""
    made = Cache(tmp_path / "a" / "b").directory
    assert made == tmp_path / "a" / "b"
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.fault("F12", "I11")
def test_with_any_umask_all_is_private(tmp_path: Path) -> None:
    """The directory, the parents that are made for it, and the files are for the user alone."""
    before = os.umask(0)
    try:
        Cache(tmp_path / "a" / "b").get(KEY, Maker())
    finally:
        os.umask(before)
    made = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert made == {
        tmp_path / "a": 0o700,
        tmp_path / "a" / "b": 0o700,
        tmp_path / "a" / "b" / f"{KEY}.cubin": 0o600,
    }


@pytest.mark.fault("F12", "I11")
def test_a_directory_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    """A parent that all users can write needs its sticky bit."""
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="can be replaced by other users"):
        assert Cache(tmp_path / "cubins").directory is None
    tmp_path.chmod(0o1777)
    assert Cache(tmp_path / "cubins").directory == tmp_path / "cubins"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """If others can write it, the cache uses memory only, and warns once."""
    tmp_path.chmod(mode)
    with pytest.warns(RuntimeWarning, match="is writable by other users") as caught:
        refused = Cache(tmp_path)
    assert len(caught) == 1
    assert refused.directory is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused.get(KEY, Maker())
    assert list(tmp_path.iterdir()) == []


def test_a_directory_others_may_read_is_used(tmp_path: Path) -> None:
    """A directory that others can read is used."""
    tmp_path.chmod(0o755)
    assert Cache(tmp_path).directory == tmp_path


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the directory could change what is in it."""
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert Cache(tmp_path).directory is None


def test_a_path_that_is_no_directory_means_memory_only(tmp_path: Path) -> None:
    """A directory that cannot be made is no error and no warning."""
    (tmp_path / "file").write_text("")
    assert Cache(tmp_path / "file").directory is None
    assert Cache(tmp_path / "file" / "below").directory is None


def test_where_the_directory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our variable comes first, then XDG's if it is absolute, then the home directory."""
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("GREENSCHED_CACHE_DIR", "")
    assert cache.default_directory() == Path("/somewhere/.cache/greensched")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.default_directory() == Path("/xdg/greensched")
    monkeypatch.setenv("GREENSCHED_CACHE_DIR", "/own")
    assert cache.default_directory() == Path("/own")


def test_no_home_means_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a home directory still compiles."""

    def home() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("GREENSCHED_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert cache.default_directory() is None
    assert Cache(cache.default_directory()).directory is None


# -- threads ----------------------------------------------------------------------------------


def test_threads_that_want_the_same_make_it_once() -> None:
    """Threads that request an entry while it is made wait and get it."""
    shared = Cache(None)
    inside, finish = threading.Event(), threading.Event()
    make = Maker()
    results: list[bytes] = []

    def slow() -> bytes:
        inside.set()
        finish.wait()
        return make()

    threads = [
        threading.Thread(target=lambda: results.append(shared.get(KEY, slow))) for _ in range(4)
    ]
    threads[0].start()
    inside.wait()
    for thread in threads[1:]:
        thread.start()
    finish.set()
    for thread in threads:
        thread.join()
    assert results == [b"cubin"] * 4
    assert make.calls == 1


def test_threads_that_want_different_things_do_not_wait() -> None:
    """A long compilation blocks no thread with another cubin."""
    shared = Cache(None)

    def slow() -> bytes:
        other = threading.Thread(target=lambda: shared.get("b", Maker()))
        other.start()
        other.join()
        return b"cubin"

    assert shared.get("a", slow) == b"cubin"


# -- through the compiler -----------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that records what it compiles."""
    compiled: list[str] = []

    def note(source: str, *, name: str, arch: str, options: object = ()) -> bytes:
        compiled.append(source)
        return f"{source} {name} {arch} {options}".encode()

    monkeypatch.setattr(nvrtc, "compile", note)
    monkeypatch.setattr(nvrtc, "preprocess", lambda source, **options: source.encode())
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    return compiled


def test_compiling_goes_through_the_cache(cache_directory: Path, compiler: list[str]) -> None:
    """The same source is compiled once, and the compiler gets all it was asked with."""
    cubins = {
        cache.compiled("int x;", name="x.cu", arch="sm_90", options=("-G",)) for _ in range(3)
    }
    assert cubins == {b"int x; x.cu sm_90 ('-G',)"}
    assert compiler == ["int x;"]
    assert len(list(cache_directory.iterdir())) == 1


@pytest.mark.fault("I6")
@pytest.mark.parametrize("texts", [(None,), (b"before", b"after")])
def test_what_is_not_known_is_not_kept(
    cache_directory: Path,
    compiler: list[str],
    monkeypatch: pytest.MonkeyPatch,
    texts: tuple[bytes | None, ...],
) -> None:
    """A cubin whose text is unknown, or changed meanwhile, is returned and not cached."""
    answers = itertools.cycle(texts)
    monkeypatch.setattr(nvrtc, "preprocess", lambda source, **options: next(answers))
    for _ in range(2):
        assert cache.compiled("int x;", name="x.cu", arch="sm_90") == b"int x; x.cu sm_90 ()"
    assert len(compiler) == 2
    assert list(cache_directory.iterdir()) == []


def test_the_process_has_one_cache(cache_directory: Path) -> None:
    """It is made at its first use, in the directory that the environment names."""
    assert not cache_directory.exists()
    assert cache.shared() is cache.shared()
    assert cache.shared().directory == cache_directory
