"""What --grow takes: factors, sizes, so many more, multiples; what each means of a present size, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import pytest
from test_plan import LLAMA, llama, planned

from widen_cli.config import ModelConfig
from widen_cli.errors import WidenError
from widen_cli.maps import catalog_map
from widen_cli.plan.parallel import undivided
from widen_cli.plan.sizes import Sizes
from widen_cli.plan.wishes import EXAMPLES, parse_grow, said_as_factors, wished

PRESENT = {"hidden": 4096, "intermediate": 11008, "heads": 32, "kv_heads": 3, "head_dim": 64, "vocab": 97}


def sizes(known: Mapping[str, int] = PRESENT, layered: Mapping[str, tuple[int, ...]] | None = None) -> Sizes:
    found = Sizes(catalog_map("llama"), ModelConfig({}, "config.json"))
    found.known, found.layered = dict(known), dict(layered or {})
    return found


def ratios(text: str, of: Sizes | None = None) -> Mapping[str, Fraction | int]:
    return wished(catalog_map("llama"), of or sizes(), parse_grow(text))


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("hidden=2", 8192),
        ("hidden=2x", 8192),
        ("hidden=1", 4096),
        ("hidden=1.5x", 6144),
        ("hidden=1.5", 6144),
        ("hidden=3/2x", 6144),
        ("hidden=5/4", 5120),
        ("hidden=5120", 5120),
        ("hidden=4096", 4096),
        ("hidden=round:4096", 4096),
        ("hidden=round:1000", 5000),
        ("hidden=+4", 4100),
        ("hidden=+4:round:128", 4224),
        ("hidden=5000:round:128", 5120),
        ("hidden=1.3x:round:256", 5376),
        ("hidden=2x:round:1", 8192),
        ("heads=17x", 544),
        ("heads=40", 40),
        ("kv_heads=3x", 9),
        ("kv_heads=+1", 4),
        ("kv_heads=17", 17),
        ("kv_heads=to:4", 4),
        ("kv_heads=to:3", 3),
        ("hidden=to:4100:round:128", 4224),
        ("kv_heads=1x", 3),
        ("head_dim=128", 128),
    ],
)
def test_what_is_meant(text: str, new: int) -> None:
    (axis,) = ratios(text)
    assert ratios(text)[axis] * PRESENT[axis] == new


def test_of_one_head_both_readings_are_one() -> None:
    assert ratios("kv_heads=2", sizes({"kv_heads": 1})) == {"kv_heads": 2}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kv_heads=3", "can mean 3 kv_heads or 3 times as many; write kv_heads=3x for 9, or kv_heads=to:3 for 3"),
        ("kv_heads=4", "can mean 4 kv_heads or 4 times as many; write kv_heads=4x for 12, or kv_heads=to:4 for 4"),
        (
            "heads=24",
            "24 is less than the 32 there are, and nothing shrinks here; `widen-ckpt collapse` takes a growth back, and 24 times as "
            "many is heads=24x",
        ),
        (
            "hidden=4000:round:8",
            "4000 is less than the 4096 there are, and nothing shrinks here; `widen-ckpt collapse` takes a growth back",
        ),
        ("kv_heads=1.5x", "1.5 times 3 is 4.5, no whole number; write kv_heads=to:5, or kv_heads=1.5x:round:1 for the next one"),
        ("vocab=1.5x", "1.5 times 97 is 145.5, no whole number; write vocab=146, or vocab=1.5x:round:1 for the next one"),
        ("hidden=4/3x", "4/3 times 4096 is 16384/3, no whole number; write hidden=5462, or hidden=4/3x:round:1 for the next one"),
        ("hidden=65537x", "is 65537 times as many; 65536 is the largest factor"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(text: str, fault: str) -> None:
    with pytest.raises(WidenError) as caught:
        ratios(text)
    assert f"--grow {text}: {fault}" in caught.value.faults


@pytest.mark.parametrize(
    "piece",
    ["hidden", "hidden=", "=2", "hidden=0", "hidden=-1", "hidden=two", "", "hidden=2;heads=2", "hidden=2 x", "hidden=3/0x",
     "hidden=+4x", "hidden=+0", "hidden=round:0", "hidden=round:", "hidden=2xround:4", "hidden=:round:4", "hidden=1e3",
     "hidden=1.5.2", "hidden=to:", "hidden=to:0", "hidden=to:2x", "hidden=to:1.5", "hidden=to:+4", "hidden=4x8", "hidden=²"],
)  # fmt: skip
def test_what_cannot_be_read(piece: str) -> None:
    with pytest.raises(WidenError) as caught:
        parse_grow(f"heads=2x,{piece}")
    shown = piece.replace("²", "\\xb2")
    assert caught.value.faults == (
        f"--grow heads=2x,{shown}: '{shown}' says of no axis what it grows to; write for example {EXAMPLES}",
    )


def test_all_pieces_that_cannot_be_read_are_named() -> None:
    with pytest.raises(WidenError) as caught:
        parse_grow("a=2,a=3,b=half,c=0.5x")
    assert [fault.partition(": ")[2].partition(";")[0] for fault in caught.value.faults] == [
        "'a' stands twice",
        "'b=half' says of no axis what it grows to",
        "'c=0.5x' is less than 1, and nothing shrinks here",
    ]


def test_all_axes_that_cannot_be_what_is_asked_are_named() -> None:
    with pytest.raises(WidenError) as caught:
        ratios("hidden=4000,kv_heads=3,hiden=2x,vocab=round:512")
    assert [fault.partition(":")[0] for fault in caught.value.faults] == [
        "--grow hidden=4000",
        "--grow kv_heads=3",
        "--grow hiden",
        "--grow vocab",
    ]


def test_sizes_that_differ_by_layer() -> None:
    layers = sizes(PRESENT, {"kv_heads": (2, 0, 3)})
    assert ratios("kv_heads=3,heads=2x", layers) == {"kv_heads": 3, "heads": 2}
    with pytest.raises(WidenError) as caught:
        ratios("kv_heads=24", layers)
    assert caught.value.faults == (
        "--grow kv_heads=24: 'kv_heads' is 0 to 3, layer by layer, so a size cannot be said of all; write a factor, such as kv_heads=2x",
    )
    with pytest.raises(WidenError, match="is no whole number in every layer, where 'kv_heads' is 0 to 3"):
        ratios("kv_heads=1.5x", layers)


def test_sizes_that_nothing_tells() -> None:
    assert ratios("heads=2,kv_heads=1.5x", sizes({})) == {"heads": 2, "kv_heads": Fraction(3, 2)}
    for text in ("heads=24", "heads=+4", "heads=round:8"):
        with pytest.raises(WidenError) as caught:
            ratios(text, sizes({}))
        assert caught.value.faults == (
            f"--grow {text}: nothing tells how many 'heads' there are, so only a factor can be said, such as heads=2x; give --config, "
            "or --set with its size",
        )


def test_the_way_back_takes_factors() -> None:
    wide = sizes({"hidden": 8192, "heads": 4})
    assert said_as_factors(parse_grow("hidden=2,heads=4,kv_heads=2x"), wide) == {"hidden": 2, "heads": 4, "kv_heads": 2}
    with pytest.raises(WidenError) as caught:
        said_as_factors(parse_grow("hidden=8192,heads=+2"), wide)
    assert caught.value.faults == (
        "--grow hidden=8192: tells what 'hidden' grew to, and the way back needs by how much; write hidden=2x",
        "--grow heads=+2: tells what 'heads' grew to, and the way back needs by how much; write heads=2x",
    )


def test_a_plan_by_sizes_is_the_plan_by_factors() -> None:
    by_size = planned(llama(), LLAMA, "hidden=24,intermediate=+10:round:20,heads=2x,kv_heads=+3")
    assert by_size == planned(llama(), LLAMA, "hidden=2x,intermediate=2x,heads=2x,kv_heads=2x")


def test_tensor_parallel_degrees_that_new_sizes_do_not_divide_by() -> None:
    old = sizes({"hidden": 4096, "intermediate": 11008, "heads": 9, "kv_heads": 8, "head_dim": 128, "vocab": 100})
    new = sizes({"hidden": 4098, "intermediate": 11012, "heads": 12, "kv_heads": 10, "head_dim": 129, "vocab": 104})
    assert list(undivided(old, new)) == [
        "hidden grows from 4096 to 4098, which tensor-parallel degrees of 4 and 8 do not divide any more; "
        "hidden=round:8 in --grow gives a size that they do",
        "intermediate grows from 11008 to 11012, which tensor-parallel degrees of 8 do not divide any more; "
        "intermediate=round:8 in --grow gives a size that they do",
        "heads grows from 9 to 12, which tensor-parallel degrees of 8 do not divide; heads=round:8 in --grow gives a size that "
        "they do",
        "kv_heads grows from 8 to 10, which tensor-parallel degrees of 4 and 8 do not divide any more; "
        "kv_heads=round:8 in --grow gives a size that they do",
    ]
    few = sizes({"kv_heads": 1})
    assert not list(undivided(sizes({"kv_heads": 2}), sizes({"kv_heads": 4})))
    assert [text[:28] for text in undivided(few, sizes({"kv_heads": 3}))] == []


def test_sizes_are_warned_of_and_multiples_are_not() -> None:
    plan = planned(llama(), LLAMA, "heads=2,kv_heads=2,intermediate=22")
    assert [text.partition(",")[0] for text in plan.warnings] == ["intermediate grows from 10 to 22"]
