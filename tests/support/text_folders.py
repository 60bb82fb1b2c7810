"""Tokenizer folders for tests: one of each kind that models come with, trained on a few lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and 1234 more of them do.",
    "Ein Mädchen aß Äpfel; être ou ne pas être; 你好，世界; привет мир 🙂👩‍🚀",
    "def f(x):\n    return x + 1  # the end\n\n\tthe quick brown fox's tail isn't here",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE_WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def byte_level(*, nfc: bool = False) -> Tokenizer:
    """GPT-2's and Llama 3's kind."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level_in_sequence() -> Tokenizer:
    """The same, with its decoder wrapped, so that nobody sees that tokens are bytes."""
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """Llama 2's kind: visible spaces, single bytes as <0xNN>, a leading space."""
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    learned.pre_tokenizer = pre_tokenizers.Split(Regex("(?=▁)"), "isolated")
    specials = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    learned.train_from_iterator(CORPUS, trainer)
    state = json.loads(learned.to_str())
    state["model"].update(byte_fallback=True, fuse_unk=True)
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def metaspace_bpe() -> Tokenizer:
    """Llama 2's and TinyLlama's since transformers 5: a space before the text's start alone."""
    tokenizer = sentencepiece_bpe()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def gemma_bpe() -> Tokenizer:
    """Gemma 3's kind: visible spaces, single bytes as <0xNN>, no leading space."""
    tokenizer = sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """T5's and Gemma's elder kind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind; few models that generate have it, but it must not be read wrongly."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "byte_level_nfc": lambda: byte_level(nfc=True),
    "byte_level_in_sequence": byte_level_in_sequence,
    "sentencepiece_bpe": sentencepiece_bpe,
    "metaspace_bpe": metaspace_bpe,
    "gemma_bpe": gemma_bpe,
    "unigram": unigram,
    "word_piece": word_piece,
}


def write_folder(
    folder: Path,
    kind: str,
    *,
    bos_by_processor: bool = False,
    template: str | None = TEMPLATE_WITH_BOS,
    model_type: str | None = None,
    **config: Any,  # noqa: ANN401  # keys of tokenizer_config.json
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = KINDS[kind]()
    if bos_by_processor:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", bos)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder
