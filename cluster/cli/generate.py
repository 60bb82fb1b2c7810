"""`legato generate`: one prompt in, one answer or several out as they come."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.answer import Answer, InTurn, read_answers
from legato.cluster.cli.connection import AddressOption, PortOption, choose_address, connect_client
from legato.cluster.cli.guide_option import make_guide
from legato.cluster.errors import ServiceError, WrongInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from legato.cluster.blocking_client import Stream
    from legato.cluster.client import Event
    from legato.protos import common_pb2, generation_pb2

INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1  # what the fields of the request can hold
MAX_TIMEOUT_S = 1e9  # gRPC takes what is much longer for a deadline that has passed


class PriorityName(StrEnum):
    """Which requests go first."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.')],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="As a user's message in the model's chat template, or as plain text. "
            "Default: chat where the model has a template.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before it.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=INT32_MAX, help="At most so many tokens.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, max=INT32_MAX, help="The k most likely only; 0 is off.")
    ] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1]; 0 is off.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=INT64_MAX, help="The same seed, the same answer.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be given again.")
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            help="The answer is JSON of this schema: a file, or the schema itself.",
            metavar="FILE|TEXT",
        ),
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="The whole answer matches this regular expression.")
    ] = None,
    choice: Annotated[
        list[str] | None,
        typer.Option(help="The answer is one of these; to be given for each."),
    ] = None,
    n: Annotated[
        int,
        typer.Option("--n", min=1, max=128, help="So many answers, each with a seed of its own."),
    ] = 1,
    priority: Annotated[
        PriorityName, typer.Option(help="batch yields to interactive.")
    ] = PriorityName.INTERACTIVE,
    stats: Annotated[bool, typer.Option("--stats", help="Timings on standard error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.")] = False,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, max=MAX_TIMEOUT_S, help="Deadline in seconds.")
    ] = None,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Send a prompt and print the answer as it comes.

    Ctrl-C cancels it. Several answers (--n) are printed one after the other, each under its number.

    Examples:

        legato generate "Why is the sky blue?" --max-tokens 64

        legato generate --raw "Once upon a time" --temperature 0 --stats

        cat letter.txt | legato generate - --system "Summarise in one sentence."

        legato generate "A name for a cat" --n 3 --max-tokens 16

        legato generate "Is the sky blue?" --choice yes --choice no

        legato generate "Describe Paris." --json-schema city.json
    """
    from legato.protos import common_pb2

    text = _read_stdin() if prompt == "-" else prompt
    for name, words in (("the prompt", [text]), ("--system", [system]), ("--stop", stop or [])):
        for word in words:
            check_utf8(name, word or "")
    for name, words in (("--regex", [regex]), ("--choice", choice or [])):
        for word in words:
            check_utf8(name, word or "")
    guide = make_guide(json_schema=json_schema, regex=regex, choice=choice or [])
    with connect_client(choose_address(address, port)) as client:
        if chat is None:
            chat = client.model().has_chat_template
        sampling = common_pb2.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop or [],
            guide=guide,
        )
        request = make_request(text, sampling, chat=chat, system=system)
        request.n = n
        if priority is PriorityName.BATCH:
            request.priority = common_pb2.PRIORITY_BATCH
        # Ctrl-C, or nobody reads our output: leaving the block frees the KV at once.
        with client.stream(request, timeout_s=timeout) as stream:
            answers = _print_stream(_with_note(stream, max_tokens), n, quiet=as_json)
    if as_json:
        objects = [_as_dict(answer) for answer in answers]
        shown = objects[0] if n == 1 else {"answers": objects}
        print(json.dumps(shown, ensure_ascii=False))
    if stats:
        from rich.console import Console

        from legato.cluster.cli.timing_table import timing_table

        console = Console(stderr=True)
        for number, answer in enumerate(answers, start=1):
            if n > 1:
                console.print(f"\n{number} of {n}", highlight=False)
            console.print(timing_table(answer), soft_wrap=True)


def make_request(
    text: str, sampling: common_pb2.SamplingParams, *, chat: bool, system: str | None
) -> generation_pb2.GenerateRequest:
    """A chat of one message, or raw text."""
    from legato.protos import generation_pb2

    if not text:
        raise WrongInputError("the prompt is empty: give some text, or - to read it from stdin")
    if not chat:
        if system is not None:
            raise WrongInputError("--system needs a chat: leave out --raw, or take a chat model")
        return generation_pb2.GenerateRequest(text=text, sampling=sampling)
    messages = [generation_pb2.ChatMessage(role="user", content=text)]
    if system is not None:
        messages.insert(0, generation_pb2.ChatMessage(role="system", content=system))
    chat_messages = generation_pb2.ChatMessages(messages=messages)
    return generation_pb2.GenerateRequest(messages=chat_messages, sampling=sampling)


def _print_stream(events: Iterable[Event], num_answers: int, *, quiet: bool) -> list[Answer]:
    answers = read_answers(events, num_answers, _writer(num_answers, quiet=quiet))
    if not quiet:
        print()
    return answers


def _with_note(stream: Stream, asked: int | None) -> Iterator[Event]:
    """The stream's events; says before the first where the answer may not be as long as asked."""
    noted = asked is None
    for event in stream:
        if not noted and asked is not None and stream.max_tokens is not None:
            noted = True
            if stream.max_tokens < asked:
                print(
                    f"legato: the answer may have {stream.max_tokens:,} tokens, not --max-tokens "
                    f"{asked:,}: the context has no room for more",
                    file=sys.stderr,
                )
        yield event


def _writer(num_answers: int, *, quiet: bool) -> Callable[[int, str], None]:
    if quiet:
        return lambda _, __: None
    if num_answers > 1:
        return InTurn(num_answers, write_text).take
    return lambda _, text: write_text(text)


def write_text(text: str) -> None:
    """Shows a piece of the answer at once; ServiceError where it cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has read enough
        raise
    except OSError as error:
        # What is left in the buffer would fail again when the interpreter ends.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until then
        raise ServiceError(f"the answer cannot be written: {error.strerror}") from error


def _read_stdin() -> str:
    if sys.stdin is None:
        raise WrongInputError("the prompt is to be read from standard input, which is closed")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise WrongInputError(f"the prompt is no UTF-8 text: {error.reason}") from error


def check_utf8(name: str, text: str) -> None:
    """Raises WrongInputError naming what it is and where it is wrong."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are no UTF-8 come from a shell as surrogates
        raise WrongInputError(
            f"{name} is no UTF-8 text, from character {error.start} on"
        ) from error


def _as_dict(answer: Answer) -> dict[str, object]:
    from legato.cluster.cli.json_form import json_dict

    assert answer.finish is not None, "the client's stream ends with it"
    return {"text": answer.text, "token_ids": answer.token_ids, **json_dict(answer.finish)}
