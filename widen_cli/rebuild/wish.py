"""What the command line asks of a mixture of experts, and whether it keeps the function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from widen_cli.errors import WidenError, printable
from widen_cli.map_rules import ArchitectureMap, Upcycle
from widen_cli.options import Options

USUAL = 2  # experts that work for a token, or sets of slices


@dataclass(frozen=True)
class Wish:
    """How many experts there are to be, how many of them work for a token, and into how many of them a copy is cut."""

    experts: int
    top_k: int
    slices: int
    router: str
    seed: int

    @property
    def copies(self) -> int:
        return self.experts // self.slices

    @property
    def exact_for(self) -> str:
        """Under what condition the model computes what the dense one does, for the plan's notes."""
        if self.top_k == self.experts:
            return "all experts work for every token, so the function is kept whatever the router says"
        if self.slices == 1:
            return (
                "the experts are alike and the weights of those chosen sum to 1, so the function is kept for any router"
            )
        return (
            f"the {self.slices} slices of a copy have one row of the router and are chosen together, so the function is kept "
            "but where two copies tie at the edge of top-k, which numbers of few bits can make happen"
        )


def wish(options: Options, target: ArchitectureMap, rules: Upcycle) -> Wish:
    """What was asked for. Raises WidenError with everything in it that would not keep the function, or cannot be built."""
    assert options.experts is not None
    usual = min(USUAL * options.slices, options.experts) if rules.normalised else options.experts
    asked = Wish(options.experts, options.top_k or usual, options.slices, options.router, options.seed)
    faults = list(_faults(asked, target.architecture, rules))
    if faults:
        raise WidenError(*faults)
    return asked


def _faults(asked: Wish, name: str, rules: Upcycle) -> Iterator[str]:
    if asked.top_k > asked.experts:
        yield f"--top-k {asked.top_k}: there are {asked.experts} experts; give as many or fewer"
        return
    if asked.experts % asked.slices:
        yield f"--experts {asked.experts}: are no whole copies of {asked.slices} slices; give a multiple of --slices"
    elif asked.top_k % asked.slices:
        yield (
            f"--top-k {asked.top_k}: takes no whole copies of {asked.slices} slices, whose sum alone is the dense layer; "
            "give a multiple of --slices"
        )
    if asked.top_k == asked.experts:
        return
    if not rules.normalised:
        yield (
            f"--top-k {asked.top_k}: the runtime of '{name}' does not make the weights of chosen experts sum to 1, so the "
            f"function is kept where all work; give --top-k {asked.experts}, or leave it out"
        )
    elif asked.slices > 1 and asked.router == "zero":
        yield (
            f"--router zero: ties all experts, and which {asked.top_k} of {asked.experts} a runtime then takes is its own "
            "affair, so they need not be the slices of whole copies; give --router random, or --top-k "
            f"{asked.experts}"
        )


def refuse_experts(options: Options) -> None:
    """Raises WidenError for options that speak of experts where none are asked for, or none can be made."""
    if options.experts is not None and options.base is not None:
        raise WidenError("--experts: an adapter stays one of its dense base; leave --base or --experts out")
    if options.base is not None and "@" in (options.grow or ""):
        raise WidenError(
            f"--grow {printable(options.grow or '')}: an adapter grows alike in all layers; leave @... out"
        )
    plain = Options(options.input, options.output)
    names = {
        "top_k": "--top-k",
        "slices": "--slices",
        "router": "--router",
        "upcycle": "--upcycle",
    }
    said = [option for name, option in names.items() if getattr(options, name) != getattr(plain, name)]
    if options.experts is None and said:
        raise WidenError(f"{', '.join(said)}: says how experts are made, and --experts does not say that they are")
