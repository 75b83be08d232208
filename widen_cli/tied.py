"""Whether the stored copies of one tied weight hold the same values."""

from __future__ import annotations

from widen_cli.checkpoint import Checkpoint
from widen_cli.errors import WidenError, printable
from widen_cli.plan import Plan
from widen_cli.safetensors_file import StoredTensor
from widen_cli.sources import HashingSource
from widen_cli.stream import BLOCK_BYTES


def check_equal(checkpoint: Checkpoint, plan: Plan) -> None:
    """Two stored copies of one tied weight have to hold the same values, or the loader decides which of them counts."""
    stored = {tensor.name: tensor for tensor in checkpoint.tensors}
    for head, table in plan.equal_pairs:
        if not checkpoint.sequential and not _same_bytes(stored[head], stored[table]):
            raise unequal(checkpoint, head, table)


def unequal(checkpoint: Checkpoint, head: str, table: str) -> WidenError:
    return WidenError(
        f"{printable(checkpoint.name)}: the config ties '{printable(head)}' to '{printable(table)}', but their values "
        f"differ, and loaders disagree on which counts; remove '{printable(head)}', or say --set tie_word_embeddings=false"
    )


def tied_digests(checkpoint: Checkpoint, plan: Plan) -> dict[str, HashingSource]:
    """Of a pipe, whose tied copies can be compared only as they pass: what hashes them."""
    if not checkpoint.sequential:
        return {}
    tied = {name for pair in plan.equal_pairs for name in pair}
    return {tensor.name: HashingSource(tensor.source) for tensor in checkpoint.tensors if tensor.name in tied}


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for start in range(0, one.nbytes, BLOCK_BYTES):
        length = min(BLOCK_BYTES, one.nbytes - start)
        if one.source.read(one.offset + start, length) != other.source.read(other.offset + start, length):
            return False
    return True
