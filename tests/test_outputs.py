"""Outputs appear whole or not at all; what speaks against a target is said before any work."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from widen_cli import renames
from widen_cli.errors import WidenError
from widen_cli.folders import DirectoryOutput
from widen_cli.output_checks import check_output, check_space, is_stream
from widen_cli.outputs import FileOutput, StreamOutput

ROOT = Path(__file__).parents[1]


@contextmanager
def unprivileged_folder() -> Iterator[Path]:
    """A folder to whose owner's rights the block is bound: root may write everywhere."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    old = os.umask(0o022)
    yield
    os.umask(old)


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def faults(target: object, inputs: list[Path] | None = None, force: bool = False, directory: bool = False) -> list[str]:
    try:
        check_output(str(target), inputs or [], force, directory)
    except WidenError as error:
        return [fault.removeprefix(f"{target}: ") for fault in error.faults]
    return []


# check_output


def test_new_target_is_fine(tmp_path: Path) -> None:
    assert faults(tmp_path / "o") == []
    assert faults(tmp_path / "o", directory=True) == []
    assert names(tmp_path) == []


def test_existing_file_needs_force(tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.touch()
    assert faults(out) == ["exists; use --force to replace it"]
    assert faults(out, force=True) == []


def test_existing_folder_needs_force_when_it_holds_files(tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.mkdir()
    assert faults(out, directory=True) == []
    (out / "x").touch()
    assert faults(out, directory=True) == ["exists and is not empty; use --force to replace it"]
    assert faults(out, directory=True, force=True) == []


def test_file_and_folder_are_not_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    text = "is a file, but a folder is to be written; choose another output"
    assert faults(tmp_path / "f", directory=True, force=True) == [text]
    text = "is a folder, but a file is to be written; give a file name"
    assert faults(tmp_path, force=True) == [text]
    assert faults("/proc", force=True, directory=True)[-1].startswith("is a mount point, which cannot be replaced")


def test_missing_parent_is_named(tmp_path: Path) -> None:
    text = f"the folder {tmp_path}/no does not exist; create it with mkdir -p"
    assert faults(tmp_path / "no" / "o") == [text]
    assert faults(tmp_path / "no" / "o", directory=True) == [text]


def test_parent_that_is_not_writable() -> None:
    with unprivileged_folder() as folder:
        text = f"the folder {folder}/closed is not writable for you; choose another one"
        assert faults(folder / "closed" / "o") == [text]


def test_same_file_is_refused_even_with_force(tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.touch()
    os.link(given, tmp_path / "hard")
    (tmp_path / "soft").symlink_to("in")
    for out in (given, tmp_path / "hard", tmp_path / "soft"):
        assert faults(out, [given], force=True) == [f"is the input {given} or holds it; choose another output"]
    assert faults(tmp_path / "soft", [tmp_path / "hard"], force=True) != []
    assert faults(tmp_path / "other", [given]) == []


def test_output_that_touches_an_input_folder(tmp_path: Path) -> None:
    given = tmp_path / "m" / "in"
    given.mkdir(parents=True)
    (given / "model.safetensors").touch()
    text = f"is the input {given} or holds it; choose another output"
    assert faults(given, [given], force=True, directory=True) == [text]
    assert faults(tmp_path / "m", [given], force=True, directory=True) == [text]
    assert faults(given / "model.safetensors", [given], force=True) == [text]
    assert faults(given / "new.safetensors", [given]) == []
    assert faults(given / "wide", [given], directory=True) == []


def test_cache_blobs_are_never_written(tmp_path: Path) -> None:
    blobs = tmp_path / "models--a" / "blobs"
    blobs.mkdir(parents=True)
    (tmp_path / "out").symlink_to(blobs / "abc")
    text = f"lies in a Hugging Face cache ({blobs}/abc), whose files are shared; choose another output"
    assert faults(tmp_path / "out", force=True) == [text]
    (blobs / "abc").touch()
    assert faults(tmp_path / "out", force=True) == [text]


def test_the_input_as_output_is_one_fault(tmp_path: Path) -> None:
    """That it exists goes without saying, and --force would not help."""
    given = tmp_path / "in"
    given.touch()
    assert faults(given, [given, given]) == [f"is the input {given} or holds it; choose another output"]


def test_streams(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    (tmp_path / "link").symlink_to("/dev/stdout")
    for target in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null", tmp_path / "p", tmp_path / "link"):
        assert is_stream(str(target)), target
    for target in (tmp_path, tmp_path / "x", "/dev/fd/x", ROOT / "pyproject.toml"):
        assert not is_stream(str(target)), target
    assert faults(tmp_path / "p") == []
    assert faults(tmp_path / "p", directory=True) == [
        "is a pipe or a device, but a folder is to be written; for one file give a weights file as the input"
    ]


def test_terminal_is_refused() -> None:
    master, slave = os.openpty()
    saved = os.dup(1)
    os.dup2(slave, 1)
    try:
        told = faults("-"), faults("/dev/stdout")
    finally:
        os.dup2(saved, 1)
        for fd in (saved, master, slave):
            os.close(fd)
    assert told == (["is a terminal; send it to a file or a pipe"],) * 2


def test_standard_output_that_is_the_input(tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.touch()
    saved = os.dup(1)
    with open(given, "ab") as file:
        os.dup2(file.fileno(), 1)
        try:
            told = faults("-", [given])
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert told == [f"is the input {given} or holds it; choose another output"]


# check_space


def test_space(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
    with pytest.raises(WidenError) as caught:
        check_space(tmp_path, 2**60)
    assert str(caught.value).startswith(f"{tmp_path}: {2**60} bytes needed, ")
    assert str(caught.value).endswith(" free; free some space or choose another folder")


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_size_limit_is_known_before(tmp_path: Path) -> None:
    with file_limit(1024):
        check_space(tmp_path, 5000, largest=1024)
        with pytest.raises(WidenError) as caught:
            check_space(tmp_path, 5000)
    text = f"{tmp_path}: a file of 5000 bytes needed, the limit is 1024; raise it with ulimit -f"
    assert str(caught.value) == text


# FileOutput


def test_file_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "o"
    with FileOutput(out, 8, force=True) as output:
        output.write_at(4, b"5678")
        output.write_at(0, memoryview(b"1234"))
        output.write_at(2, b"")
        assert not out.exists()
        (hidden,) = names(tmp_path)
        assert hidden.startswith(f".o.widen-{os.getpid()}-")
        assert hidden.endswith(".tmp")
    assert names(tmp_path) == ["o"]
    assert out.read_bytes() == b"12345678"
    assert mode(out) == 0o644


def test_relative_target_and_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FileOutput("o", force=True) as output:
        output.write_at(0, b"x")
    assert names(tmp_path) == ["o"]


def test_modes(tmp_path: Path) -> None:
    os.umask(0o077)
    with FileOutput(tmp_path / "new", force=True):
        pass
    assert mode(tmp_path / "new") == 0o600
    os.umask(0o022)
    (tmp_path / "new").chmod(0o640)
    with FileOutput(tmp_path / "new", force=True):
        (hidden,) = [name for name in names(tmp_path) if name.startswith(".")]
        assert mode(tmp_path / hidden) == 0o600, "new bytes may be read by more people than the old ones"
    assert mode(tmp_path / "new") == 0o640


def test_buffers_of_any_shape(tmp_path: Path) -> None:
    with FileOutput(tmp_path / "o", force=True) as output:
        output.write_at(0, memoryview(b"abcd").cast("H"))
        output.write_at(4, memoryview(b"efghijkl").cast("B", (2, 4)))
    assert (tmp_path / "o").read_bytes() == b"abcdefghijkl"


def test_writing_goes_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    with FileOutput(tmp_path / "o", force=True) as output:
        output.write_at(0, b"0123456789")
    assert (tmp_path / "o").read_bytes() == b"0123456789"


def test_several_threads(tmp_path: Path) -> None:
    data = os.urandom(1 << 16)
    with FileOutput(tmp_path / "o", force=True) as output, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda at: output.write_at(at, data[at : at + 64]), range(0, len(data), 64)))
    assert (tmp_path / "o").read_bytes() == data


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_any_exception_leaves_the_old_file(tmp_path: Path, kind: type[BaseException]) -> None:
    (tmp_path / "o").write_bytes(b"old")

    def work() -> None:
        with FileOutput(tmp_path / "o", force=True) as output:
            output.write_at(0, b"new")
            raise kind

    with pytest.raises(kind):
        work()
    assert names(tmp_path) == ["o"]
    assert (tmp_path / "o").read_bytes() == b"old"


def test_failing_commit_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "o").write_bytes(b"old")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with (
        pytest.raises(WidenError, match=rf"^{tmp_path}/o: cannot be written: Input/output error$"),
        FileOutput(tmp_path / "o", force=True) as output,
    ):
        output.write_at(0, b"new")
    assert names(tmp_path) == ["o"]
    assert (tmp_path / "o").read_bytes() == b"old"


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/file")
    for data in (b"first", b"second"):
        with FileOutput(tmp_path / "link", force=True) as output:
            output.write_at(0, data)
            assert names(tmp_path) == ["link", "real"]
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "file").read_bytes() == data
    assert names(tmp_path / "real") == ["file"]


def test_other_hard_links_keep_the_old_bytes(tmp_path: Path) -> None:
    (tmp_path / "o").write_bytes(b"old")
    os.link(tmp_path / "o", tmp_path / "other")
    with FileOutput(tmp_path / "o", force=True) as output:
        output.write_at(0, b"new")
    assert (tmp_path / "other").read_bytes() == b"old"


def test_leftovers_of_dead_runs_only(tmp_path: Path) -> None:
    dead = tmp_path / f".o.widen-{dead_pid()}-0123abcd.tmp"
    alive = tmp_path / f".o.widen-{os.getppid()}-0123abcd.tmp"
    other = tmp_path / f".other.widen-{dead_pid()}-0123abcd.tmp"
    named_alike = tmp_path / f".o.widen-{dead_pid()}-0123abcd.tmp.txt"
    for path in (dead, alive, other, named_alike):
        path.touch()
    with FileOutput(tmp_path / "o", force=True):
        pass
    assert names(tmp_path) == sorted(["o", alive.name, other.name, named_alike.name])


def test_long_names(tmp_path: Path) -> None:
    name = "é" * 127
    with FileOutput(tmp_path / name, force=True):
        pass
    assert names(tmp_path) == [name]


def test_full_disk_and_limit_have_the_bytes_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with file_limit(10), pytest.raises(WidenError) as caught, FileOutput(tmp_path / "o", 50, force=True) as output:
        output.write_at(0, bytes(50))
    text = f"{tmp_path}/o: the file is larger than allowed; 50 bytes needed, see ulimit -f"
    assert str(caught.value) == text
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WidenError) as caught, FileOutput(tmp_path / "o", 50, force=True) as output:
        output.write_at(0, bytes(50))
    assert str(caught.value).startswith(f"{tmp_path}/o: the disk is full; 50 bytes needed, ")
    assert str(caught.value).endswith(" free; free some space")
    assert names(tmp_path) == []


def test_missing_folder_at_start(tmp_path: Path) -> None:
    text = f"^{tmp_path}/no/o: cannot be written: No such file or directory$"
    with pytest.raises(WidenError, match=text), FileOutput(tmp_path / "no" / "o", force=True):
        pass


KILLED = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell starts with it ignored
from widen_cli.folders import DirectoryOutput
from widen_cli.outputs import FileOutput
with FileOutput(sys.argv[1], force=True) as file, DirectoryOutput(sys.argv[2]) as folder:
    file.write_at(0, b"new")
    with folder.open("a") as part:
        part.write_at(0, b"new")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_killed_run_leaves_no_target_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "o"), str(tmp_path / "d")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    assert len(names(tmp_path)) == 2
    assert all(f".widen-{process.pid}-" in name for name in names(tmp_path))
    with FileOutput(tmp_path / "o", force=True), DirectoryOutput(tmp_path / "d"):
        pass
    assert names(tmp_path) == ["d", "o"]


# StreamOutput


def test_stream_through_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "p").read_bytes)
        with StreamOutput(str(tmp_path / "p")) as output:
            output.write_at(0, b"12")
            output.write_at(2, b"")
            output.write_at(2, memoryview(b"3456").cast("H"))
            with pytest.raises(ValueError, match="5 given at 6"):
                output.write_at(5, b"x")
        assert read.result() == b"123456"
    assert (tmp_path / "p").is_fifo()


@pytest.mark.parametrize("target", ["-", "/dev/stdout", "/dev/fd/1", "LINK"])
def test_stream_continues_a_redirected_file(tmp_path: Path, target: str) -> None:
    (tmp_path / "LINK").symlink_to("/dev/stdout")
    script = (
        "import os, sys; from widen_cli.outputs import StreamOutput\n"
        "with StreamOutput(sys.argv[1]) as out: out.write_at(0, b'new')\n"
        "os.write(1, b'!')"
    )
    out = tmp_path / "o"
    out.write_bytes(b"old")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(out, "ab") as file:
        command = [sys.executable, "-c", script, target]
        subprocess.run(command, cwd=tmp_path, stdout=file, check=True, env=environment)
    assert out.read_bytes() == b"oldnew!"
    assert (tmp_path / "LINK").is_symlink()
    assert os.path.islink("/dev/stdout")


def test_broken_pipe_passes_up() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError), StreamOutput(f"/dev/fd/{writer}") as output:
        output.write_at(0, b"x")
    os.close(writer)


def test_full_device_and_unopened_device(tmp_path: Path) -> None:
    with pytest.raises(WidenError, match=r"^/dev/full: the disk is full; "), StreamOutput("/dev/full") as output:
        output.write_at(0, b"x")
    with pytest.raises(WidenError, match="cannot be written: No such file"):
        StreamOutput(str(tmp_path / "x"))


def test_closing_twice_and_closing_what_is_gone() -> None:
    output = StreamOutput("/dev/null")
    output.close()
    output.close()
    with pytest.raises(WidenError, match="cannot be written: Bad file descriptor"):
        output.write_at(0, b"x")


# DirectoryOutput


def build(output: DirectoryOutput, **files: bytes) -> None:
    for name, data in files.items():
        with output.open(name.replace("__", "/").replace("_", "."), len(data)) as file:
            file.write_at(0, data)


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "o"
    (tmp_path / "real.txt").write_text("text")
    (tmp_path / "given.txt").symlink_to("real.txt")
    with DirectoryOutput(out) as output:
        build(output, a_b=b"1", sub__c=b"2")
        output.copy(tmp_path / "given.txt", "sub/given.txt")
        assert not out.exists()
        (hidden,) = [name for name in names(tmp_path) if name.startswith(".")]
        assert hidden.startswith(f".o.widen-{os.getpid()}-")
        assert hidden.endswith(".staging")
    assert names(tmp_path) == ["given.txt", "o", "real.txt"]
    assert content(out) == {"a.b": b"1", "sub/c": b"2", "sub/given.txt": b"text"}
    assert not (out / "sub" / "given.txt").is_symlink()
    assert (mode(out), mode(out / "a.b")) == (0o755, 0o644)


def test_large_files_are_copied_whole(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "given").write_bytes(data)
    with DirectoryOutput(tmp_path / "o") as output:
        output.copy(tmp_path / "given", "x")
    assert content(tmp_path / "o") == {"x": data}


def test_copy_names_the_file_it_cannot_read(tmp_path: Path) -> None:
    with (
        pytest.raises(WidenError, match=f"^{tmp_path}/gone: cannot be read: No such file or directory$"),
        DirectoryOutput(tmp_path / "o") as output,
    ):
        output.copy(tmp_path / "gone", "x")
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "/x", "", "a/../../x"])
def test_names_that_lead_out_are_a_mistake(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="leads out of the folder"), DirectoryOutput(tmp_path / "o") as output:
        output.open(name)


def test_commit_by_hand(tmp_path: Path) -> None:
    with DirectoryOutput(tmp_path / "o") as output:
        build(output, a=b"1")
        output.commit()
        assert content(tmp_path / "o") == {"a": b"1"}
        output.commit()
    assert names(tmp_path) == ["o"]


def test_empty_folder_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o").chmod(0o750)
    with DirectoryOutput(tmp_path / "o") as output:
        build(output, a=b"1")
    assert content(tmp_path / "o") == {"a": b"1"}
    assert mode(tmp_path / "o") == 0o750
    assert names(tmp_path) == ["o"]


def old_folder(out: Path) -> None:
    (out / "mine").mkdir(parents=True)
    (out / "empty").mkdir()
    for name in ("config.json", "notes.md", "mine/x.safetensors", "model-00001-of-00002.safetensors"):
        (out / name).write_bytes(b"old")
    (out / "model.safetensors.index.json").write_bytes(b"old")
    (out / "link").symlink_to("notes.md")
    (out / "folder link").symlink_to("mine")


def test_full_folder_without_force_is_left_alone(tmp_path: Path) -> None:
    old_folder(tmp_path / "o")
    before = content(tmp_path / "o")
    with (
        pytest.raises(WidenError, match=f"^{tmp_path}/o: exists and is not empty; use --force to replace it$"),
        DirectoryOutput(tmp_path / "o") as output,
    ):
        build(output, a=b"1")
    assert content(tmp_path / "o") == before
    assert names(tmp_path) == ["o"]


class _NoExchange:
    renameat2 = None


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "two renames"])
@pytest.mark.parametrize("hard_links", [True, False], ids=["hard links", "copies"])
def test_force_replaces_and_keeps_what_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool, hard_links: bool
) -> None:
    def no_link(*arguments: object, **more: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not exchange:
        monkeypatch.setattr(renames, "_LIBC", _NoExchange())
    if not hard_links:
        monkeypatch.setattr(os, "link", no_link)
    out = tmp_path / "o"
    old_folder(out)
    with DirectoryOutput(out, force=True) as output:
        build(output, config_json=b"new", model_safetensors=b"new")
    assert content(out) == {
        "config.json": b"new",
        "model.safetensors": b"new",
        "notes.md": b"old",
        "link": b"old",
        "mine/x.safetensors": b"old",
    }
    assert os.readlink(out / "link") == "notes.md"
    assert os.readlink(out / "folder link") == "mine"
    assert (out / "empty").is_dir()
    assert names(tmp_path) == ["o"]


def test_a_reader_always_finds_the_folder_whole(tmp_path: Path) -> None:
    out = tmp_path / "o"
    out.mkdir()
    for name in ("a", "b"):
        (out / name).write_bytes(b"old")
    stop = False

    def watch() -> set[frozenset[str]]:
        seen = set()
        while not stop:
            folder = os.open(out, os.O_RDONLY)
            seen.add(frozenset(os.listdir(folder)))
            os.close(folder)
        return seen

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        for _ in range(20):
            with DirectoryOutput(out, force=True) as output:
                build(output, a=b"new", b=b"new")
        stop = True
        seen = watching.result()
    # The old folder may be watched while it is taken down, but its name never leads nowhere and the new one is whole.
    assert frozenset({"a", "b"}) in seen
    assert content(out) == {"a": b"new", "b": b"new"}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_any_exception_leaves_the_old_folder(tmp_path: Path, kind: type[BaseException]) -> None:
    old_folder(tmp_path / "o")
    before = content(tmp_path / "o")

    def work() -> None:
        with DirectoryOutput(tmp_path / "o", force=True) as output:
            build(output, a=b"1")
            raise kind

    with pytest.raises(kind):
        work()
    assert content(tmp_path / "o") == before
    assert names(tmp_path) == ["o"]


def test_second_rename_that_fails_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_folder(tmp_path / "o")
    before = content(tmp_path / "o")
    replace = os.replace

    def fail_for_staging(source: Path, target: Path) -> None:
        if str(source).endswith(".staging/files"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(renames, "_LIBC", _NoExchange())
    monkeypatch.setattr(os, "replace", fail_for_staging)
    with (
        pytest.raises(WidenError, match="cannot be written: Input/output error"),
        DirectoryOutput(tmp_path / "o", force=True) as output,
    ):
        build(output, a=b"1")
    assert content(tmp_path / "o") == before
    assert names(tmp_path) == ["o"]


def test_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "o").symlink_to("real")
    with DirectoryOutput(tmp_path / "o") as output:
        build(output, a=b"1")
    assert (tmp_path / "o").is_symlink()
    assert content(tmp_path / "real") == {"a": b"1"}


def test_dead_staging_is_removed(tmp_path: Path) -> None:
    for pid in (dead_pid(), os.getppid()):
        folder = tmp_path / f".o.widen-{pid}-0123abcd.staging"
        folder.mkdir()
        (folder / "x").touch()
    with DirectoryOutput(tmp_path / "o"):
        pass
    assert names(tmp_path) == [f".o.widen-{os.getppid()}-0123abcd.staging", "o"]


def test_interrupt_by_signal_removes_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "o"), str(tmp_path / "d")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert names(tmp_path) == []


def test_without_force_a_file_that_came_in_between_stays(tmp_path: Path) -> None:
    def work() -> None:
        with FileOutput(tmp_path / "o") as output:
            output.write_at(0, b"late")
            (tmp_path / "o").write_bytes(b"early")

    with pytest.raises(WidenError) as caught:
        work()
    assert caught.value.faults == (f"{tmp_path / 'o'}: exists; use --force to replace it",)
    assert (tmp_path / "o").read_bytes() == b"early"
    assert os.listdir(tmp_path) == ["o"]
