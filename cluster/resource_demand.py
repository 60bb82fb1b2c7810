"""ResourceDemand: what a worker asks of its node, as `--prefill-resources` and its like say it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.cluster.byte_size import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LENGTH = 4096
MAX_MEMORY_BYTES = 1 << 50
EXAMPLE = "CPU=4,GPU=1,memory=16GB,fast_gpu=1,label:zone=a"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
_AMOUNT = re.compile(r"\d{1,9}(\.\d{1,4})?")  # Ray counts in ten-thousandths
# Ray's, which takes a domain before a slash, and these forms of a condition.
_LABEL_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[A-Za-z0-9.-]{{1,253}}/)?{_LABEL_WORD}")
_CONDITION = re.compile(rf"!?{_LABEL_WORD}|!?in\({_LABEL_WORD}(?:, ?{_LABEL_WORD})*\)")
_MEANT = {
    "cpu": "CPU",
    "cpus": "CPU",
    "num_cpus": "CPU",
    "gpu": "GPU",
    "gpus": "GPU",
    "num_gpus": "GPU",
    "mem": "memory",
    "memory": "memory",
    "ram": "memory",
}
_LABEL = "label:"


@dataclass(frozen=True)
class ResourceDemand:
    """Of one worker. None: nothing was said. Amounts are Ray's, which only counts them."""

    cpus: float | None = None
    gpus: float | None = None
    memory_bytes: int | None = None
    custom: tuple[tuple[str, float], ...] = ()  # (name, amount)
    labels: tuple[tuple[str, str], ...] = ()  # (key, condition): a, !a, in(a,b) or !in(a,b)

    def amounts(self) -> dict[str, float]:
        """By Ray's names; what is zero or was not said is left out."""
        named = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes}
        return {name: float(x) for name, x in named.items() if x} | dict(self.custom)

    def parts(self) -> list[str]:
        """Each thing asked for, as an operator writes it."""
        return [amount_text(name, x) for name, x in self.amounts().items()] + [
            label_text(key, condition) for key, condition in self.labels
        ]

    def labels_match(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with `labels` meets every condition."""
        return all(label_matches(labels.get(key), condition) for key, condition in self.labels)


NO_DEMAND = ResourceDemand()


def amount_text(name: str, amount: float) -> str:
    """`GPU=1`; memory in GB."""
    if name != "memory":
        return f"{name}={amount:.9g}"
    gigabytes = amount / 1e9
    return f"memory={gigabytes:.4g}GB" if gigabytes < 1e4 else f"memory={gigabytes:.0f}GB"


def label_text(key: str, condition: str) -> str:
    """`label:zone=a`."""
    return f"{_LABEL}{key}={condition}"


def label_matches(value: str | None, condition: str) -> bool:
    """Whether a node's label (None: it has none) meets `condition`, by Ray's rules."""
    wanted = condition.removeprefix("!")
    if wanted.startswith("in("):
        found = value in [word.strip() for word in wanted[3:-1].split(",")]
    else:
        found = value == wanted
    return found is not condition.startswith("!")


def parse_demand(text: str) -> ResourceDemand:
    """Reads `CPU=4,GPU=1,memory=16GB,fast_gpu=1,label:zone=a`.

    Raises:
        ValueError: naming the part that is wrong and the rule; the caller knows the option.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"must have at most {MAX_LENGTH} characters, got {len(text)}")
    if not text.strip():
        raise ValueError(f"must be a list such as {EXAMPLE}, got nothing")
    amounts: dict[str, float] = {}
    labels: dict[str, str] = {}
    for part in re.split(r",(?![^()]*\))", text):
        name, equals, value = part.strip().partition("=")
        name, value = name.strip(), value.strip()
        if not equals:
            raise _wrong(part, f"must be name=amount, as in {EXAMPLE}")
        if name in amounts or name in labels:
            raise _wrong(part, "names what an earlier part names")
        if name.startswith(_LABEL):
            labels[name] = _condition(part, name.removeprefix(_LABEL), value)
        else:
            amounts[name] = _amount(part, name, value)
    memory = amounts.pop("memory", None)
    return ResourceDemand(
        cpus=amounts.pop("CPU", None),
        gpus=amounts.pop("GPU", None),
        memory_bytes=None if memory is None else int(memory),
        custom=tuple(amounts.items()),
        labels=tuple((name.removeprefix(_LABEL), value) for name, value in labels.items()),
    )


def _condition(part: str, key: str, value: str) -> str:
    if _LABEL_KEY.fullmatch(key) is None or _CONDITION.fullmatch(value) is None:
        raise _wrong(
            part,
            "must be label:key=value, =!value, =in(a,b) or =!in(a,b), of letters, digits, '.', '_' "
            "and '-', at most 63 each",
        )
    return value


def _amount(part: str, name: str, value: str) -> float:
    meant = _MEANT.get(name.lower(), name)
    if meant != name:
        raise _wrong(part, f"names no resource of Ray's: did you mean {meant}?")
    if _NAME.fullmatch(name) is None:
        raise _wrong(
            part,
            "names a resource that Ray cannot have: letters, digits, '_', '.', ':', '/' and '-', "
            "at most 128",
        )
    if name == "object_store_memory":
        raise _wrong(part, "asks for memory that workers do not use")
    if name == "memory":
        size = parse_bytes(value)
        if size is None or not 0 < size <= MAX_MEMORY_BYTES:
            raise _wrong(part, "must be a size from 1 byte to 1 PiB, such as 16GB")
        return size
    if _AMOUNT.fullmatch(value) is None:
        raise _wrong(
            part, "must be an amount such as 1 or 0.5, below 10^9 and of at most 4 decimals"
        )
    amount = float(value)
    if amount == 0 and name not in ("CPU", "GPU"):
        raise _wrong(part, "must be more than 0; leave it out to ask for none")
    if name == "GPU" and amount > 1 and not amount.is_integer():
        raise _wrong(part, "must be a whole number of GPUs, or less than one")
    return amount


def _wrong(part: str, rule: str) -> ValueError:
    shown = part.strip()
    return ValueError(f"{shown[:60] + '…' * (len(shown) > 60)!r} {rule}")
