"""The oracle: transformers in fp32, greedy, one prompt at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from demo_model import transformers_from_gguf
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel


def load_oracle(path: Path) -> PreTrainedModel:
    """A Hugging Face folder or a GGUF file, in fp32."""
    if path.suffix == ".gguf":
        return transformers_from_gguf(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()  # type: ignore[no-any-return]  # transformers has no types here


def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Exactly `num_tokens` tokens; EOS does not end the answer."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(  # type: ignore[operator]  # a method that the stub hides
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, ids.shape[1] :]]


def greedy_after_each(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> list[int]:
    """The token that greedy decoding adds to the prompt and each beginning of the answer: one
    forward pass. It is the answer just where `greedy` would have made that.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 :]
    return [int(token) for token in logits.argmax(-1)]
