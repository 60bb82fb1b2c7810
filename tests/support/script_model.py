"""A GPT-2 that says a script: its next token depends on the absolute position alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from tiny_models import VOCAB_SIZE, make_model, write_byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONTEXT = 256
LINE = 32  # positions of each part of the script; what a part leaves is dots


class Script:
    """Parts by name. A prompt as long as `prompt` says is answered with that part."""

    def __init__(self, parts: Mapping[str, Sequence[int]]) -> None:
        self._starts = {name: place * LINE for place, name in enumerate(parts)}
        self.token_ids: list[int] = []
        for name, part in parts.items():
            assert len(part) <= LINE, name
            self.token_ids += [*part, *b"." * (LINE - len(part))]
        assert len(self.token_ids) <= CONTEXT
        self.token_ids += b"." * (CONTEXT - len(self.token_ids))

    def prompt(self, name: str, end: Sequence[int] = ()) -> list[int]:
        """Token ids; `end` are the last of them, and make no difference to the answer."""
        length = self._starts[name] + 1
        assert len(end) <= length
        return [*(b"?" * (length - len(end))), *end]


def write_script_folder(
    folder: Path, script: Script, *, eos_token_ids: Sequence[int], chat_template: str
) -> Path:
    """The template is a chat_template.jinja; the EOS ids are those of generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(
        "gpt2",
        hidden_size=CONTEXT,
        intermediate_size=CONTEXT,
        num_hidden_layers=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith(("ln_f.weight",)) else 0.0)
            if name.endswith("wpe.weight"):
                parameter.copy_(torch.eye(CONTEXT))
            if name.startswith("lm_head"):
                for position, token_id in enumerate(script.token_ids):
                    parameter[token_id, position] = 1.0
                assert parameter.shape == (VOCAB_SIZE, CONTEXT)
    model.save_pretrained(folder)
    write_byte_tokenizer(folder, chat_template=None)
    (folder / "chat_template.jinja").write_text(chat_template)
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = list(eos_token_ids)
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder
