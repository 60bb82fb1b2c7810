"""A forward pass is a list of kernels over buffers made at its start: so it can be recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from model_checks import build, random_tokens
from paged_runner import PagedRunner
from tiny_models import FAMILIES, make_llama, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from legato.kernels import native
from legato.worker.kv.cache import KvCache, KvShape
from legato.worker.model_runner import ModelRunner
from legato.worker.models import attention, forward_pass
from legato.worker.models.forward_pass import ForwardPass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDERS = {Path(attention.__file__).parent: "models", Path(native.__file__).parent: "kernels"}
# Operations that compute nothing: new buffers, and views of old ones.
HARMLESS = {"empty", "new_empty", "view", "_unsafe_view", "slice", "select", "flatten"}
KERNELS_PER_LAYER = {"llama": 9, "mistral": 9, "qwen2": 9, "qwen3": 11, "gemma3": 13, "gpt2": 9}


class Watch(TorchDispatchMode):
    """Notes what the models' own code has torch do; a kernel's code may do what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # torch's operators have no public type
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever it returns
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name not in HARMLESS and self._caller() == "models":
            self.computed.append(name)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _caller() -> str | None:
        """Whose code is nearest on the stack."""
        frame: FrameType | None = sys._getframe()  # the only way to see callers
        while frame is not None:
            owner = code_of(frame)
            if owner is not None:
                return owner
            frame = frame.f_back
        return None


def code_of(frame: FrameType) -> str | None:
    """`models` or `kernels`, where the frame runs code of that folder."""
    return FOLDERS.get(Path(frame.f_code.co_filename).parent)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_themselves_compute_nothing(family: str) -> None:
    runner = PagedRunner(build(make_model(family)))
    for tokens in (random_tokens(30), [1]):
        with Watch() as watch:
            runner.step({0: tokens})
        assert watch.computed == []


def test_the_watch_sees_a_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(run: ForwardPass, *, add_hidden: bool) -> None:
        del add_hidden
        run.last.mul_(2)

    code = planted.__code__.replace(co_filename=attention.__file__)
    monkeypatch.setattr(ForwardPass, "take_last", FunctionType(code, globals()))
    runner = PagedRunner(build(make_model("llama")))
    with Watch() as watch:
        runner.step({0: [1, 2]})
    assert watch.computed == ["mul_"]


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_per_layer(family: str) -> None:
    """One more a layer costs every token of every model."""
    calls = []
    for num_layers in (2, 3):
        runner = PagedRunner(
            build(make_model(family, num_hidden_layers=num_layers, layer_types=None))
        )
        runner.step({0: random_tokens(5)})
        count = 0

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            del argument
            if event == "call" and frame.f_back is not None:
                called = (code_of(frame), code_of(frame.f_back)) == ("kernels", "models")
                count += called and frame.f_code.co_name != "one_query_each"  # a property

        sys.setprofile(profile)
        runner.step({0: [1]})
        sys.setprofile(None)
        calls.append(count)
    assert calls[1] - calls[0] == KERNELS_PER_LAYER[family]


def test_a_context_far_beyond_the_pool_takes_no_memory() -> None:
    model = build(make_llama(max_position_embeddings=2**31 - 1))
    config = model.config
    shape = KvShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
    ModelRunner(model, KvCache(shape, 4, torch.device("cpu")), torch.device("cpu"), 256)


@pytest.mark.skipif(not native.available(), reason="bits are those of the C kernels")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("piece", [1, 5, 13])
def test_a_long_prompt_goes_through_the_mlp_in_pieces(
    monkeypatch: pytest.MonkeyPatch, family: str, piece: int
) -> None:
    model, tokens = build(make_model(family)), random_tokens(13)
    whole = PagedRunner(model).step({0: tokens}, all_logits=True)
    monkeypatch.setattr(forward_pass, "CPU_PIECE_TOKENS", piece)
    assert torch.equal(PagedRunner(model).step({0: tokens}, all_logits=True), whole)
