"""What one narrow tensor is folded from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from widen_cli.dtypes import DType
from widen_cli.errors import WidenError, printable
from widen_cli.plan.narrowing import Header
from widen_cli.plan.result import DEPENDS, EXACT, TensorPlan
from widen_cli.safetensors_file import StoredTensor


@dataclass(frozen=True)
class Fold:
    """One narrow tensor: the plan that widens it, in the wide model's type, the wide tensors, and the type it is written in.

    `plans` are those that made the wide tensors where they are others, as of copies that are several layers or experts.
    A tensor may be made of slices: those of `more` follow this one, or stand in the first dimension of the wide one
    (`stacked`); they are laid one after the other, or `beside` each other in every row. `whole` is its shape then.
    `silent` are weights of new layers that were made of this tensor and write nothing; `of_experts`: what it is folded from are
    experts. `remedy`: only the same bits can be
    folded; what to do where they differ.
    """

    plan: TensorPlan
    wide: tuple[StoredTensor, ...]
    target: DType
    remedy: str | None = None
    plans: tuple[TensorPlan, ...] = ()
    more: tuple[Fold, ...] = ()
    stacked: bool = False
    beside: bool = False
    whole: tuple[int, ...] | None = None
    silent: tuple[StoredTensor, ...] = ()
    of_experts: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the narrow tensor."""
        return self.plan.source.shape if self.whole is None else self.whole

    def made_by(self, copy: int) -> TensorPlan:
        """The plan that made a wide tensor, by its number."""
        return self.plans[copy] if self.plans else self.plan

    @property
    def copies(self) -> bool:
        """Whether the wide model holds values of the tensor more than once, or zeros beside them."""
        return len(self.wide) > 1 or any(growth.new != growth.old for growth in self.plan.growth or ())

    @property
    def exactness(self) -> str:
        """How exactly the conversion had kept the values, coming from the type that is written now; as of a TensorPlan.

        What it does to a type with a small range matters where it makes values smaller.
        """
        if self.target.kind != self.plan.dtype.kind:
            return EXACT
        narrow = Header(self.plan.source.name, self.target, self.plan.source.shape)
        plan = replace(self.plan, source=narrow)
        shrinks = any(float(scale) < 1 for scale in plan.scales)
        return EXACT if plan.exactness_of_copies == DEPENDS and not shrinks else plan.exactness_of_copies

    def moved(self) -> WidenError:
        """That the copies differ, of which only the same bits can be folded."""
        names = ", ".join(printable(stored.name) for stored in self.wide[:2])
        kind = self.plan.dtype.name
        return WidenError(
            f"tensor '{names}': its copies have moved apart, and {kind} as it is stored has no mean; {self.remedy}"
        )
