"""`legato chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from legato.cluster.cli.answer import read_answer
from legato.cluster.cli.connection import (
    AddressOption,
    PortOption,
    choose_address,
    connect_client,
    sentences,
)
from legato.cluster.cli.generate import INT32_MAX, INT64_MAX, check_utf8, write_text
from legato.cluster.errors import ServiceError

if TYPE_CHECKING:
    from legato.cluster.cli.answer import Answer
    from legato.cluster.client import Client
    from legato.protos import common_pb2, generation_pb2

HELP = """\
/clear    forget the conversation; the system message stays
/help     this
/quit     end (or Ctrl-D)
Ctrl-C    stop the answer that comes, or empty the line
A line that ends with \\ goes on in the next one."""


@dataclass
class Conversation:
    """What has been said. Each turn is asked with all those before it."""

    system: str | None
    sampling: common_pb2.SamplingParams
    turns: list[tuple[str, str]] = field(default_factory=list)  # (role, content)

    def request(self, text: str) -> generation_pb2.GenerateRequest:
        """All so far, and `text` of the user."""
        from legato.protos import generation_pb2

        said = [("system", self.system)] if self.system is not None else []
        messages = [
            generation_pb2.ChatMessage(role=role, content=content)
            for role, content in (*said, *self.turns, ("user", text))
        ]
        return generation_pb2.GenerateRequest(
            messages=generation_pb2.ChatMessages(messages=messages), sampling=self.sampling
        )

    def add(self, text: str, answer: str) -> None:
        """A turn that was answered, if only in part."""
        self.turns += [("user", text), ("assistant", answer)]


def chat(
    system: Annotated[str | None, typer.Option(help="A system message before it all.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=INT32_MAX, help="Of each answer, at most.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass in (0, 1].")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=INT64_MAX, help="The same seed, the same answers.")
    ] = None,
    address: AddressOption = None,
    port: PortOption = None,
) -> None:
    """Talk to the model; each answer comes with its TTFT and tokens/s.

    /help tells the commands. Ctrl-C stops an answer and not the chat; Ctrl-D or /quit end it.

    Examples:

        legato chat

        legato chat --system "You are brief." --max-tokens 200 --temperature 0.7
    """
    from legato.protos import common_pb2

    check_utf8("--system", system or "")
    sampling = common_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    where = choose_address(address, port)
    with connect_client(where) as client:
        model = client.model()
        if not model.has_chat_template:
            raise ServiceError(
                f"{model.name} has no chat template: use `legato generate --raw`, or serve a model "
                "that was made for chats"
            )
        if sys.stdin.isatty():
            import readline  # noqa: F401  # gives `input` its history and keys

            print(f"{model.name} at {where}; /help tells the commands", file=sys.stderr)
        conversation = Conversation(system, sampling)
        while (line := _next_line()) is not None:
            if line.startswith("/"):
                if line == "/quit":
                    return
                _command(line, conversation)
            elif line:
                _turn(client, where, conversation, line)


def _next_line() -> str | None:
    """Stripped; None at the end of input."""
    lines: list[str] = []
    try:
        while True:
            prompt = ("... " if lines else "> ") if sys.stdin.isatty() else ""
            lines.append(input(prompt))
            if not lines[-1].endswith("\\"):
                return "\n".join(lines).strip()
            lines[-1] = lines[-1][:-1]
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        return "\n".join(lines).strip() if lines else None
    except UnicodeDecodeError as error:
        raise ServiceError(f"what was typed is no UTF-8 text: {error.reason}") from error


def _command(line: str, conversation: Conversation) -> None:
    if line == "/help":
        print(HELP)
    elif line == "/clear":
        conversation.turns.clear()
        print("the conversation is forgotten")
    else:
        from legato.cluster.cli.nearest import did_you_mean

        near = did_you_mean(line, ("/clear", "/help", "/quit"))
        print(f"no such command: {line}{near or ': /help tells those there are'}")


def _turn(client: Client, where: str, conversation: Conversation, text: str) -> None:
    """One question and its answer. What goes wrong ends the turn and not the chat."""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        write_text(piece)

    try:
        check_utf8("the message", text)
        with (
            sentences(where),
            # Ctrl-C: leaving the block frees what the answer holds, at once.
            client.stream(conversation.request(text)) as stream,
        ):
            answer = read_answer(stream, show)
    except KeyboardInterrupt:
        print(flush=True)
        print("(stopped)", file=sys.stderr)
    except ServiceError as error:
        if pieces:
            print(flush=True)
        print(f"legato: {error}{_remedy(str(error))}", file=sys.stderr)
        if not pieces:
            return
    else:
        print(flush=True)
        print(_times(answer), file=sys.stderr)
    if pieces:
        conversation.add(text, "".join(pieces))


def _remedy(sentence: str) -> str:
    return "; /clear forgets the conversation so far" if "context" in sentence else ""


def _times(answer: Answer) -> str:
    assert answer.finish is not None, "the client's stream ends with it"
    usage, times = answer.finish.usage, answer.finish.timings
    words = [f"TTFT {times.ttft_s * 1000:.0f} ms"]
    # Not from when they came: a client that looks up late finds many tokens at once.
    if usage.completion_tokens > 1 and times.decode_s > 0:
        words.append(f"{(usage.completion_tokens - 1) / times.decode_s:.1f} tokens/s")
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    words.append(f"{usage.prompt_tokens} in{cached}, {usage.completion_tokens} out")
    return f"[{', '.join(words)}]"
