"""Exact scales, and the equations that bind them.

A scale is a product of primes raised to rational powers, so `1/sqrt(2)` times itself is exactly `1/2`
and whether a factor is a power of two is a fact and not a tolerance. The equations are linear in the
logarithms of scales; solving them stays exact for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from fractions import Fraction

Exponent = int | Fraction


@dataclass(frozen=True)
class Scale:
    """A positive number, stored as sorted (prime, exponent) pairs without zero exponents."""

    powers: tuple[tuple[int, Fraction], ...] = ()

    @staticmethod
    def of(number: int | Fraction) -> Scale:
        """The scale of a positive integer or fraction."""
        fraction = Fraction(number)
        return Scale._from(_prime_powers(fraction.numerator)) / Scale._from(_prime_powers(fraction.denominator))

    @staticmethod
    def _from(powers: Mapping[int, Fraction]) -> Scale:
        return Scale(tuple(sorted((prime, power) for prime, power in powers.items() if power)))

    def __mul__(self, other: Scale) -> Scale:
        if not self.powers or not other.powers:
            return self if self.powers else other
        powers = dict(self.powers)
        for prime, power in other.powers:
            powers[prime] = powers.get(prime, Fraction(0)) + power
        return Scale._from(powers)

    def __truediv__(self, other: Scale) -> Scale:
        return self * other**-1

    def __pow__(self, exponent: Exponent) -> Scale:
        return Scale._from({prime: power * Fraction(exponent) for prime, power in self.powers})

    @property
    def is_one(self) -> bool:
        return not self.powers

    @property
    def is_power_of_two(self) -> bool:
        """True for 2**n with a whole n, 1 included: the factors that no binary float rounds by itself."""
        return all(prime == 2 and power.denominator == 1 for prime, power in self.powers)

    @property
    def power_of_two(self) -> int | None:
        """n where the scale is 2**n with a whole n."""
        return sum(int(power) for _, power in self.powers) if self.is_power_of_two else None

    @property
    def fraction(self) -> Fraction | None:
        """The number itself where it is rational, None where it holds a root."""
        if any(power.denominator != 1 for _, power in self.powers):
            return None
        return math.prod((Fraction(prime) ** int(power) for prime, power in self.powers), start=Fraction(1))

    def __float__(self) -> float:
        """The number in float64, correctly rounded but for the last root taken."""
        root = math.lcm(*(power.denominator for _, power in self.powers))
        radicand = (self**root).fraction
        assert radicand is not None
        number = float(radicand)
        while root % 2 == 0:
            number, root = math.sqrt(number), root // 2
        return number if root == 1 else number ** (1.0 / root)

    def digits(self, precision: int = 40) -> str:
        """The number in decimal, for types longer than float64."""
        with localcontext() as context:
            context.prec = precision
            number = Decimal(1)
            for prime, power in self.powers:
                number *= Decimal(prime) ** (Decimal(power.numerator) / Decimal(power.denominator))
            return str(+number)

    def __str__(self) -> str:
        """As a person writes it: `1`, `3/2`, `1/sqrt(2)`, `1/(2 sqrt(2))`, `2^(-3/4)`."""
        if any(power.denominator > 2 for _, power in self.powers):
            return " ".join(_prime_power(prime, power) for prime, power in self.powers)
        above, below = _radical(p for p in self.powers if p[1] > 0), _radical((p, -e) for p, e in self.powers if e < 0)
        if not below:
            return above or "1"
        return f"{above or '1'}/{f'({below})' if ' ' in below else below}"


ONE = Scale()


def _prime_powers(number: int) -> dict[int, Fraction]:
    if number < 1:
        raise ValueError(f"a scale is positive, not {number}")
    powers: dict[int, Fraction] = {}
    prime = 2
    while prime * prime <= number:
        while number % prime == 0:
            powers[prime] = powers.get(prime, Fraction(0)) + 1
            number //= prime
        prime += 1
    if number > 1:
        powers[number] = powers.get(number, Fraction(0)) + 1
    return powers


def _prime_power(prime: int, power: Fraction) -> str:
    if power == 1:
        return str(prime)
    return f"{prime}^{power}" if power.denominator == 1 and power > 0 else f"{prime}^({power})"


def _radical(powers: Iterable[tuple[int, Fraction]]) -> str:
    whole, under_root = 1, 1
    for prime, power in powers:
        whole *= prime ** math.floor(power)
        under_root *= prime if power.denominator == 2 else 1
    words = [str(whole)] if whole > 1 else []
    return " ".join(words + ([f"sqrt({under_root})"] if under_root > 1 else []))


class ContradictionError(Exception):
    """An equation that the ones before it rule out; `equations` are the texts of all that take part."""

    def __init__(self, equations: list[str]) -> None:
        super().__init__("; ".join(equations))
        self.equations = equations


@dataclass
class _Row:
    """sum(coefficients * log(space)) = log(right), with the numbers of the equations it came from."""

    coefficients: dict[str, Fraction]
    right: Scale
    sources: frozenset[int] = field(default_factory=frozenset)

    def plus(self, other: _Row, times: Fraction) -> _Row:
        coefficients = dict(self.coefficients)
        for name, value in other.coefficients.items():
            coefficients[name] = coefficients.get(name, Fraction(0)) + times * value
        kept = {name: value for name, value in coefficients.items() if value}
        return _Row(kept, self.right * other.right**times, self.sources | other.sources)


class Equations:
    """Equations between scales, kept in reduced form so that each new one is checked as it comes.

    An equation says: the product of `space ** coefficient` is `right`.
    """

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._texts: list[str] = []

    def require(self, coefficients: Mapping[str, Exponent], right: Scale, text: str) -> None:
        """Adds an equation; raises ContradictionError where earlier ones rule it out."""
        self._texts.append(text)
        row = self._reduced(
            _Row({n: Fraction(c) for n, c in coefficients.items() if c}, right, frozenset({len(self._texts) - 1}))
        )
        if not row.coefficients:
            if not row.right.is_one:
                raise ContradictionError([self._texts[number] for number in sorted(row.sources)])
            return
        pivot = next(iter(row.coefficients))
        inverse = 1 / row.coefficients[pivot]
        row = _Row({name: value * inverse for name, value in row.coefficients.items()}, row.right**inverse, row.sources)
        for name, other in self._rows.items():
            if pivot in other.coefficients:
                self._rows[name] = other.plus(row, -other.coefficients[pivot])
        self._rows[pivot] = row

    def prefer(self, space: str, scale: Scale, text: str) -> bool:
        """Sets a space that is still free; False where the equations already determine it."""
        if self.value(space) is not None:
            return False
        self.require({space: 1}, scale, text)
        return True

    def value(self, space: str) -> Scale | None:
        """The space's scale, or None while it is free."""
        row = self._reduced(_Row({space: Fraction(1)}, ONE))
        return None if row.coefficients else row.right**-1

    def _reduced(self, row: _Row) -> _Row:
        for name in list(row.coefficients):
            if name in self._rows and name in row.coefficients:
                row = row.plus(self._rows[name], -row.coefficients[name])
        return row
