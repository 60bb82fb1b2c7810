"""Hugging Face text: tokenizer, special tokens and chat template of a model folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from legato.protos.printable import printable, shown
from legato.text.hf_class import apply_class, class_names, tokenizer_class
from legato.text.library_errors import library_errors
from legato.text.text_parts import TextParts

if TYPE_CHECKING:
    from pathlib import Path

# Of each file beside tokenizer.json; far above any real one.
MAX_TEXT_BYTES = 16 << 20
_NAMED = (
    *("bos_token", "eos_token", "unk_token", "pad_token"),
    *("sep_token", "cls_token", "mask_token"),
)


def load_hf_text(folder: Path) -> TextParts:
    """Reads a folder's tokenizer.json and the small JSON files beside it.

    Ids and texts are those of transformers 5; `hf_class` has what a folder's tokenizer class
    changes. One thing differs: transformers does not read `add_bos_token` beside a tokenizer.json.
    Here BOS is automatic where tokenizer_config.json's `add_bos_token` says so or, without that
    key, where tokenizer.json's post-processor puts it. The ids that end an answer are those of
    generation_config.json, else the tokenizer's EOS, else config.json's.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    tokenizer = _load_tokenizer(folder)
    config = _read_object(folder / "tokenizer_config.json")
    chosen = tokenizer_class(
        config,
        _read_object(folder / "config.json"),
        byte_level=b'"ByteLevel"' in (folder / "tokenizer.json").read_bytes(),
    )
    names, others = _special_names(folder, config)
    for key, text in class_names(chosen).items():
        if key not in config and key not in names and tokenizer.token_to_id(text) is not None:
            names[key] = text
    try:
        apply_class(chosen, tokenizer, config, names)
    except ValueError as error:
        raise ValueError(f"{folder / 'tokenizer_config.json'}: {error}") from error
    special_ids = _add_config_tokens(folder, tokenizer, config, [*names.values(), *others])
    ids = {key: _named_id(folder, tokenizer, key, text) for key, text in names.items()}
    bos_id = ids.get("bos_token")
    template, no_template_reason = _chat_template(folder, config)
    return TextParts(
        name=folder.name,
        tokenizer=tokenizer,
        special_ids=special_ids,
        bos_id=bos_id,
        add_bos=_adds_bos(folder, tokenizer, config, bos_id),
        eos_token_ids=_eos_ids(folder, ids.get("eos_token")),
        chat_template=template,
        no_template_reason=no_template_reason,
        template_names=names,
    )


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (folder / "tokenizer.model").is_file():
            raise ValueError(
                f"{folder}: there is only a SentencePiece tokenizer.model; tokenizer.json is"
                " needed: convert it once with transformers (save_pretrained writes it)"
            )
        raise ValueError(f"{path}: the file is missing")
    with library_errors(str(path)):
        tokenizer = Tokenizer.from_file(str(path))
    # Saved training settings: left on, they would cut or pad prompts without a word.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_object(path: Path) -> dict[str, Any]:
    """The file's JSON object; an absent file is an empty one."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_bounded(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, holds a {type(value).__name__}")
    return value


def _read_bounded(path: Path) -> str:
    """The text of a regular file: a pipe would be waited for, and a device never ends."""
    if not path.is_file():
        raise ValueError("is not a file")
    with path.open("rb") as file:
        raw = file.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise ValueError(f"is larger than {MAX_TEXT_BYTES} bytes, the most allowed")
    return raw.decode("utf-8")


def _special_names(folder: Path, config: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Texts of the special tokens that have a name, which templates may use, and of the others.

    The older special_tokens_map.json counts only beside a config without added_tokens_decoder.
    """
    older = (
        {}
        if config.get("added_tokens_decoder")
        else _read_object(folder / "special_tokens_map.json")
    )
    both = config | {key: value for key, value in older.items() if value is not None}
    extra = both.get("extra_special_tokens") or both.get("additional_special_tokens") or []
    named = {key: value for key, value in both.items() if _is_name(key, value)}
    if isinstance(extra, dict):
        named |= extra
        extra = []
    if not isinstance(extra, list):
        raise ValueError(f"{folder}: extra_special_tokens is {shown(extra)}, not a list or object")
    names = {key: _token_text(folder, key, value) for key, value in named.items()}
    return names, [_token_text(folder, "extra_special_tokens", value) for value in extra]


def _is_name(key: str, value: object) -> bool:
    if key in _NAMED:
        return value is not None
    return key.endswith("_token") and isinstance(value, (str, dict))


def _token_text(folder: Path, key: str, value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"{folder}: {printable(key)} is {shown(text)}, not a string")
    return text


def _add_config_tokens(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], special_texts: list[str]
) -> frozenset[int]:
    """Adds what only tokenizer_config.json lists; returns the ids of all control tokens."""
    path = folder / "tokenizer_config.json"
    special = {
        index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict):
        raise ValueError(f"{path}: added_tokens_decoder must be an object")
    try:
        entries = sorted((int(key), entry) for key, entry in listed.items())
        texts = {index: str(entry["content"]) for index, entry in entries}
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path}: added_tokens_decoder has a wrong entry: {printable(str(error))}"
        ) from error
    for index, entry in entries:
        is_special = bool(entry.get("special", False))
        if tokenizer.token_to_id(texts[index]) is None or (is_special and index not in special):
            token = AddedToken(
                texts[index],
                single_word=bool(entry.get("single_word", False)),
                lstrip=bool(entry.get("lstrip", False)),
                rstrip=bool(entry.get("rstrip", False)),
                normalized=bool(entry.get("normalized", not is_special)),
                special=is_special,
            )
            (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(texts[index]) != index:
            raise ValueError(
                f"{path}: {shown(texts[index])} has id {index} there and"
                f" {tokenizer.token_to_id(texts[index])} in tokenizer.json"
            )
        if is_special:
            special.add(index)
    # A token with such a name is control whatever its entry says, as in transformers.
    for text in special_texts:
        index_or_none = tokenizer.token_to_id(text)
        if index_or_none is not None and index_or_none not in special:
            tokenizer.add_special_tokens([text])
            special.add(index_or_none)
    return frozenset(special)


def _named_id(folder: Path, tokenizer: Tokenizer, key: str, text: str) -> int | None:
    token_id = tokenizer.token_to_id(text)
    if token_id is None and key in ("bos_token", "eos_token"):
        raise ValueError(f"{folder}: {key} {shown(text)} is not in tokenizer.json")
    return token_id


def _adds_bos(
    folder: Path, tokenizer: Tokenizer, config: dict[str, Any], bos_id: int | None
) -> bool:
    wanted = config.get("add_bos_token")
    if wanted is None:
        with library_errors(str(folder / "tokenizer.json")):
            return bos_id is not None and tokenizer.encode("").ids[:1] == [bos_id]
    if not isinstance(wanted, bool):
        raise ValueError(f"{folder}: add_bos_token is {shown(wanted)}, not true or false")
    if wanted and bos_id is None:
        raise ValueError(f"{folder}: add_bos_token is true, but there is no bos_token")
    return wanted


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    for file in ("generation_config.json", "config.json"):
        value = _read_object(folder / file).get("eos_token_id")
        if value is not None and (file != "config.json" or tokenizer_eos is None):
            values = value if isinstance(value, list) else [value]
            if any(type(item) is not int or item < 0 for item in values):
                raise ValueError(
                    f"{folder / file}: eos_token_id is {shown(value)}; an id >= 0 or a list of"
                    " them is needed"
                )
            return tuple(dict.fromkeys(values))
    return () if tokenizer_eos is None else (tokenizer_eos,)


def _chat_template(folder: Path, config: dict[str, Any]) -> tuple[str | None, str]:
    """The template, or None and the reason; a file of its own wins, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return _read_bounded(path), ""
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value, "the model's folder has no chat template"
    if not isinstance(value, list) or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    ):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither a string nor a list of"
            " named templates"
        )
    by_name = {str(entry["name"]): str(entry["template"]) for entry in value}
    if "default" in by_name:
        return by_name["default"], ""
    if len(by_name) == 1:
        return next(iter(by_name.values())), ""
    listed = ", ".join(sorted(by_name)) or "none"
    return None, f"none of the model's chat templates ({printable(listed)}) is named 'default'"
