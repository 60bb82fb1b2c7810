"""WeightForms: claim 7, what weights of 8 and 4 bits do to decode and to prefill."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from legato.bench.experiments.chart import BarChart
from legato.bench.experiments.experiment import CannotMeasureError, Experiment
from legato.bench.experiments.finding import Check, Outcome, Table
from legato.bench.experiments.passes import Passes
from legato.bench.experiments.rounds import Rounds, check_at_most, number, rounds_words

if TYPE_CHECKING:
    from legato.bench.experiments.lab import Lab
    from legato.bench.experiments.time_budget import TimeBudget

FORMS = ("int8", "int4")
PREFILL_TOKENS = (512, 256, 128)  # the first that there is room for
CONTEXT_TOKENS = 32
NUM_STEPS = 8
MAX_ROUNDS = 7
SHARE = 0.7  # of the bytes' ratio that decode's speed-up is to reach
HARDLY = 1.25


@dataclass(frozen=True)
class FormTimes:
    """One form of the weights; seconds of each round."""

    name: str
    weight_bytes: int
    decode_s: tuple[float, ...]
    prefill_s: tuple[float, ...]


def checks(base: FormTimes, forms: list[FormTimes]) -> tuple[Check, ...]:
    """Decode of each form, then prefill of each; in the order of `criteria`."""
    decode, prefill = [], []
    for form, (slow, fast) in zip(forms, _CRITERIA, strict=True):
        fewer = base.weight_bytes / form.weight_bytes
        gained = Rounds.ratios(base.decode_s, form.decode_s)
        answer = gained.at_least(SHARE * fewer)
        words = f"{gained.words()}, of {number(fewer)} by the bytes"
        decode.append(Check(slow, words, answer))
        prefill.append(check_at_most(fast, Rounds.ratios(base.prefill_s, form.prefill_s), HARDLY))
    return (*decode, *prefill)


_CRITERIA = tuple(
    (
        f"{form}: decode gets faster by at least {SHARE:g} of what the weights' bytes shrink by",
        f"{form}: prefill gets faster by at most {HARDLY:g}",
    )
    for form in FORMS
)


class WeightForms(Experiment):
    """The model in all forms at once in memory, in turn in each round."""

    number, name = 7, "weight-forms"
    claim = (
        "int8 and int4 weights speed decode roughly in proportion to their bytes, and hardly "
        "prefill."
    )
    criteria = tuple(pair[0] for pair in _CRITERIA) + tuple(pair[1] for pair in _CRITERIA)
    weight = 1.4

    def measure(self, lab: Lab, budget: TimeBudget) -> Outcome:
        """Loading the two other forms takes none of the time."""
        plain = lab.engine.weights
        if plain not in ("float32", "bfloat16", "float16"):
            raise CannotMeasureError(
                f"the model's weights are {plain}: they are quantised as they are stored"
            )
        with budget.apart():
            all_passes = {plain: lab.passes} | {form: Passes(lab.load(form)) for form in FORMS}
        num_tokens = next((n for n in PREFILL_TOKENS if lab.passes.has_room(1, n)), None)
        if num_tokens is None:
            raise CannotMeasureError(
                f"a prompt of {PREFILL_TOKENS[-1]} tokens is needed, limit "
                f"{lab.passes.max_rows}: the model's context"
            )
        decode: dict[str, list[float]] = {name: [] for name in all_passes}
        prefill: dict[str, list[float]] = {name: [] for name in all_passes}
        for passes in all_passes.values():
            passes.decode_s(1, CONTEXT_TOKENS, 2)
            passes.prefill_s(num_tokens)
        for _ in budget.rounds(MAX_ROUNDS):
            for name, passes in all_passes.items():
                steps = passes.decode_s(1, CONTEXT_TOKENS, NUM_STEPS)
                decode[name].append(statistics.median(steps))
                prefill[name].append(passes.prefill_s(num_tokens))
        if not decode[plain]:
            raise CannotMeasureError("the time was over before a round could begin")
        times = [
            FormTimes(
                name, passes.engine.cost.weight_bytes, tuple(decode[name]), tuple(prefill[name])
            )
            for name, passes in all_passes.items()
        ]
        return _outcome(times[0], times[1:], num_tokens, _products(lab))


def _products(lab: Lab) -> str:
    """What quantised weights do to the products themselves, on this machine."""
    limits = lab.measure_limits()
    plain, int8 = lab.peak(limits), limits.matmul_ops_per_s.get("int8")
    if lab.engine.device.type != "cpu" or plain is None or int8 is None:
        return ""
    return (
        "On a CPU quantised weights meet activations of 8 bits, and the products themselves are "
        f"other ones: int8 ones of torch run at {number(int8.best / plain.best)} times those of "
        f"{lab.engine.product_dtype} here. So prefill can gain by them, or lose by unpacking."
    )


def _outcome(base: FormTimes, forms: list[FormTimes], num_tokens: int, products: str) -> Outcome:
    rows = tuple(
        (
            form.name,
            number(form.weight_bytes / 1e6),
            number(base.weight_bytes / form.weight_bytes),
            Rounds(form.decode_s).words("ms", 1000),
            number(Rounds.ratios(base.decode_s, form.decode_s).median),
            Rounds(form.prefill_s).words("ms", 1000),
            number(Rounds.ratios(base.prefill_s, form.prefill_s).median),
        )
        for form in (base, *forms)
    )
    head: tuple[str, ...] = ("weights", "MB a step reads", "fewer bytes", "decode step", "faster")
    head += (f"prefill of {num_tokens}", "faster")
    names = tuple(form.name for form in forms)
    chart = BarChart(
        "What weights of fewer bits do",
        f"For {' and '.join(names)}: by how much the bytes of a step shrink, and by how much "
        "decode and prefill get faster.",
        f"times {base.name}",
        names,
        (
            ("fewer bytes", tuple(_round(base.weight_bytes / f.weight_bytes) for f in forms)),
            (
                "decode faster",
                tuple(_round(Rounds.ratios(base.decode_s, f.decode_s).median) for f in forms),
            ),
            (
                "prefill faster",
                tuple(_round(Rounds.ratios(base.prefill_s, f.prefill_s).median) for f in forms),
            ),
        ),
        (1.0, f"{base.name}"),
    )
    notes = [
        f"{rounds_words(len(base.decode_s))}, each over all forms: decode of one sequence, "
        f"{NUM_STEPS} steps, and a prompt of {num_tokens} tokens."
    ]
    if products:
        notes.append(products)
    return Outcome(checks(base, forms), Table(head, rows), chart, tuple(notes))


def _round(value: float) -> float:
    return round(value, 2)
