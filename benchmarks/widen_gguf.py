"""Widening GGUF models: MB/s of every block type in one process, and whole files against `cp` of the output.

    python benchmarks/widen_gguf.py [--megabytes 400] [--rounds 5] [--kinds Q4_K+Q6_K F16] [--folder DIR]

First the blocks alone: rows of random blocks, 4 MiB of output as in a run, on one thread, in MB of output a second of
processor time; beside them what copying such rows takes. `-` is where a type cannot be widened so.

Then whole processes on a synthetic llama model whose x2 output has about that many megabytes, in turn, round after
round, in one run: `widen-ckpt`, `cp` of its output, and `cp` with a flush to the disk (the tool flushes, plain `cp` does
not). All read from the page cache. A ratio is the median of the rounds' ratios. Every process first has to start, which
`cp` does in a millisecond: what `--version` and a dry run take is printed too, to be taken off a small file's time. Where
other processes want the machine, processor time says more than wall time.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from widen_vs_copy import MEGA, timed

from widen_cli.blocks import BLOCK_TYPES, BlockType, can_widen, widen_row_blocks
from widen_cli.dimensions import Copies, Growth
from widen_cli.gguf.header import gguf_header_bytes, padded
from widen_cli.gguf.types import GGUF_TYPES, GgufType
from widen_cli.gguf.values import GgufValue, ValueType

ROW = 2048
LAYOUTS = ("interleave", "tile")
# For each kind of file the type of its matrices, and that of the value, down and output matrices (as in Q4_K_M).
KINDS = {"Q4_K+Q6_K": ("Q4_K", "Q6_K"), "Q8_0": ("Q8_0", "Q8_0"), "F16": ("F16", "F16"), "F32": ("F32", "F32")}

HIDDEN = 1024
INNER = 3 * HIDDEN
HEAD_DIM = 64
GROUP = 4  # query heads that share one key and value head
VOCAB = 8000
ALIGNMENT = 32
CHUNK = 8 * MEGA

Bytes = npt.NDArray[np.uint8]
Tensor = tuple[str, GgufType, tuple[int, ...]]


# The blocks alone.


def output_rate(widen: Callable[[], Bytes], rounds: int) -> float:
    """MB of output for each second of this thread's processor time, the median of the rounds."""
    nbytes = widen().nbytes
    taken = []
    for _ in range(rounds):
        begin = time.thread_time()
        widen()
        taken.append(time.thread_time() - begin)
    return nbytes / MEGA / statistics.median(taken)


def random_rows(kind: BlockType, growth: Growth) -> Bytes:
    """Rows of random blocks that widen to 4 MiB."""
    rows = max(1, (4 << 20) // (growth.new // kind.size * kind.nbytes))
    shape = (rows, growth.old // kind.size * kind.nbytes)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def print_block_rates(rounds: int) -> None:
    growths = {
        "interleave x2": Copies(ROW, 2),
        "interleave x3": Copies(ROW, 3),
        "tile x2": Copies(1, 2, inner=Copies(ROW)),
    }
    print(f"\nMB/s of output, one thread\n{'':10}" + "".join(f"{title:>15}" for title in growths))
    for name, kind in sorted(BLOCK_TYPES.items()):
        cells = []
        for growth in growths.values():
            rows = random_rows(kind, growth)
            widen = partial(widen_row_blocks, rows, kind, growth)
            cells.append(f"{output_rate(widen, rounds):15.0f}" if can_widen(kind, growth) is None else f"{'-':>15}")
        print(f"{name:10}" + "".join(cells), flush=True)
    memory = np.zeros(4 << 20, np.uint8)
    print(f"{'(copying)':10}{output_rate(memory.copy, rounds):15.0f}")


# Whole files.


def model_tensors(kind: str, layers: int) -> list[Tensor]:
    usual, finer = (GGUF_TYPES[name] for name in KINDS[kind])
    gain = GGUF_TYPES["F32"]
    key_rows = HIDDEN // GROUP
    tensors: list[Tensor] = [("token_embd.weight", usual, (VOCAB, HIDDEN))]
    for number in range(layers):
        layer: list[Tensor] = [
            ("attn_norm", gain, (HIDDEN,)),
            ("attn_q", usual, (HIDDEN, HIDDEN)),
            ("attn_k", usual, (key_rows, HIDDEN)),
            ("attn_v", finer, (key_rows, HIDDEN)),
            ("attn_output", usual, (HIDDEN, HIDDEN)),
            ("ffn_norm", gain, (HIDDEN,)),
            ("ffn_gate", usual, (INNER, HIDDEN)),
            ("ffn_up", usual, (INNER, HIDDEN)),
            ("ffn_down", finer, (HIDDEN, INNER)),
        ]
        tensors += [(f"blk.{number}.{name}.weight", type, shape) for name, type, shape in layer]
    return [*tensors, ("output_norm.weight", gain, (HIDDEN,)), ("output.weight", finer, (VOCAB, HIDDEN))]


def layers_for(kind: str, output_bytes: int) -> int:
    """The number of layers, at least one, whose widened file comes nearest to `output_bytes`."""

    def widened(layers: int) -> int:
        return sum(
            type.nbytes(shape) * (2 if "norm" in name or VOCAB in shape else 4)
            for name, type, shape in model_tensors(kind, layers)
        )

    bottom, layer = widened(0), widened(1) - widened(0)
    return max(1, round((output_bytes - bottom) / layer))


def metadata(layers: int) -> dict[str, GgufValue]:
    sizes = {
        "vocab_size": VOCAB,
        "context_length": 2048,
        "embedding_length": HIDDEN,
        "block_count": layers,
        "feed_forward_length": INNER,
        "attention.head_count": HIDDEN // HEAD_DIM,
        "attention.head_count_kv": HIDDEN // HEAD_DIM // GROUP,
        "rope.dimension_count": HEAD_DIM,
    }
    values = {"general.architecture": GgufValue.of(ValueType.STRING, "llama")}
    values |= {f"llama.{key}": GgufValue.of(ValueType.U32, size) for key, size in sizes.items()}
    return values | {"llama.attention.layer_norm_rms_epsilon": GgufValue.of(ValueType.F32, 1e-5)}


def tensor_data(type: GgufType, nbytes: int, draw: np.random.Generator) -> Iterator[Bytes]:
    """Random values of std 0.02, or random blocks whose float16 scales are as small, a few megabytes at a time."""
    step = CHUNK // type.nbytes_per_block
    while nbytes:
        count = min(step, nbytes // type.nbytes_per_block)
        if type.name in BLOCK_TYPES:
            data = draw.integers(0, 256, (count, type.nbytes_per_block), np.uint8)
            for field in BLOCK_TYPES[type.name].scales:
                scales = draw.uniform(0.001, 0.02, (count, 1)).astype("<f2")
                data[:, field.at : field.at + 2] = scales.view(np.uint8)
        else:
            numbers = draw.standard_normal(count, np.float32) * np.float32(0.02)
            data = numbers.astype("<f2" if type.name == "F16" else "<f4").view(np.uint8)
        yield data.reshape(-1)
        nbytes -= data.size


def make_model(path: Path, kind: str, layers: int) -> None:
    draw, tensors = np.random.default_rng(0), model_tensors(kind, layers)
    start, offsets = gguf_header_bytes(metadata(layers), tensors, ALIGNMENT)
    with path.open("wb") as file:
        file.write(start)
        for (_, type, shape), offset in zip(tensors, offsets, strict=True):
            assert file.tell() == offset
            for data in tensor_data(type, type.nbytes(shape), draw):
                file.write(data.data)
            file.write(bytes(padded(file.tell(), ALIGNMENT) - file.tell()))


def seconds(command: list[str], log: Path) -> tuple[float, float]:
    """Wall and processor time of one whole process that must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, _, status = timed(command, log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status:
        raise SystemExit(f"{' '.join(command)} failed with {status}:\n{log.read_text(errors='replace')}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, source: Path, layout: str, rounds: int) -> list[list[tuple[float, float]]]:
    """Wall and processor time of the tool, of `cp` of its output and of `cp` with a flush, round after round."""
    tool, copy, log = folder / "tool.gguf", folder / "copy.gguf", folder / "log.txt"
    commands = [
        [sys.executable, "-m", "widen_cli", "convert", str(source), str(tool), "--layout", layout, "--force"],
        ["cp", str(tool), str(copy)],
        ["sh", "-c", f'cp "{tool}" "{copy}" && sync "{copy}"'],
    ]
    taken = []
    for _ in range(rounds):
        row = []
        for command, target in zip(commands, (tool, copy, copy), strict=True):
            target.unlink(missing_ok=True)
            os.sync()
            row.append(seconds(command, log))
        taken.append(row)
    return taken


def print_file_times(folder: Path, kinds: list[str], megabytes: int, rounds: int) -> None:
    titles = ("MB", "widen s", "(cpu)", "cp s", "(cpu)", "flushed s", "/ cp", "/ flushed", "MB/s")
    print(f"\n{'':22}" + "".join(f"{title:>11}" for title in titles))
    for kind in kinds:
        source = folder / "in.gguf"
        make_model(source, kind, layers_for(kind, megabytes * MEGA))
        for layout in LAYOUTS:
            taken = measure(folder, source, layout, rounds)
            wide, copied, flushed = ([row[which] for row in taken] for which in range(3))
            times = [statistics.median(pair[clock] for pair in run) for run in (wide, copied) for clock in (0, 1)]
            times.append(statistics.median(wall for wall, _ in flushed))
            ratios = [statistics.median(row[0][0] / row[against][0] for row in taken) for against in (1, 2)]
            size = (folder / "tool.gguf").stat().st_size / MEGA
            cells = "".join(f"{cell:11.2f}" for cell in (*times, *ratios))
            print(f"{kind + ', ' + layout:22}{size:11.0f}{cells}{size / times[0]:11.0f}", flush=True)


def print_start_up(folder: Path, rounds: int) -> None:
    source, log = folder / "in.gguf", folder / "log.txt"
    make_model(source, "Q8_0", 1)
    tool = [sys.executable, "-m", "widen_cli"]
    for title, command in {"--version": [*tool, "--version"], "--dry-run": [*tool, str(source), "--dry-run"]}.items():
        taken = [seconds(command, log) for _ in range(rounds)]
        wall, cpu = (statistics.median(times) for times in zip(*taken, strict=True))
        print(f"start-up, {title}: {wall:.2f} s ({cpu:.2f} s of processor time)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400, help="size of the outputs; 0: the blocks alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="the whole files")
    parser.add_argument("--folder", type=Path, help="where the files go (default: the system's temporary folder)")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="widen-benchmark-", dir=chosen.folder))
    try:
        kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout.strip()
        print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, file system {kind or 'unknown'}")
        print_block_rates(4 * chosen.rounds)
        if chosen.megabytes:
            print()
            print_start_up(folder, chosen.rounds)
            print_file_times(folder, chosen.kinds, chosen.megabytes, chosen.rounds)
        return 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
