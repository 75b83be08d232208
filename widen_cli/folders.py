"""A folder of files, or numbered files, that appear whole or not at all; and what stays of them for `--resume`."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Never, Self

from widen_cli.errors import printable
from widen_cli.hidden import flush_folder, hidden_sibling
from widen_cli.journal import FILES, JOURNAL, Finished, Identity, Journal, Leftover, claim, remove_leftover_folders
from widen_cli.output_checks import refusing
from widen_cli.outputs import FileOutput, commit
from widen_cli.placing import Placement

WORKSHOP = "workshop"


class Staging:
    """Files that are built in a hidden folder beside a target, and what is kept of them when a run is cut short.

    With an `identity` a journal notes each file that is finished: after an exception these stay, and a later run with the
    same identity goes on from them, its `leftover`. Without, or before one is finished, the folder is removed.
    WidenError when the system refuses.
    """

    def __init__(
        self,
        target: str | Path,
        force: bool = False,
        identity: Identity | None = None,
        leftover: Leftover | None = None,
    ) -> None:
        self.name = printable(str(target))
        self._real = Path(os.path.realpath(target))
        self._force = force
        self._identity = identity
        self._leftover = leftover
        self._staging = hidden_sibling(self._real, "staging")
        self._files = self._staging / FILES
        self._journal: Journal | None = None
        self._lock: int | None = None
        self.committed = False

    def __enter__(self) -> Self:
        remove_leftover_folders(self._real, finished_too=False)
        self._lock = claim(self._leftover, self._staging) if self._leftover else None
        if self._lock is None:
            # There is none, or another run was faster.
            self._leftover = None
        try:
            with refusing(self.name, self._real.parent):
                if self._leftover is None:
                    # What replaces a folder may be read by nobody else before it is in place.
                    self._staging.mkdir(0o700)
                self._files.mkdir(exist_ok=True)
                self._begin_journal()
        except BaseException as error:
            self._give_up(error)
            raise
        return self

    def _begin_journal(self) -> None:
        if self._identity is not None:
            finished = self._leftover.finished if self._leftover else ()
            self._journal = Journal(self._staging, self._identity, finished)
            flush_folder(self._staging)
            flush_folder(self._real.parent)

    def recover(self, progress: Callable[[int], None]) -> tuple[dict[str, Finished], tuple[str, ...]]:
        """The files that an interrupted run had finished and that are still what it wrote, read and hashed again; and the
        names of those that are not. Everything else that it left is removed."""
        if self._leftover is None or self._identity is None:
            return {}, ()
        with refusing(self.name, self._real.parent):
            kept = {each.name: each for each in self._leftover.finished if each.is_in(self._files, progress)}
            self._clear(kept)
            checked = Journal(self._staging, self._identity, tuple(kept.values()))
            if self._journal is not None:
                self._journal.close()
            self._journal = checked
        return kept, tuple(each.name for each in self._leftover.finished if each.name not in kept)

    def open(self, name: str, nbytes: int | None = None) -> FileOutput:
        """The output of one file in the folder, to be used with `with`; `name` may have sub-folders."""
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            raise ValueError(f"{name!r} leads out of the folder")
        file = self._files / name
        with refusing(self.name, self._real.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
        return FileOutput(file, nbytes, hashed=self._journal is not None, name=self._shown(name))

    def _shown(self, name: str) -> str:
        return str(self._real.with_name(name))

    def note(self, name: str, output: FileOutput, counts: dict[str, tuple[int, int, int]]) -> None:
        """Notes that a file is finished, after its `with` block."""
        if self._journal is not None:
            with refusing(self.name, self._real.parent):
                nbytes = (self._files / name).stat().st_size
                self._journal.add(Finished(name=name, nbytes=nbytes, pieces=tuple(output.pieces), counts=counts))

    def _clear(self, kept: Collection[str]) -> None:
        """Removes what is no finished file."""
        for entry in os.scandir(self._files):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry)
            elif entry.name not in kept:
                os.unlink(entry)

    def finish(self) -> list[Placement]:
        raise NotImplementedError

    def placed(self) -> None:
        self.committed = True
        # What is placed is nothing to be resumed.
        (self._staging / JOURNAL).unlink(missing_ok=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None:
                commit(self)
        except BaseException as failed:
            error = failed
            raise
        finally:
            try:
                self._give_up(error)
            except (KeyboardInterrupt, SystemExit) as stopped:
                if self.committed:
                    stopped.add_note(f"{self.name} is complete")
                raise

    def _give_up(self, error: BaseException | None) -> None:
        """Removes the hidden folder, unless it holds finished files of a run that did not come to its end."""
        finished: Collection[str] = ()
        if not self.committed:
            left = self._leftover.finished if self._leftover else ()
            finished = self._journal.finished if self._journal else {each.name for each in left}
        if finished:
            with suppress(OSError):
                self._clear(finished)
            if error is not None:
                files = "1 finished file is" if len(finished) == 1 else f"{len(finished)} finished files are"
                error.add_note(
                    f"{files} kept in {printable(str(self._staging))}; the same command with --resume goes on from there"
                )
        else:
            shutil.rmtree(self._staging, ignore_errors=True)
        if self._journal is not None:
            self._journal.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self.committed:
            remove_leftover_folders(self._real, finished_too=True)


class DirectoryOutput(Staging):
    """A folder that stands at `target` only when it is committed: by `commit`, or as the `with` block ends.

    It is put in place in one step. With `force` it replaces a folder that holds files: those that were not written here
    stay, but for *.safetensors, pytorch_model*.bin, their index and an optimizer's state at its top, which would belong to
    another model.
    """

    def _shown(self, name: str) -> str:
        return str(self._real / name)

    def copy(self, source: Path, relative: str) -> None:
        """Copies a file's content (a link's target's) to `relative` in the folder."""
        reading = refusing(printable(str(source)), verb="read")
        with reading, open(source, "rb") as stream, self.open(relative) as output:
            offset = 0
            while piece := stream.read(1 << 20):
                output.write_at(offset, piece)
                offset += len(piece)

    @contextmanager
    def workshop(self) -> Iterator[Path]:
        """A hidden folder beside the output's files, for what is made before it is one of them."""
        path = self._staging / WORKSHOP
        with refusing(self.name, self._real.parent):
            shutil.rmtree(path, ignore_errors=True)  # of a run that this one goes on from
            path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def take(self, source: Path, name: str) -> None:
        """Moves a file from the workshop to `name` in the folder, flushed."""
        with refusing(self._shown(name), self._real.parent):
            with open(source, "rb") as file:
                os.fsync(file.fileno())
            os.rename(source, self._files / name)

    def finish(self) -> list[Placement]:
        if self.committed:
            return []
        with refusing(self.name, self._real.parent):
            if os.path.lexists(self._real):
                if self._force:
                    _keep_foreign(self._real, self._files)
                self._files.chmod(stat.S_IMODE(self._real.stat().st_mode))
            for folder, _, _ in os.walk(self._files):
                flush_folder(Path(folder))
        return [Placement(self._files, self._real, self.name, self._force)]

    def commit(self) -> None:
        """Puts the folder in place; a second call does nothing. WidenError when the target may not be replaced."""
        commit(self)


class PartsOutput(Staging):
    """Numbered files that stand beside `target` only when they are committed: the first, by which they are opened, last."""

    def __init__(
        self,
        target: str | Path,
        names: Sequence[str],
        force: bool,
        identity: Identity | None,
        leftover: Leftover | None,
    ) -> None:
        super().__init__(target, force, identity, leftover)
        # A link to the target says nothing of the parts, which are called otherwise.
        self._real = Path(os.path.realpath(Path(target).parent), Path(target).name)
        self._staging = hidden_sibling(self._real, "staging")
        self._files = self._staging / FILES
        self._names = tuple(names)

    def finish(self) -> list[Placement]:
        if self.committed:
            return []
        placements = []
        for name in self._names:
            real = Path(os.path.realpath(self._real.with_name(name)))
            if self._force and real.exists():
                (self._files / name).chmod(stat.S_IMODE(real.stat().st_mode) & 0o777)
            shown = printable(str(self._real.with_name(name)))
            placements.append(Placement(self._files / name, real, shown, self._force))
        return placements


def _keep_foreign(old: Path, new: Path) -> None:
    """Gives `new` every file of `old` that it has not, except weights at the top; `old` stays whole."""
    for folder, folders, names in os.walk(old, onerror=_raise):
        here = new / Path(folder).relative_to(old)
        if not os.path.lexists(here):
            here.mkdir()
            shutil.copystat(folder, here)
        # os.walk counts links to folders as folders and does not enter them.
        links = [name for name in folders if os.path.islink(Path(folder, name))]
        for name in [*names, *links]:
            torch = name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json"))
            torch = torch or name in ("optimizer.pt", "optimizer.bin")  # an optimizer's state is that of the weights
            stale = Path(folder) == old and (torch or name.endswith((".safetensors", ".safetensors.index.json")))
            if not stale and not os.path.lexists(here / name):
                _link_or_copy(Path(folder, name), here / name)


def _raise(error: OSError) -> Never:
    raise error


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        # Not every file system has hard links, and a foreign file may not be linked.
        shutil.copy2(source, target, follow_symlinks=False)
