"""Wall time and peak memory of widening a bf16 checkpoint, against `cp` of its output and a torch script.

    python benchmarks/widen_vs_copy.py [--megabytes 100 1000] [--rounds 5] [--folder DIR]

For every size a synthetic LLaMA-like checkpoint is made whose x2 output has that size. Then whole processes are timed
in turn, round after round, in one run: the tool, `cp` of the output, `cp` with a flush to the disk (the tool flushes
its output, plain `cp` does not), and a peer, torch repeat_interleave on the loaded state dict with safetensors
`save_file` (left out where torch is missing). All read from the page cache. The peer's file is then compared with the
tool's, tensor by tensor and bit by bit.

Peak memory is what wait4 reports for the child. A child starts as a copy of its parent, so the parent imports nothing
large, makes the checkpoints in a child of its own and prints the floor of the measurement. Mapped file pages that the
child touched count as its memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MEGA = 1_000_000
HEAD_DIM = 32
GROUP = 4  # query heads that share one key and value head
LAYERS = 4
VOCAB = 16_000
CHUNK = 8 * MEGA

Shapes = dict[str, tuple[int, ...]]


def llama_config(hidden: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM // GROUP,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def llama_shapes(hidden: int, factor: int = 1) -> Shapes:
    """Every tensor of the checkpoint, all sizes but the vocabulary and the head size grown by `factor`."""
    ffn, wide = hidden * 11 // 4 * factor, hidden * factor
    layer = {
        "input_layernorm": (wide,),
        "self_attn.q_proj": (wide, wide),
        "self_attn.k_proj": (wide // GROUP, wide),
        "self_attn.v_proj": (wide // GROUP, wide),
        "self_attn.o_proj": (wide, wide),
        "post_attention_layernorm": (wide,),
        "mlp.gate_proj": (ffn, wide),
        "mlp.up_proj": (ffn, wide),
        "mlp.down_proj": (wide, ffn),
    }
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, wide)}
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (wide,), "lm_head.weight": (VOCAB, wide)}


def stored_bytes(shapes: Shapes) -> int:
    total = 0
    for shape in shapes.values():
        size = 2
        for extent in shape:
            size *= extent
        total += size
    return total


def hidden_for(output_bytes: int) -> int:
    """The hidden size, a multiple of whole head groups, whose widened file comes nearest to `output_bytes`."""
    step = HEAD_DIM * GROUP
    return min(
        range(step, 64 * step, step), key=lambda hidden: abs(stored_bytes(llama_shapes(hidden, 2)) - output_bytes)
    )


def header_bytes(shapes: Shapes) -> bytes:
    """The safetensors header of bf16 tensors laid one after the other, padded to a multiple of eight."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + stored_bytes({name: shape})
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def make_checkpoint(path: Path, hidden: int) -> None:
    """Writes random weights of std 0.02, gains around 1, a few megabytes at a time, and the config beside them."""
    import numpy as np

    generator = np.random.default_rng(0)
    shapes = llama_shapes(hidden)
    with path.open("wb") as file:
        file.write(header_bytes(shapes))
        for name, shape in shapes.items():
            left = stored_bytes({name: shape}) // 2
            while left:
                count = min(left, CHUNK // 2)
                values = generator.standard_normal(count, dtype=np.float32) * np.float32(0.02)
                if "norm" in name:
                    values += 1
                file.write((values.view(np.uint32) >> 16).astype("<u2").tobytes())
                left -= count
    path.with_name(f"{path.stem}.config.json").write_text(json.dumps(llama_config(hidden), indent=2))


def widen_with_torch(source: Path, target: Path) -> None:
    """The peer: everything loaded, repeated x2 along the grown axes, matrices halved (mode `copy`), saved."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(os.cpu_count() or 1)
    wide = {}
    for name, tensor in load_file(source).items():
        rows_are_words = tensor.shape[0] == VOCAB
        if not rows_are_words:
            by_head = HEAD_DIM if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else 1
            groups = tensor.reshape(-1, by_head, *tensor.shape[1:])
            tensor = groups.repeat_interleave(2, 0).flatten(0, 1)
        if tensor.ndim == 2:
            by_head = HEAD_DIM if name.endswith("o_proj.weight") else 1
            tensor = tensor.reshape(tensor.shape[0], -1, by_head).repeat_interleave(2, 1).flatten(1, 2)
            if "embed_tokens" not in name:
                tensor = tensor * 0.5
        wide[name] = tensor.contiguous()
    save_file(wide, target, metadata={"format": "pt"})


def tensor_blocks(path: Path) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """(name, dtype, shape, begin, end) of every tensor, with offsets from the start of the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            yield name, entry["dtype"], tuple(entry["shape"]), begin, end


def first_difference(left: Path, right: Path) -> str | None:
    """The first tensor in which two safetensors files differ, in whatever order they store their tensors."""
    with left.open("rb") as first, right.open("rb") as second:
        ours, theirs = list(tensor_blocks(left)), list(tensor_blocks(right))
        if [block[:3] for block in ours] != [block[:3] for block in theirs]:
            return "names, dtypes or shapes"
        for (name, _, _, begin, end), (_, _, _, other_begin, _) in zip(ours, theirs, strict=True):
            first.seek(begin)
            second.seek(other_begin)
            left_over = end - begin
            while left_over:
                count = min(CHUNK, left_over)
                if first.read(count) != second.read(count):
                    return name
                left_over -= count
    return None


def timed(command: list[str], log: Path) -> tuple[float, float, int]:
    """(seconds, peak MB, exit status) of one whole process, its output in `log`."""
    with log.open("wb") as output:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)  # reaped here, Popen must not wait again
    kilobytes = usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss / 1024
    return seconds, kilobytes * 1024 / MEGA, child.returncode


def contenders(folder: Path, source: Path) -> dict[str, tuple[list[str], Path | None]]:
    """Name: (command, the file it writes). The copies copy the first output there is."""
    this = [sys.executable, str(Path(__file__).resolve())]
    tool, peer, copy = folder / "tool.safetensors", folder / "peer.safetensors", folder / "copy.safetensors"
    convert = [sys.executable, "-m", "widen_cli", "convert", str(source), str(tool), "--factor", "2", "--force"]
    found: dict[str, tuple[list[str], Path | None]] = {"widen-ckpt": (convert, tool)}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("safetensors"):
        found["torch repeat_interleave"] = ([*this, "--peer", str(source), str(peer)], peer)
        found["  of this, importing torch"] = ([sys.executable, "-c", "import torch, safetensors.torch"], None)
    copying = f'original="{tool}"; [ -e "$original" ] || original="{peer}"; cp "$original" "{copy}"'
    found["cp"] = (["sh", "-c", copying], copy)
    found["cp, flushed"] = (["sh", "-c", f'{copying} && sync "{copy}"'], copy)
    found["floor (true)"] = (["true"], None)
    return found


def measure(folder: Path, source: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds and peak MB of every contender in every round; one that fails is reported and left out."""
    taken: dict[str, list[tuple[float, float]]] = {}
    running = contenders(folder, source)
    log = folder / "log.txt"
    for _ in range(rounds):
        for name, (command, target) in list(running.items()):
            if target:
                target.unlink(missing_ok=True)
            os.sync()
            seconds, peak, status = timed(command, log)
            if status:
                last = (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1]
                print(f"{name} failed with {status}: {last}", file=sys.stderr)
                del running[name]
                continue
            taken.setdefault(name, []).append((seconds, peak))
    return taken


def print_table(taken: dict[str, list[tuple[float, float]]]) -> None:
    medians = {name: statistics.median(seconds for seconds, _ in runs) for name, runs in taken.items()}
    print(f"{'':28}{'median s':>10}{'min s':>8}{'max s':>8}{'/ cp':>8}{'/ cp flushed':>14}{'peak MB':>9}")
    for name, runs in taken.items():
        seconds = [second for second, _ in runs]
        ratios = [medians[name] / medians[copy] if copy in medians else float("nan") for copy in ("cp", "cp, flushed")]
        print(
            f"{name:28}{medians[name]:10.2f}{min(seconds):8.2f}{max(seconds):8.2f}"
            f"{ratios[0]:8.2f}{ratios[1]:14.2f}{max(peak for _, peak in runs):9.0f}"
        )


def report(folder: Path, megabytes: int, rounds: int) -> bool:
    """Measures one size and prints its table. False if the tool failed or its file differs from the peer's."""
    hidden = hidden_for(megabytes * MEGA)
    source = folder / "in.safetensors"
    subprocess.run([sys.executable, __file__, "--make", str(source), str(hidden)], check=True)
    largest = max(stored_bytes({name: shape}) for name, shape in llama_shapes(hidden, 2).items())
    taken = measure(folder, source, rounds)
    print(
        f"\noutput {stored_bytes(llama_shapes(hidden, 2)) / MEGA:.0f} MB (largest tensor {largest / MEGA:.0f} MB), "
        f"input {source.stat().st_size / MEGA:.0f} MB, hidden {hidden} -> {2 * hidden}, {rounds} rounds"
    )
    print_table(taken)
    tool, peer = folder / "tool.safetensors", folder / "peer.safetensors"
    good = "widen-ckpt" in taken
    if good and peer.exists():
        difference = first_difference(tool, peer)
        print("same bits as the peer" if difference is None else f"differs from the peer in {difference}")
        good = difference is None
    for leftover in folder.iterdir():
        leftover.unlink()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000], help="sizes of the outputs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the files go (default: the system's temporary folder)")
    parser.add_argument("--make", nargs=2, metavar=("FILE", "HIDDEN"), help=argparse.SUPPRESS)
    parser.add_argument("--peer", nargs=2, metavar=("IN", "OUT"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.make:
        make_checkpoint(Path(chosen.make[0]), int(chosen.make[1]))
        return 0
    if chosen.peer:
        widen_with_torch(Path(chosen.peer[0]), Path(chosen.peer[1]))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="widen-benchmark-", dir=chosen.folder))
    try:
        kind = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True).stdout.strip()
        print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, file system {kind or 'unknown'}")
        good = [report(folder, megabytes, chosen.rounds) for megabytes in chosen.megabytes]
        return 0 if all(good) else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
