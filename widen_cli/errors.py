"""The one error class of the tool, and the collector that reports all faults of a run together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Self

NAME_LIMIT = 800
VALUE_LIMIT = 200


class WidenError(Exception):
    """What a user did or gave is refused; nothing was written.

    `faults` holds one text a fault. Each begins with what is at fault (a file's name, a map's
    `file:line:column`, an option), names the fault and says what to do.
    """

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class Faults:
    """Collects faults so that one run reports all of them.

    Used as a context manager it raises one `WidenError` with every fault at the end of the block;
    a `WidenError` raised inside the block joins the list.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: set[str] = set()

    def add(self, fault: str) -> None:
        if fault not in self._known:
            self._known.add(fault)
            self.texts.append(fault)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A block whose WidenError joins the list, so that the checks after it still run."""
        try:
            yield
        except WidenError as error:
            for fault in error.faults:
                self.add(fault)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WidenError):
            for fault in error.faults:
                self.add(fault)
        elif error is not None:
            return
        if self.texts:
            raise WidenError(*self.texts) from None


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The tail ` (did you mean 'x'?)` for the nearest known word that is alike enough, or an empty text."""
    near = get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f" (did you mean '{printable(near[0])}'?)" if near else ""


def first_of(texts: Sequence[str], limit: int) -> str:
    """The first few of several texts, and how many more there are."""
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def is_text(text: str) -> bool:
    """Whether a string has a UTF-8 form; half of a surrogate pair has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(name: str) -> str:
    """A tensor or file name made safe for a terminal: control and non-ASCII characters escaped, endless ones cut inside."""
    plain = name.isascii() and name.isprintable()
    text = (
        name
        if plain
        else "".join(c if " " <= c <= "~" else c.encode("unicode_escape", "surrogatepass").decode() for c in name)
    )
    # Two names fit a line of NAME_LIMIT; a path keeps its beginning and the file's name.
    return text if len(text) <= NAME_LIMIT else f"{text[: NAME_LIMIT // 2]}...{text[-NAME_LIMIT // 4 :]}"


def brief(value: object) -> str:
    """A value from a file as Python writes it, safe for a terminal and short."""
    text = printable(repr(value))
    return text if len(text) <= VALUE_LIMIT else f"{text[:VALUE_LIMIT]}..."
