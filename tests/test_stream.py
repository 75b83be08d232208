"""Streaming: every output row once, sources that cannot go back, and the same bytes by any road."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from widen_cli.dimensions import Copies, Growth, Laid
from widen_cli.dtypes import STORED, DType
from widen_cli.plan import TensorPlan
from widen_cli.scales import ONE, Scale
from widen_cli.stream import Layout, Target, TensorStream, blocks, layout
from widen_cli.transform import Counts

SCALES = (ONE, Scale.of(2), Scale.of(2) ** -1)


@dataclass(frozen=True)
class Header:
    name: str
    dtype: DType
    shape: tuple[int, ...]


@dataclass
class Memory:
    """A source that checks what it is asked for; a sequential one is a pipe, which never goes back."""

    data: bytes
    sequential: bool = False
    reads: list[tuple[int, int]] = field(default_factory=list)

    def read(self, offset: int, nbytes: int) -> bytes:
        assert 0 <= offset <= offset + nbytes <= len(self.data)
        if self.sequential and self.reads:
            assert offset >= sum(self.reads[-1]), "a pipe was asked to go back"
        self.reads.append((offset, nbytes))
        return self.data[offset : offset + nbytes]


@dataclass(frozen=True)
class Stored:
    source: Memory
    offset: int
    nbytes: int


@dataclass
class Paper:
    """An output on which each byte may be written once; `forward` asks for the order of a pipe."""

    size: int
    forward: bool = False
    data: bytearray = field(init=False)
    written: bytearray = field(init=False)
    at: int = 0

    def __post_init__(self) -> None:
        self.data, self.written = bytearray(self.size), bytearray(self.size)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data)
        assert view.nbytes == len(view), "bytes, not items"
        stop = offset + len(view)
        assert 0 <= offset <= stop <= self.size
        assert not any(self.written[offset:stop]), "written twice"
        if self.forward:
            assert offset == self.at, "a pipe cannot leave a gap"
            self.at = stop
        self.data[offset:stop] = view
        self.written[offset:stop] = b"\1" * len(view)


def origins(growth: Growth) -> Iterator[tuple[int, Scale, bool]]:
    """(old position, scale, zero) of every new position, one by one."""
    if isinstance(growth, Laid):
        start = 0
        for part in growth.parts:
            yield from ((start + old, scale, zero) for old, scale, zero in origins(part))
            start += part.old
        return
    for position, copy in product(range(growth.size), range(growth.copies)):
        silent = growth.first_only and copy > 0
        if growth.inner is None:
            yield position, growth.scale, silent
        else:
            for old, scale, zero in origins(growth.inner):
                yield position * growth.inner.old + old, scale, zero or silent


def trees(max_leaves: int = 4) -> st.SearchStrategy[Growth]:
    sizes, copies = st.integers(1, 4), st.sampled_from([1, 1, 2, 3])
    leaves = st.builds(Copies, sizes, copies, st.booleans(), st.sampled_from(SCALES))

    def deeper(inner: st.SearchStrategy[Growth]) -> st.SearchStrategy[Growth]:
        nested = st.builds(Copies, sizes, copies, st.booleans(), st.just(ONE), inner)
        return nested | st.lists(inner, min_size=1, max_size=3).map(lambda parts: Laid(tuple(parts)))

    return st.recursive(leaves, deeper, max_leaves=max_leaves)


def make_plan(*growth: Growth, dtype: str = "F32", to: str | None = None, scale: Scale = ONE) -> TensorPlan:
    header = Header("w", STORED[dtype], tuple(tree.old for tree in growth))
    return TensorPlan(header, ("w",), "w", STORED[to or dtype], growth, scale)


def values(plan: TensorPlan) -> np.ndarray:
    """Small multiples of 1/4, exact in every type and under every scale used here."""
    kind = plan.source.dtype.numpy
    assert kind is not None
    return (np.random.default_rng(0).integers(-8, 9, plan.source.shape) / 4).astype(kind)


def expected(plan: TensorPlan, old: np.ndarray) -> bytes:
    """The wide tensor, gathered one value at a time."""
    axes = [list(origins(tree)) for tree in plan.growth or ()]
    wide = np.zeros([len(axis) for axis in axes], plan.dtype.numpy)
    for place in np.ndindex(*wide.shape):
        found = [axis[at] for axis, at in zip(axes, place, strict=True)]
        if not any(zero for _, _, zero in found):
            factor = math.prod((float(scale) for _, scale, _ in found), start=float(plan.scale))
            wide[place] = float(old[tuple(at for at, _, _ in found)]) * factor
    return wide.tobytes()


def carried(stream: TensorStream, plan: TensorPlan, stored: Stored, *targets: Target, forward: bool = False) -> Counts:
    counts = stream.run(plan, stored, targets, forward)
    stream.finish()
    return counts


def streamed(
    plan: TensorPlan, *, threads: int = 1, sequential: bool = False, forward: bool = False
) -> tuple[bytes, Counts, Memory]:
    """What `TensorStream` makes of a tensor that lies behind 13 bytes, at 7 bytes into the output."""
    old = values(plan)
    source = Memory(b"x" * 13 + old.tobytes() + b"y" * 5, sequential)
    paper = Paper(7 + plan.dtype.nbytes(plan.shape), forward)
    paper.write_at(0, b"h" * 7)
    stream = TensorStream(threads)
    try:
        counts = carried(stream, plan, Stored(source, 13, old.nbytes), Target(paper, 7), forward=forward)
    finally:
        stream.close()
    assert all(paper.written), "a hole"
    return bytes(paper.data[7:]), counts, source


@settings(deadline=None)
@given(rows=trees(), limit=st.integers(1, 400))
def test_blocks_cover_each_output_row_once_and_in_order(rows: Growth, limit: int) -> None:
    shape = Layout(rows, (Copies(3, 2),), STORED["F32"], STORED["F16"])
    expected_rows = list(origins(rows))
    row = 0
    for group in blocks(shape, limit):
        for block in group:
            assert block.row == row
            for old in range(block.run.start, block.run.stop):
                for copy in range(block.run.each):
                    zero = block.run.filled or copy >= block.run.live
                    assert (old, block.run.scale, zero) == expected_rows[row]
                    row += 1
    assert row == len(expected_rows) == rows.new


@settings(deadline=None)
@given(rows=trees(), limit=st.integers(1, 400))
def test_blocks_stay_within_the_limit_or_are_one_row(rows: Growth, limit: int) -> None:
    shape = Layout(rows, (Copies(3, 2),), STORED["F32"], STORED["F16"])
    for group in blocks(shape, limit):
        for block in group:
            count = block.run.stop - block.run.start
            assert count == 1 or count * block.run.each * shape.new_bytes <= limit


@settings(deadline=None)
@given(rows=trees(), limit=st.integers(1, 400))
def test_groups_let_a_source_go_forward_only(rows: Growth, limit: int) -> None:
    """Old rows of a later group never lie before those of an earlier one, and each is first met once."""
    shape = Layout(rows, (Copies(3, 2),), STORED["F32"], STORED["F16"])
    stop, fresh = 0, 0
    for group in blocks(shape, limit):
        assert min(block.run.start for block in group) >= stop
        stop = max(block.run.stop for block in group)
        fresh += sum(block.run.stop - block.run.start for block in group if not block.run.again)
    assert stop == fresh == rows.old


@settings(deadline=None, max_examples=50)
@given(
    growth=st.lists(trees(3), min_size=1, max_size=3).filter(
        lambda trees: math.prod(tree.new for tree in trees) <= 3000
    ),
    cast=st.sampled_from([("F32", "F32"), ("BF16", "BF16"), ("F16", "F32"), ("F64", "BF16"), ("F8_E5M2", "F8_E5M2")]),
    scale=st.sampled_from(SCALES),
)
def test_every_road_gives_the_bytes_of_the_gather(growth: list[Growth], cast: tuple[str, str], scale: Scale) -> None:
    plan = make_plan(*growth, dtype=cast[0], to=cast[1], scale=scale)
    wanted = expected(plan, values(plan))
    count = math.prod(plan.source.shape)
    for threads, sequential, forward in product((1, 3), (False, True), (False, True)):
        found, counts, _ = streamed(plan, threads=threads, sequential=sequential, forward=forward)
        assert found == wanted, (threads, sequential, forward)
        assert (counts.values, counts.rounded, counts.overflowed) == (count, 0, 0)


HEADS = Copies(4, 3, inner=Copies(6))


@pytest.mark.parametrize("limit", [1, 100, 1 << 22])
def test_a_pipe_is_read_once_where_heads_are_copied(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 4 heads stands 3 times: its rows are held, not asked for again."""
    monkeypatch.setattr("widen_cli.stream.BLOCK_BYTES", limit)
    plan = make_plan(HEADS, Copies(8, 2))
    found, counts, source = streamed(plan, sequential=True, forward=True)
    assert found == expected(plan, values(plan))
    assert sum(nbytes for _, nbytes in source.reads) == 24 * 8 * 4
    assert counts.values == 24 * 8
    assert max(nbytes for _, nbytes in source.reads) <= 6 * 8 * 4, "no more than a head is held"


def test_a_pipe_with_parts_and_copies_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-head packed q, k and v, where only the value has a factor."""
    packed = Copies(3, 2, inner=Laid((Copies(2), Copies(2), Copies(2, scale=Scale.of(2)))))
    plan = make_plan(packed, Copies(5, 3, True))
    found, counts, source = streamed(plan, sequential=True, forward=True)
    assert found == expected(plan, values(plan))
    assert sum(nbytes for _, nbytes in source.reads) == 18 * 5 * 4
    assert counts.values == 18 * 5


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_tiny_blocks_and_threads_give_the_same_bytes(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plan = make_plan(Copies(40, 2), Copies(30, 3), dtype="F16", scale=Scale.of(3))
    whole, counts, _ = streamed(plan)
    monkeypatch.setattr("widen_cli.stream.BLOCK_BYTES", 500)
    monkeypatch.setattr("widen_cli.stream.blocks", lambda shape, limit: seen.append(limit) or blocks(shape, limit))
    found, again, _ = streamed(plan, threads=threads)
    assert seen == [500]
    assert len(next(iter(blocks(layout(plan), 500)))) > 20
    assert (found, again) == (whole, counts)
    assert counts.values == 1200


def test_large_rows_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """[experts, up, hidden]: an expert is too large for a row, so rows are those of its matrix."""
    monkeypatch.setattr("widen_cli.stream.ROW_BYTES", 64)
    plan = make_plan(Copies(2), Copies(5, 2, scale=Scale.of(2)), Copies(6, 3))
    shape = layout(plan)
    assert (shape.rows.old, shape.rows.new, shape.old_sizes) == (10, 20, (6,))
    for sequential in (False, True):
        found, counts, _ = streamed(plan, sequential=sequential, forward=sequential)
        assert found == expected(plan, values(plan))
        assert counts.values == 60


@settings(deadline=None, max_examples=50)
@given(growth=st.lists(trees(3), min_size=3, max_size=4).filter(lambda t: math.prod(g.new for g in t) <= 3000))
def test_taking_apart_changes_nothing(growth: list[Growth]) -> None:
    plan = make_plan(*growth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("widen_cli.stream.ROW_BYTES", 8)
        for sequential in (False, True):
            found, counts, _ = streamed(plan, sequential=sequential, forward=sequential)
            assert found == expected(plan, values(plan))
            assert counts.values == math.prod(plan.source.shape)


def test_a_tensor_without_growth_is_copied() -> None:
    for dtype, shape in (("I64", (3, 4)), ("F32", ()), ("F32", (0, 3)), ("BF16", (5,))):
        kind = STORED[dtype]
        data = bytes(np.random.default_rng(0).integers(0, 256, kind.nbytes(shape), np.uint8))
        plan = TensorPlan(Header("w", kind, shape), ("w",), "w", kind)
        paper = Paper(len(data))
        counts = TensorStream(1).run(plan, Stored(Memory(data), 0, len(data)), [Target(paper, 0)], False)
        assert bytes(paper.data) == data
        assert all(paper.written)
        assert counts == Counts()


def test_an_empty_tensor_that_grows_writes_nothing() -> None:
    plan = make_plan(Copies(0, 2), Copies(3, 2))
    assert plan.shape == (0, 6)
    assert streamed(plan)[0] == b""


def test_several_targets_get_the_same_bytes() -> None:
    plan = make_plan(Copies(4), Copies(3, 2))
    old, papers = values(plan), [Paper(96), Paper(100)]
    stream = TensorStream(2)
    carried(stream, plan, Stored(Memory(old.tobytes()), 0, 48), Target(papers[0], 0), Target(papers[1], 4))
    stream.close()
    assert bytes(papers[0].data) == bytes(papers[1].data[4:]) == expected(plan, old)


class _Broken(Memory):
    def read(self, offset: int, nbytes: int) -> bytes:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("threads", [1, 3])
def test_a_failing_read_is_raised(threads: int) -> None:
    plan = make_plan(Copies(400), Copies(300, 2))
    stream = TensorStream(threads)
    with pytest.raises(OSError, match="the disk is gone"):
        carried(stream, plan, Stored(_Broken(b""), 0, 480000), Target(Paper(960000), 0))
    stream.close()


class _SlowPaper(Paper):
    """Takes a while over each write, and fails the first."""

    given_up = False

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        assert not self.given_up, "written after the output was given up"
        if offset == 0:
            raise OSError("the disk is full")
        time.sleep(0.02)
        super().write_at(offset, data)


def test_nothing_is_written_once_a_failed_run_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widen_cli.stream.BLOCK_BYTES", 4800)
    paper, plan, stream = _SlowPaper(960000), make_plan(Copies(400), Copies(300, 2)), TensorStream(3)
    with pytest.raises(OSError, match="the disk is full"):
        carried(stream, plan, Stored(Memory(bytes(480000)), 0, 480000), Target(paper, 0))
    stream.abandon()
    before, paper.given_up = bytes(paper.written), True
    stream.finish()
    stream.close()
    assert bytes(paper.written) == before
    assert any(before)
    assert not all(before)
