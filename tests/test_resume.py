"""What an interrupted run keeps, and when the next one may go on from it."""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from interruptions import inputs, visible

from widen_cli import output_checks, quota, renames
from widen_cli.convert import prepare
from widen_cli.errors import WidenError
from widen_cli.hidden import hidden_sibling
from widen_cli.jobs import Report
from widen_cli.journal import Finished, Identity, Journal, left_by_dead_runs
from widen_cli.moves import Moves, settle
from widen_cli.options import Options
from widen_cli.output_checks import check_space
from widen_cli.placing import Placement, put_in_place, signals_held
from widen_cli.writing import run

OPTIONS = Options("model", "out", max_shard_size="2KB", threads=1)
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def whole(here: Path) -> dict[str, str]:
    """The output of a run in one go."""
    done = widen(replace(OPTIONS, output="out-in-one-go"))
    assert done.notes == ()
    return {name.replace("out-in-one-go", "out"): digest for name, digest in visible(here).items()}


def widen(options: Options) -> Report:
    return run(prepare(options), lambda nbytes: None)


def output(here: Path) -> dict[str, str]:
    return {name: digest for name, digest in visible(here).items() if not name.startswith("out-in-one-go")}


def cut_short(options: Options = OPTIONS, tensors: int = 10) -> KeyboardInterrupt:
    """A run that is interrupted after so many tensors; the finished shards are the first two."""
    done = 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += 1
        if done == tensors:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        run(prepare(options), progress)
    return caught.value


def left() -> Path:
    """The hidden folder that an interrupted run has left; there is one."""
    (found,) = Path().glob(".out*.staging")
    return found


def warned(options: Options) -> list[str]:
    job = prepare(options)
    job.checkpoint.close()
    return [text for text in job.warnings if "resume" in text]


def refused(options: Options) -> tuple[str, ...]:
    with pytest.raises(WidenError) as caught:
        prepare(options)
    return caught.value.faults


def test_finished_shards_stay_and_are_not_written_again(here: Path, whole: dict[str, str]) -> None:
    stopped = cut_short()
    assert stopped.__notes__ == [
        f"2 finished files are kept in {here / left()}; the same command with --resume goes on from there"
    ]
    assert output(here) == {}
    assert sorted(os.listdir(left())) == ["files", "journal"]
    assert sorted(os.listdir(left() / "files")) == SHARDS[:2]
    before = [(left() / "files" / name).stat() for name in SHARDS[:2]]
    report = widen(replace(OPTIONS, resume=True))
    assert output(here) == whole
    after = [(here / "out" / name).stat() for name in SHARDS[:2]]
    assert [(file.st_ino, file.st_mtime_ns) for file in before] == [(file.st_ino, file.st_mtime_ns) for file in after]
    nbytes = sum(file.st_size for file in before)
    assert report.notes == (f"resumed: 2 of 3 files, {nbytes} bytes, were finished and are unchanged",)
    assert list(here.glob(".out*")) == []


def test_what_is_reported_is_that_of_a_run_in_one_go(here: Path) -> None:
    rounding = replace(OPTIONS, factor=3)
    cut_short(rounding)
    resumed = widen(replace(rounding, resume=True))
    anew = widen(replace(rounding, output="other"))
    assert resumed.counts == anew.counts
    assert resumed.total.rounded > 0


def test_before_a_shard_is_finished_nothing_stays(here: Path) -> None:
    assert not hasattr(cut_short(tensors=1), "__notes__")
    assert list(here.glob(".out*")) == []


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    times = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda file: os.truncate(file, 100), lambda file: os.truncate(file, 10**6), Path.unlink],
    ids=["one bit", "shorter", "longer", "missing"],
)
def test_a_finished_shard_is_trusted_by_its_bytes(
    here: Path, whole: dict[str, str], damage: Callable[[Path], None]
) -> None:
    cut_short()
    damage(left() / "files" / SHARDS[0])
    report = widen(replace(OPTIONS, resume=True))
    assert report.notes[0] == f"{SHARDS[0]}: was not what the interrupted run had written; it was made anew"
    assert report.notes[1].startswith("resumed: 1 of 3 files, ")
    assert output(here) == whole


def test_what_nobody_noted_is_not_taken(here: Path, whole: dict[str, str]) -> None:
    """A journal whose last line was cut short, a shard that it does not name, and files that are no shards."""
    cut_short()
    journal = left() / "journal"
    journal.write_bytes(journal.read_bytes()[:-20])
    (left() / "files" / "stranger.safetensors").write_bytes(b"x")
    (left() / "files" / "folder").mkdir()
    report = widen(replace(OPTIONS, resume=True))
    assert len(report.notes) == 1
    assert report.notes[0].startswith("resumed: 1 of 3 files, ")
    assert output(here) == whole


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\xff\n", b'{"tool": "1", "made": "x"'])
def test_a_journal_that_cannot_be_read_counts_as_none(here: Path, content: bytes) -> None:
    cut_short()
    (left() / "journal").write_bytes(content)
    assert warned(replace(OPTIONS, resume=True)) == [
        "--resume: no interrupted run has left finished files for out; this is made anew"
    ]
    widen(OPTIONS)
    assert list(here.glob(".out*")) == []


def test_other_options_and_another_input_are_refused(here: Path) -> None:
    cut_short()
    tail = "make that the same again, or leave --resume out to begin anew"
    where = f"--resume: what {here / left()} holds"
    for changed, asked in (
        ({"factor": 3}, "--factor 3 --max-shard-size 2KB"),
        ({"max_shard_size": "3KB"}, "--max-shard-size 3KB"),
        ({"dtype": "F64"}, "--dtype F64 --max-shard-size 2KB"),
        (
            {"scaling": "sum", "settings": ("rms_norm_eps=0.5",)},
            "--scaling sum --set rms_norm_eps=0.5 --max-shard-size 2KB",
        ),
    ):
        assert refused(replace(OPTIONS, resume=True, **changed)) == (
            f"{where} was made with other options: --max-shard-size 2KB, where this run has {asked}; {tail}",
        )
    journal = left() / "journal"
    whole = journal.read_text()
    first, *rest = whole.splitlines()
    journal.write_text("\n".join([json.dumps({**json.loads(first), "made": "of another config"}), *rest, ""]))
    assert refused(replace(OPTIONS, resume=True)) == (f"{where} was made with another config or map; {tail}",)
    journal.write_text(whole)
    os.utime("model/model.safetensors")
    assert refused(replace(OPTIONS, resume=True)) == (
        f"{where} was made of another input: the size or time of model.safetensors differs; {tail}",
    )


def test_the_same_in_other_words_is_the_same(here: Path, whole: dict[str, str]) -> None:
    cut_short()
    notes = widen(replace(OPTIONS, resume=True, factor=2, max_shard_size="2000")).notes
    assert notes[0].startswith("resumed: 2 of 3 files, ")
    assert output(here) == whole


def test_another_version_is_refused(here: Path) -> None:
    cut_short()
    journal = left() / "journal"
    first, *rest = journal.read_text().splitlines()
    journal.write_text("\n".join([json.dumps({**json.loads(first), "tool": "0.0"}), *rest, ""]))
    (fault,) = refused(replace(OPTIONS, resume=True))
    assert " holds was made by version 0.0, this is " in fault


def test_without_resume_it_is_told_and_removed_at_the_end_only(here: Path, whole: dict[str, str]) -> None:
    cut_short()
    first = left()
    told = (
        f"{here / first}: 2 finished files of an interrupted run of the same; --resume would go on from there; "
        "this run makes all of them anew, and removes those at its end"
    )
    assert warned(OPTIONS) == [told]
    cut_short(tensors=1)
    assert left() == first, "a run that came to nothing has destroyed the work of another"
    assert widen(OPTIONS).notes == ()
    assert output(here) == whole
    assert list(here.glob(".out*")) == []


@pytest.mark.parametrize("options", [Options("in.safetensors", "out.safetensors"), Options("model", "out")])
def test_one_file_is_made_anew(options: Options) -> None:
    assert warned(options) == []
    told = "--resume: only what is written as several files can be resumed, and not from a pipe; this is made anew"
    assert warned(replace(options, resume=True)) == [told]


def test_a_run_that_lives_keeps_its_folder(here: Path) -> None:
    """It is known by the lock on its journal; a number of a process may be another one's by now, or of another machine."""
    cut_short()
    living = here / f".out.widen-{os.getppid()}-0123abcd.staging"
    os.rename(left(), living)
    assert [leftover.path for leftover in left_by_dead_runs(here / "out")] == [living]
    identity = left_by_dead_runs(here / "out")[0].identity
    dead = here / f".out.widen-{dead_pid()}-0123abcd.staging"
    os.rename(living, dead)
    held = Journal(dead, identity, [Finished(name="a", nbytes=0, pieces=(), counts={})])
    assert left_by_dead_runs(here / "out") == []
    widen(OPTIONS)
    assert dead.exists()
    held.close()
    assert [leftover.path for leftover in left_by_dead_runs(here / "out")] == [dead]


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_identity_hangs_on_no_hash_order_path_or_thread() -> None:
    script = (
        "import sys; from widen_cli.convert import prepare; from widen_cli.options import Options\n"
        "print(prepare(Options(sys.argv[1], 'other', max_shard_size='2KB', threads=int(sys.argv[2]))).identity)"
    )
    root = str(Path(__file__).parents[1])
    told = [
        subprocess.check_output(
            [sys.executable, "-c", script, model, threads],
            env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": threads},
        )
        for model, threads in (("model", "1"), (str(Path("model").resolve()), "2"))
    ]
    assert told[0] == told[1]
    assert b"made=" in told[0]


# Full disks and quotas.


def test_a_disk_that_fills_up_keeps_what_is_finished(
    here: Path, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, written = os.pwrite, 0
    in_one_go = here / "out-in-one-go"
    room = sum((in_one_go / name).stat().st_size for name in SHARDS[:2]) + 100

    def fills(fd: int, data: memoryview, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fills)
    with pytest.raises(WidenError) as caught:
        widen(OPTIONS)
    monkeypatch.setattr(os, "pwrite", pwrite)
    said = str(caught.value)
    assert caught.value.__notes__ == [
        f"2 finished files are kept in {here / left()}; the same command with --resume goes on from there"
    ]
    assert sorted(os.listdir(left() / "files")) == SHARDS[:2]
    widen(replace(OPTIONS, resume=True))
    assert output(here) == whole
    needed = (here / "out" / SHARDS[2]).stat().st_size
    assert said.startswith(f"{here}/out/{SHARDS[2]}: the disk is full; {needed} bytes needed, ")


def test_room_is_asked_for_what_is_still_to_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short()
    kept = sum(file.stat().st_size for file in (left() / "files").iterdir())
    job = prepare(OPTIONS)
    job.checkpoint.close()
    beside = sum(file.stat().st_size for file in map(Path, ("model/tokenizer.json",)))
    monkeypatch.setattr(output_checks, "free_bytes", lambda folder: 100)
    told = f"{here}: {{}} bytes needed, 100 free; free some space or choose another folder"
    assert refused(OPTIONS) == (told.format(job.nbytes + beside),)
    assert refused(replace(OPTIONS, resume=True)) == (told.format(job.nbytes + beside - kept),)


def test_a_quota_is_asked_before_the_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is struct if_dqblk: limits in KiB, the use in bytes; 0 is no limit."""
    limits = {0: (10, 9216), 1: (0, 10**9)}

    def ask(fd: int, kind: int, number: int) -> bytes:
        hard, used = limits[kind]
        return struct.pack("<8QI4x", hard, 0, used, 0, 0, 0, 0, 0, 63)

    monkeypatch.setattr(quota, "_ask", ask)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    check_space(here, 1024)
    with pytest.raises(WidenError) as caught:
        check_space(here, 1025)
    assert caught.value.faults == (
        f"{here}: 1025 bytes needed, your disk quota has 1024 left; free some space or choose another folder",
    )
    limits[1] = (9, 9216)
    with pytest.raises(WidenError, match="1 bytes needed, your disk quota has 0 left"):
        check_space(here, 1)


def test_without_quotas_nothing_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quota._ask(-1, 0, 0) is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(quota, "_ask", lambda fd, kind, number: None)
    check_space(here, 1)


# Several names at once.


class _NoExchange:
    renameat2 = None


def placements(here: Path) -> list[Placement]:
    """Two files to be replaced, and a third whose name nothing can have."""
    (here / "blocked").mkdir()
    (here / "blocked" / "x").touch()
    for name in ("a", "b"):
        (here / name).write_text(f"old {name}")
    for name in ("new a", "new b", "new c"):
        (here / name).write_text(name)
    return [Placement(here / f"new {name}", here / name, name, True) for name in ("a", "b")]


@pytest.mark.parametrize("exchange", [True, False])
def test_several_are_replaced_together(here: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(renames, "_LIBC", _NoExchange())
    with put_in_place(placements(here)):
        pass
    assert [(here / name).read_text() for name in ("a", "b")] == ["new a", "new b"]
    assert list(here.glob(".*")) == []


def test_an_error_brings_all_the_old_ones_back(here: Path) -> None:
    blocked = Placement(here / "new c", here / "blocked" / "x", "c", False)
    refused = pytest.raises(WidenError, match=r"^c: exists; use --force to replace it$")
    with refused, put_in_place([*placements(here), blocked]):
        pass
    assert [(here / name).read_text() for name in ("a", "b")] == ["old a", "old b"]
    assert [(here / f"new {name}").read_text() for name in ("a", "b", "c")] == ["new a", "new b", "new c"]
    assert list(here.glob(".*")) == []


def begun(here: Path) -> Path:
    """Two files of which the old ones are aside and one is in, as a killed run leaves them; the note of it."""
    first, second = placements(here)
    moves = Moves.begin([(each.staged, each.real, each.name, True) for each in (first, second)])
    for each in moves.each:
        each.set_aside()
    moves.each[1].place()
    os.close(moves.fd)
    return moves.note


def staged_as_runs_do(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with names that a run gives."""
    real = placements

    def hidden(where: Path) -> list[Placement]:
        made = [replace(each, staged=hidden_sibling(each.real, "tmp")) for each in real(where)]
        for each in made:
            (where / f"new {each.name}").rename(each.staged)
        return made

    monkeypatch.setitem(globals(), "placements", hidden)
    return begun(here)


@pytest.mark.parametrize("asked", ["a", "b"])
def test_what_was_begun_is_completed_by_whoever_names_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    staged_as_runs_do(here, monkeypatch)
    assert not (here / "a").exists()
    assert not settle(here / "another")
    assert settle(here / asked, look=True)
    assert not (here / "a").exists()
    assert settle(here / asked)
    assert [(here / name).read_text() for name in ("a", "b")] == ["new a", "new b"]
    assert list(here.glob(".*")) == []
    assert not settle(here / asked)


def test_what_was_changed_since_is_left_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = staged_as_runs_do(here, monkeypatch)
    (here / "a").write_text("somebody else's")
    before = sorted(os.listdir(here))
    with pytest.raises(WidenError) as refused:
        settle(here / "a")
    assert refused.value.faults == (
        f"{here / 'a'}: an interrupted run had begun to put it in place, and {here / 'a'} has been changed since; "
        f"remove {note}, which notes what waits under which name, to leave it so",
    )
    assert (sorted(os.listdir(here)), (here / "a").read_text()) == (before, "somebody else's")


def test_what_cannot_be_completed_is_taken_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged_as_runs_do(here, monkeypatch)
    (waiting,) = here.glob(".a.*.tmp")
    waiting.unlink()
    assert settle(here / "b")
    assert [(here / name).read_text() for name in ("a", "b")] == ["old a", "old b"]
    assert not list(here.glob(".*.placing"))


@pytest.mark.parametrize("key", ["staged", "old"])
def test_a_note_from_elsewhere_moves_nothing_but_names_of_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    note = staged_as_runs_do(here, monkeypatch)
    told = json.loads(note.read_text())
    told[0][key] = "new c"
    note.write_text(json.dumps(told))
    before = sorted(os.listdir(here))
    assert not settle(here / "a")
    assert sorted(os.listdir(here)) == before


def test_a_signal_waits_for_the_end_of_what_is_held() -> None:
    done = []
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), signals_held():  # noqa: PT012 - the block has to go on
            os.kill(os.getpid(), signal.SIGINT)
            done.append("work")
    finally:
        signal.signal(signal.SIGINT, old)
    assert done == ["work"]


def test_the_journal_holds_names_that_are_no_text(here: Path) -> None:
    made = Identity(tool="1", made="x", inputs={})
    finished = Finished(name="a", nbytes=0, pieces=(), counts={"\ud800": (1, 0, 0)})
    staging = here / f".out.widen-{dead_pid()}-0123abcd.staging"
    staging.mkdir()
    Journal(staging, made, [finished]).close()
    (found,) = left_by_dead_runs(here / "out")
    assert (found.identity, found.finished) == (made, (finished,))


def test_a_signal_while_a_file_is_noted_leaves_note_and_file(
    here: Path, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note without its file would be told as one that somebody changed."""
    flush, flushed = os.fsync, 0

    def interrupting(fd: int) -> None:
        nonlocal flushed
        flush(fd)
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/journal"):
            flushed += 1
            if flushed == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "fsync", interrupting)
    # A shell's background job, as the tests may be one, is started with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            widen(OPTIONS)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    (kept,) = left_by_dead_runs(here / "out")
    assert [each.name for each in kept.finished] == SHARDS[:2]
    assert sorted(path.name for path in (kept.path / "files").iterdir()) == SHARDS[:2]
    nbytes = kept.nbytes
    resumed = widen(replace(OPTIONS, resume=True))
    assert resumed.notes == (f"resumed: 2 of 3 files, {nbytes} bytes, were finished and are unchanged",)
    assert output(here) == whole


@pytest.mark.parametrize("name", ["../../other", "/other", "a/b", "", ".", "..", "a\0b"])
def test_a_noted_name_that_is_none_of_a_file_in_the_folder_counts_as_not_noted(here: Path, name: str) -> None:
    cut_short()
    journal = left() / "journal"
    line = json.loads(journal.read_text().splitlines()[1])
    journal.write_text(journal.read_text() + json.dumps(line | {"name": name}) + "\n" + "[" * 100_000 + "\n")
    (here / "other").write_bytes(b"mine")
    assert len(widen(replace(OPTIONS, resume=True)).notes) == 1
    assert (here / "other").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_stands_for_a_finished_file_and_is_none_is_made_anew(here: Path, whole: dict[str, str], kind: str) -> None:
    cut_short()
    file = left() / "files" / SHARDS[0]
    moved = file.rename(here / "out-in-one-go" / "moved")
    if kind == "link":
        file.symlink_to(moved)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    notes = widen(replace(OPTIONS, resume=True)).notes
    assert notes[0] == f"{SHARDS[0]}: was not what the interrupted run had written; it was made anew"
    assert notes[1].startswith("resumed: 1 of 3 files, ")
    assert output(here) == whole


def test_a_folder_of_finished_files_that_is_a_link_is_not_taken_over(here: Path, whole: dict[str, str]) -> None:
    cut_short()
    moved = (left() / "files").rename(here / "out-in-one-go" / "moved")
    (moved.parent / "link").symlink_to(moved)
    (moved.parent / "link").rename(left() / "files")
    assert widen(replace(OPTIONS, resume=True)).notes == ()
    assert not (here / "out").is_symlink()
    assert output(here) == whole


@pytest.mark.parametrize("options", [OPTIONS, replace(OPTIONS, max_shard_size=None)])
def test_an_input_that_is_written_to_while_it_is_read_is_refused(here: Path, options: Options) -> None:
    """Half of it may have been read before. What is finished is no use: another time, another input."""
    before, done = os.stat("model/model.safetensors"), 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += 1
        if done == 10:
            flipped(here / "model" / "model.safetensors")
            os.utime("model/model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns + 1))

    with pytest.raises(WidenError) as caught:
        run(prepare(options), progress)
    assert caught.value.faults == (
        "model/model.safetensors: was changed while it was read; run this again when nothing writes to it",
    )
    assert not (here / "out").exists()
    assert run(prepare(options), lambda nbytes: None).counts
